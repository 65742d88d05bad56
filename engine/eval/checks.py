"""Rules that a program can check in an answer: a registry from a constraint's id to its check.

Every check is a pure function of the answer and its arguments and returns a `Verdict` with a reason
for a person. An unknown id, a missing, an unknown or a mistyped argument is an error, never a pass,
and an empty answer passes nothing.

Ids that the IFEval benchmark publishes keep its names, arguments and meaning (`ifeval.py`); the others are
ours (`exact.py`). How words and sentences are counted is in `words.py`.
"""

from collections.abc import Mapping
from typing import Any

from hymoe.engine.eval import exact, ifeval  # they fill CHECKS
from hymoe.engine.eval.json_text import parse_json
from hymoe.engine.eval.rules import CHECKS, Verdict, resolve
from hymoe.engine.eval.words import count_sentences, count_substring, count_word, words_of

__all__ = [
    "CHECKS",
    "Verdict",
    "check",
    "count_sentences",
    "count_substring",
    "count_word",
    "exact",
    "ifeval",
    "parse_json",
    "resolve",
    "words_of",
]


def check(instruction_id: str, answer: str, arguments: Mapping[str, Any] | None = None) -> Verdict:
    """Judges an answer by one constraint.

    Args:
        instruction_id: a key of CHECKS.
        answer: the text to judge.
        arguments: of the check; entries that are None count as absent, as in IFEval's public files.

    Raises:
        UserError: an unknown id, or arguments that the check does not take or that are missing.
    """
    judge, values = resolve(instruction_id, arguments)
    if not answer.strip():
        return Verdict(False, "the answer is empty")
    return judge(answer, **values)

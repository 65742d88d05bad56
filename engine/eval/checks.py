r"""Rules that a program can check in an answer: a registry from a constraint's id to its check.

Every check is a pure function of the answer and its arguments and returns a `Verdict` with a reason
for a person. An unknown id, a missing, an unknown or a mistyped argument is an error, never a pass,
and an empty answer passes nothing.

**Names.** Ids that the IFEval benchmark publishes keep its names, arguments and meaning. The others
are ours; their meaning is in the docstring of the check, and a prompt should say the same.

**Words** are runs of `\w` as in IFEval: `isn't` is two. Where a rule speaks of a *word* it has to
stand alone (`bad` is not in `badge`); a *substring* may stand anywhere. Both compare after NFC
normalisation and take what they look for literally, never as a pattern.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hymoe.engine.errors import UserError

RELATIONS = ("less than", "at least")
FENCE = re.compile(r"^```(?:json)?[ \t]*\r?\n(.*?)\r?\n?```$", re.IGNORECASE | re.DOTALL)
# A full stop after one of these, or after single letters (J. Smith, 5 p.m.), does not end a sentence.
ABBREVIATIONS = frozenset(
    ["dr", "mr", "mrs", "ms", "prof", "st", "jr", "sr", "vs", "etc", "cf", "approx"]
)
LETTERS = re.compile(r"[^\W\d_](?:\.[^\W\d_])*")
SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?=\s|$)")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an answer keeps a constraint, and why."""

    passed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Check:
    """One rule: what it is asked with, and the function that judges."""

    arguments: Mapping[str, str]  # name -> kind, a key of KINDS
    judge: Callable[..., Verdict]


CHECKS: dict[str, Check] = {}


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


def resolve(
    instruction_id: str, arguments: Mapping[str, Any] | None
) -> tuple[Callable[..., Verdict], dict[str, Any]]:
    """The function and the checked arguments of a constraint.

    Raises:
        UserError: as `check`.
    """
    if instruction_id not in CHECKS:
        known = ", ".join(CHECKS)
        raise UserError(f"unknown constraint {instruction_id!r}, expected one of {known}")
    rule = CHECKS[instruction_id]
    given = {key: value for key, value in (arguments or {}).items() if value is not None}
    for name in rule.arguments:
        if name not in given:
            raise UserError(f"constraint {instruction_id}: found no argument {name!r}, expected it")
    values = {}
    for name, value in given.items():
        if name not in rule.arguments:
            known = ", ".join(rule.arguments) or "none"
            raise UserError(
                f"constraint {instruction_id}: unknown argument {name!r}, expected {known}"
            )
        expected, accept = KINDS[rule.arguments[name]]
        if not accept(value):
            raise UserError(f"constraint {instruction_id}: {name} = {value!r}, expected {expected}")
        values[name] = value
    return rule.judge, values


def words_of(text: str) -> list[str]:
    r"""Runs of `\w`, the words that every rule here counts."""
    return re.findall(r"\w+", unicodedata.normalize("NFC", text))


def count_word(text: str, word: str) -> int:
    """How often `word` stands alone in `text`, whatever the case."""
    text, word = _folded(text), _folded(word)
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text))


def count_substring(text: str, part: str) -> int:
    """How often `part` occurs in `text`, also inside words, whatever the case."""
    return _folded(text).count(_folded(part))


def count_sentences(text: str) -> int:
    """Sentences: `.!?` at a word's end closes one, except after an abbreviation or an initial."""
    count, start = 0, 0
    for end in SENTENCE_END.finditer(text):
        before = text[start : end.start()].split()
        last = before[-1].lstrip("\"'([").lower() if before else ""
        is_stop = end.group().rstrip("\"')]") == "."
        is_short = last in ABBREVIATIONS or LETTERS.fullmatch(last) is not None
        closes_text = not text[end.end() :].strip()
        if before and (closes_text or not (is_stop and is_short)):
            count, start = count + 1, end.end()
    return count + bool(words_of(text[start:]))


def parse_json(text: str, *, unique_keys: bool) -> Any:
    """JSON as the standard has it (no NaN), alone or inside one Markdown fence.

    Args:
        text: the answer.
        unique_keys: a key that occurs twice in an object is an error.

    Raises:
        ValueError: anything else.
    """
    text = text.strip()
    fenced = FENCE.match(text)

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(items)
        if unique_keys and len(content) < len(items):
            raise ValueError("a key occurs twice")
        return content

    body = fenced.group(1) if fenced else text
    return json.loads(body, parse_constant=refuse, object_pairs_hook=pairs)


KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "count": ("a whole number of 0 or more", lambda v: type(v) is int and v >= 0),
    "text": ("text that is not empty", lambda v: isinstance(v, str) and bool(v)),
    "texts": (
        "a list of texts that are not empty",
        lambda v: isinstance(v, list) and bool(v) and all(isinstance(t, str) and t for t in v),
    ),
    "relation": (f"one of {', '.join(RELATIONS)}", lambda v: v in RELATIONS),
}


def _rule(instruction_id: str, **arguments: str) -> Callable[[Callable[..., Verdict]], Any]:
    def register(judge: Callable[..., Verdict]) -> Callable[..., Verdict]:
        CHECKS[instruction_id] = Check(arguments, judge)
        return judge

    return register


@_rule("keywords:existence", keywords="texts")
def _keywords_existence(answer: str, keywords: Sequence[str]) -> Verdict:
    """IFEval: each keyword occurs as a substring, whatever the case."""
    missing = [word for word in keywords if not count_substring(answer, word)]
    return Verdict(not missing, f"lacks {_quoted(missing)}" if missing else "has every keyword")


@_rule("keywords:forbidden_words", forbidden_words="texts")
def _keywords_forbidden(answer: str, forbidden_words: Sequence[str]) -> Verdict:
    """IFEval: none occurs as a word, whatever the case."""
    found = [word for word in forbidden_words if count_word(answer, word)]
    return Verdict(not found, f"has {_quoted(found)}" if found else "has no forbidden word")


@_rule("keywords:frequency", keyword="text", frequency="count", relation="relation")
def _keywords_frequency(answer: str, keyword: str, frequency: int, relation: str) -> Verdict:
    """IFEval: the keyword occurs so often, as a substring, whatever the case."""
    return _related(count_substring(answer, keyword), frequency, relation, f"times {keyword!r}")


@_rule("length_constraints:number_words", num_words="count", relation="relation")
def _number_words(answer: str, num_words: int, relation: str) -> Verdict:
    r"""IFEval: the number of `\w` runs."""
    return _related(len(words_of(answer)), num_words, relation, "words")


@_rule("change_case:english_capital")
def _all_upper(answer: str) -> Verdict:
    """IFEval: no lower-case letter, and at least one letter; the language is not looked at."""
    return Verdict(answer.isupper(), _case_reason(answer))


@_rule("change_case:english_lowercase")
def _all_lower(answer: str) -> Verdict:
    """IFEval: no upper-case letter, and at least one letter; the language is not looked at."""
    return Verdict(answer.islower(), _case_reason(answer))


@_rule("punctuation:no_comma")
def _no_comma(answer: str) -> Verdict:
    """IFEval: no comma."""
    return Verdict("," not in answer, f"has {answer.count(',')} commas")


@_rule("startend:end_checker", end_phrase="text")
def _ends_with(answer: str, end_phrase: str) -> Verdict:
    """IFEval: ends with the phrase, whatever the case, quotation marks around the answer aside."""
    end = answer.strip().strip('"').lower()
    return Verdict(end.endswith(end_phrase.strip().lower()), f"ends with {end[-40:]!r}")


@_rule("startend:quotation")
def _quotation(answer: str) -> Verdict:
    """IFEval: the whole answer is inside double quotation marks."""
    text = answer.strip()
    passed = len(text) > 1 and text[0] == text[-1] == '"'
    return Verdict(passed, f"starts with {text[:1]!r} and ends with {text[-1:]!r}")


@_rule("detectable_format:json_format")
def _json_format(answer: str) -> Verdict:
    """IFEval: any JSON, a fence around it aside."""
    return _json_verdict(answer, lambda value: None, unique_keys=False)


@_rule("detectable_format:number_bullet_lists", num_bullets="count")
def _bullet_count(answer: str, num_bullets: int) -> Verdict:
    """IFEval: exactly so many lines that start with `*` or `-`."""
    stars = re.findall(r"^\s*\*[^\*].*$", answer, re.MULTILINE)
    dashes = re.findall(r"^\s*-.*$", answer, re.MULTILINE)
    return _exactly(len(stars) + len(dashes), num_bullets, "bullets")


@_rule("count:words", num_words="count")
def _exact_words(answer: str, num_words: int) -> Verdict:
    r"""Exactly so many words (runs of `\w`)."""
    return _exactly(len(words_of(answer)), num_words, "words")


@_rule("count:sentences", num_sentences="count")
def _exact_sentences(answer: str, num_sentences: int) -> Verdict:
    """Exactly so many sentences, as `count_sentences` counts."""
    return _exactly(count_sentences(answer), num_sentences, "sentences")


@_rule("words:required", words="texts")
def _words_required(answer: str, words: Sequence[str]) -> Verdict:
    """Each stands in the answer as a word."""
    missing = [word for word in words if not count_word(answer, word)]
    return Verdict(not missing, f"lacks {_quoted(missing)}" if missing else "has every word")


@_rule("words:forbidden", words="texts")
def _words_forbidden(answer: str, words: Sequence[str]) -> Verdict:
    """None stands in the answer as a word."""
    return _keywords_forbidden(answer, words)


@_rule("words:count", word="text", times="count")
def _word_count(answer: str, word: str, times: int) -> Verdict:
    """The word stands in the answer exactly so often."""
    return _exactly(count_word(answer, word), times, f"times {word!r}")


@_rule("substrings:required", substrings="texts")
def _substrings_required(answer: str, substrings: Sequence[str]) -> Verdict:
    """Each occurs in the answer, also inside words."""
    return _keywords_existence(answer, substrings)


@_rule("substrings:forbidden", substrings="texts")
def _substrings_forbidden(answer: str, substrings: Sequence[str]) -> Verdict:
    """None occurs in the answer, not even inside a word."""
    found = [part for part in substrings if count_substring(answer, part)]
    return Verdict(not found, f"has {_quoted(found)}" if found else "has no forbidden text")


@_rule("substrings:count", substring="text", times="count")
def _substring_count(answer: str, substring: str, times: int) -> Verdict:
    """The text occurs exactly so often, also inside words."""
    return _exactly(count_substring(answer, substring), times, f"times {substring!r}")


@_rule("words:repeated", word="text", times="count")
def _word_repeated(answer: str, word: str, times: int) -> Verdict:
    """The answer is the word, exactly so often, and no other word."""
    others = [found for found in words_of(answer) if found.lower() != word.lower()]
    if others:
        return Verdict(False, f"has other words: {_quoted(others)}")
    return _exactly(count_word(answer, word), times, f"times {word!r}")


@_rule("list:reversed", items="texts")
def _list_reversed(answer: str, items: Sequence[str]) -> Verdict:
    """The items in reverse order, separated by commas, and nothing else."""
    return _same_items(_comma_list(answer), list(reversed(items)))


@_rule("list:without", items="texts", forbidden="text")
def _list_without(answer: str, items: Sequence[str], forbidden: str) -> Verdict:
    """The items in order but the forbidden one, separated by commas, and nothing else."""
    return _same_items(_comma_list(answer), [item for item in items if item != forbidden])


@_rule("list:bulleted", items="texts")
def _list_bulleted(answer: str, items: Sequence[str]) -> Verdict:
    """The items in their order, each on a line of its own after `- `, and nothing else."""
    lines = answer.strip().splitlines()
    plain = [line for line in lines if not line.startswith("- ")]
    if plain:
        return Verdict(False, f"has a line that is no bullet: {plain[0][:40]!r}")
    return _same_items([line[2:].strip() for line in lines], list(items))


@_rule("case:upper_list", items="texts")
def _upper_list(answer: str, items: Sequence[str]) -> Verdict:
    """The items in their order in capital letters, separated by commas, and nothing else."""
    return _same_items(_comma_list(answer), [item.upper() for item in items])


@_rule("json:list", items="texts")
def _json_list(answer: str, items: Sequence[str]) -> Verdict:
    """A JSON list of exactly these strings in this order; a fence around it is allowed."""
    expected = list(items)
    return _json_verdict(
        answer, lambda value: None if value == expected else f"expected the list {expected}"
    )


@_rule("json:object", keys="texts")
def _json_object(answer: str, keys: Sequence[str]) -> Verdict:
    """A JSON object with exactly these keys, each once; a fence around it is allowed."""

    def fault(value: Any) -> str | None:
        if not isinstance(value, dict):
            return "expected an object"
        return None if set(value) == set(keys) else f"expected exactly the keys {_quoted(keys)}"

    return _json_verdict(answer, fault)


def _json_verdict(
    answer: str, fault: Callable[[Any], str | None], *, unique_keys: bool = True
) -> Verdict:
    try:
        value = parse_json(answer, unique_keys=unique_keys)
    except (ValueError, RecursionError) as error:
        return Verdict(False, f"is not valid JSON: {error}")
    found = fault(value)
    return Verdict(found is None, "is the JSON asked for" if found is None else f"is JSON, {found}")


def _comma_list(answer: str) -> list[str]:
    return [item.strip() for item in answer.strip().split(",")]


def _same_items(found: list[str], expected: list[str]) -> Verdict:
    return Verdict(found == expected, f"has {_quoted(found)}, asked for {_quoted(expected)}")


def _exactly(found: int, expected: int, what: str) -> Verdict:
    return Verdict(found == expected, f"has {found} {what}, asked for exactly {expected}")


def _related(found: int, expected: int, relation: str, what: str) -> Verdict:
    passed = found < expected if relation == "less than" else found >= expected
    return Verdict(passed, f"has {found} {what}, asked for {relation} {expected}")


def _case_reason(answer: str) -> str:
    upper, lower = sum(c.isupper() for c in answer), sum(c.islower() for c in answer)
    return f"has {upper} upper-case and {lower} lower-case letters"


def _folded(text: str) -> str:
    return unicodedata.normalize("NFC", text).lower()


def _quoted(items: Sequence[str], limit: int = 8) -> str:
    shown = ", ".join(repr(item) for item in items[:limit])
    return shown + (f" and {len(items) - limit} more" if len(items) > limit else "")

r"""What is wrong with an answer whatever its constraints: cut, empty, repeating itself, or a copy of the prompt.

A check of constraints alone is passed by a loop that holds the keyword, and by the prompt itself. Both rules look at
words (`\w` runs; in scripts without spaces, characters), so that signs and case hide nothing.
"""

import re

import numpy as np

from hymoe.engine.eval.asking import CLOSED

TIMES = 4  # a word or phrase so often in a row is a loop
LONGEST_PHRASE = 60  # words of a phrase that is looked for
FEWEST_FOR_SHARE = 40  # words from which on the share of different runs says something
RUN = 4  # words
LEAST_DIFFERENT = 0.5
COPY_RUN = 6  # words: shorter runs of the prompt belong into many answers
MOST_COPIED = 0.75  # an edited text that the prompt gives keeps more than half of its runs
# Thai, Lao, Myanmar, Khmer, kana and Chinese characters are units by themselves.
UNIT = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]|"
    r"[^\W\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]+"
)


def fault(
    answer: str,
    prompt: str,
    kinds: tuple[str, ...],
    finish_reason: str | None = None,
    given: str = "",
) -> tuple[str, str] | None:
    """The reason to refuse an answer, and what was found, or None.

    Args:
        answer: the text.
        prompt: the last user turn.
        kinds: of its constraints; a closed one determines the answer, which may then repeat or copy.
        finish_reason: as `generate.py` writes it; "length" is a cut.
        given: text that the answer has to start with, which is no copying.
    """
    if finish_reason == "length":
        return "cut", "it ended at the longest length allowed"
    if not answer.strip():
        return "empty", "it has no text"
    if any(kind in CLOSED for kind in kinds):
        return None
    body = answer.strip()
    if given and body.lower().startswith(given.strip().lower()):
        body = body[len(given.strip()) :]
        if not units(body):
            return "parrots the prompt", "it has nothing but the request"
    found = loop(body)
    if found is not None:
        return "repeats itself", found
    copied = copied_share(body, prompt)
    if copied >= MOST_COPIED:
        return (
            "parrots the prompt",
            f"{copied:.0%} of its runs of {COPY_RUN} words are the prompt's",
        )
    return None


def units(text: str) -> list[str]:
    """Words in lower case, or characters in scripts without spaces."""
    return UNIT.findall(text.lower())


def loop(text: str) -> str | None:
    """What a text repeats, or None: a phrase TIMES in a row, or few different runs of words over all."""
    words = units(text)
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    ids = np.array([numbers[word] for word in words], dtype=np.int64)  # [W]
    for size in range(1, min(LONGEST_PHRASE, len(words) // TIMES) + 1):
        # Stretches in which each word equals the one `size` before it, between places where it does not.
        ends = np.flatnonzero(ids[size:] != ids[:-size])
        ends = np.concatenate(([-1], ends, [len(ids) - size]))
        lengths = np.diff(ends) - 1
        longest = int(lengths.argmax())
        if lengths[longest] >= size * (TIMES - 1):
            start = int(ends[longest]) + 1
            phrase = " ".join(words[start : start + size])
            return f"{phrase[:40]!r} comes {TIMES} times in a row or more"
    if len(words) >= FEWEST_FOR_SHARE:
        share = len(_runs(words, RUN)) / (len(words) - RUN + 1)
        if share < LEAST_DIFFERENT:
            return f"only {share:.0%} of its runs of {RUN} words are different"
    return None


def copied_share(answer: str, prompt: str) -> float:
    """Share of the answer's runs of COPY_RUN words that the prompt has; a shorter answer counts as one run."""
    said, asked = units(answer), units(prompt)
    size = min(COPY_RUN, len(said))
    if size < COPY_RUN:  # a few words of the prompt may well be the answer; all of it is not
        return float(bool(said) and said == asked)
    runs = [tuple(said[i : i + size]) for i in range(len(said) - size + 1)]
    known = _runs(asked, size)
    return sum(run in known for run in runs) / len(runs)


def _runs(words: list[str], size: int) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}

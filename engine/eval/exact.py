"""Our own constraints: exact counts, required and forbidden text, exact lists, JSON and letter case.

They are what the verifier-filtered training data asks for. Each docstring is the whole rule; a prompt that
asks for it should say the same.
"""

from collections.abc import Sequence
from typing import Any

from hymoe.engine.eval.ifeval import case_reason, keywords_existence, keywords_forbidden
from hymoe.engine.eval.json_text import json_verdict
from hymoe.engine.eval.rules import SHOWN, Verdict, exactly, quoted, rule
from hymoe.engine.eval.words import count_sentences, count_substring, count_word, words_of


@rule("count:words", num_words="count")
def exact_words(answer: str, num_words: int) -> Verdict:
    r"""Exactly so many words (runs of `\w`)."""
    return exactly(len(words_of(answer)), num_words, "words")


@rule("count:sentences", num_sentences="count")
def exact_sentences(answer: str, num_sentences: int) -> Verdict:
    """Exactly so many sentences, as `count_sentences` counts."""
    return exactly(count_sentences(answer), num_sentences, "sentences")


@rule("words:required", words="texts")
def words_required(answer: str, words: Sequence[str]) -> Verdict:
    """Each stands in the answer as a word."""
    missing = [word for word in words if not count_word(answer, word)]
    return Verdict(not missing, f"lacks {quoted(missing)}" if missing else "has every word")


@rule("words:forbidden", words="texts")
def words_forbidden(answer: str, words: Sequence[str]) -> Verdict:
    """None stands in the answer as a word."""
    return keywords_forbidden(answer, words)


@rule("words:count", word="text", times="count")
def word_count(answer: str, word: str, times: int) -> Verdict:
    """The word stands in the answer exactly so often."""
    return exactly(count_word(answer, word), times, f"times {word!r}")


@rule("substrings:required", substrings="texts")
def substrings_required(answer: str, substrings: Sequence[str]) -> Verdict:
    """Each occurs in the answer, also inside words."""
    return keywords_existence(answer, substrings)


@rule("substrings:forbidden", substrings="texts")
def substrings_forbidden(answer: str, substrings: Sequence[str]) -> Verdict:
    """None occurs in the answer, not even inside a word."""
    found = [part for part in substrings if count_substring(answer, part)]
    return Verdict(not found, f"has {quoted(found)}" if found else "has no forbidden text")


@rule("substrings:count", substring="text", times="count")
def substring_count(answer: str, substring: str, times: int) -> Verdict:
    """The text occurs exactly so often, also inside words."""
    return exactly(count_substring(answer, substring), times, f"times {substring!r}")


@rule("words:repeated", word="text", times="count")
def word_repeated(answer: str, word: str, times: int) -> Verdict:
    """The answer is the word, exactly so often, and no other word."""
    others = [found for found in words_of(answer) if found.lower() != word.lower()]
    if others:
        return Verdict(False, f"has other words: {quoted(others)}")
    return exactly(count_word(answer, word), times, f"times {word!r}")


@rule("list:reversed", items="texts")
def list_reversed(answer: str, items: Sequence[str]) -> Verdict:
    """The items in reverse order, separated by commas, and nothing else."""
    return _same_items(_comma_list(answer), list(reversed(items)))


@rule("list:without", items="texts", forbidden="text")
def list_without(answer: str, items: Sequence[str], forbidden: str) -> Verdict:
    """The items in order but the forbidden one, separated by commas, and nothing else."""
    return _same_items(_comma_list(answer), [item for item in items if item != forbidden])


@rule("list:bulleted", items="texts")
def list_bulleted(answer: str, items: Sequence[str]) -> Verdict:
    """The items in their order, each on a line of its own after `- `, and nothing else."""
    lines = answer.strip().splitlines()
    plain = [line for line in lines if not line.startswith("- ")]
    if plain:
        return Verdict(False, f"has a line that is no bullet: {plain[0][:SHOWN]!r}")
    return _same_items([line[2:].strip() for line in lines], list(items))


@rule("case:upper")
def upper(answer: str) -> Verdict:
    """No lower-case letter, and at least one letter, in whatever language."""
    return Verdict(answer.isupper(), case_reason(answer))


@rule("case:lower")
def lower(answer: str) -> Verdict:
    """No upper-case letter, and at least one letter, in whatever language."""
    return Verdict(answer.islower(), case_reason(answer))


@rule("case:upper_list", items="texts")
def upper_list(answer: str, items: Sequence[str]) -> Verdict:
    """The items in their order in capital letters, separated by commas, and nothing else."""
    return _same_items(_comma_list(answer), [item.upper() for item in items])


@rule("json:list", items="texts")
def json_list(answer: str, items: Sequence[str]) -> Verdict:
    """A JSON list of exactly these strings in this order; a fence around it is allowed."""
    expected = list(items)
    return json_verdict(
        answer, lambda value: None if value == expected else f"expected the list {expected}"
    )


@rule("json:object", keys="texts")
def json_object(answer: str, keys: Sequence[str]) -> Verdict:
    """A JSON object with exactly these keys, each once; a fence around it is allowed."""

    def fault(value: Any) -> str | None:
        if not isinstance(value, dict):
            return "expected an object"
        return None if set(value) == set(keys) else f"expected exactly the keys {quoted(keys)}"

    return json_verdict(answer, fault)


def _comma_list(answer: str) -> list[str]:
    return [item.strip() for item in answer.strip().split(",")]


def _same_items(found: list[str], expected: list[str]) -> Verdict:
    return Verdict(found == expected, f"has {quoted(found)}, asked for {quoted(expected)}")

r"""The 25 constraints of IFEval, under their public ids, arguments and meaning.

Each docstring says the rule as it is judged, which is sometimes narrower or wider than its prompt's words.
Two differences from the public checker are on purpose: keywords are literal text, never patterns, and any
character may be counted as a `letter` (there `#` and `!` raise an error or are replaced by a random letter).
"""

import re
from collections.abc import Sequence

from hymoe.engine.eval.json_text import json_verdict
from hymoe.engine.eval.language import detect_language
from hymoe.engine.eval.rules import SHOWN, Verdict, exactly, quoted, related, rule
from hymoe.engine.eval.words import (
    capital_words,
    count_punkt_sentences,
    count_substring,
    count_word,
    words_of,
)

OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
PARAGRAPH_MARK = re.compile(r"\s?\*\*\*\s?")
RESPONSE_MARK = "******"
FIRST_WORD_END = re.compile(r"[.,?!'\"]")
POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}


@rule("keywords:existence", keywords="texts")
def keywords_existence(answer: str, keywords: Sequence[str]) -> Verdict:
    """Each keyword occurs as a substring, whatever the case."""
    missing = [word for word in keywords if not count_substring(answer, word)]
    return Verdict(not missing, f"lacks {quoted(missing)}" if missing else "has every keyword")


@rule("keywords:forbidden_words", forbidden_words="texts")
def keywords_forbidden(answer: str, forbidden_words: Sequence[str]) -> Verdict:
    """None occurs as a word, whatever the case."""
    found = [word for word in forbidden_words if count_word(answer, word)]
    return Verdict(not found, f"has {quoted(found)}" if found else "has no forbidden word")


@rule("keywords:frequency", keyword="text", frequency="count", relation="relation")
def keywords_frequency(answer: str, keyword: str, frequency: int, relation: str) -> Verdict:
    """The keyword occurs so often, as a substring, whatever the case."""
    return related(count_substring(answer, keyword), frequency, relation, f"times {keyword!r}")


@rule("keywords:letter_frequency", letter="letter", let_frequency="count", let_relation="relation")
def letter_frequency(answer: str, letter: str, let_frequency: int, let_relation: str) -> Verdict:
    """The character occurs so often, whatever the case."""
    letter = letter.strip()
    found = answer.lower().count(letter.lower())
    return related(found, let_frequency, let_relation, f"times {letter!r}")


@rule("language:response_language", language="language")
def response_language(answer: str, language: str) -> Verdict:
    """The text as a whole is most like that language; text in no language passes, as there."""
    return _in_language(answer, language)


@rule("length_constraints:number_sentences", num_sentences="count", relation="relation")
def number_sentences(answer: str, num_sentences: int, relation: str) -> Verdict:
    """The number of sentences that the English Punkt model finds."""
    return related(count_punkt_sentences(answer), num_sentences, relation, "sentences")


@rule("length_constraints:number_words", num_words="count", relation="relation")
def number_words(answer: str, num_words: int, relation: str) -> Verdict:
    r"""The number of `\w` runs."""
    return related(len(words_of(answer)), num_words, relation, "words")


@rule("length_constraints:number_paragraphs", num_paragraphs="count")
def number_paragraphs(answer: str, num_paragraphs: int) -> Verdict:
    """Exactly so many paragraphs between `***`; none is empty, but for what is before and after all."""
    parts = PARAGRAPH_MARK.split(answer)
    return _exact_parts(parts, num_paragraphs, "paragraphs", "***")


@rule(
    "length_constraints:nth_paragraph_first_word",
    num_paragraphs="count",
    nth_paragraph="position",
    first_word="text",
)
def nth_paragraph_first_word(
    answer: str, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> Verdict:
    """Exactly so many paragraphs between empty lines, and the nth starts with the word.

    Empty paragraphs do not count, yet keep their place in the numbering. A word ends at a space or at
    one of `.,?!'"`; quotation marks before it are passed over.
    """
    parts = answer.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if nth_paragraph > count:
        return Verdict(False, f"has {count} paragraphs, no number {nth_paragraph}")
    words = parts[nth_paragraph - 1].split()
    if not words:
        return Verdict(False, f"has an empty paragraph {nth_paragraph}")
    opened = words[0].lstrip("'").lstrip('"')
    first = FIRST_WORD_END.split(opened)[0].lower()
    said = f"has {count} paragraphs, asked for exactly {num_paragraphs}"
    said += f"; number {nth_paragraph} starts with {first[:SHOWN]!r}, asked for {first_word!r}"
    return Verdict(count == num_paragraphs and first == first_word.lower(), said)


@rule("detectable_content:number_placeholders", num_placeholders="count")
def number_placeholders(answer: str, num_placeholders: int) -> Verdict:
    """At least so many `[...]` on one line each."""
    found = len(re.findall(r"\[.*?\]", answer))
    return related(found, num_placeholders, "at least", "placeholders")


@rule("detectable_content:postscript", postscript_marker="text")
def postscript(answer: str, postscript_marker: str) -> Verdict:
    """The marker occurs, whatever the case; `P.S.` and `P.P.S` may have a space after each stop."""
    pattern = POSTSCRIPTS.get(postscript_marker, re.escape(postscript_marker.lower()))
    found = re.search(pattern, answer.lower())
    word = "has" if found else "lacks"
    return Verdict(found is not None, f"{word} the postscript marker {postscript_marker!r}")


@rule("detectable_format:number_bullet_lists", num_bullets="count")
def number_bullet_lists(answer: str, num_bullets: int) -> Verdict:
    """Exactly so many lines that start with `-`, or with one `*`."""
    stars = re.findall(r"^\s*\*[^\*].*$", answer, re.MULTILINE)
    dashes = re.findall(r"^\s*-.*$", answer, re.MULTILINE)
    return exactly(len(stars) + len(dashes), num_bullets, "bullets")


@rule("detectable_format:constrained_response")
def constrained_response(answer: str) -> Verdict:
    """One of the three sentences of OPTIONS occurs, to the letter; other text is allowed."""
    found = [option for option in OPTIONS if option in answer]
    return Verdict(bool(found), f"says {quoted(found)}" if found else f"says none of {OPTIONS}")


@rule("detectable_format:number_highlighted_sections", num_highlights="count")
def number_highlighted_sections(answer: str, num_highlights: int) -> Verdict:
    """At least so many `*...*` and `**...**` with text between, on one line each."""
    single = re.findall(r"\*([^\n*]*)\*", answer)
    double = re.findall(r"\*\*([^\n*]*)\*\*", answer)
    found = sum(bool(text.strip()) for text in [*single, *double])
    return related(found, num_highlights, "at least", "highlighted sections")


@rule("detectable_format:multiple_sections", section_spliter="text", num_sections="count")
def multiple_sections(answer: str, section_spliter: str, num_sections: int) -> Verdict:
    """The word and a number after it (`Section 1`) occur at least so often."""
    found = len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d", answer))
    return related(found, num_sections, "at least", f"marks {section_spliter!r} with a number")


@rule("detectable_format:json_format")
def json_format(answer: str) -> Verdict:
    """Any JSON, a fence around it aside."""
    return json_verdict(answer, lambda value: None, unique_keys=False)


@rule("detectable_format:title")
def title(answer: str) -> Verdict:
    """A `<<...>>` with text in it, on one line."""
    found = [text.strip("<> \t") for text in re.findall(r"<<[^\n]+>>", answer)]
    found = [text for text in found if text]
    said = f"has the title {found[0][:SHOWN]!r}" if found else "has no title in << >>"
    return Verdict(bool(found), said)


@rule("combination:two_responses")
def two_responses(answer: str) -> Verdict:
    """Two different responses with `******` between them."""
    parts = answer.split(RESPONSE_MARK)
    verdict = _exact_parts(parts, 2, "responses", RESPONSE_MARK)
    texts = [part.strip() for part in parts if part.strip()]
    if verdict.passed and texts[0] == texts[1]:
        return Verdict(False, "has the same response twice")
    return verdict


@rule("combination:repeat_prompt", prompt_to_repeat="text")
def repeat_prompt(answer: str, prompt_to_repeat: str) -> Verdict:
    """Starts with the request, word for word, whatever the case."""
    passed = answer.strip().lower().startswith(prompt_to_repeat.strip().lower())
    return Verdict(passed, f"starts with {answer.strip()[:SHOWN]!r}")


@rule("startend:end_checker", end_phrase="text")
def end_checker(answer: str, end_phrase: str) -> Verdict:
    """Ends with the phrase, whatever the case, quotation marks around the answer aside."""
    end = answer.strip().strip('"').lower()
    return Verdict(end.endswith(end_phrase.strip().lower()), f"ends with {end[-SHOWN:]!r}")


@rule("startend:quotation")
def quotation(answer: str) -> Verdict:
    """The whole answer is inside double quotation marks."""
    text = answer.strip()
    passed = len(text) > 1 and text[0] == text[-1] == '"'
    return Verdict(passed, f"starts with {text[:1]!r} and ends with {text[-1:]!r}")


@rule("change_case:capital_word_frequency", capital_frequency="count", capital_relation="relation")
def capital_word_frequency(answer: str, capital_frequency: int, capital_relation: str) -> Verdict:
    """So many words have a letter and no lower-case one, as `words.capital_words` counts."""
    found = len(capital_words(answer))
    return related(found, capital_frequency, capital_relation, "words in capitals")


@rule("change_case:english_capital")
def english_capital(answer: str) -> Verdict:
    """English, with no lower-case letter and at least one letter."""
    return _in_language(answer, "en") if answer.isupper() else Verdict(False, case_reason(answer))


@rule("change_case:english_lowercase")
def english_lowercase(answer: str) -> Verdict:
    """English, with no upper-case letter and at least one letter."""
    return _in_language(answer, "en") if answer.islower() else Verdict(False, case_reason(answer))


@rule("punctuation:no_comma")
def no_comma(answer: str) -> Verdict:
    """No comma."""
    return Verdict("," not in answer, f"has {answer.count(',')} commas")


def case_reason(answer: str) -> str:
    """How many letters of either case there are."""
    upper, lower = sum(c.isupper() for c in answer), sum(c.islower() for c in answer)
    return f"has {upper} upper-case and {lower} lower-case letters"


def _in_language(answer: str, expected: str) -> Verdict:
    found = detect_language(answer)
    if found is None:
        return Verdict(True, "has nothing that tells a language")
    return Verdict(found == expected, f"reads like language {found!r}, asked for {expected!r}")


def _exact_parts(parts: list[str], expected: int, what: str, mark: str) -> Verdict:
    """So many parts; the outer two may be empty and then do not count, an empty inner one fails."""
    if any(not part.strip() for part in parts[1:-1]):
        return Verdict(False, f"has nothing between two {mark}")
    return exactly(sum(bool(part.strip()) for part in parts), expected, what)

"""Which constraints may stand in one prompt: never two that contradict each other.

`go_together` looks at their ids alone, by two tables: pairs that contradict or blur each other (CONFLICTS), and the
constraints that shape the whole answer, with all that may stand beside each (BESIDE). `clash` looks at the texts that
the arguments demand and limit: no keyword may hold a forbidden word, and nothing that is demanded may hold what is
counted elsewhere.
"""

import itertools
from collections.abc import Sequence

from hymoe.engine.eval.asking import CLOSED, Asked
from hymoe.engine.eval.ifeval import OPTIONS
from hymoe.engine.eval.words import count_substring

WORDS_ = ("count:words", "length_constraints:number_words")
SENTENCES = ("count:sentences", "length_constraints:number_sentences")
NTH = "length_constraints:nth_paragraph_first_word"
PARAGRAPHS = ("length_constraints:number_paragraphs", NTH)
CASE = ("case:upper", "case:lower", "change_case:english_capital", "change_case:english_lowercase")
CONTENT = (
    *("keywords:existence", "keywords:forbidden_words", "keywords:frequency"),
    *("keywords:letter_frequency", "words:required", "words:forbidden", "words:count"),
    *("substrings:required", "substrings:forbidden", "substrings:count"),
)
BULLETS, TITLE = "detectable_format:number_bullet_lists", "detectable_format:title"
SECTION, POSTSCRIPT = "detectable_format:multiple_sections", "detectable_content:postscript"
END, LANGUAGE = "startend:end_checker", "language:response_language"
CAPITALS = "change_case:capital_word_frequency"
PLACEHOLDERS = "detectable_content:number_placeholders"
# No constraint of the first list stands beside one of the second; an id never stands beside itself.
CONFLICTS: tuple[tuple[Sequence[str], Sequence[str]], ...] = (
    (WORDS_, WORDS_),
    (SENTENCES, SENTENCES),
    (PARAGRAPHS, PARAGRAPHS),  # their separators differ
    (CASE, CASE),
    (WORDS_, SENTENCES),  # a few long ones, or many of a word each
    (SENTENCES, (*PARAGRAPHS, BULLETS, TITLE, SECTION, POSTSCRIPT)),  # is a heading a sentence?
    # Given text with letters of both cases:
    (CASE, (CAPITALS, SECTION, POSTSCRIPT, END, LANGUAGE)),
    ((NTH,), (TITLE, SECTION, POSTSCRIPT, BULLETS)),  # is a heading a paragraph?
    (("startend:quotation",), (BULLETS,)),  # the mark before the first bullet
    ((END,), (POSTSCRIPT,)),
    # English words and counting rules:
    ((LANGUAGE,), (*CONTENT, *WORDS_, *SENTENCES, NTH, SECTION, POSTSCRIPT, END, CAPITALS)),
)
# Constraints that shape the whole answer, and all that may stand beside each.
BESIDE: dict[str, tuple[str, ...]] = {
    "detectable_format:json_format": CONTENT,
    "json:object": CONTENT,
    "detectable_format:constrained_response": CONTENT,
    "combination:two_responses": (*CONTENT, *CASE, LANGUAGE, "punctuation:no_comma"),
    "combination:repeat_prompt": (*CONTENT, POSTSCRIPT, END, PLACEHOLDERS, "punctuation:no_comma"),
}
_CONFLICTING = {
    frozenset(pair) for one, other in CONFLICTS for pair in itertools.product(one, other)
}
# Argument: what it does with its text. Text that is demanded of an answer may hold none that is limited.
DEMANDED = {
    ("keywords:existence", "keywords"),
    ("keywords:frequency", "keyword"),
    ("words:required", "words"),
    ("words:count", "word"),
    ("substrings:required", "substrings"),
    ("substrings:count", "substring"),
    (NTH, "first_word"),
    (POSTSCRIPT, "postscript_marker"),
    (SECTION, "section_spliter"),
    ("combination:repeat_prompt", "prompt_to_repeat"),
    (END, "end_phrase"),
    ("json:object", "keys"),
}
LIMITED = {
    ("keywords:forbidden_words", "forbidden_words"),
    ("keywords:frequency", "keyword"),
    ("words:forbidden", "words"),
    ("words:count", "word"),
    ("substrings:forbidden", "substrings"),
    ("substrings:count", "substring"),
    ("keywords:letter_frequency", "letter"),
}


def go_together(one: str, other: str) -> bool:
    """Whether two constraints may stand in one prompt, by their ids; closed ones stand alone."""
    if one == other or frozenset((one, other)) in _CONFLICTING or {one, other} & CLOSED.keys():
        return False
    return other in BESIDE.get(one, (other,)) and one in BESIDE.get(other, (one,))


def clash(one: Asked, other: Asked) -> bool:
    """Whether one demands a text that holds what the other forbids or counts."""
    for limiting, demanding in ((one, other), (other, one)):
        limited, demanded = _limited(limiting), _demanded(demanding)
        if any(count_substring(text, part) for text in demanded for part in limited):
            return True
    return False


def _limited(asked: Asked) -> list[str]:
    if asked.id == "punctuation:no_comma":
        return [","]
    relation = asked.arguments.get("relation", asked.arguments.get("let_relation"))
    return [] if relation == "at least" else _texts(asked, LIMITED)


def _demanded(asked: Asked) -> list[str]:
    if asked.id == "detectable_format:constrained_response":
        return list(OPTIONS)
    if asked.id in ("json:object", "detectable_format:json_format"):
        return ['{"": ""}', *_texts(asked, DEMANDED)]
    return [] if asked.arguments.get("relation") == "less than" else _texts(asked, DEMANDED)


def _texts(asked: Asked, table: set[tuple[str, str]]) -> list[str]:
    found = []
    for name, value in asked.arguments.items():
        if (asked.id, name) in table:
            found += value if isinstance(value, list) else [value]
    return found

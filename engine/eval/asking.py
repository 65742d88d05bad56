r"""How each constraint is asked for: the arguments that are drawn, and the sentence that says the rule.

`OPEN` constraints are added to a request, several of them where `together.py` says that they may. `CLOSED` ones are a
whole prompt: the constraint determines the answer, which `solved` gives.

An exact count says in its sentence how is counted, because readers differ: `isn't` is two runs of `\w`.
"""

import json
import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hymoe.engine.errors import UserError
from hymoe.engine.eval.ifeval import OPTIONS
from hymoe.engine.eval.tasks import COMMON, Task
from hymoe.engine.typed_toml import read_toml

WORD_RULE = 'a word is an unbroken run of letters and digits, so that "isn\'t" and "well-known" are two words each'
SENTENCE_RULE = (
    'a sentence ends with ".", "!" or "?" before a space or the end of the text; the stop of an abbreviation such as '
    '"Dr." or of an initial ends none; text after the last end is a sentence too'
)
ALONE_RULE = "as a word of its own, not inside a longer word; upper or lower case does not matter"
INSIDE_RULE = "also inside longer words; upper or lower case does not matter"
PIECES = ("ing", "tion", "ment", "ight", "ough", "port", "able", "ever", "stand", "land")
SIGNS = ("!", "?", ";", ":", "(")
END_PHRASES = (
    "Is there anything else I can help with?",
    "Any other questions?",
    "That is all there is to say.",
    "And that was the end of it.",
    "Thank you for reading.",
    "The rest is up to you.",
)
SECTIONS = ("Section", "Part", "Chapter", "Day", "Step")
MARKERS = ("P.S.", "P.P.S")
KEYS = (
    "title",
    "summary",
    "reason",
    "steps",
    "result",
    "author",
    "date",
    "topic",
    "answer",
    "notes",
)
LANGUAGES = {
    "de": "German",
    "fr": "French",
    "es": "Spanish",
    "it": "Italian",
    "pt": "Portuguese",
    "nl": "Dutch",
    "pl": "Polish",
    "fi": "Finnish",
    "ru": "Russian",
    "hi": "Hindi",
    "bn": "Bengali",
    "ar": "Arabic",
    "ko": "Korean",
    "vi": "Vietnamese",
}
ORDINALS = ("first", "second", "third", "fourth", "fifth")


@dataclass(frozen=True, slots=True)
class Asked:
    """One constraint of a prompt."""

    id: str
    arguments: dict[str, Any]
    sentence: str


class Words:
    """Words for a prompt's constraints, no word twice: those of the request first, then common ones."""

    def __init__(self, rng: random.Random, task: Task) -> None:
        """Shuffles them."""
        own = rng.sample(task.words, len(task.words))
        self._left = [*own, *(w for w in rng.sample(COMMON, len(COMMON)) if w not in own)]

    def take(self, count: int = 1) -> list[str]:
        """The next ones."""
        taken, self._left = self._left[:count], self._left[count:]
        return taken


Draw = Callable[[random.Random, Words, Task], dict[str, Any]]


def _relation(rng: random.Random, less: range, least: range) -> tuple[str, int]:
    relation = rng.choice(("less than", "at least"))
    return relation, rng.choice(less if relation == "less than" else least)


def _frequency(rng: random.Random, words: Words, task: Task) -> dict[str, Any]:
    relation, count = _relation(rng, range(2, 5), range(2, 5))
    return {"keyword": words.take()[0], "frequency": count, "relation": relation}


def _letter(rng: random.Random, words: Words, task: Task) -> dict[str, Any]:
    relation, count = _relation(rng, range(2, 6), range(3, 7))
    # A rare letter can be kept rare in a text of any length, a common one reached in a short one.
    letter = rng.choice("jqxz" if relation == "less than" else "aeinorst")
    return {"letter": letter, "let_frequency": count, "let_relation": relation}


def _number_words(rng: random.Random, words: Words, task: Task) -> dict[str, Any]:
    relation, count = _relation(rng, range(40, 201, 20), range(50, 301, 50))
    return {"num_words": count, "relation": relation}


def _number_sentences(rng: random.Random, words: Words, task: Task) -> dict[str, Any]:
    relation, count = _relation(rng, range(4, 11), range(3, 13))
    return {"num_sentences": count, "relation": relation}


def _nth_paragraph(rng: random.Random, words: Words, task: Task) -> dict[str, Any]:
    count = rng.randint(2, 5)
    return {
        "num_paragraphs": count,
        "nth_paragraph": rng.randint(1, count),
        "first_word": words.take()[0],
    }


def _capitals(rng: random.Random, words: Words, task: Task) -> dict[str, Any]:
    relation, count = _relation(rng, range(3, 9), range(2, 7))
    return {"capital_frequency": count, "capital_relation": relation}


def _substring_count(rng: random.Random, words: Words, task: Task) -> dict[str, Any]:
    part = rng.choice((*PIECES, words.take()[0]))
    return {"substring": part, "times": rng.randint(2, 4)}


def _no(rng: random.Random, words: Words, task: Task) -> dict[str, Any]:
    return {}


def _number(name: str, fewest: int, most: int, step: int = 1) -> Draw:
    return lambda rng, words, task: {name: rng.randrange(fewest, most + 1, step)}


def _some(name: str, fewest: int, most: int) -> Draw:
    return lambda rng, words, task: {name: words.take(rng.randint(fewest, most))}


def _one(name: str, values: Sequence[str]) -> Draw:
    return lambda rng, words, task: {name: rng.choice(values)}


# Id: how arguments are drawn, and ways to say it, filled in from the arguments (texts in quotation marks).
OPEN: dict[str, tuple[Draw, tuple[str, ...]]] = {
    "keywords:existence": (
        _some("keywords", 2, 3),
        ("Include the keywords {keywords}.", "Each of these keywords has to occur: {keywords}."),
    ),
    "keywords:forbidden_words": (
        _some("forbidden_words", 2, 3),
        ("Do not use the words {forbidden_words}.", "Leave out these words: {forbidden_words}."),
    ),
    "keywords:frequency": (
        _frequency,
        (
            "The word {keyword} should appear {relation} {frequency} times.",
            "Use {keyword} {relation} {frequency} times.",
        ),
    ),
    "keywords:letter_frequency": (
        _letter,
        (
            "The letter {letter} should appear {let_relation} {let_frequency} times.",
            "In the whole answer, have the letter {letter} {let_relation} {let_frequency} times.",
        ),
    ),
    "language:response_language": (
        _one("language", tuple(LANGUAGES)),
        (
            "Answer in {language} only, no other language is allowed.",
            "Write the whole answer in {language}.",
        ),
    ),
    "length_constraints:number_sentences": (
        _number_sentences,
        (
            "Answer in {relation} {num_sentences} sentences.",
            "The answer should have {relation} {num_sentences} sentences.",
        ),
    ),
    "length_constraints:number_words": (
        _number_words,
        ("Answer in {relation} {num_words} words.", "Use {relation} {num_words} words."),
    ),
    "length_constraints:number_paragraphs": (
        _number("num_paragraphs", 2, 5),
        (
            "Write exactly {num_paragraphs} paragraphs and separate them by the divider ***.",
            "There should be exactly {num_paragraphs} paragraphs, with *** between each two.",
        ),
    ),
    "length_constraints:nth_paragraph_first_word": (
        _nth_paragraph,
        (
            "Write exactly {num_paragraphs} paragraphs with an empty line between each two and no other empty lines; "
            "the {nth_paragraph} one has to start with the word {first_word}.",
        ),
    ),
    "detectable_content:number_placeholders": (
        _number("num_placeholders", 2, 4),
        (
            "Have at least {num_placeholders} placeholders in square brackets, such as [name].",
            "Leave at least {num_placeholders} gaps to fill in, each in square brackets, such as [date].",
        ),
    ),
    "detectable_content:postscript": (
        _one("postscript_marker", MARKERS),
        ("At the end add a postscript that starts with {postscript_marker}",),
    ),
    "detectable_format:number_bullet_lists": (
        _number("num_bullets", 2, 5),
        (
            'Have exactly {num_bullets} bullet points, each on a line of its own that starts with "* " or "- ".',
        ),
    ),
    "detectable_format:constrained_response": (
        _no,
        ("Say one of these sentences to the letter: {options}.",),
    ),
    "detectable_format:number_highlighted_sections": (
        _number("num_highlights", 2, 4),
        (
            "Highlight at least {num_highlights} passages with asterisks, such as *highlighted passage*.",
        ),
    ),
    "detectable_format:multiple_sections": (
        lambda rng, words, task: {
            "section_spliter": rng.choice(SECTIONS),
            "num_sections": rng.randint(2, 4),
        },
        (
            "Divide the answer into at least {num_sections} sections and start each with {section_spliter} and its "
            "number, such as {section_spliter} 1.",
        ),
    ),
    "detectable_format:json_format": (
        _no,
        ("The whole answer has to be valid JSON; a Markdown fence around it is allowed.",),
    ),
    "detectable_format:title": (
        _no,
        ("Give it a title in double angular brackets, such as <<a title>>.",),
    ),
    "combination:two_responses": (
        _no,
        ("Give two different responses, with six asterisks ****** and nothing else between them.",),
    ),
    "combination:repeat_prompt": (
        lambda rng, words, task: {"prompt_to_repeat": task.text},
        (
            "First repeat the request above word for word, without a change and with nothing before it, then answer "
            "it (this sentence and what follows it are no part of the request).",
        ),
    ),
    "startend:end_checker": (
        _one("end_phrase", END_PHRASES),
        ("The answer has to end with {end_phrase} and nothing after it.",),
    ),
    "startend:quotation": (
        _no,
        ("Put the whole answer in double quotation marks.",),
    ),
    "change_case:capital_word_frequency": (
        _capitals,
        (
            "Words in capital letters only should appear {capital_relation} {capital_frequency} times.",
        ),
    ),
    "change_case:english_capital": (
        _no,
        ("Answer in English and in capital letters only.",),
    ),
    "change_case:english_lowercase": (
        _no,
        ("Answer in English and in lower-case letters only, without any capital letter.",),
    ),
    "punctuation:no_comma": (
        _no,
        ("Do not use any commas.", "There should be no comma in the answer."),
    ),
    "count:words": (
        _number("num_words", 25, 120),
        (
            f"Answer in exactly {{num_words}} words ({WORD_RULE}).",
            f"The answer has to have exactly {{num_words}} words, where {WORD_RULE}.",
        ),
    ),
    "count:sentences": (
        _number("num_sentences", 2, 8),
        (f"Answer in exactly {{num_sentences}} sentences ({SENTENCE_RULE}).",),
    ),
    "words:required": (
        _some("words", 2, 3),
        ("Use each of the words {words}, in this form and not as a part of a longer word.",),
    ),
    "words:forbidden": (
        _some("words", 2, 3),
        ("None of the words {words} may occur; as a part of a longer word they may.",),
    ),
    "words:count": (
        lambda rng, words, task: {"word": words.take()[0], "times": rng.randint(2, 4)},
        (f"Use the word {{word}} exactly {{times}} times ({ALONE_RULE}).",),
    ),
    "substrings:required": (
        lambda rng, words, task: {"substrings": [rng.choice(PIECES), *words.take()]},
        (f"Each of the letter sequences {{substrings}} has to occur ({INSIDE_RULE}).",),
    ),
    "substrings:forbidden": (
        lambda rng, words, task: {"substrings": [rng.choice(SIGNS), *words.take()]},
        (f"None of {{substrings}} may occur ({INSIDE_RULE}).",),
    ),
    "substrings:count": (
        _substring_count,
        (f"The letters {{substring}} have to occur exactly {{times}} times ({INSIDE_RULE}).",),
    ),
    "case:upper": (
        _no,
        ("Use capital letters only.", "There may be no lower-case letter in the answer."),
    ),
    "case:lower": (
        _no,
        ("Use lower-case letters only.", "There may be no capital letter in the answer."),
    ),
    "json:object": (
        lambda rng, words, task: {"keys": rng.sample(KEYS, rng.randint(2, 4))},
        (
            "Answer with one JSON object that has exactly the keys {keys}, each once, and nothing outside of it but "
            "a Markdown fence.",
        ),
    ),
}
CLOSED: dict[str, tuple[str, ...]] = {
    "words:repeated": (
        "Repeat {word} {times} times, with spaces between and no other word.",
        "Write the word {word} exactly {times} times and no other word.",
    ),
    "list:reversed": (
        "Reverse, with commas between and nothing else: {items}",
        "Put this list into reverse order, with commas between and nothing before or after it: {items}",
    ),
    "list:without": (
        "Leave out {forbidden}, with commas between the others and nothing else: {items}",
        "Copy this list without {forbidden}, with commas between and nothing before or after it: {items}",
    ),
    "list:bulleted": (
        'Bullets, each on a line after "- " and nothing else: {items}',
        'Turn this into a list, each item in its order on a line of its own after "- ", and nothing else: {items}',
    ),
    "case:upper_list": (
        "Capital letters, with commas between and nothing else: {items}",
        "Copy this list in capital letters, with commas between and nothing before or after it: {items}",
    ),
    "json:list": (
        "JSON list of these strings and nothing else: {items}",
        "Turn this into a JSON list of strings in the same order, and nothing else: {items}",
    ),
}


def is_askable(kind: str, task: Task) -> bool:
    """Whether a request can have the constraint: yes, no or maybe must be an answer to it."""
    return kind != "detectable_format:constrained_response" or task.is_yes_no


def draw(
    kind: str, rng: random.Random, words: Words, task: Task, wordings: Mapping[str, Sequence[str]]
) -> Asked:
    """Draws the arguments and the wording of an open constraint."""
    arguments = OPEN[kind][0](rng, words, task)
    return Asked(kind, arguments, rng.choice(wordings[kind]).format(**_shown(arguments)))


def draw_closed(
    kind: str, rng: random.Random, items: Sequence[str], wordings: Mapping[str, Sequence[str]]
) -> Asked:
    """Draws a closed constraint; its sentence is the whole prompt.

    Args:
        kind: a key of CLOSED.
        rng: decides.
        items: what lists are made of, six or more.
        wordings: as `read_wordings` gives them.
    """
    if kind == "words:repeated":
        arguments: dict[str, Any] = {"word": rng.choice(items), "times": rng.randint(2, 6)}
    else:
        arguments = {"items": rng.sample(items, rng.randint(3 if kind == "list:without" else 2, 5))}
        if kind == "list:without":
            arguments["forbidden"] = rng.choice(arguments["items"])
    shown = {k: ", ".join(v) if isinstance(v, list) else v for k, v in arguments.items()}
    return Asked(kind, arguments, rng.choice(wordings[kind]).format(**shown))


def read_wordings(path: Path | None) -> dict[str, Sequence[str]]:
    """The wordings of every kind: the built-in ones, where a user's file has no others.

    Args:
        path: TOML, `"count:words" = ["In exactly {num_words} words.", ...]`, in any language.

    Raises:
        UserError: an unknown kind, an unknown argument, or one that a wording does not say.
    """
    made: dict[str, Sequence[str]] = {kind: wordings for kind, (_, wordings) in OPEN.items()}
    made.update(CLOSED)
    for kind, wordings in ({} if path is None else read_toml(path)).items():
        where = f"{path}: {kind!r}"
        if kind not in made:
            raise UserError(f"{where} is unknown, expected one of {', '.join(made)}")
        if not isinstance(wordings, list) or not wordings:
            raise UserError(f"{where} is {wordings!r}, expected a list of texts")
        needed = _placeholders(made[kind][0])
        for wording in wordings:
            try:
                found = _placeholders(wording)
            except (TypeError, ValueError) as error:
                raise UserError(f"{where}: {wording!r} is no wording: {error}") from None
            if found != needed:
                names = (
                    ", ".join("{" + name + "}" for name in sorted(needed)) or "nothing in braces"
                )
                raise UserError(f"{where}: {wording!r}: expected {names}")
        made[kind] = wordings
    return made


def _placeholders(wording: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(wording) if name is not None}


def solved(kind: str, arguments: Mapping[str, Any]) -> str:
    """The answer that a closed constraint determines."""
    items = arguments.get("items", [])
    if kind == "words:repeated":
        return " ".join([arguments["word"]] * arguments["times"])
    if kind == "list:bulleted":
        return "\n".join(f"- {item}" for item in items)
    if kind == "json:list":
        return json.dumps(items, ensure_ascii=False)
    if kind == "list:reversed":
        items = items[::-1]
    if kind == "list:without":
        items = [item for item in items if item != arguments["forbidden"]]
    if kind == "case:upper_list":
        items = [item.upper() for item in items]
    return ", ".join(items)


def _shown(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a wording may name: texts in quotation marks, numbers and relations as they are."""
    bare = ("relation", "let_relation", "capital_relation", "section_spliter", "postscript_marker")
    shown = {
        name: value if isinstance(value, int) or name in bare else _quoted(value)
        for name, value in arguments.items()
    }
    if "language" in arguments:
        shown["language"] = LANGUAGES[arguments["language"]]
    if "nth_paragraph" in arguments:
        shown["nth_paragraph"] = ORDINALS[arguments["nth_paragraph"] - 1]
    return shown | {"options": _quoted(OPTIONS, "or")}


def _quoted(value: str | Sequence[str], last: str = "and") -> str:
    quoted = [f'"{text}"' for text in ([value] if isinstance(value, str) else value)]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} {last} {quoted[-1]}"

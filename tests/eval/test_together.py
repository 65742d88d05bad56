"""Constraints of one prompt never contradict each other.

Shown by construction: `Writer` makes an answer to every drawn prompt that the checks pass, out of plain English words.
"""

import itertools
import json
import random
from typing import Any

import pytest

from hymoe.engine.eval.asking import CLOSED, OPEN, Asked
from hymoe.engine.eval.checks import check
from hymoe.engine.eval.decency import fault
from hymoe.engine.eval.synthesize import Made, Wanted, prompts
from hymoe.engine.eval.together import clash, go_together
from hymoe.engine.eval.words import count_substring, words_of

PLAIN = words_of(
    "the old man said that he was glad to see the calm sea from his home in the hills and we did not know why so he "
    "told us of the days when his son had been one sailor who knew each bay on that coast and how all of them had "
    "sung as the ships came back with fish and salt and with news of far towns and their odd laws"
)
OTHER_LANGUAGES = {
    "de": "Der alte Mann sah das Meer und sagte dass er sich freue wieder daheim zu sein",
    "fr": "Le vieil homme regarde la mer et dit qu'il est heureux d'\u00eatre enfin chez lui",
    "es": "El hombre viejo mira el mar y dice que est\u00e1 muy contento de estar en su casa",
    "it": "Il vecchio guarda il mare e dice che \u00e8 molto contento di essere a casa sua",
    "pt": "O homem velho olha para o mar e diz que est\u00e1 muito contente de n\u00e3o ir embora",
    "nl": "De oude man kijkt naar de zee en zegt dat hij heel blij is om weer thuis te zijn",
    "pl": "Stary cz\u0142owiek patrzy na morze i m\u00f3wi \u017ce jest szcz\u0119\u015bliwy w domu",
    "fi": "Vanha mies katsoo merta ja sanoo ett\u00e4 h\u00e4n on iloinen kun on taas kotona",
    "ru": "\u0421\u0442\u0430\u0440\u044b\u0439 \u0447\u0435\u043b\u043e\u0432\u0435\u043a "
    "\u0441\u043c\u043e\u0442\u0440\u0438\u0442 \u043d\u0430 \u043c\u043e\u0440\u0435 "
    "\u0438 \u0433\u043e\u0432\u043e\u0440\u0438\u0442 \u0447\u0442\u043e \u043e\u043d "
    "\u043e\u0447\u0435\u043d\u044c \u0440\u0430\u0434 \u0431\u044b\u0442\u044c "
    "\u0434\u043e\u043c\u0430 \u043f\u043e\u0442\u043e\u043c\u0443 \u0447\u0442\u043e "
    "\u044d\u0442\u043e \u0441\u0447\u0430\u0441\u0442\u044c\u0435",
    "hi": "\u092c\u0942\u0922\u093c\u093e \u0906\u0926\u092e\u0940 \u0938\u092e\u0941\u0926\u094d\u0930 \u0915\u094b "
    "\u0926\u0947\u0916\u0924\u093e \u0939\u0948 \u0914\u0930 \u0916\u0941\u0936 \u0939\u0948",
    "bn": "\u09ac\u09c3\u09a6\u09cd\u09a7 \u09b2\u09cb\u0995\u099f\u09bf \u09b8\u09ae\u09c1\u09a6\u09cd\u09b0 "
    "\u09a6\u09c7\u0996\u09c7 \u098f\u09ac\u0982 \u09b8\u09c7 \u0996\u09c1\u09b6\u09bf",
    "ar": "\u064a\u0646\u0638\u0631 \u0627\u0644\u0631\u062c\u0644 \u0625\u0644\u0649 \u0627\u0644\u0628\u062d\u0631 "
    "\u0648\u0647\u0648 \u0633\u0639\u064a\u062f",
    "ko": "\ub178\uc778\uc740 \ubc14\ub2e4\ub97c \ubcf4\uace0 \uae30\ubed0\ud558\uba70 \uc9d1\uc5d0 \uc788\ub2e4",
    "vi": "\u00d4ng gi\u00e0 nh\u00ecn bi\u1ec3n v\u00e0 n\u00f3i r\u1eb1ng \u00f4ng r\u1ea5t vui khi \u1edf nh\u00e0",
}


class Writer:
    """Makes an answer to a prompt, by building in what each constraint asks for."""

    def __init__(self, made: Made, rng: random.Random) -> None:
        self.rng = rng
        self.of = {asked.id: asked.arguments for asked in made.asked}
        limited = [text for asked in made.asked for text in self._limited(asked)]
        self.fill = [w for w in PLAIN if not any(count_substring(w, part) for part in limited)]
        if "language:response_language" in self.of:
            language = self.of["language:response_language"]["language"]
            self.fill = OTHER_LANGUAGES[language].split()

    @staticmethod
    def _limited(asked: Asked) -> list[str]:
        names = ("forbidden_words", "words", "word", "substrings", "substring", "keyword", "letter")
        if asked.id.endswith("required") or asked.arguments.get("let_relation") == "at least":
            return []
        found = [asked.arguments[name] for name in names if name in asked.arguments]
        return [text for value in found for text in (value if isinstance(value, list) else [value])]

    def get(self, kind: str, name: str, default: Any) -> Any:
        return self.of.get(kind, {}).get(name, default)

    def needed(self) -> list[str]:
        """Texts that have to stand somewhere."""
        texts = list(self.get("keywords:existence", "keywords", []))
        texts += self.get("words:required", "words", [])
        texts += self.get("substrings:required", "substrings", [])
        for kind, text, times in (
            ("words:count", "word", "times"),
            ("substrings:count", "substring", "times"),
        ):
            texts += [self.get(kind, text, "")] * self.get(kind, times, 0)
        if self.get("keywords:frequency", "relation", "") == "at least":
            texts += [self.of["keywords:frequency"]["keyword"]] * self.of["keywords:frequency"][
                "frequency"
            ]
        letter = self.get("keywords:letter_frequency", "letter", "")
        if self.get("keywords:letter_frequency", "let_relation", "") == "at least":
            texts += [w for w in self.fill if letter in w][:1] * self.of[
                "keywords:letter_frequency"
            ]["let_frequency"]
        if self.get("change_case:capital_word_frequency", "capital_relation", "") == "at least":
            texts += ["FBI"] * self.of["change_case:capital_word_frequency"]["capital_frequency"]
        texts += [f"*{self.fill[0]}*"] * self.get(
            "detectable_format:number_highlighted_sections", "num_highlights", 0
        )
        texts += [f"[{self.fill[1]}]"] * self.get(
            "detectable_content:number_placeholders", "num_placeholders", 0
        )
        return texts

    def sentences(self) -> int:
        for kind in ("count:sentences", "length_constraints:number_sentences"):
            if kind in self.of:
                fewer = self.of[kind].get("relation") == "less than"
                return self.of[kind]["num_sentences"] - fewer - ("startend:end_checker" in self.of)
        return max(3, *(a.get("num_paragraphs", 0) for a in self.of.values()))

    def body(self, filler: int) -> str:
        """Sentences in paragraphs, with so many words beside the needed ones."""
        rng = random.Random(self.rng.random())
        laps = [rng.sample(self.fill, len(self.fill)) for _ in range(filler // len(self.fill))]
        tokens = [*self.fill, *itertools.chain(*laps)][:filler]
        texts = self.needed()
        step = max(1, len(tokens) // (len(texts) + 1))
        for number, text in enumerate(texts):  # apart from each other
            tokens.insert((number + 1) * (step + 1) - 1, text)
        size, count = max(1, len(tokens) // self.sentences()), self.sentences()
        parts = [tokens[n * size : (n + 1) * size if n < count - 1 else None] for n in range(count)]
        said = [" ".join(part) + "." for part in parts]
        said = [
            s if "keywords:letter_frequency" in self.of else s[:1].upper() + s[1:] for s in said
        ]
        paragraphs = 1
        mark = " "
        for kind, separator in (
            ("length_constraints:number_paragraphs", "\n***\n"),
            ("length_constraints:nth_paragraph_first_word", "\n\n"),
        ):
            if kind in self.of:
                paragraphs, mark = self.of[kind]["num_paragraphs"], separator
        blocks = [" ".join(said[n::paragraphs]) for n in range(paragraphs)]
        first = self.get("length_constraints:nth_paragraph_first_word", "first_word", "")
        if first:
            place = self.of["length_constraints:nth_paragraph_first_word"]["nth_paragraph"] - 1
            blocks[place] = f"{first} {blocks[place]}"
        return mark.join(blocks)

    def answer(self, filler: int = 34) -> str:
        of, text = self.of, self.body(filler)
        splitter = self.get("detectable_format:multiple_sections", "section_spliter", "")
        for number in range(self.get("detectable_format:multiple_sections", "num_sections", 0)):
            text += f"\n{splitter} {number + 1}"
        bullets = self.get("detectable_format:number_bullet_lists", "num_bullets", 0)
        text += "".join(f"\n- {word}" for word in self.rng.sample(self.fill, bullets))
        if "detectable_format:title" in of:
            text = f"<<{self.fill[3]}>>\n{text}"
        if "detectable_format:constrained_response" in of:
            text = f"My answer is no. {text}"
        if "combination:repeat_prompt" in of:
            text = f"{of['combination:repeat_prompt']['prompt_to_repeat']}\n{text}"
        for kind, name in (
            ("detectable_content:postscript", "postscript_marker"),
            ("startend:end_checker", "end_phrase"),
        ):
            text += f"\n{of[kind][name]}" if kind in of else ""
        if "combination:two_responses" in of:
            text += "\n******\n" + " ".join(reversed(self.fill[:20])) + "."
        if "detectable_format:json_format" in of:
            text = json.dumps({self.fill[0]: text}, ensure_ascii=False)
        if "json:object" in of:
            text = json.dumps(
                dict.fromkeys(of["json:object"]["keys"][1:], 1)
                | {of["json:object"]["keys"][0]: text}
            )
        if "startend:quotation" in of:
            text = f'"{text}"'
        if {"case:upper", "change_case:english_capital"} & of.keys():
            text = text.upper()
        if {"case:lower", "change_case:english_lowercase"} & of.keys():
            text = text.lower()
        return text

    def fitting(self) -> str:
        """With as many words as asked for."""
        state = self.rng.getstate()
        text = self.answer()
        for kind in ("count:words", "length_constraints:number_words"):
            if kind in self.of:
                target = self.of[kind]["num_words"] - (self.of[kind].get("relation") == "less than")
                filler = 34 + target - len(words_of(text))
                self.rng.setstate(state)
                text = self.answer(filler) if filler >= 0 else text
        return text


def faults(made: Made, answer: str) -> list[str]:
    """What keeps an answer from being kept."""
    verdicts = [(asked.id, check(asked.id, answer, asked.arguments)) for asked in made.asked]
    broken = [f"{kind}: {verdict.reason}" for kind, verdict in verdicts if not verdict.passed]
    given = [a.arguments["prompt_to_repeat"] for a in made.asked if a.id.endswith("repeat_prompt")]
    kinds = tuple(asked.id for asked in made.asked)
    found = fault(answer, made.text, kinds, "stop", "".join(given))
    return broken if found is None else [*broken, ": ".join(found)]


def check_made(made: Made, rng: random.Random) -> None:
    for _ in range(10):
        answer = Writer(made, rng).fitting()
        # What a detector makes of words in random order is no matter of which constraints go together.
        found = [fault for fault in faults(made, answer) if "reads like language" not in fault]
        if not found:
            return
    raise AssertionError(f"{found}\n{made.text}\n---\n{answer}")


def test_every_pair_that_may_stand_together_can_be_kept() -> None:
    rng = random.Random()
    pairs = [pair for pair in itertools.combinations(OPEN, 2) if go_together(*pair)]
    assert 300 < len(pairs) < 550
    for pair in pairs:
        for made in prompts(
            Wanted(count=1, seed=rng.randrange(1 << 30), kinds=pair, fewest=2, most=2)
        ):
            assert {asked.id for asked in made.asked} == set(pair)
            check_made(made, rng)


def test_up_to_four_together_can_be_kept() -> None:
    rng = random.Random()
    seed = rng.randrange(1 << 30)
    for made in prompts(Wanted(count=400, seed=seed, fewest=1, most=4)):
        if made.asked[0].id in CLOSED:
            continue
        check_made(made, rng)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("case:upper", "case:lower"),
        ("case:upper", "change_case:english_lowercase"),
        ("count:words", "count:words"),
        ("count:words", "length_constraints:number_words"),
        ("count:sentences", "length_constraints:number_sentences"),
        ("length_constraints:number_paragraphs", "length_constraints:nth_paragraph_first_word"),
        ("json:object", "punctuation:no_comma"),
        ("json:object", "startend:quotation"),
        ("detectable_format:json_format", "detectable_format:number_bullet_lists"),
        ("combination:two_responses", "length_constraints:number_paragraphs"),
        ("combination:repeat_prompt", "startend:quotation"),
        ("language:response_language", "keywords:existence"),
        ("language:response_language", "change_case:english_capital"),
        ("case:lower", "detectable_content:postscript"),
        ("list:reversed", "punctuation:no_comma"),
        ("list:reversed", "json:list"),
    ],
)
def test_contradictions_by_kind(one: str, other: str) -> None:
    assert not go_together(one, other)
    assert not go_together(other, one)


@pytest.mark.parametrize(
    ("one", "other", "contradict"),
    [
        (
            ("keywords:existence", {"keywords": ["river"]}),
            ("words:forbidden", {"words": ["river"]}),
            True,
        ),
        (
            ("keywords:existence", {"keywords": ["Rivers"]}),
            ("substrings:forbidden", {"substrings": ["river"]}),
            True,
        ),
        (
            ("words:count", {"word": "art", "times": 2}),
            ("words:required", {"words": ["start"]}),
            True,
        ),
        (
            ("substrings:count", {"substring": "!", "times": 2}),
            ("startend:end_checker", {"end_phrase": "So!"}),
            True,
        ),
        (
            ("punctuation:no_comma", {}),
            ("combination:repeat_prompt", {"prompt_to_repeat": "Go, now"}),
            True,
        ),
        (
            ("punctuation:no_comma", {}),
            ("combination:repeat_prompt", {"prompt_to_repeat": "Go now"}),
            False,
        ),
        (("json:object", {"keys": ["a"]}), ("substrings:forbidden", {"substrings": [":"]}), True),
        (
            ("json:object", {"keys": ["notes"]}),
            ("keywords:forbidden_words", {"forbidden_words": ["notes"]}),
            True,
        ),
        (
            ("keywords:frequency", {"keyword": "sea", "frequency": 2, "relation": "less than"}),
            ("words:count", {"word": "sea", "times": 4}),
            True,
        ),
        (
            ("keywords:frequency", {"keyword": "sea", "frequency": 2, "relation": "at least"}),
            ("words:required", {"words": ["sea"]}),
            False,
        ),
        (
            (
                "keywords:letter_frequency",
                {"letter": "z", "let_frequency": 2, "let_relation": "less than"},
            ),
            ("words:required", {"words": ["maze"]}),
            True,
        ),
        (
            ("keywords:existence", {"keywords": ["river"]}),
            ("words:forbidden", {"words": ["lamp"]}),
            False,
        ),
    ],
)
def test_contradictions_by_argument(one: Any, other: Any, contradict: bool) -> None:
    pair = Asked(*one, ""), Asked(*other, "")
    assert clash(*pair) is contradict
    assert clash(*reversed(pair)) is contradict

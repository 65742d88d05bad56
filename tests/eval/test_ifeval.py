"""IFEval's 25 kinds: each on texts that a careless check gets wrong, and against recorded verdicts."""

import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hymoe.engine.errors import UserError
from hymoe.engine.eval import language, words
from hymoe.engine.eval.checks import CHECKS, check
from hymoe.engine.eval.instruct import Prompt, loose_versions, score

ENGLISH = "the quick brown fox jumps over the lazy dog and then goes home to sleep"
GERMAN = "der schnelle braune Fuchs springt \u00fcber den faulen Hund und geht dann nach Hause"


def letters(letter: str, count: int, relation: str = "at least") -> dict[str, Any]:
    return {"letter": letter, "let_frequency": count, "let_relation": relation}


def nth(paragraphs: int, number: int, word: str) -> dict[str, Any]:
    return {"num_paragraphs": paragraphs, "nth_paragraph": number, "first_word": word}


def capitals(count: int, relation: str = "at least") -> dict[str, Any]:
    return {"capital_frequency": count, "capital_relation": relation}


def sentences(count: int, relation: str = "at least") -> dict[str, Any]:
    return {"num_sentences": count, "relation": relation}


@pytest.mark.parametrize(
    ("kind", "arguments", "answer", "passed"),
    [
        ("keywords:letter_frequency", letters("q", 2), "Quite quick", True),
        ("keywords:letter_frequency", letters("Q", 3), "Quite quick", False),
        ("keywords:letter_frequency", letters("#", 1, "less than"), "a # b", False),
        ("language:response_language", {"language": "de"}, GERMAN, True),
        ("language:response_language", {"language": "en"}, GERMAN, False),
        ("language:response_language", {"language": "hi"}, "1234 !", True),
        # Typographic quotation marks close no sentence; abbreviations neither.
        ("length_constraints:number_sentences", sentences(2), "Dr. Li left. He slept.", True),
        ("length_constraints:number_sentences", sentences(3), "Dr. Li left. He slept.", False),
        (
            "length_constraints:number_sentences",
            sentences(2, "less than"),
            "\u201cGo.\u201d He went.",
            True,
        ),
        ("length_constraints:number_sentences", sentences(2), '"Go." He went.', True),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", True),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***a***b***", True),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\n\n***\nb", False),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n\nb", False),
        ("length_constraints:nth_paragraph_first_word", nth(2, 2, "It"), "a\n\n\"'it's b", False),
        ("length_constraints:nth_paragraph_first_word", nth(2, 2, "It"), "a\n\n'\"it's b", True),
        ("length_constraints:nth_paragraph_first_word", nth(2, 2, "it"), "a\n\nitem", False),
        ("length_constraints:nth_paragraph_first_word", nth(2, 3, "it"), "a\n\nit", False),
        ("length_constraints:nth_paragraph_first_word", nth(2, 2, "it"), "a\n\n\n\nit", False),
        ("length_constraints:nth_paragraph_first_word", nth(3, 1, "a"), "a\n\nit", False),
        ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b c]", True),
        ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a\n] [b]", False),
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, "x\np. s. y", True),
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, "x\nps y", False),
        ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "x\nP. P.S: y", True),
        ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "x\nP.S. y", False),
        ("detectable_content:postscript", {"postscript_marker": "N.B"}, "x\nNUB y", False),
        ("detectable_format:constrained_response", {}, "Well. My answer is no.", True),
        ("detectable_format:constrained_response", {}, "my answer is no.", False),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b\n**bold**", True),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b\n- c", False),
        (
            "detectable_format:number_highlighted_sections",
            {"num_highlights": 2},
            "*a* **b**",
            True,
        ),
        (
            "detectable_format:number_highlighted_sections",
            {"num_highlights": 1},
            "* a\n* b\n****",
            False,
        ),
        (
            "detectable_format:multiple_sections",
            {"section_spliter": "Day", "num_sections": 2},
            "Day 1\nx\nDay 22",
            True,
        ),
        (
            "detectable_format:multiple_sections",
            {"section_spliter": "D.y", "num_sections": 1},
            "Day 1",
            False,
        ),
        ("detectable_format:title", {}, "<<a b>> c", True),
        ("detectable_format:title", {}, "<<  >>", False),
        ("detectable_format:title", {}, "<<a\nb>>", False),
        ("combination:two_responses", {}, "a ****** b", True),
        ("combination:two_responses", {}, "a ****** a", False),
        ("combination:two_responses", {}, "a ****** b ****** c", False),
        ("combination:two_responses", {}, "a ****** ****** c", False),
        ("combination:two_responses", {}, "******a******b******", True),
        ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, " say HI. Hi!", True),
        ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "Sure. Say hi.", False),
        ("change_case:capital_word_frequency", capitals(2), "I am NOT", True),
        ("change_case:capital_word_frequency", capitals(1), "Mc Cat", False),
        ("change_case:capital_word_frequency", capitals(2, "less than"), "STATE-OF-THE-ART", True),
        ("change_case:capital_word_frequency", capitals(2), "DON'T", True),
        ("change_case:english_capital", {}, ENGLISH.upper(), True),
        ("change_case:english_capital", {}, GERMAN.upper(), False),
        ("change_case:english_capital", {}, "123 !", False),
        ("change_case:english_capital", {}, ENGLISH, False),
        ("change_case:english_lowercase", {}, ENGLISH, True),
        ("change_case:english_lowercase", {}, GERMAN.lower(), False),
        ("change_case:english_lowercase", {}, "123 !", False),
    ],
)
def test_verdicts(kind: str, arguments: dict[str, Any], answer: str, passed: bool) -> None:
    verdict = check(kind, answer, arguments)
    assert verdict.passed is passed, verdict.reason
    assert len(verdict.reason) > 5
    assert "\n" not in verdict.reason


def test_tokens_of_the_treebank() -> None:
    tokens = words.treebank_tokens('He said, "I CANNOT go: it\'s 10:30, 3,000 U.S. dollars..." OK.')
    assert [t for t in tokens if t.isalnum() or "'" in t] == (
        ["He", "said", "I", "CAN", "NOT", "go", "it", "'s", "dollars", "OK"]
    )
    assert {"10:30", "3,000", "U.S.", "..."} <= set(tokens)


def test_the_language_is_the_same_every_time() -> None:
    text = "inscriptions"  # three languages, by chance
    assert len({language.detect_language(text) for _ in range(20)}) == 1
    assert language.detect_language("12 !?") is None


@pytest.mark.parametrize(
    ("module", "maker", "kind", "arguments"),
    [
        ("langdetect", language._detectors, "language:response_language", {"language": "en"}),
        ("punkt", words._punkt, "length_constraints:number_sentences", sentences(1)),
    ],
)
def test_a_missing_package_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, module: str, maker: Any, kind: str, arguments: dict[str, Any]
) -> None:
    maker.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match="pip install"):
        check(kind, "Some text.", arguments)
    monkeypatch.undo()
    maker.cache_clear()
    check(kind, "Some text.", arguments)


# Prompts whose recorded verdicts came out at random (a letter that is no letter), or were recorded for others.
LEFT_OUT = {1122, 1129, 2785}
DETECT_LANGUAGE = {
    "change_case:english_capital",
    "change_case:english_lowercase",
    "language:response_language",
}
# Every disagreement. All are the language detector's draw: the recorded runs left its seed open and drew anew
# for each of a loose verdict's versions. In brackets, how many of 60 seeds pass the text; ours is one of them.
# The other 22 kinds have none.
CHANCE = {
    # A list of five adjectives (20).
    ("claude-3-haiku-20240307", 1645, "change_case:english_capital"),
    # Fifty first names (7).
    ("claude-3-haiku-20240307", 3456, "change_case:english_capital"),
    # Loose: PRADA OR NIKE? a dozen times (12).
    ("deepseek-ai__deepseek-llm-7b-chat", 1219, "change_case:english_capital"),
    # Loose: three invented company names (15).
    ("hugging-quants__Meta-Llama-3.1-8B-Instruct-AWQ-INT4", 3617, "change_case:english_capital"),
    # The one word "inscriptions" (1): passes loosely and not strictly in the record, though both see the same text.
    ("gpt-4o-mini-2024-07-18", 202, "change_case:english_lowercase"),
    # Broken Bulgarian, near to Macedonian (49).
    ("CohereForAI__aya-23-8B", 2596, "language:response_language"),
    # Loose: a line of Gujarati with a Latin transcription (15).
    ("mistralai__Mistral-7B-Instruct-v0.3", 3112, "language:response_language"),
}


def recorded(folder: Path) -> Iterator[tuple[str, int, str, list[bool], list[bool]]]:
    """Yields (file, key, response, strict, loose) of eight models, and of GPT-4 by the text of its prompts."""
    for path in sorted(folder.glob("*.jsonl.gz")):
        for line in gzip.decompress(path.read_bytes()).decode().splitlines():
            row = json.loads(line)
            name = path.name.removesuffix(".jsonl.gz")
            yield name, row["key"], row["response"], row["strict"], row["loose"]
    keys = {row["prompt"]: row["key"] for row in rows(folder / "input_data.jsonl")}
    strict = rows(folder / "gpt4_eval_results_strict.jsonl")
    loose = rows(folder / "gpt4_eval_results_loose.jsonl")
    for s, l in zip(strict, loose, strict=True):
        assert (s["prompt"], s["response"]) == (l["prompt"], l["response"])
        verdicts = s["follow_instruction_list"], l["follow_instruction_list"]
        yield "gpt4", keys[s["prompt"]], s["response"], *verdicts


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_agrees_with_the_recorded_verdicts_of_the_public_benchmark(shared_dir: Path) -> None:
    folder = shared_dir / "data" / "ifeval"
    prompts = {row["key"]: row for row in rows(folder / "input_data.jsonl")}
    total, missed = Counter(), Counter()
    found = set()
    for name, key, response, strict, loose in recorded(folder):
        if key in LEFT_OUT:
            continue
        kinds = tuple(prompts[key]["instruction_id_list"])
        prompt = Prompt("k", "", kinds, tuple(prompts[key]["kwargs"]))
        report = score([prompt], {"k": response})
        ours = zip(report.strict["k"], report.loose["k"], strict=True)
        for kind, verdict, theirs in zip(kinds, ours, zip(strict, loose, strict=True), strict=True):
            total[kind] += 1
            if verdict != theirs:
                missed[kind] += 1
                found.add((name, key, kind))
    assert len(total) == 25
    assert set(total) <= set(CHECKS)
    for kind, count in total.items():
        allowed = 0.03 if kind in DETECT_LANGUAGE else 0.005
        most = 1 if count < 200 else int(allowed * count)
        assert missed[kind] <= most, (kind, missed[kind], count)
    assert found == CHANCE
    for name, key, kind in CHANCE:
        response = next(r for n, k, r, *_ in recorded(folder) if (n, k) == (name, key))
        place = prompts[key]["instruction_id_list"].index(kind)
        assert depends_on_seed(response, kind, prompts[key]["kwargs"][place]), (name, key)


def depends_on_seed(response: str, kind: str, arguments: dict[str, Any]) -> bool:
    """Whether one version of a response passes with some seeds of the detector and fails with others."""
    factory, _ = language._detectors()
    texts = dict.fromkeys(loose_versions(response))
    try:
        for text in texts:
            seen = set()
            for factory.seed in range(60):
                seen.add(check(kind, text, arguments).passed)
            if len(seen) == 2:
                return True
    finally:
        factory.seed = language.SEED
    return False

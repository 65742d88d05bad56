"""Rules for answers: each judged on texts that a careless check would get wrong."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest

from hymoe.engine.errors import UserError
from hymoe.engine.eval.checks import CHECKS, check, count_sentences, count_word, words_of
from hymoe.engine.eval.instruct import (
    Prompt,
    Tally,
    loose_versions,
    read_answers,
    read_prompts,
    score,
)
from hymoe.engine.eval.intervals import wilson

REPO = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("kind", "arguments", "answer", "passed"),
    [
        # A word stands alone, a substring does not; what is looked for is never a pattern.
        ("words:forbidden", {"words": ["bad"]}, "A badge.", True),
        ("words:forbidden", {"words": ["$5"]}, "It costs $5 now", False),
        ("words:forbidden", {"words": ["caf\u00e9"]}, "a cafe\u0301", False),
        ("words:required", {"words": ["C++"]}, "I use C++.", True),
        ("words:required", {"words": ["a.c"]}, "abc", False),
        ("words:required", {"words": ["river", "lamp"]}, "Lamp, RIVER", True),
        ("words:required", {"words": ["river", "lamp"]}, "lamps by the river", False),
        ("words:count", {"word": "art", "times": 1}, "start smart art", True),
        ("substrings:forbidden", {"substrings": ["bad"]}, "A badge.", False),
        ("substrings:required", {"substrings": ["a.c"]}, "abc", False),
        ("substrings:count", {"substring": "art", "times": 3}, "start smart art", True),
        ("keywords:existence", {"keywords": ["a.c"]}, "abc", False),
        ("keywords:existence", {"keywords": ["art"]}, "START", True),
        ("keywords:forbidden_words", {"forbidden_words": ["bad"]}, "A badge.", True),
        ("keywords:forbidden_words", {"forbidden_words": ["bad"]}, "Bad!", False),
        (
            "keywords:frequency",
            {"keyword": "art", "frequency": 2, "relation": "less than"},
            "start",
            True,
        ),
        (
            "keywords:frequency",
            {"keyword": "art", "frequency": 2, "relation": "at least"},
            "start",
            False,
        ),
        ("count:words", {"num_words": 3}, "Cats run fast.", True),
        ("count:words", {"num_words": 7}, "state-of-the-art isn't easy", True),
        ("count:words", {"num_words": 0}, "\U0001f600", True),
        ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "a b", False),
        ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "a b", True),
        (
            "count:sentences",
            {"num_sentences": 2},
            "Dr. Li paid 3.5 dollars, i.e. too much. Fine.",
            True,
        ),
        ("count:sentences", {"num_sentences": 1}, "Really?! ", True),
        # Text without letters has no case.
        ("case:upper", {}, "123 !", False),
        ("case:lower", {}, "123 !", False),
        ("case:upper", {}, "A1 B", True),
        ("case:upper", {}, "STRASSE \u00df", False),
        ("case:lower", {}, "a B", False),
        ("case:lower", {}, "a b", True),
        ("punctuation:no_comma", {}, "a; b", True),
        ("punctuation:no_comma", {}, "a, b", False),
        ("startend:end_checker", {"end_phrase": "The end."}, 'Well. "the END."', True),
        ("startend:end_checker", {"end_phrase": "The end."}, "The end. Not.", False),
        ("startend:quotation", {}, ' "a" ', True),
        ("startend:quotation", {}, '"', False),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b\n**bold**", True),
        # JSON: one fence is fine, anything else around it is not.
        ("json:object", {"keys": ["a"]}, '```JSON\r\n{"a":1}\r\n```', True),
        ("json:object", {"keys": ["a"]}, '```json5\n{"a":1}\n```', False),
        ("json:object", {"keys": ["a"]}, 'Here you go: {"a":1}', False),
        ("json:object", {"keys": ["a"]}, '{"a": NaN}', False),
        ("json:object", {"keys": ["a"]}, '{"a":1,"a":2}', False),
        ("json:object", {"keys": ["a"]}, "42", False),
        ("json:object", {"keys": ["a"]}, '{"a":"```"}', True),
        ("json:object", {"keys": ["a", "b"]}, '{"a":1}', False),
        ("json:object", {"keys": ["a"]}, "[" * 100_000, False),
        ("json:list", {"items": ["a", "b"]}, '["a", "b"]', True),
        ("json:list", {"items": ["a", "b"]}, '["b", "a"]', False),
        ("json:list", {"items": ["1"]}, "[1]", False),
        ("detectable_format:json_format", {}, "42", True),
        ("detectable_format:json_format", {}, "```\n[]\n```", True),
        ("detectable_format:json_format", {}, "{'a': 1}", False),
        # Exact lists.
        ("words:repeated", {"word": "lamp", "times": 3}, "lamp lamp lamp", True),
        ("words:repeated", {"word": "lamp", "times": 3}, "lamp lamp lamp lamp", False),
        ("words:repeated", {"word": "lamp", "times": 3}, "lamp lamp lamp river", False),
        ("list:reversed", {"items": ["a", "b", "c"]}, "c, b, a", True),
        ("list:reversed", {"items": ["a", "b", "c"]}, "a, b, c", False),
        ("list:without", {"items": ["a", "b", "c"], "forbidden": "b"}, "a, c", True),
        ("list:without", {"items": ["a", "b", "c"], "forbidden": "b"}, "c, a", False),
        ("list:without", {"items": ["a", "b", "c"], "forbidden": "b"}, "a, b, c", False),
        ("list:bulleted", {"items": ["a", "b"]}, "- a\n- b\n", True),
        ("list:bulleted", {"items": ["a", "b"]}, "a\n- b", False),
        ("case:upper_list", {"items": ["a", "b"]}, "A, B", True),
        ("case:upper_list", {"items": ["a", "b"]}, "A, b", False),
    ],
)
def test_verdicts(kind: str, arguments: dict[str, Any], answer: str, passed: bool) -> None:
    verdict = check(kind, answer, arguments)
    assert verdict.passed is passed, verdict.reason
    assert len(verdict.reason) > 5
    assert "\n" not in verdict.reason


EXAMPLE_ARGUMENTS: dict[str, Any] = {
    "count": 0,
    "text": "x",
    "texts": ["x"],
    "relation": "less than",
    "position": 1,
    "letter": "x",
    "language": "en",
}


@pytest.mark.parametrize("kind", sorted(CHECKS))
@pytest.mark.parametrize("answer", ["", " \n\t"])
def test_an_empty_answer_passes_nothing(kind: str, answer: str) -> None:
    arguments = {name: EXAMPLE_ARGUMENTS[of] for name, of in CHECKS[kind].arguments.items()}
    assert check(kind, answer, arguments).reason == "the answer is empty"
    assert not check(kind, answer, arguments).passed


@pytest.mark.parametrize("kind", sorted(CHECKS))
def test_bad_arguments_are_errors_for_every_kind(kind: str) -> None:
    good = {name: EXAMPLE_ARGUMENTS[of] for name, of in CHECKS[kind].arguments.items()}
    check(
        kind, "anything", {**good, "other": None}
    )  # IFEval's files have nulls for what is not meant
    with pytest.raises(UserError, match=f"{kind}: unknown argument 'other'"):
        check(kind, "anything", {**good, "other": 1})
    for name, of in CHECKS[kind].arguments.items():
        for absent in ({}, {name: None}):
            rest = {k: v for k, v in good.items() if k != name}
            with pytest.raises(UserError, match=f"{kind}: found no argument '{name}'"):
                check(kind, "anything", {**rest, **absent})
        bad = {
            "count": ["3", -1, 2.0, True],
            "text": ["", 3],
            "texts": [[], "x", [""]],
            "relation": ["more"],
            "position": [0, "1", True],
            "letter": ["", "ab", 1],
            "language": ["English", "xx", 1],
        }
        for value in bad[of]:
            with pytest.raises(UserError, match=f"{kind}: {name} = "):
                check(kind, "anything", {**good, name: value})


@pytest.mark.parametrize("kind", ["no_such_rule", "", "keywords", "KEYWORDS:existence"])
def test_unknown_kind_is_an_error(kind: str) -> None:
    with pytest.raises(UserError, match="unknown constraint"):
        check(kind, "anything")


def test_counting() -> None:
    assert words_of("\U0001f600") == []
    assert count_word("C++ c++ C+++", "C++") == 3  # a sign is no part of a word
    assert [
        count_sentences(t) for t in ("", "a", "Go. Stop", "a.b", "...", "Why? Why! (Yes.) No")
    ] == [
        0,
        1,
        2,
        1,
        0,
        4,
    ]
    assert count_sentences("J. Smith met Mr. Yu. They left at 5 p.m. on Monday.") == 2


def test_loose_versions_drop_first_and_last_line_and_stars() -> None:
    prompt = Prompt("k", "p", ("case:upper",), ({},))
    for answer, strict, loose in (
        ("Sure:\nABC", False, True),
        ("ABC\nHope this helps", False, True),
        ("Sure:\nABC\nbye", False, True),
        ("ABC", True, True),
        ("abc\nABC\nABC\nabc\nabc", False, False),
    ):
        report = score([prompt], {"k": answer})
        assert (report.strict["k"], report.loose["k"]) == ([strict], [loose])
        assert report.loose_reasons["k"][0].startswith("without") is (loose and not strict)
    assert len(loose_versions("a")) == 8


def test_totals_by_kind_and_prompt() -> None:
    prompts = [
        Prompt("a", "", ("punctuation:no_comma", "count:words"), ({}, {"num_words": 2})),
        Prompt("b", "", ("punctuation:no_comma",), ({},)),
        Prompt("c", "", (), ()),
    ]
    report = score(prompts, {"a": "x, y", "b": "x", "c": "x"})
    assert report.strict == {"a": [False, True], "b": [True], "c": []}
    assert {k: (t.strict, t.total) for k, t in report.by_kind.items()} == {
        "punctuation:no_comma": (1, 2),
        "count:words": (1, 1),
    }
    assert (report.constraints.strict, report.constraints.total) == (2, 3)
    assert (report.prompts.strict, report.prompts.total) == (
        1,
        2,
    )  # a prompt without rules counts nowhere
    assert report.prompts_without_constraints == 1
    assert report.reasons["a"][0] == "has 1 commas"


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompt_row(**changes: Any) -> dict[str, Any]:
    row = {
        "key": 1,
        "prompt": "p",
        "instruction_id_list": ["count:words"],
        "kwargs": [{"num_words": 1}],
    }
    return {**row, **changes}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (prompt_row(key=None), '"key" is None'),
        (prompt_row(prompt=3), '"prompt" is 3'),
        (prompt_row(kwargs=[]), "0 kwargs for 1 constraints"),
        (prompt_row(kwargs=[None]), "kwargs has None"),
        (prompt_row(kwargs=[{}]), "count:words: found no argument 'num_words'"),
        (prompt_row(instruction_id_list=["nix"]), "unknown constraint 'nix'"),
        (prompt_row(key="0"), "key 0 again"),
    ],
)
def test_bad_prompts(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    path = write(tmp_path / "p.jsonl", [prompt_row(key=0), row])
    with pytest.raises(UserError, match=rf"p\.jsonl:2: .*{said}"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"key": 1, "response": "x"}], "no answer to 1 of 2 prompts, the first is 2"),
        ([{"key": 1, "response": "x"}] * 2, r"a\.jsonl:2: found key 1 again"),
        ([{"key": 3, "response": "x"}], r"a\.jsonl:1: found key 3, expected a key of the prompts"),
        ([{"response": "x"}], 'neither "key" nor "id"'),
        ([{"key": 1, "response": None}], '"response" is None'),
        ([], "found no rows"),
    ],
)
def test_bad_answers(tmp_path: Path, rows: list[Any], said: str) -> None:
    prompts = read_prompts(write(tmp_path / "p.jsonl", [prompt_row(key=1), prompt_row(key=2)]))
    with pytest.raises(UserError, match=said):
        read_answers(write(tmp_path / "a.jsonl", rows), prompts)


def evaluate(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(REPO / "scripts" / "evaluate.py"),
        "instructions",
        *map(str, arguments),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_command(tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", [prompt_row(key=1), prompt_row(key="b")])
    first = write(
        tmp_path / "a.jsonl", [{"key": 1, "response": "x"}, {"key": "b", "response": "x y"}]
    )
    # What generate.py writes is accepted too.
    second = write(
        tmp_path / "b.jsonl",
        [{"id": i, "response": "x", "finish_reason": "stop", "num_tokens": 1} for i in ("b", 1)],
    )
    out = tmp_path / "out.json"
    done = evaluate("--prompts", prompts, "--answers", first, "--json", out)
    assert done.returncode == 0, done.stderr
    verdicts = json.loads(out.read_text())["verdicts"]
    assert {k: (v["strict"], v["loose"]) for k, v in verdicts.items()} == {
        "1": ([True], [True]),
        "b": ([False],) * 2,
    }
    done = evaluate("--prompts", prompts, "--answers", first, second, "--json", out)
    assert done.returncode == 0, done.stderr
    files = json.loads(out.read_text())["files"]
    assert [f["constraints"]["strict_rate"] for f in files] == [0.5, 1.0]
    line = next(line for line in done.stdout.splitlines() if "count:words" in line)
    assert "50.0% [9.5%, 90.5%]" in line
    assert "100.0% [34.2%, 100.0%]" in line

    kept = out.read_text()
    bad = write(tmp_path / "bad.jsonl", [{"key": 1, "response": "x"}])
    done = evaluate("--prompts", prompts, "--answers", bad, "--json", out)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "bad.jsonl" in done.stderr
    assert done.stdout == ""
    assert out.read_text() == kept


@pytest.mark.parametrize(("passed", "total"), [(0, 1), (1, 1), (0, 9), (282, 409), (409, 409)])
def test_intervals_are_wilsons(passed: int, total: int) -> None:
    interval = binomtest(passed, total).proportion_ci(method="wilson")
    assert wilson(passed, total) == pytest.approx((interval.low, interval.high), abs=1e-12)
    made = Tally(total=total, strict=passed, loose=total).as_dict()
    assert made["strict_interval"] == list(wilson(passed, total))
    assert made["loose_interval"][1] == 1.0
    assert Tally().as_dict()["strict_interval"] is None

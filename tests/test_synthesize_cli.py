"""scripts/synthesize.py: prompts that generate.py takes as they are, answers of which only verified ones are kept."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hymoe.engine.data.formats import read_questions, read_rows
from hymoe.engine.data.mixture import load_mixture
from hymoe.engine.data.pipeline import prepare
from hymoe.engine.data.tokenizer import train_tokenizer
from hymoe.engine.errors import UserError
from hymoe.engine.eval.checks import check
from hymoe.engine.eval.instruct import read_prompts
from hymoe.engine.eval.verified import Filter, Kept, keep_verified
from tests.runs import write_jsonl

REPO = Path(__file__).resolve().parent.parent
NINE = "Ann went to the sea with her old dog"  # nine words, none of them a prompt's


def synthesize(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPO / "scripts" / "synthesize.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def prompt(key: str | int, *kinds: tuple[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "key": key,
        "prompt": f"Question {key} about what happened last summer in a village",
        "instruction_id_list": [kind for kind, _ in kinds],
        "kwargs": [arguments for _, arguments in kinds],
        **more,
    }


def answer(key: str | int, response: str, finish_reason: str = "stop") -> dict[str, Any]:
    return {"id": key, "response": response, "finish_reason": finish_reason, "num_tokens": 1}


UPPER = ("case:upper", {})
WORDS = ("count:words", {"num_words": 9})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three prompts, and an answer for every reason."""
    asked = [
        prompt(1, UPPER, WORDS, seed=4),
        prompt(
            "b",
            WORDS,
            messages=[
                {"role": "system", "content": "Be kind."},
                {
                    "role": "user",
                    "content": "Question b about what happened last summer in a village",
                },
            ],
        ),
        prompt("c", UPPER),
    ]
    write_jsonl(tmp_path / "prompts.jsonl", asked)
    write_jsonl(
        tmp_path / "first.jsonl",
        [
            answer(1, NINE.upper()),
            answer("b", NINE, "length"),
            answer("c", " \n"),
            answer("c", "SO SO SO SO IT WENT"),
            answer("c", asked[2]["prompt"].upper()),
        ],
    )
    write_jsonl(
        tmp_path / "second.jsonl",
        [
            answer(1, NINE),
            answer(1, f"  {NINE.upper()}\n"),
            answer(1, NINE.upper().replace("ANN", "BOB")),
            answer(1, NINE.upper().replace("ANN", "EVE")),
            answer("b", NINE),
            {"key": "b", "response": None},
        ],
    )
    return tmp_path


def filtered(folder: Path, *answers: str, **changes: Any) -> Kept:
    return keep_verified(
        Filter(
            prompts=folder / "prompts.jsonl",
            answers=tuple(folder / name for name in answers or ("first.jsonl", "second.jsonl")),
            out=folder / "data.jsonl",
            **changes,
        )
    )


def test_only_verified_answers_are_kept_and_the_rest_is_counted(folder: Path) -> None:
    kept = filtered(folder, most=2, rejected=folder / "no.jsonl", unanswered=folder / "left.jsonl")
    rows = rows_of(folder / "data.jsonl")
    assert [(row["id"], row["messages"][-1]["content"]) for row in rows] == [
        ("1", NINE.upper()),
        ("1", NINE.upper().replace("ANN", "BOB")),
        ("b", NINE),
    ]
    first, _, third = rows
    assert first["messages"][:-1] == [
        {"role": "user", "content": "Question 1 about what happened last summer in a village"}
    ]
    assert first["constraints"] == ["case:upper", "count:words"]
    assert (first["answers_file"], first["seed"]) == (str(folder / "first.jsonl"), 4)
    assert third["messages"][0] == {"role": "system", "content": "Be kind."}
    assert kept.by_reason == {
        "cut": 1,
        "empty": 2,
        "repeats itself": 1,
        "parrots the prompt": 1,
        "breaks a constraint": 1,
        "duplicate": 1,
        "more than asked for": 1,
    }
    assert kept.rows + sum(kept.by_reason.values()) == kept.answers == 11
    # By kind: of the answers that came to the checks.
    assert kept.judged == {"case:upper": 5, "count:words": 6}
    assert kept.passed == {"case:upper": 4, "count:words": 6}
    assert kept.unanswered == ["c"]
    assert [row["key"] for row in rows_of(folder / "left.jsonl")] == ["c"]
    refused = {(row["key"], row["reason"]): row["found"] for row in rows_of(folder / "no.jsonl")}
    assert "lower-case" in refused["1", "breaks a constraint"]
    assert "'so' comes 4 times" in refused["c", "repeats itself"]
    # A file of prompts is answered again, and prepared, as it is.
    assert [question.id for question in read_questions(folder / "left.jsonl")] == ["c"]
    assert len(list(read_rows(folder / "data.jsonl"))) == 3


def test_every_kept_row_passes_again_and_feeds_prepare_data(folder: Path) -> None:
    filtered(folder)
    asked = {one.key: one for one in read_prompts(folder / "prompts.jsonl")}
    rows = rows_of(folder / "data.jsonl")
    for row in rows:
        one = asked[row["id"]]
        for kind, arguments in zip(one.instruction_ids, one.arguments, strict=True):
            assert check(kind, row["messages"][-1]["content"], arguments).passed
    train_tokenizer(
        [m["content"] for row in rows for m in row["messages"]], folder / "tokenizer.json"
    )
    (folder / "mixture.toml").write_text(
        'seq_len = 256\ntokenizer = "tokenizer.json"\nchat_template = "chatml"\n'
        '[[source]]\nname = "verified"\npath = "data.jsonl"\n'
    )
    prepare(load_mixture(folder / "mixture.toml"), None, folder / "packed", 1, lambda line: None)
    manifest = json.loads((folder / "packed" / "manifest.json").read_text())
    assert manifest["documents"] == len(rows) == 4


def test_loose_passes_what_strict_refuses(folder: Path) -> None:
    write_jsonl(
        folder / "chatty.jsonl",
        [answer(1, f"Sure, here it is:\n{NINE.upper()}"), answer("b", NINE)],
    )
    assert filtered(folder, "chatty.jsonl").rows == 1
    assert filtered(folder, "chatty.jsonl", loose=True).rows == 2
    kept = [row["messages"][-1]["content"] for row in rows_of(folder / "data.jsonl")]
    assert kept[0].startswith("Sure, here it is:\n")  # as it is


def test_held_out_requests_are_never_trained_on(tmp_path: Path) -> None:
    """Prompts of one request are on one side, whatever their order and their file."""
    asked = [prompt(n, UPPER, group=f"request {n % 100}") for n in range(300)]
    answers = [answer(n, f"IT IS {n}") for n in range(300) if n % 7]
    write_jsonl(tmp_path / "prompts.jsonl", asked)
    write_jsonl(tmp_path / "first.jsonl", answers)
    kept = filtered(tmp_path, "first.jsonl", held_out=0.2)
    held = {row["key"] for row in rows_of(tmp_path / "data.heldout_prompts.jsonl")}
    trained = rows_of(tmp_path / "data.jsonl")
    checked = rows_of(tmp_path / "data.heldout.jsonl")
    assert 30 < len(held) == kept.held_out_prompts < 100
    assert {int(row["id"]) for row in checked} == {
        n for n in held if n % 7
    }  # the hard ones stay to be asked
    assert {int(row["id"]) for row in trained} == {n for n in range(300) if n % 7} - held
    assert not {row["group"] for row in trained} & {row["group"] for row in checked}
    # Again from a part of the prompts in another order: the same side.
    write_jsonl(tmp_path / "prompts.jsonl", asked[200:50:-1])
    write_jsonl(tmp_path / "first.jsonl", [row for row in answers if 50 < row["id"] <= 200])
    filtered(tmp_path, "first.jsonl", held_out=0.2)
    again = {row["key"] for row in rows_of(tmp_path / "data.heldout_prompts.jsonl")}
    assert again == {key for key in held if 50 < key <= 200}
    filtered(tmp_path, "first.jsonl", held_out=0.2, seed=1)
    assert again != {row["key"] for row in rows_of(tmp_path / "data.heldout_prompts.jsonl")}
    # Without groups the text decides, so that the same prompt under two keys is on one side.
    plain = [
        {**prompt(n, UPPER), "prompt": f"Tell  me {n % 50}" if n < 50 else f"tell me {n % 50}"}
        for n in range(100)
    ]
    write_jsonl(tmp_path / "prompts.jsonl", plain)
    write_jsonl(tmp_path / "first.jsonl", [answer(n, f"IT IS {n}") for n in range(100)])
    filtered(tmp_path, "first.jsonl", held_out=0.3)
    keys = {row["key"] % 50 for row in rows_of(tmp_path / "data.heldout_prompts.jsonl")}
    counts = Counter(row["key"] % 50 for row in rows_of(tmp_path / "data.heldout_prompts.jsonl"))
    assert counts == dict.fromkeys(keys, 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"held_out": 1.0}, "--held-out 1.0: expected a share"),
        ({"held_out": -0.1}, "--held-out -0.1: expected a share"),
        ({"held_out": 1e-9}, "0 of 3 prompts would be held out"),
        ({"most": 0}, "--most 0: expected 1 or more"),
        ({"rejected": Path("absent") / "x.jsonl"}, "--rejected absent"),
        ({"answers": ()}, "--answers: found no file"),
        ({"answers": (Path("absent.jsonl"),)}, r"absent\.jsonl: no such file"),
    ],
)
def test_bad_settings_leave_nothing(folder: Path, changes: dict[str, Any], said: str) -> None:
    before = sorted(folder.iterdir())
    given = {"prompts": folder / "prompts.jsonl", "answers": (folder / "first.jsonl",)}
    with pytest.raises(UserError, match=said):
        keep_verified(Filter(**{**given, "out": folder / "data.jsonl", **changes}))
    assert sorted(folder.iterdir()) == before
    with pytest.raises(UserError, match=r"prompts\.jsonl: is named twice"):
        keep_verified(Filter(**given, out=folder / "prompts.jsonl"))
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (answer("z", "X"), r"bad\.jsonl:2: found key z, expected a key of .*prompts\.jsonl"),
        ({"response": "X"}, r"bad\.jsonl:2: found key None"),
        ({"id": "c", "response": 3}, r'bad\.jsonl:2: "response" is 3, expected text'),
    ],
)
def test_bad_answers_leave_nothing(folder: Path, row: dict[str, Any], said: str) -> None:
    write_jsonl(folder / "bad.jsonl", [answer("c", "IT WENT"), row])
    before = sorted(folder.iterdir())
    with pytest.raises(UserError, match=said):
        filtered(folder, "bad.jsonl", rejected=folder / "no.jsonl")
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (prompt("z"), "has no constraint"),
        (prompt("z", ("nix", {})), "unknown constraint 'nix'"),
        (prompt("z", ("count:words", {})), "found no argument 'num_words'"),
        (prompt("b", UPPER), "found key b again"),
        (prompt("z", UPPER, messages=[{"role": "user", "content": "Other"}]), "is not the prompt"),
    ],
)
def test_bad_prompts(folder: Path, row: dict[str, Any], said: str) -> None:
    write_jsonl(folder / "prompts.jsonl", [*rows_of(folder / "prompts.jsonl"), row])
    with pytest.raises(UserError, match=rf"prompts\.jsonl:4: .*{said}"):
        filtered(folder)


def test_nothing_kept_is_said(folder: Path) -> None:
    write_jsonl(folder / "bad.jsonl", [answer("c", "it went")])
    with pytest.raises(UserError, match=r"none of 1 answers could be kept .*1 breaks a constraint"):
        filtered(folder, "bad.jsonl")
    assert not (folder / "data.jsonl").exists()


def test_commands(tmp_path: Path) -> None:
    """Prompts, their determined answers, the filter's tables; bad input is one line and status 2."""
    made = synthesize(
        *(
            "prompts",
            "--count",
            200,
            "--seed",
            3,
            "--out",
            "prompts.jsonl",
            "--solved",
            "solved.jsonl",
        ),
        *("--kinds", "json:list,list,count:words", "--constraints", 1),
        cwd=tmp_path,
    )
    assert made.returncode == 0, made.stderr
    assert "prompts.jsonl: 200 prompts" in made.stdout
    solved = rows_of(tmp_path / "solved.jsonl")
    asked = rows_of(tmp_path / "prompts.jsonl")
    open_ones = [row["key"] for row in asked if row["instruction_id_list"] == ["count:words"]]
    assert len(solved) + len(open_ones) == 200
    assert 30 <= len(open_ones) <= 50
    more = [{"id": key, "response": "Too few.", "finish_reason": "stop"} for key in open_ones]
    write_jsonl(tmp_path / "model.jsonl", more)
    done = synthesize(
        *("filter", "--prompts", "prompts.jsonl", "--answers", "solved.jsonl", "model.jsonl"),
        *("--out", "data.jsonl", "--held-out", 0.1, "--rejected", "no.jsonl"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    kept = len(rows_of(tmp_path / "data.jsonl")), len(rows_of(tmp_path / "data.heldout.jsonl"))
    assert sum(kept) == len(solved)
    assert f"data.jsonl: {kept[0]} conversations" in done.stdout
    assert f"data.heldout.jsonl: {kept[1]} conversations" in done.stdout
    table = [[cell.strip() for cell in line.split("\u2502")] for line in done.stdout.splitlines()]
    number = len(open_ones)
    assert ["", "breaks a constraint", str(number), f"{number / 200:.1%}", ""] in table
    assert ["", "count:words", "0", str(number), "0.0%", ""] in table
    first = [key for key in (row["key"] for row in asked) if key in open_ones][:10]
    assert (
        f"{number} of 200 prompts have no verified answer: {', '.join(first)}, ..." in done.stdout
    )

    for arguments in (
        ("prompts", "--count", 5, "--out", "x.jsonl", "--kinds", "nix"),
        ("prompts", "--count", 5, "--out", "x.jsonl", "--constraints", "two"),
        (
            "prompts",
            "--count",
            5,
            "--out",
            "x.jsonl",
            "--kinds",
            "case",
            "--solved",
            "absent/y.jsonl",
        ),
        ("filter", "--prompts", "absent.jsonl", "--answers", "model.jsonl", "--out", "x.jsonl"),
    ):
        refused = synthesize(*arguments, cwd=tmp_path)
        assert refused.returncode == 2, refused.stdout
        assert refused.stderr.startswith("synthesize.py: ")
        assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "x.jsonl").exists()

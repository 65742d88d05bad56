"""Sweeps: the rule comes before the numbers, the table has its tests, and what was trained on chooses nothing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from hymoe.engine.errors import UserError
from hymoe.engine.eval.choice import Choice, Measured, choose, compare
from hymoe.engine.eval.scores import LengthScorer
from hymoe.engine.eval.sweep import read_sweep, run_sweep, settings_of

REPO = Path(__file__).resolve().parents[2]
# Stands for generate.py: an answer of penalty x 100 characters, fewer without a system prompt, none in capitals.
MAKER = """
import json, sys
prompts, answers, system, penalty = sys.argv[1:]
size = int(float(penalty) * 100) - (0 if open(system).read() else 40)
rows = [json.loads(line) for line in open(prompts)]
with open(answers, "w") as out:
    for n, row in enumerate(rows):
        text = "x" * (size + n % 7)
        out.write(json.dumps({"id": row["id"], "response": text.upper() if n % 2 else text}) + chr(10))
"""
SWEEP = """
out = "out"
penalties = [1.0, 1.1]
command = ["python", "maker.py", "{prompts}", "{answers}", "{system_prompt}", "{penalty}"]
resamples = 200

[checkpoints]
last = "run/final"

[system_prompts]
none = "none.txt"
serving = "serving.txt"

[[split]]
name = "heldout"
battles = "battles.jsonl"

[[split]]
name = "rules"
prompts = "prompts.jsonl"

[choice]
split = "heldout"
measure = "win_rate"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sweep of four settings over 40 battles and 30 prompts."""
    battles = [
        {
            "id": n,
            "messages": [{"role": "user", "content": f"Question {n}?"}],
            "answer": "a",
            "opponent_answer": "y" * (60 + 2 * n),
            "winner": "mine",
        }
        for n in range(40)
    ]
    prompts = [
        {"key": n, "prompt": f"p{n}", "instruction_id_list": ["case:upper"], "kwargs": [{}]}
        for n in range(30)
    ]
    (tmp_path / "battles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in battles))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (tmp_path / "maker.py").write_text(MAKER)
    (tmp_path / "none.txt").write_text("")
    (tmp_path / "serving.txt").write_text("Be kind.")
    (tmp_path / "sweep.toml").write_text(
        SWEEP.replace('"maker.py"', json.dumps(str(tmp_path / "maker.py")))
    )
    return tmp_path


def run(folder: Path) -> tuple[Any, list[str]]:
    said: list[str] = []
    result = run_sweep(read_sweep(folder / "sweep.toml"), LengthScorer(), said.append)
    return result, said


def test_the_command_makes_answers_tests_and_chooses(folder: Path) -> None:
    command = [
        sys.executable,
        str(REPO / "scripts" / "evaluate.py"),
        "sweep",
        str(folder / "sweep.toml"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "Chosen is the setting with the highest win_rate on split 'heldout'"
    )
    assert "chosen: last/serving/1.1" in done.stdout
    assert (folder / "out" / "plot.png").read_bytes().startswith(b"\x89PNG")
    made = json.loads((folder / "out" / "results.json").read_text())
    rows = {row["setting"]: row for row in made["splits"]["heldout"]["settings"]}
    assert list(rows) == ["last/none/1", "last/none/1.1", "last/serving/1", "last/serving/1.1"]

    # Independent figures: longer than the recorded answer is a win.
    def outcomes(size: int) -> list[float]:
        margins = [size + n % 7 - (60 + 2 * n) for n in range(40)]
        return [1.0 if m > 0 else 0.5 if m == 0 else 0.0 for m in margins]

    base = outcomes(60)
    for name, size in (("last/none/1.1", 70), ("last/serving/1", 100), ("last/serving/1.1", 110)):
        items = outcomes(size)
        assert rows[name]["value"] == pytest.approx(sum(items) / 40)
        assert rows[name]["test"]["p_value"] == pytest.approx(stats.ttest_rel(items, base).pvalue)
        assert rows[name]["p_holm"] >= rows[name]["test"]["p_value"]
    rules = {row["setting"]: row for row in made["splits"]["rules"]["settings"]}
    assert {row["value"] for row in rules.values()} == {0.5}
    assert rules["last/serving/1"]["test"]["p_value"] == 1.0
    stated = json.loads((folder / "out" / "rule.json").read_text())
    assert stated["rule"] == made["rule"]

    answers = sorted((folder / "out" / "answers").rglob("last_*.jsonl"))
    assert len(answers) == 8
    before = {path: path.stat().st_mtime_ns for path in answers}
    _, said = run(folder)  # again: nothing is made anew
    assert len(said) == 1
    assert before == {path: path.stat().st_mtime_ns for path in answers}
    (folder / "serving.txt").write_text("Be brief.")
    _, said = run(folder)
    assert len(said) == 1 + 4  # both penalties of that prompt, on both splits
    (folder / "run" / "final").mkdir(parents=True)
    (folder / "run" / "final" / "model.safetensors").write_text("weights")
    _, said = run(folder)
    assert len(said) == 1 + 8  # another checkpoint
    assert len(run(folder)[1]) == 1


def test_answers_may_be_there_already(folder: Path) -> None:
    text = (folder / "sweep.toml").read_text()
    start = text.index("command =")
    text = (
        text[:start]
        + 'answers = "{split}-{system_prompt}-{penalty}.jsonl"\n'
        + text[text.index("resamples") :]
    )
    (folder / "sweep.toml").write_text(text)
    for split, count in (("heldout", 40), ("rules", 30)):
        for system in ("none", "serving"):
            for penalty in ("1", "1.1"):
                rows = [{"id": n, "response": "X" * (n + len(system))} for n in range(count)]
                path = folder / f"{split}-{system}-{penalty}.jsonl"
                path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result, _ = run(folder)
    assert result.chosen == "last/none/1"
    assert result.tests["heldout"].tests["last/none/1.1"].verdict.startswith("no difference")
    (folder / "heldout-none-1.jsonl").unlink()
    with pytest.raises(UserError, match=r"heldout-none-1\.jsonl: no such file"):
        run(folder)


def test_a_rule_is_not_changed_after_the_numbers(folder: Path) -> None:
    run(folder)
    text = (folder / "sweep.toml").read_text()
    (folder / "sweep.toml").write_text(text + 'rule = "highest"\n')
    with pytest.raises(UserError, match="results under another rule; a rule is stated before"):
        run(folder)
    (folder / "sweep.toml").write_text(text)
    run(folder)


def test_items_that_were_trained_on_choose_nothing(folder: Path) -> None:
    text = (folder / "sweep.toml").read_text()
    (folder / "sweep.toml").write_text('training = ["train.jsonl"]\n' + text)
    row = {"messages": [{"role": "user", "content": "Something else"}]}
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    result, _ = run(folder)
    assert "None of its 40 items is in train.jsonl" in result.rule
    row["messages"][0]["content"] = " question  7?"
    with (folder / "train.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"train\.jsonl:2: has the request of 7 of split 'heldout'"):
        run(folder)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('measure = "win_rate"', 'measure = "prompts_strict"', "expected one of win_rate"),
        ('measure = "win_rate"', 'measure = "luck"', "expected one of"),
        ('split = "heldout"', 'split = "test"', "expected one of"),
        ('prompts = "prompts.jsonl"', "", "expected either battles or prompts"),
        ('name = "rules"', 'name = "heldout"', "a name of its own"),
        ("penalties = [1.0, 1.1]", "penalties = [1.0, 1.0]", "expected each once"),
        ("penalties = [1.0, 1.1]", 'penalties = ["1"]', "expected numbers above 0"),
        ("penalties = [1.0, 1.1]", "", "found no penalties"),
        ("resamples", "resample", "unknown"),
        ("{penalty}", "{temperature}", "'temperature' is unknown"),
        ("{system_prompt}", "/nowhere", "the command ended with 1"),
        ('serving = "serving.txt"', 'serving = "no.txt"', "no.txt: no such file"),
        ("[choice]", "[choice]\nbaseline = 'x'", "[choice] baseline = 'x'"),
    ],
)
def test_bad_sweeps(folder: Path, old: str, new: str, said: str) -> None:
    path = folder / "sweep.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UserError) as error:
        run(folder)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (folder / "out" / "results.json").exists()


def measured(*items: float) -> Measured:
    return Measured(sum(items) / len(items), None, items, {})


def test_the_rule_decides() -> None:
    found = {
        "a": measured(*[0.0, 1.0] * 10),
        "b": measured(*[0.0, 1.0] * 9, 1.0, 1.0),
        "c": measured(*[1.0] * 19, 0.0),
    }
    careful = Choice(split="s", measure="win_rate")
    tests = compare(found, "a", "win_rate")
    assert choose(careful, found, tests)[0] == "c"
    two = {name: found[name] for name in "ab"}
    assert choose(careful, two, compare(two, "a", "win_rate"))[0] == "a"
    assert choose(Choice(split="s", measure="win_rate", rule="highest"), two, tests)[0] == "b"
    assert (
        "the baseline has the highest" in choose(careful, found, compare(found, "c", "win_rate"))[1]
    )
    equal = {"x": measured(1.0, 0.0), "y": measured(0.0, 1.0)}
    rule = Choice(split="s", measure="win_rate", rule="highest")
    assert choose(rule, equal, compare(equal, "y", "win_rate"))[0] == "x"


def test_settings_keep_the_order_of_the_file(folder: Path) -> None:
    names = [setting.name for setting in settings_of(read_sweep(folder / "sweep.toml"))]
    assert names == ["last/none/1", "last/none/1.1", "last/serving/1", "last/serving/1.1"]


@pytest.mark.parametrize("package", ["scipy", "matplotlib"])
def test_a_missing_package_is_said_before_the_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"pip install {package}"):
        run(folder)
    assert not (folder / "out").exists()

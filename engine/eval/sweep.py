"""A sweep: system prompts x repetition penalties x checkpoints on the same items, and a choice by a stated rule.

```toml
out = "sweep"                     # folder for rule, answers, scores, results and plot
penalties = [1.0, 1.05]
training = ["train.jsonl"]        # optional: files that no item of the choice's split may come from
reward_model = "reward"           # HF folder; absent: the stand-in scorer, the answer's length
answers = "answers/{split}_{checkpoint}_{system_prompt}_{penalty}.jsonl"     # names; or instead of it
command = ["python", "scripts/generate.py", "--model", "{checkpoint}", "--system-prompt", "{system_prompt}",
           "--repetition-penalty", "{penalty}", "--prompts", "{prompts}", "--out", "{answers}"]     # paths

[checkpoints]                     # name = path, the same for system prompts
step_800 = "runs/x/final"
[system_prompts]
serving = "serving.txt"

[[split]]                         # battles, or prompts with constraints
name = "heldout"
battles = "heldout.jsonl"

[choice]                          # choice.py
split = "heldout"
measure = "win_rate"
```

Paths are relative to the file; a penalty of 1.0 is written 1 in names. Answers that the command made stay until
the command, the items, the system prompt or the checkpoint's files change. The first setting is the baseline
unless `[choice]` names another as `checkpoint/system_prompt/penalty`. The rule is written to `out/rule.json`
before anything is generated or scored; a folder that has results under another rule is refused.
"""

import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hymoe.engine.data.sources import read_jsonl
from hymoe.engine.errors import UserError
from hymoe.engine.eval import choice as choices
from hymoe.engine.eval.battles import read_battles
from hymoe.engine.eval.choice import Choice, Measured, Tests, measure_battles, measure_prompts
from hymoe.engine.eval.instruct import read_prompts, read_responses, score
from hymoe.engine.eval.judge import Rules, judge
from hymoe.engine.eval.paired import ASSUMPTIONS, scipy_stats
from hymoe.engine.eval.report import figure_class, write_json
from hymoe.engine.eval.scores import Progress, ScoreCache, Scorer
from hymoe.engine.typed_toml import from_table, read_toml

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Items that every setting answers."""

    name: str
    battles: str = ""
    prompts: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """A sweep as its file says it; paths are resolved."""

    out: str
    penalties: tuple[float, ...]
    checkpoints: dict[str, str]
    system_prompts: dict[str, str]
    splits: tuple[Split, ...]
    choice: Choice
    answers: str = ""
    command: tuple[str, ...] = ()
    training: tuple[str, ...] = ()
    reward_model: str = ""
    seed: int = 0  # of the bootstrap
    resamples: int = 10_000
    folder: Path = field(default_factory=Path)

    def path(self, text: str) -> Path:
        """A path of the file."""
        return self.folder / text


@dataclass(frozen=True, slots=True)
class Setting:
    """One cell of the table."""

    checkpoint: str
    system_prompt: str
    penalty: float

    @property
    def name(self) -> str:
        """As the choice names it."""
        return f"{self.checkpoint}/{self.system_prompt}/{self.penalty:g}"


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a sweep found."""

    rule: str
    chosen: str
    why: str
    choice: Choice
    found: dict[str, dict[str, Measured]]  # by split and setting
    tests: dict[str, Tests]  # by split
    measures: dict[str, str]  # of each split


def read_sweep(path: Path) -> Sweep:
    """Reads and checks a file.

    Raises:
        UserError: an unknown key, a missing one, or one that contradicts another.
    """
    table = read_toml(path)
    splits = [
        from_table(f"{path}: [[split]] {number}", Split, values)
        for number, values in enumerate(_taken(table, "split", list, path), start=1)
    ]
    choice = from_table(f"{path}: [choice]", Choice, _taken(table, "choice", dict, path))
    for key in ("out", "penalties", "checkpoints", "system_prompts"):
        if not table.get(key):
            raise UserError(f"{path}: found no {key}, expected it")
    sweep = from_table(
        f"{path}:", Sweep, table, splits=tuple(splits), choice=choice, folder=path.parent
    )
    names = [split.name for split in splits]
    if len(set(names)) != len(names) or not all(names):
        raise UserError(
            f"{path}: the splits are named {names}, expected a name of its own for each"
        )
    for split in splits:
        if bool(split.battles) == bool(split.prompts):
            raise UserError(f"{path}: split {split.name!r}: expected either battles or prompts")
    if choice.split not in names:
        raise UserError(f"{path}: [choice] split = {choice.split!r}, expected one of {names}")
    of = choices.OF_BATTLES if splits[names.index(choice.split)].battles else choices.OF_PROMPTS
    if choice.measure not in of:
        raise UserError(
            f"{path}: [choice] measure = {choice.measure!r}, expected one of {', '.join(of)} for this split"
        )
    if bool(sweep.answers) == bool(sweep.command):
        raise UserError(f"{path}: expected either answers (files) or command (that makes them)")
    if not all(isinstance(p, int | float) and p > 0 for p in sweep.penalties):
        raise UserError(f"{path}: penalties = {list(sweep.penalties)}, expected numbers above 0")
    labels = [setting.name for setting in settings_of(sweep)]
    if len(set(labels)) != len(labels):
        raise UserError(f"{path}: penalties = {list(sweep.penalties)}, expected each once")
    if choice.baseline and choice.baseline not in labels:
        raise UserError(
            f"{path}: [choice] baseline = {choice.baseline!r}, expected one of {', '.join(labels)}"
        )
    return sweep


def settings_of(sweep: Sweep) -> list[Setting]:
    """Every cell, in the order of the file: checkpoints, then system prompts, then penalties."""
    axes = (sweep.checkpoints, sweep.system_prompts, sweep.penalties)
    return [Setting(*cell) for cell in itertools.product(*axes)]


def run_sweep(
    sweep: Sweep, scorer: Scorer, say: Say, progress: Progress | None = None
) -> SweepResult:
    """States the rule, gets the answers, measures, tests and chooses.

    Args:
        sweep: what to do.
        scorer: of battles.
        say: gets lines for a person; the first is the rule.
        progress: of scoring.

    Raises:
        UserError: bad files, a command that failed, items of the choice that were trained on, another rule.
    """
    scipy_stats(), figure_class()  # missing packages are said now, not after hours
    settings = settings_of(sweep)
    baseline = sweep.choice.baseline or settings[0].name
    out = sweep.path(sweep.out)
    rule = _state_rule(sweep, out, baseline, scorer.name)
    say(rule)
    found: dict[str, dict[str, Measured]] = {}
    tests: dict[str, Tests] = {}
    measures: dict[str, str] = {}
    for split in sweep.splits:
        default = "win_rate" if split.battles else "prompts_strict"
        measure = sweep.choice.measure if split.name == sweep.choice.split else default
        files = [_answers(sweep, split, setting, out, say) for setting in settings]
        rows = _measure(sweep, split, files, scorer, out, measure, progress)
        found[split.name] = dict(zip([s.name for s in settings], rows, strict=True))
        tests[split.name] = choices.compare(found[split.name], baseline, measure)
        measures[split.name] = measure
    decided = sweep.choice.split
    chosen, why = choices.choose(sweep.choice, found[decided], tests[decided])
    result = SweepResult(rule, chosen, why, sweep.choice, found, tests, measures)
    write_json(out / "results.json", as_dict(result))
    return result


def as_dict(result: SweepResult) -> dict[str, Any]:
    """For a JSON file."""
    return {
        "rule": result.rule,
        "chosen": result.chosen,
        "why": result.why,
        "assumptions": ASSUMPTIONS,
        "splits": {
            name: {
                "measure": result.measures[name],
                "baseline": result.tests[name].baseline,
                "items": len(next(iter(rows.values())).items),
                "settings": choices.as_rows(rows, result.tests[name]),
            }
            for name, rows in result.found.items()
        },
    }


def _taken(table: dict[str, Any], key: str, kind: type, path: Path) -> Any:
    values = table.pop(key, None)
    if not isinstance(values, kind) or not values:
        raise UserError(f"{path}: found no [{key}], expected it")
    return values


def _state_rule(sweep: Sweep, out: Path, baseline: str, scorer: str) -> str:
    """Writes the rule down and returns it in words."""
    split = next(split for split in sweep.splits if split.name == sweep.choice.split)
    items = sweep.path(split.battles or split.prompts)
    trained = _not_trained_on(sweep, split, items)
    sentence = f"{sweep.choice.sentence(baseline)} {trained}"
    stated = {
        "rule": sentence,
        "scorer": scorer,
        "split_sha256": hashlib.sha256(items.read_bytes()).hexdigest(),
        "settings": [setting.name for setting in settings_of(sweep)],
    }
    file = out / "rule.json"
    if (out / "results.json").exists():
        before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
        changed = sorted(key for key in stated if (before or {}).get(key) != stated[key])
        if changed:
            raise UserError(
                f"{out}: has results under another {' and '.join(changed)}; a rule is stated before the numbers: "
                "name another folder as out"
            )
    out.mkdir(parents=True, exist_ok=True)
    write_json(file, stated)
    return sentence


def _not_trained_on(sweep: Sweep, split: Split, items: Path) -> str:
    """Refuses items that a training file has; says what was looked at."""
    asked = {_plain(text): id_ for id_, text in _requests(split, items)}
    if not sweep.training:
        return f"The {len(asked)} items were not compared with training data: the file names none."
    for name in sweep.training:
        path = sweep.path(name)
        for number, row in read_jsonl(path):
            for text in _user_texts(row):
                if _plain(text) in asked:
                    raise UserError(
                        f"{path}:{number}: has the request of {asked[_plain(text)]} of split {split.name!r}, "
                        "expected a split that was not used for training"
                    )
    return f"None of its {len(asked)} items is in {', '.join(sweep.training)}."


def _requests(split: Split, items: Path) -> Iterator[tuple[str, str]]:
    if split.battles:
        for battle in read_battles(items)[0]:
            yield battle.id, battle.messages[-1].content or ""
    else:
        for prompt in read_prompts(items):
            yield prompt.key, prompt.prompt


def _user_texts(row: dict[str, Any]) -> Iterator[str]:
    for column in ("messages", "conversations", "conversation", "conversation_a"):
        turns = row.get(column)
        for turn in turns if isinstance(turns, list) else []:
            if isinstance(turn, dict) and turn.get("role", turn.get("from")) in ("user", "human"):
                yield from (turn[k] for k in ("content", "value") if isinstance(turn.get(k), str))
    for column in ("prompt", "instruction", "question", "problem"):
        if isinstance(row.get(column), str):
            yield row[column]


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _answers(sweep: Sweep, split: Split, setting: Setting, out: Path, say: Say) -> Path:
    """The file of a setting's answers; made by the command where it is not there or was made otherwise."""
    if sweep.answers:
        names = {"checkpoint": setting.checkpoint, "system_prompt": setting.system_prompt}
        filled = _filled(sweep.answers, split=split.name, penalty=f"{setting.penalty:g}", **names)
        return sweep.path(filled)
    folder = out / "answers" / split.name
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "prompts.jsonl"
    ids = _write_prompts(sweep, split, prompts)
    target = folder / (setting.name.replace("/", "_") + ".jsonl")
    system = sweep.path(sweep.system_prompts[setting.system_prompt])
    paths = {
        "checkpoint": str(sweep.path(sweep.checkpoints[setting.checkpoint])),
        "system_prompt": str(system),
        "penalty": f"{setting.penalty:g}",
        "prompts": str(prompts),
        "answers": str(target),
    }
    command = [_filled(part, **paths) for part in sweep.command]
    command = [sys.executable if part == "python" else part for part in command]
    if not system.is_file():
        raise UserError(f"{system}: no such file, expected a system prompt")
    content = [path.read_bytes() for path in (prompts, system)]
    made = {
        "command": command,
        "sha256": [hashlib.sha256(c).hexdigest() for c in content],
        "checkpoint": _state_of(Path(paths["checkpoint"])),
    }
    note = target.with_suffix(".made.json")
    if note.exists() and json.loads(note.read_text(encoding="utf-8")) == made and target.exists():
        return target
    say(f"{setting.name} on {split.name}: {len(ids)} answers to make")
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise UserError(
            f"{setting.name} on {split.name}: the command ended with {done.returncode}: {' '.join(command)}"
        )
    read_responses(target, ids, f"items of {split.name}")
    write_json(note, made)
    return target


def _state_of(checkpoint: Path) -> list[list[Any]]:
    """Name, bytes and time of each file: another training run's weights are other weights."""
    files = sorted(path for path in checkpoint.glob("*") if path.is_file())
    stats = [(path.name, path.stat()) for path in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _write_prompts(sweep: Sweep, split: Split, path: Path) -> list[str]:
    """The split's items as a file that `generate.py` reads."""
    if split.battles:
        rows = [
            {"id": b.id, "messages": [{"role": m.role, "content": m.content} for m in b.messages]}
            for b in read_battles(sweep.path(split.battles))[0]
        ]
    else:
        file = sweep.path(split.prompts)
        read_prompts(file)  # refuses what is wrong with it
        rows = [
            {
                "id": str(row["key"]),
                "messages": row.get("messages") or [{"role": "user", "content": row["prompt"]}],
            }
            for _, row in read_jsonl(file)
        ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [str(row["id"]) for row in rows]


def _filled(template: str, **values: str) -> str:
    try:
        return template.format(**values)
    except (KeyError, IndexError, ValueError) as error:
        known = ", ".join("{" + name + "}" for name in values)
        raise UserError(f"{template!r}: {error} is unknown, expected {known}") from None


def _measure(
    sweep: Sweep,
    split: Split,
    files: list[Path],
    scorer: Scorer,
    out: Path,
    measure: str,
    progress: Progress | None,
) -> list[Measured]:
    if split.prompts:
        prompts = read_prompts(sweep.path(split.prompts))
        keys = [prompt.key for prompt in prompts]
        given = [read_responses(path, keys, "prompts") for path in files]
        return [measure_prompts(score(prompts, answers), measure) for answers in given]
    rules = Rules(seed=sweep.seed, resamples=sweep.resamples)
    cache = ScoreCache(out / "scores.jsonl")
    found = judge(sweep.path(split.battles), files, scorer, cache, rules, progress)
    return [
        measure_battles(one.result, one.scores, found.recorded_scores, measure)
        for one in found.candidates
    ]

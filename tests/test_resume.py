"""A run that is killed at any moment continues to the bits of a run that nothing has happened to."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hymoe.engine.checkpoint import Saved
from hymoe.engine.checkpoint_files import states
from hymoe.engine.optim import schedule
from tests.forked import Ranks, ranks
from tests.runs import make_data, metrics, save_by_transformers, write_recipe

STEPS = 8
MEASURED = {
    "step_seconds",
    "tokens_per_second",
    "peak_memory_bytes",
}  # of this run, not of its arithmetic


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base, data and a recipe of 8 steps that saves after 3, 6 and 8 and evaluates after 4 and 8."""
    root = tmp_path_factory.mktemp("resume")
    data = make_data(root)
    save_by_transformers(root / "base", torch.bfloat16, data["tokenizer"])
    write_recipe(
        root / "recipe.toml",
        model={"path": root / "base"},
        data={"path": data["train"], "eval": data["eval"], "seq_len": 64, "micro_tokens": 64},
        optim={"lr": 1e-3, "warmup_steps": 3},
        train={"steps": STEPS, "step_tokens": 128, "eval_every": 4},
        run={"dir": root / "unused", "save_every": 3, "keep_last": 3},
    )
    return root


@pytest.fixture(scope="module")
def launch(root: Path) -> Iterator[Ranks]:
    with ranks(root) as parent:
        yield parent


@pytest.fixture(scope="module")
def unbroken(root: Path, launch: Ranks) -> Path:
    """On 2 ranks, in one go."""
    ran = launch(2, root / "recipe.toml", "--run.dir", root / "unbroken")
    assert ran.codes == [0, 0], ran.out
    return root / "unbroken"


def arithmetic(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in m.items() if k not in MEASURED} for m in metrics(run)]


def assert_same_state(one: Path, other: Path) -> None:
    """Every saved tensor to the bit, and the progress but for its seconds."""
    one, other = Saved(one), Saved(other)
    assert one.tensors.keys() == other.tensors.keys()
    for name in one.tensors:
        assert torch.equal(one.read(name), other.read(name)), name
    progress = [dict(saved.manifest["progress"]) for saved in (one, other)]
    for values in progress:
        del values["seconds"]
    assert progress[0] == progress[1]


def assert_same_run(run: Path, unbroken: Path) -> None:
    """Metrics, last state, export."""
    assert arithmetic(run) == arithmetic(unbroken)
    assert_same_state(states(run / "checkpoints")[0], states(unbroken / "checkpoints")[0])
    names = sorted(file.name for file in (unbroken / "final").iterdir())
    assert names == sorted(file.name for file in (run / "final").iterdir())
    for name in names:
        assert (run / "final" / name).read_bytes() == (unbroken / "final" / name).read_bytes(), name


NOW = ("--run.save-in-background", "false")  # so that the test knows which states are whole

# (moment, step) -> the state that the next start continues; shard to rename: in the background save itself.
KILLS = {
    ("loading", 0): None,
    ("shard", 3): None,
    ("evaluation", 4): 3,
    ("manifest", 6): 3,
    ("rename", 6): 3,
    ("step", 8): 6,
    ("export", 8): 8,
}


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: f"{kill[0]}{kill[1]}")
def test_killed_at_any_moment_it_resumes_to_the_same_bits(
    root: Path, launch: Ranks, unbroken: Path, tmp_path: Path, kill: tuple[str, int]
) -> None:
    """NVIDIA-NeMo/Automodel#3261: half-written states; Lightning#4655: a schedule that is one step late."""
    (where, step), run = kill, tmp_path / "run"
    arguments = (root / "recipe.toml", "--run.dir", run)
    in_save = where in ("shard", "manifest", "rename")
    fault = {"where": where, "step": step, "rank": 1 if where == "shard" else 0}
    killed = launch(
        2, *arguments, *(() if in_save else NOW), fault="at", action="kill_all", **fault
    )
    assert killed.codes == [-9, -9], killed.out
    resumed = launch(2, *arguments)
    assert resumed.codes == [0, 0], resumed.out
    at = KILLS[kill]
    said = "saved no state: from the start again" if at is None else f"after step {at}, saved by 2"
    assert said in resumed.out
    if in_save:
        assert f"removed .step_{step:08d}.partial: a save that was cut short" in resumed.out
    assert not list((run / "checkpoints").glob(".*"))
    assert_same_run(run, unbroken)


def test_two_kills_and_a_half_removed_state(
    root: Path, launch: Ranks, unbroken: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = (
        root / "recipe.toml",
        "--run.dir",
        run,
        "--run.keep-last",
        1,
        "--run.save-every",
        2,
    )
    kill = {"fault": "at", "action": "kill_all", "rank": 0}
    assert launch(2, *arguments, where="prune", **kill).codes == [-9, -9]
    assert [state.name for state in states(run / "checkpoints")] == ["step_00000004"]
    second = launch(2, *arguments, where="step", step=7, **kill)
    assert "removed .step_00000002.removed" in second.out
    assert launch(2, *arguments).codes == [0, 0]
    assert_same_run(run, unbroken)


def test_learning_rates_are_those_of_the_schedule(unbroken: Path) -> None:
    shape = {"lr": 1e-3, "min_lr_ratio": 0.1, "warmup_steps": 3, "steps": STEPS}
    assert [m["lr"] for m in metrics(unbroken)] == [
        schedule(n, **shape) for n in range(1, STEPS + 1)
    ]


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_continues_with_float_noise(
    root: Path, launch: Ranks, unbroken: Path, tmp_path: Path, first: int, second: int
) -> None:
    run = tmp_path / "run"
    arguments = (root / "recipe.toml", "--run.dir", run)
    launch(first, *arguments, *NOW, fault="at", where="step", step=5, action="kill_all", rank=0)
    ran = launch(second, *arguments)
    assert f"saved by {first} ranks" in ran.out
    for one, other in zip(metrics(run), metrics(unbroken), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert (one["lr"], one["tokens"], one["epoch"]) == (other["lr"], other["tokens"], other["epoch"])  # fmt: skip


def test_a_finished_run_has_nothing_left_to_do(
    root: Path, launch: Ranks, unbroken: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(unbroken, tmp_path / "run")
    arguments = (root / "recipe.toml", "--run.dir", run)
    before = (run / "metrics.jsonl").read_bytes()
    again = launch(2, *arguments)
    assert again.codes == [0, 0]
    assert "finished after step 8, exported too: nothing to do" in again.out
    shutil.rmtree(run / "final")
    only_export = launch(2, *arguments)
    assert only_export.codes == [0, 0], only_export.out
    assert "step 8/8" not in only_export.out
    assert (run / "metrics.jsonl").read_bytes() == before
    assert_same_run(run, unbroken)


@pytest.mark.parametrize(
    ("change", "said"),
    {
        "lr": (("--optim.lr", "2e-3"), "optim.lr was 0.001, is 0.002"),
        "steps": (("--train.steps", "9"), "train.steps was 8, is 9"),
        "step-tokens": (("--train.step-tokens", "256"), "train.step_tokens was 128, is 256"),
        "seed": (("--train.seed", "1"), "train.seed was 4242, is 1"),
        "rounding": (("--optim.rounding", "nearest"), "optim.rounding was exact, is nearest"),
    }.values(),
)
def test_another_recipe_is_refused_with_the_difference(
    root: Path, launch: Ranks, unbroken: Path, change: tuple[str, str], said: str
) -> None:
    before = (unbroken / "metrics.jsonl").read_bytes()
    ran = launch(1, root / "recipe.toml", "--run.dir", unbroken, *change)
    assert ran.codes == [2]
    assert said in ran.out
    assert len(ran.out.strip().splitlines()) == 1, ran.out
    assert (unbroken / "metrics.jsonl").read_bytes() == before


def test_other_data_is_refused_unless_told_to_go_on(
    root: Path, launch: Ranks, unbroken: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(unbroken, tmp_path / "run")
    data = tmp_path / "other.jsonl"
    data.write_text("".join((root / "train.jsonl").read_text().splitlines(keepends=True)[:60]))
    arguments = (root / "recipe.toml", "--run.dir", run, "--data.path", data)
    refused = launch(1, *arguments)
    assert "data.path (its content) was" in refused.out
    shutil.rmtree(run / "checkpoints" / "step_00000008")
    (run / "evidence.json").unlink()
    ran = launch(1, *arguments, "--run.resume-anyway", "true")
    assert ran.codes == [0], ran.out
    assert "run.resume_anyway: data.path (its content) was" in ran.out
    assert [m["step"] for m in metrics(run)] == list(range(1, STEPS + 1))


def test_what_does_not_matter_may_change(root: Path, launch: Ranks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = (root / "recipe.toml", "--run.dir", run)
    launch(1, *arguments, *NOW, fault="at", where="step", step=5, action="kill_all")
    ran = launch(1, *arguments, "--run.save-every", 4, "--train.eval-every", 0, "--train.keep", "inputs")  # fmt: skip
    assert ran.codes == [0], ran.out
    assert "save_every = 4" in (run / "recipe.toml").read_text()


def test_a_damaged_state_is_skipped_with_a_line(
    root: Path, launch: Ranks, unbroken: Path, tmp_path: Path
) -> None:
    """The newest is bit-flipped: the one before is taken, by number and not as text."""
    run = shutil.copytree(unbroken, tmp_path / "run")
    for name in ("final", "checkpoints/step_00000003"):
        shutil.rmtree(run / name)
    (run / "evidence.json").unlink()
    shard = run / "checkpoints" / "step_00000008" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    ran = launch(2, root / "recipe.toml", "--run.dir", run)
    assert ran.codes == [0, 0], ran.out
    assert "skipped step_00000008: __1_0.distcp has another checksum" in ran.out
    assert "after step 6" in ran.out
    assert_same_run(run, unbroken)


def test_all_damaged_is_refused_and_not_begun_again(
    root: Path, launch: Ranks, unbroken: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(unbroken, tmp_path / "run")
    for state in states(run / "checkpoints"):
        (state / "manifest.json").unlink()
    before = (run / "metrics.jsonl").read_bytes()
    ran = launch(1, root / "recipe.toml", "--run.dir", run)
    assert ran.codes == [2]
    assert "none of its saved states is whole" in ran.out
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_named_state_starts_another_run(
    root: Path, launch: Ranks, unbroken: Path, tmp_path: Path
) -> None:
    state, run = unbroken / "checkpoints" / "step_00000006", tmp_path / "run"
    arguments = (root / "recipe.toml", "--run.dir", run, "--run.resume", state)
    assert launch(2, *arguments).codes == [0, 0]
    assert arithmetic(run) == arithmetic(unbroken)[6:]
    assert_same_state(run / "checkpoints" / "step_00000008", unbroken / "checkpoints" / "step_00000008")  # fmt: skip
    back = launch(1, root / "recipe.toml", "--run.dir", unbroken, "--run.resume", state)
    assert "run.dir has gone on to step_00000008" in back.out
    never = launch(1, root / "recipe.toml", "--run.dir", unbroken, "--run.resume", "never")
    assert "holds an earlier run" in never.out


def test_the_manifest_says_what_the_state_is(unbroken: Path) -> None:
    manifest = Saved(unbroken / "checkpoints" / "step_00000006").manifest
    assert (manifest["step"], manifest["world_size"], manifest["progress"]["applied"]) == (6, 2, 6)
    assert manifest["identity"]["optim.rounding"] == "exact"
    assert manifest["recipe"] == (unbroken / "recipe.toml").read_text()
    assert json.dumps(manifest)  # plain JSON

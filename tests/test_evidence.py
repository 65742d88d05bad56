"""A run accounts for itself: data, base, losses, and every session with how it ended."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hymoe.engine.evidence import failures, history, thinned
from hymoe.engine.hf_checkpoint import Checkpoint
from hymoe.engine.provenance import BackgroundHashes, described, revision_of
from tests.forked import Ranks, ranks
from tests.runs import make_data, metrics, save_by_transformers, write_recipe

OLD_KEYS = {
    *("recipe_sha256", "base", "steps", "applied_steps", "tokens", "supervised_tokens"),
    *("training_seconds", "stopped_by", "eval_loss_before", "eval_loss_after", "world_size"),
    *("update_kept_in_export", "peak_memory_bytes_of_rank_0", "machine"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base, data and a recipe of 6 steps that saves every second one."""
    root = tmp_path_factory.mktemp("evidence")
    data = make_data(root)
    save_by_transformers(root / "base", torch.bfloat16, data["tokenizer"])
    write_recipe(
        root / "recipe.toml",
        model={"path": root / "base"},
        data={"path": data["train"], "eval": data["eval"], "seq_len": 64, "micro_tokens": 128},
        optim={"lr": 1e-3, "warmup_steps": 1},
        train={"steps": 6, "step_tokens": 128, "eval_every": 3},
        run={"dir": root / "unused", "save_every": 2, "save_in_background": False},
    )
    return root


@pytest.fixture(scope="module")
def launch(root: Path) -> Iterator[Ranks]:
    with ranks(root) as parent:
        yield parent


def evidence_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "evidence.json").read_text())


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def killed_and_resumed(root: Path, launch: Ranks) -> Path:
    """Killed at step 3 after the state of step 2, resumed to the end."""
    arguments = (root / "recipe.toml", "--run.dir", root / "run")
    killed = launch(1, *arguments, fault="at", action="kill_all", where="step", step=4, rank=0)
    assert killed.codes == [-9], killed.out
    resumed = launch(1, *arguments)
    assert resumed.codes == [0], resumed.out
    return root / "run"


def test_the_evidence_matches_what_is_on_disk(root: Path, killed_and_resumed: Path) -> None:
    run = killed_and_resumed
    found, steps = evidence_of(run), metrics(run)
    assert found.keys() >= OLD_KEYS
    assert found["recipe"] == (run / "recipe.toml").read_text()
    files = {path.name: path for path in (root / "base").iterdir()}
    assert found["base_files"] == {
        name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for name, path in sorted(files.items())
    }
    assert found["data"]["file_sha256"] == sha256(root / "train.jsonl")
    assert found["data"]["rows_read"] == 120
    assert found["held_out_data"]["file_sha256"] == sha256(root / "eval.jsonl")
    assert found["tokens"] == sum(m["tokens"] for m in steps)
    assert [p["step"] for p in found["loss_curve"]] == [1, 2, 3, 4, 5, 6]
    assert [p["loss"] for p in found["loss_curve"]] == [m["loss"] for m in steps]
    assert [e["step"] for e in found["eval_losses"]] == [0, 3, 6]
    assert found["eval_losses"][-1]["eval_loss"] == found["eval_loss_after"]
    assert found["export"]["folder"] == "final"
    weights = {path.name: sha256(path) for path in (run / "final").glob("*.safetensors")}
    assert {n: w["sha256"] for n, w in found["export"]["weights"].items()} == weights
    assert found["started"] <= found["ended"]
    assert not list(run.glob(".*"))


def test_the_evidence_tells_of_a_kill_and_the_resume(killed_and_resumed: Path) -> None:
    trouble = evidence_of(killed_and_resumed)["failures"]
    assert trouble["crashes"] == 1
    assert [r["after_step"] for r in trouble["resumes"]] == [2]
    assert [s["ended"]["how"] for s in trouble["sessions"]] == ["killed or crashed", "finished"]
    assert trouble["signals"] == []
    assert trouble["history_missing"] is None


def test_a_run_that_goes_on_elsewhere_keeps_the_earlier_history(
    root: Path, launch: Ranks, killed_and_resumed: Path, tmp_path: Path
) -> None:
    earlier = shutil.copytree(killed_and_resumed, tmp_path / "earlier")
    state = earlier / "checkpoints" / "step_00000004"
    arguments = ("--run.dir", tmp_path / "later", "--run.resume", state)
    went_on = launch(1, root / "recipe.toml", *arguments)
    assert went_on.codes == [0], went_on.out
    found = evidence_of(tmp_path / "later")
    assert [m["step"] for m in metrics(tmp_path / "later")] == [5, 6]
    assert [p["step"] for p in found["loss_curve"]] == [1, 2, 3, 4, 5, 6]
    assert [r["after_step"] for r in found["failures"]["resumes"]] == [2, 4]
    shutil.rmtree(earlier)
    events, steps, missing = history(tmp_path / "later")
    assert [m["step"] for m in steps] == [5, 6]
    assert str(earlier) in missing
    assert "steps 1 to 4" in missing


def test_a_run_that_was_moved_misses_nothing(killed_and_resumed: Path, tmp_path: Path) -> None:
    """Its events name states in the folder where it was."""
    moved = shutil.copytree(killed_and_resumed, tmp_path / "moved")
    assert history(moved) == history(killed_and_resumed)


def event(kind: str, second: int, **values: Any) -> dict[str, Any]:
    return {
        "event": kind,
        "time": f"2026-01-01T00:00:{second:02d}+00:00",
        "message": None,
        **values,
    }


def test_every_session_says_how_it_ended() -> None:
    events = [
        event("start", 0, world_size=4, machine={"device": "x"}),
        event("stop", 1, message="SIGTERM: stopped after step 7: saved, leaving", step=7),
        event("resume", 2, message="skipped step_00000007: damaged"),
        event("start", 3, world_size=2),
        event("resume", 4, step=5, state="s"),
        event("not_finite", 5, step=9),
        event("start", 6),
        event("start", 7),
        event("export", 8),
    ]
    steps = [{"step": 6, "skipped": True}, {"step": 7, "skipped": False}]
    found = failures(events, steps)
    assert found["skipped_steps"] == [6]
    assert [s["ended"]["how"] for s in found["sessions"]] == [
        "signal",
        "too many steps skipped",
        "killed or crashed",
        "finished",
    ]
    assert found["signals"] == [
        {"how": "signal", "signal": "SIGTERM", "step": 7, "time": events[1]["time"]}
    ]
    assert found["notes"] == ["skipped step_00000007: damaged"]
    assert found["crashes"] == 1


def test_an_event_behind_a_line_that_a_kill_cut_off_is_not_lost(tmp_path: Path) -> None:
    whole = [json.dumps(event("start", second)) for second in (0, 1)]
    (tmp_path / "events.jsonl").write_text(f'{whole[0]}\n{{"event": "sa{whole[1]}\n')
    assert [e["time"][-8:-6] for e in history(tmp_path)[0]] == ["00", "01"]


@pytest.mark.parametrize("count", [0, 1, 2, 200, 201, 5000])
def test_the_curve_is_thinned_evenly_with_both_ends(count: int) -> None:
    steps = [{"step": i, "loss": 1.0, "lr": 0.1, "grad_norm": 2.0} for i in range(1, count + 1)]
    found = [point["step"] for point in thinned(steps)]
    assert len(found) == min(count, 200)
    assert found[:1] + found[-1:] == ([1, count] if count else [])
    gaps = {after - before for before, after in zip(found, found[1:], strict=False)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_a_base_is_hashed_beside_the_caller_and_a_fault_is_said(root: Path, tmp_path: Path) -> None:
    base = shutil.copytree(root / "base", tmp_path / "base")
    (base / ".hidden").write_text("x")
    found = BackgroundHashes(Checkpoint.open(base)).result(60)
    names = [path.name for path in base.iterdir() if path.name != ".hidden"]
    assert found == described(base, names)
    opened = Checkpoint.open(base)
    first = next(iter(opened.entries.values())).file
    known = BackgroundHashes(opened, {first.name: "f" * 64}).result(60)
    assert known == found | {first.name: found[first.name] | {"sha256": "f" * 64}}
    first.unlink()
    first.mkdir()  # readable as a name, not as a file
    gone = BackgroundHashes(opened).result(60)
    assert first.name not in gone
    assert all(values["sha256"] for values in gone.values())


def test_the_revision_is_found_where_a_download_left_it(tmp_path: Path) -> None:
    commits = [hashlib.sha1(bytes([i])).hexdigest() for i in range(4)]

    def folder(path: Path, config: dict[str, Any] | None = None) -> Path:
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config or {}))
        return path

    cached = folder(tmp_path / "models--org--name" / "snapshots" / commits[0])
    said = {"revision": commits[0], "repository": "org/name", "from": "download cache"}
    assert revision_of(cached) == said
    noted = folder(tmp_path / "noted")
    note = noted / ".cache" / "huggingface" / "download" / "config.json.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"{commits[1]}\netag\n1.0\n")
    assert revision_of(noted)["revision"] == commits[1]
    for packed in (False, True):
        clone = folder(tmp_path / f"clone{packed}")
        (clone / ".git" / "refs" / "heads").mkdir(parents=True)
        (clone / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
        if packed:
            refs = f"# pack-refs\n{commits[0]} refs/heads/other\n{commits[2]} refs/heads/main\n"
            (clone / ".git" / "packed-refs").write_text(refs)
        else:
            (clone / ".git" / "refs" / "heads" / "main").write_text(commits[2] + "\n")
        assert revision_of(clone) == {"revision": commits[2], "from": ".git"}
    kept = folder(tmp_path / "kept", {"_commit_hash": commits[3]})
    assert revision_of(kept) == {"revision": commits[3], "from": "config.json"}
    assert revision_of(folder(tmp_path / "unknown")) is None

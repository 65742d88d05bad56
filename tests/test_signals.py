"""Signals and faults: all ranks leave together with everything saved, or all end with one line that says why."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hymoe.engine import faults
from hymoe.engine.checkpoint_files import states
from hymoe.engine.recipe import Recipe
from tests.forked import REPO, Ranks
from tests.runs import metrics
from tests.test_resume import NOW, STEPS, assert_same_run, launch, root, unbroken

__all__ = ["launch", "root", "unbroken"]  # fixtures


# (moment, step, action) -> what is said.
SIGNALS = {
    ("loading", 0, "terminate"): "nothing to save while loading, leaving",
    ("evaluation", 0, "terminate"): "nothing to save before the first step, leaving",
    ("step", 2, "usr1_twice"): "stopped after step 2: saved, leaving",
    ("shard", 3, "terminate"): ": saved, leaving",  # during the first save: the step after it ends
    ("evaluation", 4, "terminate"): "stopped after step 4: saved, leaving",
    ("export", 8, "terminate"): "exported",
}


@pytest.mark.parametrize("moment", SIGNALS, ids=lambda m: f"{m[0]}{m[1]}")
def test_a_signal_to_one_rank_ends_all_with_everything_saved(
    root: Path, launch: Ranks, unbroken: Path, tmp_path: Path, moment: tuple[str, int, str]
) -> None:
    (where, step, action), run = moment, tmp_path / "run"
    arguments = (root / "recipe.toml", "--run.dir", run)
    stopped = launch(2, *arguments, fault="at", where=where, step=step, action=action, rank=1)
    assert stopped.codes == [0, 0], stopped.out
    assert SIGNALS[moment] in stopped.out
    assert "Traceback" not in stopped.out
    if ": saved, leaving" in SIGNALS[moment]:
        assert not (run / "final").exists()
        assert metrics(run)[-1]["step"] in (
            step - (where == "evaluation"),
            step,
            step + 1,
            step + 2,
        )
    resumed = launch(2, *arguments)
    assert resumed.codes == [0, 0], resumed.out
    assert_same_run(run, unbroken)


def test_a_rank_that_dies_ends_the_others_with_one_line_and_no_save(
    root: Path, launch: Ranks, tmp_path: Path
) -> None:
    """Its SIGTERM, as torchrun sends it to whoever is left, saves nothing."""
    run = tmp_path / "run"
    pids = launch.start(3, root / "recipe.toml", "--run.dir", run, "--train.step-tokens", 192, *NOW,
                        fault="at", where="step", step=5, action="kill_one", rank=1)  # fmt: skip
    while len(launch.said().splitlines()) < 2 or "step 4/" not in launch.said():
        time.sleep(0.02)
    for pid in (pids[0], pids[2]):
        os.kill(pid, signal.SIGTERM)
    ran = launch.wait()
    assert ran.codes[1] == -9
    assert ran.codes[0] == ran.codes[2] == 1, ran.out
    assert ran.out.count("train.py:") == 1, ran.out
    assert "another rank has died, step" in ran.out
    assert "Traceback" not in ran.out
    assert [state.name for state in states(run / "checkpoints")] == ["step_00000003"]
    assert launch(3, root / "recipe.toml", "--run.dir", run, "--train.step-tokens", 192).codes == [0] * 3  # fmt: skip


def test_a_rank_that_waits_for_a_dead_one_for_ever_is_ended(
    root: Path, launch: Ranks, tmp_path: Path
) -> None:
    ran = launch(2, root / "recipe.toml", "--run.dir", tmp_path / "run", fault="hang", step=2)
    assert ran.codes == [1, -9]
    assert "train.py: [rank 0] rank 1 has died; leaving without a save" in ran.out


@pytest.mark.slow
def test_torchrun_returns_0_after_a_signal_to_a_worker(
    root: Path, launch: Ranks, unbroken: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    script = [str(REPO / "scripts" / "train.py"), str(root / "recipe.toml"), "--run.dir", str(run)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*launcher, *script], stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "step 2/8" in line:
                os.kill(workers(process.pid)[-1], signal.SIGTERM)
        assert process.wait(timeout=60) == 0, lines
    assert any("saved, leaving" in line for line in lines)
    assert 2 <= metrics(run)[-1]["step"] < STEPS
    assert launch(2, root / "recipe.toml", "--run.dir", run).codes == [0, 0]
    assert_same_run(run, unbroken)


def workers(launcher: int) -> list[int]:
    """Process ids of torchrun's children."""
    tasks = Path(f"/proc/{launcher}/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def test_gradients_that_stay_not_finite_stop_the_run_with_names(
    root: Path, launch: Ranks, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = (root / "recipe.toml", "--run.dir", run, "--optim.max-skipped", 3)
    ran = launch(2, *arguments, fault="not_finite", first=4, last=99, rank=1)
    assert ran.codes[0] == 2, ran.out
    line = next(line for line in ran.out.splitlines() if line.startswith("train.py: "))
    assert "step 6: loss or gradient norm was not finite 3 steps in a row" in line
    assert "gradients not finite: layers.3.mixer.up_proj.weight;" in line
    assert "data rows of this step: " in line
    assert [m["skipped"] for m in metrics(run)] == [False] * 3 + [True] * 3
    # What was counted in a row is part of the state: a resume does not begin to count anew.
    skipping = launch(2, *arguments, fault="not_finite", first=4, last=5, rank=1)
    assert skipping.codes == [0, 0], skipping.out
    assert [m["skipped"] for m in metrics(run)] == [m["step"] in (4, 5) for m in metrics(run)]


def test_a_full_disk_leaves_the_last_good_state_and_a_clear_line(
    root: Path, launch: Ranks, unbroken: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = (root / "recipe.toml", "--run.dir", run)
    full = launch(2, *arguments, fault="at", where="shard", step=6, action="no_room", rank=1)
    assert full.codes[0] == 2, full.out
    assert "step_00000006: cannot be written (No space left on device)" in full.out
    assert "Traceback" not in full.out
    assert [state.name for state in states(run / "checkpoints")] == ["step_00000003"]
    assert launch(2, *arguments).codes == [0, 0]
    assert_same_run(run, unbroken)


def test_a_disk_without_room_is_found_before_writing(
    root: Path, launch: Ranks, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    full = launch(1, root / "recipe.toml", "--run.dir", run, fault="disk", free=1000, after=1)
    assert full.codes == [2]
    assert "step_00000006: needs" in full.out
    assert "the disk has 1,000 free" in full.out
    assert [state.name for state in states(run / "checkpoints")] == ["step_00000003"]


def test_out_of_memory_says_what_was_done_and_what_would_help(
    root: Path, launch: Ranks, tmp_path: Path
) -> None:
    ran = launch(2, root / "recipe.toml", "--run.dir", tmp_path / "run", "--train.keep", "all",
                 fault="at", where="evaluation", step=4, action="no_memory", rank=1)  # fmt: skip
    assert ran.codes == [1, 1], ran.out
    assert "Traceback" not in ran.out
    lines = [line for line in ran.out.splitlines() if line.startswith("train.py:")]
    assert len(lines) == 1, ran.out
    said = ("[rank 1] out of memory, step 4", "Tried to allocate 2.00 GiB.", "more ranks")
    for part in (*said, 'train.keep = "inputs" (is all)'):
        assert part in lines[0]


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (MemoryError(), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (
            RuntimeError("[gloo/pair.cc:547] Connection closed by peer [::1]:1"),
            "another rank has died",
        ),
        (RuntimeError("size mismatch"), None),
        (ValueError("out of memory"), None),
    ],
)
def test_only_known_faults_are_explained(error: Exception, part: str | None) -> None:
    found = faults.explain(error, "step 3: evaluating", Recipe())
    assert (found is None) == (part is None)
    assert part is None or (part in str(found) and "step 3" in str(found))


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Path]:
    """A folder for PATH with a stand-in for the scheduler's command: it writes down what it is asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    (folder / "scontrol").chmod(0o755)
    return folder


@pytest.mark.slow
def test_the_job_file_saves_on_the_warning_and_asks_to_be_run_again(
    root: Path, launch: Ranks, unbroken: Path, tmp_path: Path, scheduler: Path
) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    python = str(Path(sys.executable).parent)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "42", "SLURM_GPUS_ON_NODE": "2",
           "PATH": f"{scheduler}:{python}:{os.environ['PATH']}"}  # fmt: skip
    file = REPO / "scripts" / "slurm" / "train.sbatch"
    job = ["bash", str(file), str(root / "recipe.toml"), "--run.dir", str(run)]
    options = {"env": env, "cwd": REPO}
    with log.open("w") as out, subprocess.Popen(job, stdout=out, stderr=out, **options) as process:
        while process.poll() is None and "step 2/8" not in log.read_text():
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)  # a second one does not hurt
        assert process.wait(timeout=100) == 0, log.read_text()
    assert "saved, leaving" in log.read_text()
    assert (tmp_path / "asked").read_text() == "requeue 42\n"
    again = subprocess.run(job, capture_output=True, text=True, check=False, **options)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "asked").read_text() == "requeue 42\n"
    assert_same_run(run, unbroken)

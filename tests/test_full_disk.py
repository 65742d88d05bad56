"""A disk that is too small, or fills up while it is written to: the last good state stays, nothing is half written.

The disk is a small tmpfs, which only root may mount; where that is not permitted, a limit on the size of files stands
in for it (another error of the system, at the same places).
"""

import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hymoe.engine import checkpoint_files
from hymoe.engine.checkpoint import Group, Part, Parts, Saved
from hymoe.engine.checkpoint_files import states
from hymoe.engine.hf_checkpoint import load_pretrained, save_pretrained
from hymoe.engine.saver import Saver
from tests.forked import Ranks
from tests.hf_folder import refused
from tests.test_resume import assert_same_run, launch, root, unbroken
from tests.tiny import tiny_lm

__all__ = ["launch", "root", "unbroken"]  # fixtures

MB = 1 << 20


@contextmanager
def tmpfs(folder: Path, size: int) -> Iterator[Path]:
    """A disk of so many bytes in a folder."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def resize(folder: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)


@dataclass
class Disk:
    """Where there is little room, what the system says of it, and how there comes to be more."""

    folder: Path
    says: str
    grow: Callable[[], None]


@pytest.fixture(params=["tmpfs", "limit"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """Room for 1.5 MB."""
    if request.param == "tmpfs":
        with tmpfs(tmp_path / "disk", 3 * MB // 2) as folder:
            yield Disk(folder, "No space left on device", lambda: resize(folder, 64 * MB))
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * MB // 2, before[1]))
    try:
        grow = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)  # noqa: E731
        yield Disk(tmp_path, "File too large", grow)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def seems_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks is told that there is room: it will have gone when it is needed."""
    plenty = shutil.disk_usage("/")._replace(free=1 << 50)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: plenty)


def state_of(seed: int, megabytes: int) -> Parts:
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randn(megabytes * MB // 4 // 64, 64, generator=rng)
    return {"model.w": Part(rows, tuple(rows.shape), 0)}


def saver(folder: Path, parts: Parts, **options: object) -> Saver:
    return Saver(folder, lambda: parts, Group(), about={}, **options)


@pytest.mark.parametrize("in_background", [True, False])
def test_a_save_that_fills_the_disk(disk: Disk, seems_large: None, in_background: bool) -> None:
    """The state before it stays, and what was written of it goes: the disk is not left full."""
    folder, small, large = disk.folder / "checkpoints", state_of(1, 1), state_of(2, 4)
    first = saver(folder, small)
    first.save(1, {})
    first.wait()

    def save() -> None:
        keeper = saver(folder, large, keep_last=1, in_background=in_background)
        keeper.save(2, {})
        keeper.wait()

    refused(save, "step_00000002", "cannot be written", disk.says)
    assert [path.name for path in folder.iterdir()] == ["step_00000001"]
    assert torch.equal(Saved(folder / "step_00000001").read("model.w"), small["model.w"].tensor)
    disk.grow()
    save()
    assert [state.name for state in states(folder)] == ["step_00000002"]
    assert torch.equal(Saved(folder / "step_00000002").read("model.w"), large["model.w"].tensor)


def test_free_room_is_asked_for_before_a_save(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", 3 * MB // 2) as folder:
        keeper = saver(folder / "checkpoints", state_of(1, 1))
        keeper.save(1, {})
        keeper.wait()
        refused(lambda: keeper.save(2, {}), "step_00000002", " free; make room", "run.keep_last")
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_00000001"]


def test_an_export_that_fills_the_disk(disk: Disk, seems_large: None) -> None:
    lm = tiny_lm(vocab_size=20_000)  # 5 MB
    before = sorted(disk.folder.iterdir())
    refused(lambda: save_pretrained(lm, disk.folder / "out"), "the export failed", disk.says)
    assert sorted(disk.folder.iterdir()) == before
    disk.grow()
    save_pretrained(lm, disk.folder / "out")
    assert torch.equal(load_pretrained(disk.folder / "out").head.weight, lm.head.weight)


def test_free_room_is_asked_for_before_an_export(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", 3 * MB // 2) as folder:
        lm = tiny_lm(vocab_size=20_000)
        refused(lambda: save_pretrained(lm, folder / "out"), "the export needs", "are free")
        assert not list(folder.iterdir())


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# What is found at the second save -> what is said.
RUNS = {
    "before it writes": " free; make room",
    "while it writes": "cannot be written (No space",
}


@pytest.mark.slow
@pytest.mark.parametrize("when", RUNS)
def test_a_run_on_a_full_disk_leaves_its_last_state_and_goes_on_when_there_is_room(
    root: Path, launch: Ranks, unbroken: Path, tmp_path: Path, when: str
) -> None:
    one = size_of(unbroken / "checkpoints" / "step_00000003")
    with tmpfs(tmp_path / "disk", one + one // 2 + 64 * 1024) as folder:
        arguments = (root / "recipe.toml", "--run.dir", folder / "run", "--run.export", "final")
        # Of a smaller export, so that only the second save finds too little room.
        fault = {"fault": "disk", "free": 1 << 50, "after": 0} if when == "while it writes" else {}
        ran = launch(2, *arguments, **fault)
        assert ran.codes == [2, 2], ran.out
        assert RUNS[when] in ran.out
        assert "Traceback" not in ran.out
        checkpoints = folder / "run" / "checkpoints"
        assert [path.name for path in checkpoints.iterdir()] == ["step_00000003"]
        manifest = checkpoint_files.read_manifest(checkpoints / "step_00000003")
        assert (
            checkpoint_files.fault(checkpoints / "step_00000003", manifest["files"], manifest)
            is None
        )
        resize(folder, 64 * MB)
        ran = launch(2, *arguments)
        assert ran.codes == [0, 0], ran.out
        assert "after step 3, saved by 2" in ran.out
        assert_same_run(folder / "run", unbroken)

"""A saved state: whole or not there, found by number, damage found, rows that any number of ranks can load."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hymoe.engine import checkpoint_files, saver
from hymoe.engine.checkpoint import Group, Part, Parts, Saved, load, write
from hymoe.engine.checkpoint_files import name_of, prune, read_manifest, states, sweep
from hymoe.engine.errors import UserError
from hymoe.engine.recipe import Recipe, Run
from hymoe.engine.resume import begin, truncate_metrics
from hymoe.engine.saver import Saver

BF16, F32, I16 = torch.bfloat16, torch.float32, torch.int16
WHOLE = {  # 7 rows do not divide; of 2 rows the third and fourth rank get none; () is what a count would be
    "model.w": ((7, 3), BF16),
    "optim.w.remainder": ((7, 3), I16),
    "model.experts": ((4, 2, 3), BF16),
    "model.two": ((2,), F32),
    "model.norm": ((5,), F32),  # replicated
    "model.scalar": ((), F32),  # replicated
}
REPLICATED = {"model.norm", "model.scalar"}


def whole(seed: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=rng) * 100).to(dtype)
        for name, (shape, dtype) in WHOLE.items()
    }


def parts(seed: int | None, rank: int, size: int) -> Parts:
    """A rank's rows, as FSDP2 deals them; seed None: memory that waits for a load."""
    made = {}
    for name, tensor in whole(seed or 0).items():
        if name in REPLICATED:
            rows, first = tensor, 0
        else:
            most = -(-len(tensor) // size)
            first = min(rank * most, len(tensor))
            rows = tensor[first : first + most]
        if rows.numel() or not tensor.shape:
            rows = torch.zeros_like(rows) if seed is None else rows.clone()
            made[name] = Part(rows, tuple(tensor.shape), first)
    return made


def assert_holds(state: Path, seed: int) -> None:
    saved = Saved(state)
    for name, tensor in whole(seed).items():
        assert torch.equal(saved.read(name), tensor), name
    assert torch.equal(saved.read("model.w", 2, 3), whole(seed)["model.w"][2:5])


def _worker(rank: int, size: int, folder: str) -> None:
    """Saves as one of `size` ranks, in the background; loads what 1 and 3 ranks have saved; saves that again."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store_{size}", rank=rank, world_size=size
    )
    group, root = Group(), Path(folder)
    live = parts(size, rank, size)
    keeper = Saver(root / f"by_{size}", lambda: live, group, about={})
    keeper.save(1, {})
    for part in live.values():
        part.tensor.zero_()  # training goes on: what is written is the copy
    keeper.wait()
    for other in (1, 3):
        if (root / f"by_{other}").exists():
            found = parts(None, rank, size)
            load(root / f"by_{other}" / name_of(1), found, group)
            write(root / f"by_{size}", 10 + other, found, {}, group)
    group.close()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """by_N/step_00000001 holds whole(N), written by N ranks; by_N/step_0000001M the same as by_M's."""
    root = tmp_path_factory.mktemp("saved")
    write(root / "by_1", 1, parts(1, 0, 1), {"step": 1}, Group())
    for size in (3, 2, 4):
        mp.start_processes(_worker, (size, str(root)), nprocs=size, start_method="fork")
    return root


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_number_of_ranks_writes_the_same_tensors(saved: Path, size: int) -> None:
    assert_holds(saved / f"by_{size}" / name_of(1), seed=size)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("other", [1, 3])
def test_any_number_of_ranks_loads_the_same_tensors(saved: Path, size: int, other: int) -> None:
    if size != other:
        assert_holds(saved / f"by_{size}" / name_of(10 + other), seed=other)


@pytest.mark.parametrize("other", [1, 2, 3, 4])
def test_one_process_loads_what_any_number_wrote(saved: Path, other: int) -> None:
    found = parts(None, 0, 1)
    load(saved / f"by_{other}" / name_of(1), found, Group())
    for name, tensor in whole(other).items():
        assert torch.equal(found[name].tensor, tensor), name


@pytest.mark.parametrize(
    ("change", "said"),
    {
        "missing": ({"model.more": Part(torch.zeros(2), (2,), 0)}, "has no model.more"),
        "shape": ({"model.norm": Part(torch.zeros(6), (6,), 0)}, "model.norm is torch.float32 [5]"),
        "dtype": ({"model.two": Part(torch.zeros(2, dtype=BF16), (2,), 0)}, "expected torch.bfloat16"),
    }.values(),
    ids=["missing", "shape", "dtype"],
)  # fmt: skip
def test_another_model_is_refused_before_anything_changes(
    saved: Path, change: Parts, said: str
) -> None:
    found = parts(None, 0, 1) | change
    with pytest.raises(UserError, match="step_00000001") as refused:
        load(saved / "by_2" / name_of(1), found, Group())
    assert said in str(refused.value)
    assert not found["model.w"].tensor.any()


# Damage, and what is said of it.
def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 16
    file.write_bytes(content)


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, "bytes, expected"),
    "flipped": (flip, "another checksum"),
    "longer": (lengthen, "bytes, expected"),
    "gone": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata"])
def test_damage_is_found_and_the_state_before_is_taken(
    saved: Path, tmp_path: Path, name: str, damage: str
) -> None:
    spoil, said = DAMAGE[damage]
    run = run_with(tmp_path, saved / "by_2" / name_of(1), [9, 10])
    spoil(run / "checkpoints" / name_of(10) / name)
    start = begin(recipe_of(run), {}, Group())
    assert start.state.name == name_of(9)
    (line,) = start.notes
    assert line.startswith(f"skipped step_00000010: {name}")
    assert said in line


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("spoil", [cut_in_half, flip, Path.unlink])
def test_a_damaged_manifest_is_found(
    saved: Path, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    run = run_with(tmp_path, saved / "by_2" / name_of(1), [9, 10])
    spoil(run / "checkpoints" / name_of(10) / "manifest.json")
    start = begin(recipe_of(run), {}, Group())
    assert start.state.name == name_of(9)
    assert "skipped step_00000010: " in start.notes[0]


def test_any_one_changed_character_of_a_manifest_is_found(saved: Path, tmp_path: Path) -> None:
    state = shutil.copytree(saved / "by_1" / name_of(1), tmp_path / name_of(1))
    file = state / "manifest.json"
    text = file.read_text()
    expected = read_manifest(state)
    for place in range(len(text)):
        for other in "0}":
            file.write_text(text[:place] + other + text[place + 1 :])
            with contextlib.suppress(UserError):
                assert read_manifest(state) == expected  # a change of white space, or none


def test_the_newest_is_the_highest_number_and_leftovers_are_removed(
    saved: Path, tmp_path: Path
) -> None:
    """NVIDIA-NeMo/Automodel#3261: text order, and half-written folders taken for whole ones."""
    run = run_with(tmp_path, saved / "by_1" / name_of(1), [9, 10, 100_000_000, 99_999_999])
    folder = run / "checkpoints"
    for leftover in (".step_200000000.partial", ".step_00000003.removed"):
        shutil.copytree(folder / name_of(9), folder / leftover)
    (folder / "notes").mkdir()
    start = begin(recipe_of(run), {}, Group())
    assert start.state.name == "step_100000000"
    assert len(start.notes) == 2
    assert all("removed .step_" in note for note in start.notes)
    assert sorted(path.name for path in folder.iterdir() if path.name[0] != "s") == ["notes"]
    assert not begin(recipe_of(run), {}, Group()).notes  # said once


def run_with(tmp_path: Path, state: Path, steps: list[int]) -> Path:
    """A run folder with copies of a state under several numbers."""
    run = tmp_path / "run"
    for step in steps:
        shutil.copytree(state, run / "checkpoints" / name_of(step))
        manifest = read_manifest(state)
        files = manifest.pop("files")
        content = {"format": 1, "identity": {}, "progress": {}, **manifest, "step": step}
        copy = run / "checkpoints" / name_of(step)
        partial = checkpoint_files.partial_of(run / "checkpoints", step)
        copy.rename(partial)
        checkpoint_files.publish(partial, files, content)
    (run / "recipe.toml").write_text("")
    return run


def recipe_of(run: Path, **changes: Any) -> Recipe:
    return Recipe(run=Run(dir=str(run), export="", **changes))


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({"keep_last": 1, "keep_every": 0}, [12]),
        ({"keep_last": 3, "keep_every": 0}, [12, 10, 8]),
        ({"keep_last": 1, "keep_every": 4}, [12, 8, 4]),
        ({"keep_last": 20, "keep_every": 0}, [12, 10, 8, 6, 4, 2]),
    ],
)
def test_what_is_kept(tmp_path: Path, keep: dict[str, int], left: list[int]) -> None:
    for step in range(2, 13, 2):
        (tmp_path / name_of(step)).mkdir()
    prune(tmp_path, **keep)
    assert [checkpoint_files.step_of(path) for path in states(tmp_path)] == left


def test_old_states_go_only_when_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = parts(1, 0, 1)
    keeper = Saver(tmp_path, lambda: live, Group(), about={}, keep_last=1)
    keeper.save(1, {})
    keeper.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        keeper.save(2, {})
        with pytest.raises(UserError, match=r"step_00000002: cannot be written \(No space left"):
            keeper.wait()
    assert [state.name for state in states(tmp_path)] == [name_of(1)]
    assert_holds(tmp_path / name_of(1), seed=1)
    assert sweep(tmp_path) == []  # what was written has gone: a full disk does not stay full
    keeper.save(2, {})  # the writer is not out of order
    keeper.wait()
    assert [state.name for state in states(tmp_path)] == [name_of(2)]


def no_space(*args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_error_of_the_writer_surfaces_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = parts(1, 0, 1)
    keeper = Saver(tmp_path, lambda: live, Group(), about={})
    monkeypatch.setattr(checkpoint_files, "publish", no_space)
    keeper.save(1, {})
    keeper.leave(10)
    assert keeper.has_failed
    with pytest.raises(UserError, match="step_00000001"):
        keeper.save(2, {})


def test_no_room_on_the_disk_is_found_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = parts(1, 0, 1)
    monkeypatch.setattr(checkpoint_files, "free_bytes", lambda folder: 10)
    with pytest.raises(UserError, match="the disk has 10 free"):
        Saver(tmp_path, lambda: live, Group(), about={}).save(1, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("room", [0, 1 << 40], ids=["short", "enough"])
def test_short_host_memory_makes_a_save_wait_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    live, said = parts(1, 0, 1), []
    monkeypatch.setattr(saver, "available_bytes", lambda: room)
    options = {"about": {}, "say": lambda kind, message, **values: said.append(message)}
    keeper = Saver(tmp_path, lambda: live, Group(), **options)
    for step in (1, 2):
        keeper.save(step, {})
        if not room:
            assert (tmp_path / name_of(step)).is_dir()  # written when `save` returns
    keeper.wait()
    assert_holds(tmp_path / name_of(2), seed=1)
    waiting = [line for line in said if "training waits while a state is written" in line]
    assert len(waiting) == (0 if room else 1)


def test_available_memory_is_a_positive_number_of_this_machine() -> None:
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < saver.available_bytes() <= pages


@pytest.mark.parametrize("tail", [b"", b'{"step": 6, "lo', b'{"step": 6}\n', b"\0\0\n", b"\n"])
def test_metrics_are_cut_after_the_step(tmp_path: Path, tail: bytes) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": n, "loss": n / 7}).encode() + b"\n" for n in range(1, 6)]
    for step in (0, 3, 5):
        file.write_bytes(b"".join(lines) + tail)
        last = truncate_metrics(file, step)
        assert (last or {"step": 0})["step"] == step
        assert file.read_bytes() == b"".join(lines[:step])


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    assert not dist.is_initialized()

"""Writes a model as an HF folder: whole, or not at all.

`hf_plan` has decided which tensor lies at which byte of which file, so every rank writes the rows that it
holds straight to their place, in slices: nothing is gathered, all ranks write at once, and the bytes do
not depend on their number. The target must be on a file system that all ranks share.

The folder is written as `.NAME.partial` beside the target, synced and renamed. A failure on any rank
stops all of them and removes it; one that a kill left behind is removed by the next export.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from hymoe.engine.errors import UserError
from hymoe.engine.hf_index import INDEX, SLICE_BYTES, TORCH_DTYPES, contained
from hymoe.engine.hf_plan import ExportPlan, Planned, passed_through, plan_export
from hymoe.engine.hf_rows import LocalRows, local_rows, named_tensors
from hymoe.model.names import by_parameter

Value = Callable[[str, torch.Tensor], torch.Tensor | None]
Progress = Callable[[int, int], None]
T = TypeVar("T")


def save_pretrained(
    lm: nn.Module,
    path: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    base: str | Path | None = None,
    value: Value | None = None,
    progress: Progress | None = None,
) -> ExportPlan:
    """Writes the model as an HF folder; collective: every rank of the default process group calls it.

    Args:
        lm: HybridLM; plain parameters (equal on all ranks) or FSDP2's DTensors, any device.
        path: the folder, absent or empty.
        max_shard_size: bytes of a file, or a string such as "4GB" (10^9) or "500MiB" (2^20).
        base: the HF folder that the model came from; `lm.source` where not given. With neither, weights
            and config.json alone are written.
        value: (our name, parameter) -> what to write in its place: this rank's rows, in the dtype that
            `export_dtypes` names; or None for the parameter itself, cast by rounding to nearest. Not
            called on a rank that does not write the parameter.
        progress: called with (bytes written, bytes to write) of this rank.

    Returns:
        The plan that was carried out; the rules are in hf_plan's head.

    Raises:
        UserError: the target is not empty, the base does not fit the model, the disk is too small.
        ValueError: `value` gave another shape or dtype.
    """
    plan = _together(lambda: plan_export(lm, path, max_shard_size=max_shard_size, base=base))
    partial = plan.target.with_name(f".{plan.target.name}.partial")
    first = _rank_and_world()[0] == 0
    try:
        _together(lambda: _create(plan, partial) if first else None)
        written = _together(lambda: _write(plan, lm, partial, value, progress))
        counts = _gather(written)
        _together(lambda: _finish(plan, lm, partial, counts) if first else None)
    except BaseException:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return plan


def save_pieces(
    plan: ExportPlan,
    lm: nn.Module,
    pieces: Iterable[tuple[str, int, torch.Tensor]],
    progress: Progress | None = None,
) -> None:
    """Writes an HF folder in one process from pieces of tensors that come one after the other.

    For a model that is nowhere in memory. What the base only passes through is added here.

    Args:
        plan: from `plan_export`.
        lm: its model; on the meta device, say.
        pieces: (name in the file, first row, (rows, ...) of any dtype); together every row of `plan.specs` once.
        progress: called with (bytes written, bytes to write).

    Raises:
        UserError: the disk is full, or refuses.
        RuntimeError: the pieces do not make up the whole.
    """
    partial = plan.target.with_name(f".{plan.target.name}.partial")

    def write() -> dict[int, int]:
        out = _Shards(plan, partial, plan.total_size, progress)
        try:
            for name, begin, rows in pieces:
                out.put(plan.tensors[name], begin, rows)
            for entry in passed_through(plan.base):
                out.put_bytes(plan.tensors[entry.name], plan.base.raw(entry.name))
        finally:
            out.close()
        return out.written

    try:
        _together(lambda: _create(plan, partial))
        written = _together(write)
        _together(lambda: _finish(plan, lm, partial, [written]))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _create(plan: ExportPlan, partial: Path) -> None:
    """Makes the folder with every shard at its full size, headers written."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for shard in plan.shards:
        with open(partial / shard.name, "xb") as file:
            file.write(shard.head)
            file.truncate(shard.size)


def _write(
    plan: ExportPlan,
    lm: nn.Module,
    partial: Path,
    value: Value | None,
    progress: Progress | None,
) -> dict[int, int]:
    """Writes what this rank holds; returns shard number -> bytes written."""
    rank, world = _rank_and_world()
    mine = []
    for position, (name, tensor) in enumerate(named_tensors(lm).items()):
        part = local_rows(name, tensor)
        if part.first_copy if part.sharded else position % world == rank:
            mine.append((name, tensor, part))
    passed = passed_through(plan.base)[rank::world]
    files = by_parameter(plan.specs)
    total = sum(entry.nbytes for entry in passed)
    for name, _, part in mine:
        total += sum(
            _row_bytes(p) * len(r) for p, _, r in _pieces(plan, files[name], part.local, part)
        )
    out = _Shards(plan, partial, total, progress)
    try:
        for name, tensor, part in mine:
            rows = _rows(plan, files[name], name, tensor, part, value)
            for planned, begin, piece in _pieces(plan, files[name], rows, part):
                out.put(planned, begin, piece)
        for entry in passed:
            out.put_bytes(plan.tensors[entry.name], plan.base.raw(entry.name))
    finally:
        out.close()
    return out.written


def _rows(
    plan: ExportPlan,
    files: list[str],
    name: str,
    tensor: torch.Tensor,
    part: LocalRows,
    value: Value | None,
) -> torch.Tensor:
    """This rank's rows of a parameter as they are to be written, checked."""
    rows = value(name, tensor) if value is not None else None
    if rows is None:
        rows = part.local
    else:
        dtypes = {TORCH_DTYPES[plan.tensors[file].dtype] for file in files}
        # A stack with experts of two dtypes comes in the wider one, and each expert gets its own.
        if len(dtypes) == 1 and rows.dtype not in dtypes:
            raise ValueError(f"{name}: value gave {rows.dtype}; expected {dtypes.pop()}")
    if rows.shape != part.local.shape:
        raise ValueError(
            f"{name}: value gave {list(rows.shape)}; expected {list(part.local.shape)}"
        )
    if rows.is_meta:
        raise ValueError(f"{name} is on the meta device: there is nothing to write")
    return rows.detach()


def _pieces(
    plan: ExportPlan, files: list[str], rows: torch.Tensor, part: LocalRows
) -> Iterator[tuple[Planned, int, torch.Tensor]]:
    """Rows of a parameter -> (tensor of the file, first row in it, its rows)."""
    if plan.specs[files[0]].expert is not None:
        for row, expert in enumerate(part.numbers):
            yield plan.tensors[files[expert]], 0, rows[row]
        return
    for file in files:
        yield plan.tensors[file], part.begin, rows


def _row_bytes(planned: Planned) -> int:
    return planned.nbytes // max(1, planned.shape[0])


class _Shards:
    """The shard files, opened by this rank as it first writes to each; synced on close."""

    def __init__(
        self, plan: ExportPlan, partial: Path, total: int, progress: Progress | None
    ) -> None:
        self.plan, self.partial, self.total, self.progress = plan, partial, total, progress
        self.open: dict[int, int] = {}
        self.written: dict[int, int] = {}

    def put(self, planned: Planned, begin: int, rows: torch.Tensor) -> None:
        """Writes rows of any dtype and device from row `begin` of a tensor on."""
        row_bytes, dtype = _row_bytes(planned), TORCH_DTYPES[planned.dtype]
        step = max(1, SLICE_BYTES // row_bytes)
        for at in range(0, len(rows), step):
            piece = rows[at : at + step].to(dtype).cpu().contiguous()
            data = memoryview(piece.reshape(-1).view(torch.uint8).numpy())
            self._pwrite(planned, planned.start + (begin + at) * row_bytes, data)

    def put_bytes(self, planned: Planned, pieces: Iterator[bytes]) -> None:
        """Writes a whole tensor as it is."""
        at = planned.start
        for piece in pieces:
            self._pwrite(planned, at, memoryview(piece))
            at += len(piece)

    def _pwrite(self, planned: Planned, offset: int, data: memoryview) -> None:
        shard = planned.shard
        if shard not in self.open:
            file = self.partial / self.plan.shards[shard].name
            self.open[shard] = os.open(file, os.O_WRONLY)
        done = 0
        while done < len(data):
            done += os.pwrite(self.open[shard], data[done:], offset + done)
        self.written[shard] = self.written.get(shard, 0) + done
        if self.progress is not None:
            self.progress(sum(self.written.values()), self.total)

    def close(self) -> None:
        """Syncs and closes."""
        for fd in self.open.values():
            os.fsync(fd)
            os.close(fd)
        self.open.clear()


def _finish(plan: ExportPlan, lm: nn.Module, partial: Path, counts: list[dict[int, int]]) -> None:
    """Checks that every byte was written, adds the other files, renames."""
    for number, shard in enumerate(plan.shards):
        written = sum(count.get(number, 0) for count in counts)
        if written != plan.shard_bytes(number):
            raise RuntimeError(
                f"{shard.name}: {written} bytes written of {plan.shard_bytes(number)}"
            )
    if len(plan.shards) > 1:
        weight_map = {name: plan.shards[t.shard].name for name, t in plan.tensors.items()}
        index = {"metadata": {"total_size": plan.total_size}, "weight_map": weight_map}
        _put_file(partial / INDEX, (json.dumps(index, indent=2) + "\n").encode())
    if plan.base is None:
        config = json.dumps(lm.config.to_dict(), indent=2) + "\n"
        _put_file(partial / "config.json", config.encode())
    for name in plan.carried:
        source = contained(plan.base.folder, name)
        if source is None:
            raise UserError(f"{plan.base.folder / name}: became a link out of the folder")
        _put_file(partial / name, source.read_bytes())
    _sync(partial)
    os.rename(partial, plan.target)
    _sync(plan.target.parent)


def _put_file(file: Path, content: bytes) -> None:
    file.parent.mkdir(exist_ok=True)
    with open(file, "xb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def _sync(folder: Path) -> None:
    """Makes the entries of a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _rank_and_world() -> tuple[int, int]:
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _gather(mine: T) -> list[T]:
    """What every rank has, on every rank."""
    world = _rank_and_world()[1]
    if world == 1:
        return [mine]
    all_of_them: list[T] = [mine] * world
    dist.all_gather_object(all_of_them, mine)
    return all_of_them


def _together(step: Callable[[], T]) -> T:
    """Runs a step on every rank; where it fails on one it fails on all, with that one's message."""
    result, error = None, None
    try:
        result = step()
    except OSError as failure:
        error = UserError(f"the export failed: {failure}")
    except Exception as failure:
        error = failure
    user = error is None or isinstance(error, UserError)
    found = _gather(None if error is None else (user, str(error)))
    if error is not None:
        raise error
    for rank, failed in enumerate(found):
        if failed is not None:
            user, message = failed
            raise (UserError if user else RuntimeError)(
                message if user else f"rank {rank}: {message}"
            )
    return result

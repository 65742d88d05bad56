"""A saved state -> HF folder, in one process without a GPU, never more than a few pieces of tensors in memory.

**Source.** A run folder (its newest whole state; what is not whole is skipped with a line), a saved state, or an HF
folder, which is dealt to other shards. A state may come from any number of ranks.

**Bytes.** What a run's own export writes of the same state: same plan (`hf_plan`), same writer (`hf_export`), same
rounding by key (`export.file_values`), which depends on the element's index in its tensor and not on the piece.

**Memory.** A piece is PIECE_BYTES of rows, or one expert. Threads read and round some pieces ahead of the writer.
"""

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hymoe.engine import checkpoint_files as files
from hymoe.engine.checkpoint import FORMAT
from hymoe.engine.checkpoint_slices import SavedRows
from hymoe.engine.errors import UserError
from hymoe.engine.export import file_values
from hymoe.engine.hf_checkpoint import Checkpoint, export_dtypes, plan_export, read_config
from hymoe.engine.hf_export import save_pieces
from hymoe.engine.hf_plan import export_specs
from hymoe.engine.log import byte_progress
from hymoe.engine.optim import parameter_keys
from hymoe.engine.resume import base_identity
from hymoe.model.config import HybridConfig
from hymoe.model.names import Spec, by_parameter, parameter_shape
from hymoe.model.net import HybridLM

PIECE_BYTES = 4 << 20  # of the file; an expert of the 30B model has 10 MB
MOST_THREADS = 8  # rounding takes 20 ns an element and thread: eight keep a disk of 700 MB/s busy

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion has written.

    Attributes:
        state: the saved state or HF folder that was read.
        step: the last training step in it; None for an HF folder.
        base: the HF folder that dtypes, `mtp.*`, config and tokenizer came from.
        files: names of the weight files.
        bytes: of all tensors.
    """

    state: Path
    step: int | None
    base: Path
    files: tuple[str, ...]
    bytes: int


def convert(
    source: Path,
    out: Path,
    *,
    max_shard_size: str = "5GB",
    shards: int | None = None,
    base: Path | None = None,
    say: Say,
) -> Converted:
    """Writes `out` whole, or not at all.

    Args:
        source: run folder, saved state, or HF folder.
        out: absent or empty.
        max_shard_size: bytes of a file, such as "4GB" (10^9) or "500MiB" (2^20).
        shards: exactly so many files instead.
        base: the base's folder, where it is no longer where the run found it.
        say: takes lines for a person.

    Raises:
        UserError: no whole state, the base is gone or another one, `out` is not empty, the disk is too small.
    """
    state = choose(source, say)
    with opened(state, base) as found:
        plan = plan_export(
            found.lm, out, max_shard_size=max_shard_size, base=found.base.folder, shards=shards
        )
        for name, reason in plan.skipped.items():
            if reason != "weights":
                say(f"not copied: {name} of the base: {reason}")
        began = time.perf_counter()
        save_pieces(plan, found.lm, pieces(found), byte_progress("written", say))
        rate = plan.total_size / max(time.perf_counter() - began, 1e-9) / 1e9
        say(
            f"{plan.target}: {plan.total_size / 1e9:.2f} GB in {len(plan.tensors)} tensors and {len(plan.shards)} "
            f"files, {rate:.2f} GB/s"
        )
        names = tuple(shard.name for shard in plan.shards)
        return Converted(state, found.step, found.base.folder, names, plan.total_size)


def choose(source: Path, say: Say) -> Path:
    """The saved state or HF folder that a path stands for, its files checked against their checksums.

    Raises:
        UserError: there is none, or none is whole.
    """
    if not source.is_dir():
        raise UserError(f"{source}: no such folder; expected a run, a saved state or an HF folder")
    if (source / "config.json").is_file():
        return source
    if files.NAME.fullmatch(source.name) or (source / ".metadata").is_file():
        if (problem := _fault(source, say)) is not None:
            raise UserError(f"{source}: not a whole state: {problem}")
        return source
    folder = source / files.FOLDER if (source / files.FOLDER).is_dir() else source
    for path in sorted(folder.iterdir()):
        if files.LEFTOVER.fullmatch(path.name):
            say(
                f"skipped {path.name}: a save that was cut short or is under way, or one being removed"
            )
    states, problem = files.states(folder), None
    for state in states:
        problem = _fault(state, say)
        if problem is None:
            say(f"taking {state}")
            return state
        say(f"skipped {state.name}: {problem}")
    if states:
        raise UserError(f"{source}: none of its {len(states)} saved states is whole; {problem}")
    raise UserError(
        f"{source}: no config.json and no saved state; expected a run with checkpoints/, a state or an HF folder"
    )


def _fault(state: Path, say: Say) -> str | None:
    """What is wrong with a state; None where it is whole. Reads all of its files."""
    try:
        manifest = files.read_manifest(state)
    except UserError as error:
        return str(error)
    if manifest.get("format") != FORMAT:
        return f"format {manifest.get('format')}, expected {FORMAT}"
    sizes = {name: about["bytes"] for name, about in manifest["files"].items()}
    report, done = byte_progress(f"checked of {state.name}", say), 0
    with ThreadPoolExecutor(min(4, _cores())) as pool:
        found = [pool.submit(files.fault, state, [name], manifest) for name in sizes]
        for size, future in zip(sizes.values(), found, strict=True):
            if (problem := future.result()) is not None:
                pool.shutdown(cancel_futures=True)
                return problem
            done += size
            report(done, sum(sizes.values()))
    return None


@dataclass(frozen=True, slots=True)
class Source:
    """Where the tensors of an HF folder come from.

    Attributes:
        lm: the model, on the meta device.
        base: the HF folder behind it.
        step: of the state; None where the base itself is the source.
        specs: file name -> Spec of what the model supplies.
        rows: (file name, Spec, first, end) -> those rows of the tensor as the file gets them.
    """

    lm: HybridLM
    base: Checkpoint
    step: int | None
    specs: dict[str, Spec]
    rows: Callable[[str, Spec, int, int], Tensor]


@contextlib.contextmanager
def opened(state: Path, base: Path | None = None) -> Iterator[Source]:
    """Opens what `choose` gave.

    Args:
        state: saved state, or HF folder.
        base: the base's folder, where it is no longer where the run found it.

    Raises:
        UserError: the base is gone or another one, or the state lacks a tensor of its model.
    """
    if (state / "config.json").is_file():
        if base is not None:
            raise UserError(f"base = {base}: {state} is an HF folder and has none")
        checkpoint, lm = _base_of(state)
        specs = export_specs(lm, checkpoint)
        yield Source(
            lm, checkpoint, None, specs, lambda file, _, low, high: checkpoint.read(file, low, high)
        )
        return
    saved = SavedRows(state)
    try:
        folder = Path(saved.manifest["base"]) if base is None else base
        if not folder.is_dir():
            raise UserError(f"{state}: its base {folder} is not there; name its folder by --base")
        checkpoint, lm = _base_of(folder)
        _check_base(saved, folder, lm.config)
        specs = export_specs(lm, checkpoint)
        _check_tensors(saved, specs)
        yield Source(lm, checkpoint, saved.manifest["step"], specs, _Trained(saved, lm))
    finally:
        saved.close()


def _base_of(folder: Path) -> tuple[Checkpoint, HybridLM]:
    checkpoint = Checkpoint.open(folder)
    lm = HybridLM(read_config(folder), kernels="torch", device="meta")
    lm.source = folder
    return checkpoint, lm


def _check_base(saved: SavedRows, folder: Path, config: HybridConfig) -> None:
    """The folder is the one that the run began with, by config and tokenizer; as `resume.identity` has them."""
    tokenizer = folder / "tokenizer.json"
    for key, found in base_identity(config, tokenizer if tokenizer.is_file() else None).items():
        expected = saved.manifest["identity"].get(key)
        if expected not in (None, found):
            what = key.partition("(its ")[2].rstrip(")")
            raise UserError(
                f"{folder}: its {what} has hash {found}, the base of {saved.state} had {expected}; "
                "expected the folder that the run began with"
            )


def _check_tensors(saved: SavedRows, specs: dict[str, Spec]) -> None:
    """The state has exactly the tensors of the model, in its shapes."""
    expected = {
        f"model.{name}": parameter_shape(
            specs, names[:1] if specs[names[0]].expert is None else names
        )
        for name, names in by_parameter(specs).items()
    }
    for name, shape in expected.items():
        if name not in saved.tensors:
            raise UserError(f"{saved.state}: has no {name}; its base's config.json asks for it")
        if saved.tensors[name][1] != shape:
            found = list(saved.tensors[name][1])
            raise UserError(f"{saved.state}: {name} has shape {found}, expected {list(shape)}")
    for name in saved.tensors:
        if name.startswith("model.") and name not in expected:
            raise UserError(f"{saved.state}: {name} is not in the model of its base's config.json")


class _Trained:
    """Rows of a state's tensors as the file gets them."""

    def __init__(self, saved: SavedRows, lm: HybridLM) -> None:
        self._saved, self._dtypes = saved, export_dtypes(lm)
        names = [name for name in self._dtypes if f"optim.{name}.exp_avg" in saved.tensors]
        self._keys = parameter_keys(names)
        self._bits: dict[str, Any] = {
            "seed": saved.manifest["identity"]["train.seed"],
            "step": saved.manifest["progress"]["count"],
        }

    def __call__(self, file: str, spec: Spec, first: int, end: int) -> Tensor:
        name, saved = spec.param, self._saved
        if spec.expert is not None:  # a row of the stack is the whole tensor of the file
            first, end = spec.expert, spec.expert + 1
        rows = saved.read(f"model.{name}", first, end - first)
        if name in self._keys:  # all but buffers, which nothing trains
            remainder = f"optim.{name}.remainder"
            rows = file_values(
                rows,
                saved.read(remainder, first, end - first) if remainder in saved.tensors else None,
                self._dtypes[name],
                key=self._keys[name],
                offset=first * math.prod(rows.shape[1:]),
                **self._bits,
            )
        return rows if spec.expert is None else rows[0]


def pieces(source: Source) -> Iterator[tuple[str, int, Tensor]]:
    """Every row of every tensor that the model supplies, in the order of the files.

    Yields:
        Name in the file, first row, (rows, ...) as `Source.rows` gives them.
    """
    threads = min(MOST_THREADS, _cores())
    waiting: deque[tuple[str, int, Future[Tensor]]] = deque()
    # The work is shared by threads here, so torch must not start as many again in each.
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for file, spec, first, end in _cuts(source):
                waiting.append((file, first, pool.submit(source.rows, file, spec, first, end)))
                if len(waiting) > threads:
                    name, begin, rows = waiting.popleft()
                    yield name, begin, rows.result()
            while waiting:
                name, begin, rows = waiting.popleft()
                yield name, begin, rows.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _cuts(source: Source) -> Iterator[tuple[str, Spec, int, int]]:
    """Tensors of the file in ranges of rows of about PIECE_BYTES; an expert is not cut."""
    for file, spec in source.specs.items():
        rows = spec.shape[0]
        step = rows
        if spec.expert is None:
            step = max(1, PIECE_BYTES // max(1, source.base.nbytes(file, 1)))
        for first in range(0, rows, step):
            yield file, spec, first, min(first + step, rows)


def _cores() -> int:
    return len(os.sched_getaffinity(0))

"""The state of a run on disk, written and read by any number of ranks; `engine/saver.py` says when.

**What.** Each tensor by name: `model.NAME` (parameters and buffers), `optim.NAME.exp_avg`, `.exp_avg_sq` and, for
exact masters, `.remainder`. Sharding is by whole rows of dimension 0, so a rank's part is its rows and the number
of the first; torch's distributed checkpoint (DCP) writes each row once and reads any split of them. The small rest
(step, counts, recipe, what the data was) is JSON in the manifest. The data position and all random bits are
functions of the step, the seed and the number of applied steps: there is no generator whose state could be lost.

**Trust.** DCP's `.metadata` is a pickle: load states of your own runs only.
"""

import os
import socket
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hymoe.engine import checkpoint_files as files
from hymoe.engine.errors import UserError
from hymoe.engine.hf_rows import local_rows, named_tensors
from hymoe.engine.optim import Optimizer
from hymoe.engine.relabel import runs_of

FORMAT = 1  # of the manifest and of the tensors' names


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's rows of a tensor.

    Attributes:
        tensor: (rows, ...) the memory itself.
        shape: of the whole tensor.
        first_row: where the rows begin in it.
        order: of a stack whose experts are spread anew, the expert in each place; in a state they lie in their own.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    first_row: int
    order: tuple[int, ...] | None = None

    @property
    def chunks(self) -> list[tuple[ChunkStorageMetadata, Tensor]]:
        """The rows as DCP calls them, in runs without a gap."""
        if not self.shape:
            return [(ChunkStorageMetadata(torch.Size(), self.tensor.shape), self.tensor)]
        rest, chunks = [0] * (len(self.shape) - 1), []
        for run in runs_of(self.first_row, len(self.tensor), self.order):
            rows = self.tensor[run.at : run.at + run.count]
            chunks.append((ChunkStorageMetadata(torch.Size([run.begin, *rest]), rows.shape), rows))
        return chunks


Parts = dict[str, Part]


def parts_of(lm: nn.Module, optimizer: Optimizer) -> Parts:
    """Every tensor of a run's state, by its name in the state; live memory, of this rank's rows only."""
    parts = {}
    for name, tensor in named_tensors(lm).items():
        rows = local_rows(name, tensor)
        begin = rows.begin if rows.local.numel() else 0
        parts[f"model.{name}"] = Part(rows.local, tuple(tensor.shape), begin, rows.order)
    for name, tensors in optimizer.state().items():
        place = optimizer.shards[name]
        for kind, tensor in tensors.items():
            parts[f"optim.{name}.{kind}"] = Part(tensor, place.shape, place.first_row, place.order)
    return {name: part for name, part in parts.items() if part.tensor.numel() or not part.shape}


class Group:
    """The ranks of a run, speaking over a process group of their own on the CPU; or one process alone."""

    def __init__(self) -> None:
        """Collective where there is a process group."""
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.rank = dist.get_rank() if self.group else 0
        self.size = dist.get_world_size() if self.group else 1

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self.group is None:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def first_fault(self, message: str | None) -> str | None:
        """The message of the first rank that has one, on every rank."""
        return next((found for found in self.gather(message) if found is not None), None)

    def peers(self) -> dict[int, int]:
        """Process ids of the other ranks on this machine, by rank; collective."""
        host = socket.gethostname()
        everyone = self.gather((host, os.getpid()))
        return {
            rank: pid
            for rank, (name, pid) in enumerate(everyone)
            if rank != self.rank and name == host
        }

    def close(self) -> None:
        """Destroys the process group. One that is left to the end of the interpreter aborts it now and then."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    @property
    def dcp_options(self) -> dict[str, Any]:
        """What DCP's save and load are told of the ranks."""
        if self.group is not None:
            return {"process_group": self.group}
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        return {"no_dist": True}


def write(folder: Path, step: int, parts: Parts, content: dict[str, Any], group: Group) -> Path:
    """Writes a state whole; collective.

    Args:
        folder: that holds the states.
        step: number of the last step in it.
        parts: this rank's.
        content: for the manifest; rank 0's counts.
        group: all ranks.

    Returns:
        The state's folder.

    Raises:
        UserError: the disk is full, or refuses; on every rank.
    """
    partial = files.partial_of(folder, step)
    try:
        writer = _Writer(partial, single_file_per_rank=True, sync_files=True)
        dcp.save({}, storage_writer=writer, planner=_Saving(parts), **group.dcp_options)
        mine = {p.name: files.measure(p) for p in partial.glob(f"__{group.rank}_*")}
        if group.rank == 0:
            mine[".metadata"] = files.measure(partial / ".metadata")
        problem = None
    except (CheckpointException, OSError) as error:
        mine, problem = {}, _reason(error)
    if (problem := group.first_fault(problem)) is None:
        everyone = {name: about for part in group.gather(mine) for name, about in part.items()}
        try:
            if group.rank == 0:
                files.publish(partial, everyone, content)
        except OSError as error:
            problem = _reason(error)
        problem = group.first_fault(problem)
    if problem is not None:
        raise UserError(f"{folder / files.name_of(step)}: cannot be written ({problem})")
    return folder / files.name_of(step)


def load(state: Path, parts: Parts, group: Group) -> None:
    """Fills this rank's parts from a state that any number of ranks wrote; collective.

    Raises:
        UserError: the state has no such tensor, or of another shape or dtype; nothing is changed then.
    """
    reader = dcp.FileSystemReader(state)
    saved = reader.read_metadata().state_dict_metadata
    for name, part in parts.items():
        if name not in saved:
            raise UserError(f"{state}: has no {name}; it is the state of another model")
        found, expected = saved[name], (part.tensor.dtype, torch.Size(part.shape))
        if (found.properties.dtype, found.size) != expected:
            raise UserError(
                f"{state}: {name} is {found.properties.dtype} {list(found.size)}, "
                f"expected {expected[0]} {list(expected[1])}"
            )
    try:
        dcp.load({}, storage_reader=reader, planner=_Loading(parts), **group.dcp_options)
    except CheckpointException as error:
        raise UserError(f"{state}: cannot be read ({_reason(error)})") from None


class Saved:
    """A state on disk, tensor by tensor, in a process of its own: for conversion and for tests.

    Attributes:
        manifest: what the state is.
        tensors: name -> (dtype, shape).
    """

    def __init__(self, state: Path) -> None:
        """Reads the manifest and the list of tensors, no tensor.

        Raises:
            UserError: not a whole state.
        """
        self.manifest = files.read_manifest(state)
        self._state = state
        saved: dict[str, TensorStorageMetadata] = (
            dcp.FileSystemReader(state).read_metadata().state_dict_metadata
        )
        self.tensors = {
            name: (about.properties.dtype, tuple(about.size)) for name, about in saved.items()
        }

    def read(self, name: str, first_row: int = 0, rows: int | None = None) -> Tensor:
        """Rows of a tensor, all where not said.

        Raises:
            KeyError: no such tensor.
        """
        dtype, shape = self.tensors[name]
        if shape:
            shape = (shape[0] - first_row if rows is None else rows, *shape[1:])
        part = Part(torch.empty(shape, dtype=dtype), self.tensors[name][1], first_row)
        reader = dcp.FileSystemReader(self._state)
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load({}, storage_reader=reader, planner=_Loading({name: part}), no_dist=True)
        return part.tensor


class _Writer(dcp.FileSystemWriter):
    """DCP's, but what the disk said is the error, not torch.save's, which only finds itself at a wrong place."""

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            found: BaseException | None = error
            while found is not None and not isinstance(found, OSError):
                found = found.__cause__ or found.__context__
            raise (error if found is None else found) from None


def _rows_by_place(parts: Parts) -> dict[tuple[str, torch.Size], Tensor]:
    """A tensor's name and the place of a chunk of it -> the chunk's memory."""
    return {
        (name, chunk.offsets): rows for name, part in parts.items() for chunk, rows in part.chunks
    }


class _Saving(dcp.DefaultSavePlanner):
    """One write for each chunk; DCP drops the copies of replicated rows and checks that all rows are there."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts, self._rows = parts, _rows_by_place(parts)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(name, chunk.offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=chunk,
                        properties=TensorProperties(dtype=part.tensor.dtype),
                        size=torch.Size(part.shape),
                    ),
                )
                for name, part in self._parts.items()
                for chunk, _ in part.chunks
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._rows[index.fqn, index.offset]


class _Loading(dcp.DefaultLoadPlanner):
    """Reads for each part the saved rows that overlap it."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts, self._rows = parts, _rows_by_place(parts)

    def create_local_plan(self) -> LoadPlan:
        saved = self.metadata.state_dict_metadata
        return LoadPlan(
            [
                item
                for name, part in self._parts.items()
                for item in create_read_items_for_chunk_list(
                    name, saved[name], [chunk for chunk, _ in part.chunks]
                )
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._rows[index.fqn, index.offset]


def _reason(error: BaseException) -> str:
    """The first cause in a few words, without DCP's tracebacks."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return words.splitlines()[0]

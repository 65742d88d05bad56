"""What each rank computes in a step: a pure function of the step's number.

Nothing is consumed and nothing has to be saved: step n of a run is the same after a resume, and its
set of rows is the same on any number of ranks. Rows are shuffled anew each epoch by the seed; a
step may take the last rows of one epoch and the first of the next, so every row comes once an
epoch.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from hymoe.engine.data.chat import NOT_SUPERVISED
from hymoe.engine.data.rows import Rows
from hymoe.engine.errors import UserError
from hymoe.kernels.packed import Packed


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass of one rank."""

    input_ids: Tensor  # (T,) int64
    labels: Tensor  # (T,) int64, shifted; -100 = not supervised
    packed: Packed  # with the number of supervised tokens


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimiser step of one rank, with the counts of all ranks, known without communication."""

    micro_batches: tuple[MicroBatch, ...]
    supervised_tokens: int  # of all ranks: what the loss is divided by
    num_tokens: int  # of all ranks
    epoch: float  # epochs of data seen when this step is done


class Loader:
    """Hands each rank its micro-batches of a step."""

    def __init__(
        self,
        rows: Rows,
        step_tokens: int,
        micro_tokens: int,
        seq_len: int,
        rank: int,
        world_size: int,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Checks that the sizes divide.

        Args:
            rows: packed rows.
            step_tokens: room for tokens in a step, over all ranks: whole rows of `seq_len`.
            micro_tokens: room for tokens in one micro-batch of one rank: whole rows of `seq_len`.
            seq_len: room for tokens in a row.
            rank: this process.
            world_size: number of processes that share the data.
            seed: of the shuffling.
            device: where the tensors go.

        Raises:
            UserError: sizes that do not divide, with the numbers, or no rows.
        """
        _check_multiple("train.step_tokens", step_tokens, "seq_len", seq_len)
        _check_multiple("data.micro_tokens", micro_tokens, "seq_len", seq_len)
        if step_tokens % (world_size * micro_tokens):
            raise UserError(
                f"train.step_tokens = {step_tokens}, expected a multiple of "
                f"{world_size * micro_tokens} = {world_size} ranks x data.micro_tokens "
                f"= {micro_tokens}"
            )
        _check_rows(rows, seq_len)
        self.rows = rows
        self.rows_per_step = step_tokens // seq_len
        self.micro_steps = step_tokens // (world_size * micro_tokens)
        self._rows_per_micro = micro_tokens // seq_len
        self._rank = rank
        self._seed = seed
        self._device = device
        # One epoch's order is asked for many times in a row; two are alive where an epoch ends.
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def steps_in(self, epochs: float) -> int:
        """Number of steps that see every row at least `epochs` times."""
        return math.ceil(epochs * len(self.rows) / self.rows_per_step)

    def row_indices(self, n: int) -> list[int]:
        """The rows of step n, counted from 0, of all ranks in order."""
        first = n * self.rows_per_step
        places = range(first, first + self.rows_per_step)
        size = len(self.rows)
        return [int(self._order(place // size)[place % size]) for place in places]

    def step(self, n: int) -> StepBatch:
        """This rank's part of step n, counted from 0."""
        indices = self.row_indices(n)
        mine = self._rows_per_micro * self.micro_steps
        start = self._rank * mine
        micro_batches = tuple(
            _micro_batch(self.rows, indices[i : i + self._rows_per_micro], self._device)
            for i in range(start, start + mine, self._rows_per_micro)
        )
        return StepBatch(
            micro_batches=micro_batches,
            supervised_tokens=sum(self.rows.supervised_tokens(i) for i in indices),
            num_tokens=sum(self.rows.num_tokens(i) for i in indices),
            epoch=(n + 1) * self.rows_per_step / len(self.rows),
        )

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(len(self.rows))


def eval_batches(
    rows: Rows,
    micro_tokens: int,
    seq_len: int,
    rank: int,
    world_size: int,
    device: torch.device | str = "cpu",
) -> Iterator[MicroBatch]:
    """This rank's part of a pass over every row, each counted once on any number of ranks.

    Every rank yields the same number of micro-batches, because a forward pass of a sharded model is
    a collective. A rank without rows left yields a row with no label supervised, which adds
    nothing.

    Args:
        rows: packed rows.
        micro_tokens: room for tokens in one micro-batch of one rank: whole rows of `seq_len`.
        seq_len: room for tokens in a row.
        rank: this process.
        world_size: number of processes that share the rows.
        device: where the tensors go.

    Raises:
        UserError: `micro_tokens` is not whole rows, or no rows.
    """
    _check_multiple("data.micro_tokens", micro_tokens, "seq_len", seq_len)
    _check_rows(rows, seq_len)
    rows_per_micro = micro_tokens // seq_len
    mine = list(range(rank, len(rows), world_size))
    most = math.ceil(len(rows) / world_size)
    for start in range(0, most, rows_per_micro):
        indices = mine[start : start + rows_per_micro]
        if indices:
            yield _micro_batch(rows, indices, device)
        else:
            idle = _micro_batch(rows, [0], device)
            idle.labels.fill_(NOT_SUPERVISED)
            yield replace(idle, packed=replace(idle.packed, supervised=0))


def _micro_batch(rows: Rows, indices: list[int], device: torch.device | str) -> MicroBatch:
    parts = [rows[i] for i in indices]
    lengths = np.concatenate([np.diff(cu_seqlens) for _, _, cu_seqlens in parts]).tolist()
    input_ids = torch.from_numpy(np.concatenate([ids for ids, _, _ in parts]))
    labels = torch.from_numpy(np.concatenate([labels for _, labels, _ in parts]))
    return MicroBatch(
        input_ids=input_ids.to(device),
        labels=labels.to(device),
        packed=Packed.from_lengths(
            lengths, device, supervised=sum(rows.supervised_tokens(i) for i in indices)
        ),
    )


def _check_multiple(name: str, value: int, of_name: str, of: int) -> None:
    if of < 1 or value < of or value % of:
        raise UserError(f"{name} = {value}, expected a multiple of {of_name} = {of}")


def _check_rows(rows: Rows, seq_len: int) -> None:
    if len(rows) == 0:
        raise UserError("found no packed rows, expected at least one")
    if rows.seq_len > seq_len:
        raise UserError(
            f"rows are packed for {rows.seq_len} tokens, expected at most seq_len = {seq_len}"
        )

"""One row of packed documents, described on the host so that no kernel has to ask the device.

A row holds T tokens of S documents end to end, without padding. Everything that a kernel wants to know of
the boundaries is an index table built here once a row and kept, whatever the number of layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Block:
    """Consecutive chunks that are worked on together; a chunk is Q tokens of one document, its last one perhaps fewer.

    Attributes:
        rows: the tokens of the row that the block holds.
        chunks: n, number of chunks.
        slots: int64, the place of each of those tokens among the n*Q slots; None where every slot has a token.
        continued: of the numbers 0..n those of the chunks that continue the document of the chunk before;
            0 continues the block before, n is the first chunk of the next block.
    """

    rows: slice
    chunks: int
    slots: torch.Tensor | None
    continued: frozenset[int]


@dataclass(frozen=True)
class Chunks:
    """The row cut into chunks of at most Q tokens that begin anew with each document, as tables for a kernel.

    A state enters every chunk but a document's first one; those states are numbered ("slots") along each document.
    There are fewer than T/Q of them however many documents there are: a short document has none.

    Attributes:
        size: Q.
        count: C, number of chunks, at most T/Q + S.
        slots: number of states between chunks.
        table: (C, 4) int32 on the device: first token, tokens, slot of the state that enters the chunk, slot of the
            state that leaves it; -1 where there is none.
        long: (L, 3) int32 on the device, the documents of more than one chunk, longest first: first token, tokens,
            first slot.
    """

    size: int
    count: int
    slots: int
    table: torch.Tensor
    long: torch.Tensor


@dataclass(frozen=True)
class Bucket:
    """Documents of similar length, padded behind their end to the longest of them.

    Attributes:
        tokens: (s, l) int64, index of each token; a document's last one stands in for its padding, so that
            even a NaN cannot reach another document.
        slots: (t,) int64, places of the real tokens in the flattened table.
        rows: (t,) int64, the tokens that stand there.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, eq=False)
class Packed:
    """Boundaries of the documents in one packed row.

    Attributes:
        lengths: tokens of each document, on the host; none is 0.
        device: where the tables live.
        supervised: number of supervised tokens in the row where the host knows it, else None.
    """

    lengths: tuple[int, ...]
    device: torch.device
    supervised: int | None = None
    _tables: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        supervised: int | None = None,
    ) -> "Packed":
        """Describes documents of the given lengths.

        Raises:
            ValueError: there is no document, or one has no token.
        """
        lengths = tuple(int(n) for n in lengths)
        if not lengths or min(lengths) < 1:
            raise ValueError(
                f"document lengths {lengths[:8]}: expected at least one, each of 1 token or more"
            )
        return cls(lengths, torch.device(device), supervised)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: torch.Tensor) -> "Packed":
        """Describes the row of `cu_seqlens`, (S+1,) int32: document starts, the last entry is T.

        Asks the device once; a training loop builds the row from host lengths instead.
        """
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
            raise ValueError(f"cu_seqlens {tuple(cu_seqlens.shape)}: expected shape (S+1,)")
        starts = cu_seqlens.tolist()
        if starts[0] != 0:
            raise ValueError(f"cu_seqlens {starts[:8]}: expected the first entry to be 0")
        lengths = [b - a for a, b in zip(starts[:-1], starts[1:], strict=True)]
        return cls.from_lengths(lengths, cu_seqlens.device)

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.lengths)

    @property
    def max_len(self) -> int:
        """Tokens of the longest document."""
        return max(self.lengths)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """(S+1,) int32 on the device."""
        return self._table("cu_seqlens", lambda: self._on_device(self._starts().astype(np.int32)))

    @property
    def seq_idx(self) -> torch.Tensor:
        """(T,) int32 on the device, number of the document that a token is in."""
        make = lambda: np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)  # noqa: E731
        return self._table("seq_idx", lambda: self._on_device(make()))

    def crossings(self, back: int, start: int, stop: int) -> torch.Tensor | None:
        """Which of the tokens start..stop-1 lie in another document than the token `back` behind them.

        Returns:
            int64 indices counted from `start`, or None where there are none. A token without one behind it is
            not among them.
        """

        def make() -> torch.Tensor | None:
            found = self._crossings(back)
            first, last = np.searchsorted(found, (start, stop))
            return self._on_device(found[first:last] - start) if last > first else None

        return self._table(("crossings", back, start, stop), make)

    def _crossings(self, back: int) -> np.ndarray:
        """The same of the whole row, on the host."""

        def make() -> np.ndarray:
            document = np.repeat(np.arange(len(self.lengths)), self.lengths)
            return np.flatnonzero(document[:-back] != document[back:])

        return self._table(("all crossings", back), make)

    def blocks(self, size: int, most: int) -> tuple[Block, ...]:
        """The row cut into chunks of `size` tokens that begin anew with each document, `most` chunks a block."""
        return self._table(("blocks", size, most), lambda: self._make_blocks(size, most))

    def chunks(self, size: int) -> Chunks:
        """The row cut into chunks of `size` tokens that begin anew with each document."""
        return self._table(("chunks", size), lambda: self._make_chunks(size))

    def buckets(self) -> tuple[Bucket, ...]:
        """All documents, grouped by the power of two that bounds their length."""
        return self._table("buckets", self._make_buckets)

    @property
    def from_buckets(self) -> torch.Tensor:
        """(T,) int64, the place of each token in the real tokens of all buckets, one after another."""
        return self._table(
            "from_buckets", lambda: torch.argsort(torch.cat([b.rows for b in self.buckets()]))
        )

    def _make_blocks(self, size: int, most: int) -> tuple[Block, ...]:
        counts = [-(-n // size) for n in self.lengths]
        number = np.concatenate([np.arange(n) for n in counts])  # of each chunk in its document
        filled = np.full(len(number), size)
        filled[np.cumsum(counts) - 1] = np.asarray(self.lengths) - (np.asarray(counts) - 1) * size
        starts = np.concatenate([[0], np.cumsum(filled)])
        blocks = []
        for first in range(0, len(number), most):
            last = min(first + most, len(number))
            slots = np.flatnonzero(np.arange(size) < filled[first:last, None])
            is_full = len(slots) == (last - first) * size
            blocks.append(
                Block(
                    slice(int(starts[first]), int(starts[last])),
                    last - first,
                    None if is_full else self._on_device(slots),
                    frozenset(np.flatnonzero(number[first : last + 1]).tolist()),
                )
            )
        return tuple(blocks)

    def _make_chunks(self, size: int) -> Chunks:
        lengths, starts = np.asarray(self.lengths), self._starts()[:-1]
        counts = -(-lengths // size)
        document = np.repeat(np.arange(len(lengths)), counts)
        number = (
            np.arange(len(document)) - (np.cumsum(counts) - counts)[document]
        )  # in its document
        enters = number > 0
        enter = np.where(enters, np.cumsum(enters) - 1, -1)
        leave = np.where(number + 1 < counts[document], np.cumsum(enters), -1)
        first = starts[document] + number * size
        filled = np.minimum(size, lengths[document] - number * size)
        slot = np.cumsum(counts - 1) - (counts - 1)  # first one of each document
        long = np.flatnonzero(counts > 1)
        long = long[np.argsort(-counts[long], kind="stable")]
        tables = [
            self._on_device(np.stack(columns, axis=1).astype(np.int32))
            for columns in (
                (first, filled, enter, leave),
                (starts[long], lengths[long], slot[long]),
            )
        ]
        return Chunks(size, len(document), int(enters.sum()), *tables)

    def _make_buckets(self) -> tuple[Bucket, ...]:
        starts = self._starts()
        groups: dict[int, list[int]] = {}
        for document, length in enumerate(self.lengths):
            groups.setdefault((length - 1).bit_length(), []).append(document)
        buckets = []
        for _, documents in sorted(groups.items()):
            longest = max(self.lengths[d] for d in documents)
            place = np.arange(longest)
            lengths = np.array([self.lengths[d] for d in documents])[:, None]
            tokens = starts[documents][:, None] + np.minimum(place, lengths - 1)
            slots = np.flatnonzero(place < lengths)
            rows = tokens.reshape(-1)[slots]
            buckets.append(
                Bucket(self._on_device(tokens), self._on_device(slots), self._on_device(rows))
            )
        return tuple(buckets)

    def _starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)

    def _table(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]

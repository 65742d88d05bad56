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
class ChunkTable:
    """The row cut into chunks of Q tokens that start anew with each document (C chunks in all).

    Attributes:
        tokens: (C, Q) int64, index of each token; T where a document's last chunk has none.
        slots: (T,) int64, the place of each token in the flattened table.
        waves: for j = 1, 2, ...: int64 indices of the chunks that are number j of their document. The
            chunk before is the index minus one.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    waves: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Bucket:
    """Documents of similar length, padded behind their end to the longest of them.

    Attributes:
        tokens: (s, l) int64, index of each token; T behind a document's end.
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
        starts = cu_seqlens.tolist()
        if cu_seqlens.dim() != 1 or len(starts) < 2 or starts[0] != 0:
            raise ValueError(f"cu_seqlens {starts[:8]}: expected (S+1,) starting with 0")
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

    def crossings(self, back: int) -> torch.Tensor:
        """int64 indices t for which the tokens t and t + back exist and lie in different documents."""

        def make() -> torch.Tensor:
            document = np.repeat(np.arange(len(self.lengths)), self.lengths)
            return self._on_device(np.flatnonzero(document[:-back] != document[back:]))

        return self._table(("crossings", back), make)

    def chunks(self, size: int) -> ChunkTable:
        """The row cut into chunks of `size` tokens, aligned to document starts."""
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

    def _make_chunks(self, size: int) -> ChunkTable:
        counts = [-(-n // size) for n in self.lengths]
        tokens = np.full((sum(counts), size), self.num_tokens, dtype=np.int64)
        flat, slots, numbers = tokens.reshape(-1), [], []
        first = 0
        for start, length, count in zip(self._starts(), self.lengths, counts, strict=False):
            flat[first * size : first * size + length] = np.arange(start, start + length)
            slots.append(np.arange(first * size, first * size + length))
            numbers.append(np.arange(count))
            first += count
        number = np.concatenate(numbers)
        waves = tuple(self._on_device(np.flatnonzero(number == j)) for j in range(1, max(counts)))
        return ChunkTable(self._on_device(tokens), self._on_device(np.concatenate(slots)), waves)

    def _make_buckets(self) -> tuple[Bucket, ...]:
        starts = self._starts()
        groups: dict[int, list[int]] = {}
        for document, length in enumerate(self.lengths):
            groups.setdefault((length - 1).bit_length(), []).append(document)
        buckets = []
        for _, documents in sorted(groups.items()):
            longest = max(self.lengths[d] for d in documents)
            tokens = np.full((len(documents), longest), self.num_tokens, dtype=np.int64)
            for row, d in enumerate(documents):
                tokens[row, : self.lengths[d]] = np.arange(starts[d], starts[d + 1])
            slots = np.flatnonzero(tokens.reshape(-1) < self.num_tokens)
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

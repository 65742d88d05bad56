"""Packed rows, the shape in which data reaches the loop: documents end to end, labels shifted."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from hymoe.engine.data.chat import NOT_SUPERVISED


class Rows(Protocol):
    """What the loader asks of a packed data set, in memory or on disk."""

    seq_len: int  # most tokens of a row

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One row.

        Returns:
            input_ids: (T,) int64.
            labels: (T,) int64, the id that follows each token; -100 where it is not supervised,
                which the last token of a document never is.
            cu_seqlens: (S+1,) int32, document starts, last = T.
        """
        ...

    def num_tokens(self, i: int) -> int:
        """T of row i, without reading it."""
        ...

    def supervised_tokens(self, i: int) -> int:
        """Number of labels of row i that are not -100, without reading it."""
        ...


class Described(Protocol):
    """What is said of a data set when a run starts."""

    def summary(self) -> str:
        """One line for a person."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """The same for a log."""
        ...


class MemoryRows:
    """Rows held in memory."""

    def __init__(
        self,
        documents: Sequence[tuple[Sequence[int], Sequence[int]]],
        packing: Iterable[Sequence[int]],
        seq_len: int,
    ) -> None:
        """Lays documents out in rows.

        Args:
            documents: (ids, shifted labels) of each document.
            packing: the document indices of each row, as `pack.pack_best_fit` returns them.
            seq_len: most tokens of a row.
        """
        self.seq_len = seq_len
        self._rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for indices in packing:
            chosen = [documents[i] for i in indices]
            ids = np.concatenate([np.asarray(ids, dtype=np.int32) for ids, _ in chosen])
            labels = np.concatenate([np.asarray(labels, dtype=np.int32) for _, labels in chosen])
            ends = np.cumsum([len(ids) for ids, _ in chosen])
            if ends[-1] > seq_len:
                raise ValueError(f"a row of {ends[-1]} tokens, expected at most {seq_len}")
            self._rows.append((ids, labels, np.concatenate([[0], ends]).astype(np.int32)))
        self._supervised = [int((labels != NOT_SUPERVISED).sum()) for _, labels, _ in self._rows]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One row: input_ids (T,) int64, labels (T,) int64, cu_seqlens (S+1,) int32."""
        ids, labels, cu_seqlens = self._rows[i]
        return ids.astype(np.int64), labels.astype(np.int64), cu_seqlens

    def num_tokens(self, i: int) -> int:
        """Tokens of row i."""
        return len(self._rows[i][0])

    def supervised_tokens(self, i: int) -> int:
        """Labels of row i that are not -100."""
        return self._supervised[i]

"""Rows of Parquet files as plain Python values, a slice of a row group at a time.

A worker that takes slices of one row group in turn decodes that group once: the reader stays where the last slice
ended. Pages are decoded as they are asked for, so memory does not grow with the size of a row group.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from hymoe.engine.errors import UserError

BATCH_ROWS = 256  # decoded at a time
BUFFER_BYTES = 1 << 20  # read ahead for each column; without it a whole column of the group is read


def columns(path: Path) -> tuple[str, ...]:
    """The names of a file's columns.

    Raises:
        UserError: the file cannot be read.
    """
    with _opened(path) as file:
        return tuple(file.schema_arrow.names)


def group_sizes(path: Path) -> list[int]:
    """Rows of each row group, from the metadata.

    Raises:
        UserError: the file cannot be read.
    """
    with _opened(path) as file:
        metadata = file.metadata
        return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


def rows(
    path: str,
    group: int,
    names: tuple[str, ...] | None,
    start: int,
    num_rows: int,
    wanted: Sequence[bool] | None = None,
) -> Iterator[dict[str, Any] | str]:
    """Yields rows of a row group, structs and maps as dicts, lists as lists; or what is wrong with one, as text.

    Args:
        path: the file.
        group: which row group.
        names: of the columns to read, where the file has them; None is all.
        start: first row, in the group.
        num_rows: how many.
        wanted: one for each, whether it is; None is all.

    Raises:
        UserError: the file cannot be read on, or has none of the columns.
    """
    reader = _kept.pop() if _kept else None
    key = _key(path, names)
    if reader is None or reader.key != key:
        reader = _Reader(key, path, names)
    reader.seek(group, start)
    at = 0
    for batch in reader.batches(start, start + num_rows):
        if wanted is not None:
            mask = pyarrow.array(wanted[at : at + batch.num_rows], pyarrow.bool_())
            at += batch.num_rows
            batch = batch.filter(mask)
        yield from _plain(batch)
    _kept[:] = [reader]


def _plain(batch: pyarrow.RecordBatch) -> Iterator[dict[str, Any] | str]:
    has_maps = any("map<" in str(field.type) for field in batch.schema)
    how = (
        "strict" if has_maps else None
    )  # "strict" is slow, and means the same where there are no maps
    try:
        found = batch.to_pylist(maps_as_pydicts=how)
    except (ValueError, KeyError, OverflowError):  # text that is not UTF-8, a date beyond Python's
        found = None
    if found is not None:
        yield from found
        return
    for i in range(batch.num_rows):
        try:
            yield batch.slice(i, 1).to_pylist(maps_as_pydicts=how)[0]
        except (ValueError, KeyError, OverflowError) as error:
            yield f"found a value that cannot be read ({error}), expected plain values"


class _Reader:
    """A file, with one of its row groups decoded up to some row."""

    def __init__(self, key: tuple[Any, ...], path: str, names: tuple[str, ...] | None) -> None:
        self.key = key
        self._path = path
        self._file = _opened(Path(path))
        self._names = None
        if names is not None:
            found = self._file.schema_arrow.names
            self._names = [name for name in names if name in found]
            if not self._names:
                raise UserError(
                    f"{path}: found columns {', '.join(found)}, expected one of {', '.join(names)}"
                )
        self._group = -1
        self._batches: Iterator[pyarrow.RecordBatch] = iter(())
        self._batch: pyarrow.RecordBatch | None = None
        self._at = 0  # row of the group at which the batch starts

    def seek(self, group: int, start: int) -> None:
        """Makes the row `start` of a group the next, or one before it."""
        if group == self._group and self._at <= start:
            return
        self._group, self._at, self._batch = group, 0, None
        self._batches = self._file.iter_batches(
            BATCH_ROWS, row_groups=[group], columns=self._names, use_threads=False
        )

    def batches(self, start: int, stop: int) -> Iterator[pyarrow.RecordBatch]:
        """Yields the rows from start to stop."""
        while self._at < stop:
            if self._batch is None:
                self._batch = self._next()
            end = self._at + self._batch.num_rows
            first, last = max(start, self._at), min(stop, end)
            if first < last:
                yield self._batch.slice(first - self._at, last - first)
            if end > stop:
                return
            self._at, self._batch = end, None

    def _next(self) -> pyarrow.RecordBatch:
        try:
            return next(self._batches)
        except StopIteration as error:
            raise UserError(f"{self._path}: found fewer rows than its metadata says") from error
        except (pyarrow.ArrowException, OSError) as error:
            raise _unreadable(self._path, error) from error


_kept: list[_Reader] = []  # the last reader of this process, or none while it is in use


def _key(path: str, names: tuple[str, ...] | None) -> tuple[Any, ...]:
    """Names an open reader: a forked process would share its position, a rewritten file its place."""
    try:
        stat = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    return os.getpid(), path, stat.st_mtime_ns, stat.st_size, names


def _opened(path: Path) -> pyarrow.parquet.ParquetFile:
    try:
        return pyarrow.parquet.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False)
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path | str, error: Exception) -> UserError:
    text = " ".join(str(error).split())
    return UserError(f"{path}: cannot be read ({text}), expected a Parquet file")

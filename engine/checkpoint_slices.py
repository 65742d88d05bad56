"""Rows of a saved state's tensors, read straight from where they lie: memory of the rows asked for, no more.

torch's distributed checkpoint (DCP) reads a rank's part of a tensor whole even where one row is wanted: of a stack
of experts that one rank wrote, a gigabyte for each expert. Here only the rows are read.

**Layout.** A part is what `torch.save` wrote of one contiguous tensor: a ZIP archive at `offset` in the rank's file,
whose member `.../data/0` holds the elements, stored and not compressed. DCP's `.metadata` says which rows, which
file, which offset; the archive's own directory says where the member begins.
"""

import io
import math
import os
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hymoe.engine import checkpoint_files as files
from hymoe.engine.errors import UserError

MEMBER = "/data/0"  # of the one tensor of an archive
LOCAL_HEADER = struct.Struct(
    "<4s22xHH"
)  # of a member: signature, ..., length of name, of extra field


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of a tensor that one rank wrote: an archive of `length` bytes at `offset` of a file."""

    first_row: int
    rows: int
    file: str
    offset: int
    length: int


class SavedRows:
    """The tensors of a state, for one process and any number of threads.

    All files are opened at once, so a state that its run removes meanwhile can be read to its end.

    Attributes:
        state: the folder.
        manifest: what the state is.
        tensors: name -> (dtype, shape).
    """

    def __init__(self, state: Path) -> None:
        """Reads the manifest and the list of tensors, no tensor.

        Raises:
            UserError: not a whole state.
        """
        self.state = state
        self.manifest = files.read_manifest(state)
        found = dcp.FileSystemReader(state).read_metadata()
        saved = found.state_dict_metadata
        self.tensors = {name: (t.properties.dtype, tuple(t.size)) for name, t in saved.items()}
        self._chunks: dict[str, list[Chunk]] = {name: [] for name in saved}
        for index, place in found.storage_data.items():
            at = next(c for c in saved[index.fqn].chunks if c.offsets == index.offset)
            first, rows = (at.offsets[0], at.sizes[0]) if at.sizes else (0, 1)
            chunk = Chunk(first, rows, place.relative_path, place.offset, place.length)
            self._chunks[index.fqn].append(chunk)
        self._data: dict[Chunk, int] = {}
        self._open: dict[str, int] = {}
        try:
            for name in sorted({c.file for chunks in self._chunks.values() for c in chunks}):
                self._open[name] = os.open(state / name, os.O_RDONLY)
        except OSError as error:
            self.close()
            raise UserError(f"{state}: cannot be read ({error.strerror})") from None

    def read(self, name: str, first_row: int = 0, rows: int | None = None) -> Tensor:
        """Rows of a tensor, all where not said.

        Returns:
            (rows, ...) contiguous, in the dtype of the state.

        Raises:
            KeyError: no such tensor.
            UserError: a file is not what DCP's list says.
        """
        dtype, shape = self.tensors[name]
        if shape:
            shape = (shape[0] - first_row if rows is None else rows, *shape[1:])
        out = torch.empty(shape, dtype=dtype)
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        end, filled = first_row + (shape[0] if shape else 1), 0
        memory = memoryview(out.reshape(-1).view(torch.uint8).numpy())
        for chunk in self._chunks[name]:
            low, high = max(first_row, chunk.first_row), min(end, chunk.first_row + chunk.rows)
            if low < high:
                into = memory[(low - first_row) * row_bytes : (high - first_row) * row_bytes]
                self._pread(chunk, into, (low - chunk.first_row) * row_bytes, name, row_bytes)
                filled += high - low
        if filled != end - first_row:
            raise UserError(f"{self.state}: has {filled} of {end - first_row} rows of {name}")
        return out

    def close(self) -> None:
        """Closes the files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _pread(self, chunk: Chunk, into: memoryview, skip: int, name: str, row_bytes: int) -> None:
        """Fills memory from byte `skip` of a chunk's elements on."""
        fd = self._open[chunk.file]
        if chunk not in self._data:
            self._data[chunk] = self._find(chunk, name, chunk.rows * row_bytes)
        offset, done = self._data[chunk] + skip, 0
        while done < len(into):  # one call moves 2 GiB at most
            count = os.preadv(fd, [into[done:]], offset + done)
            if count == 0:
                raise UserError(f"{self.state / chunk.file}: ends within {name}")
            done += count

    def _find(self, chunk: Chunk, name: str, nbytes: int) -> int:
        """Where in its file the elements of a chunk begin."""
        fd = self._open[chunk.file]
        try:
            with zipfile.ZipFile(_Window(fd, chunk.offset, chunk.length)) as archive:
                (member,) = (m for m in archive.infolist() if m.filename.endswith(MEMBER))
            header = os.pread(fd, LOCAL_HEADER.size, chunk.offset + member.header_offset)
            signature, name_bytes, extra_bytes = LOCAL_HEADER.unpack(header)
            is_plain = signature == b"PK\3\4" and member.compress_type == zipfile.ZIP_STORED
        except (zipfile.BadZipFile, ValueError, struct.error) as error:
            raise UserError(
                f"{self.state / chunk.file}: no tensor where {name} is ({error})"
            ) from None
        if not is_plain or member.file_size != nbytes:
            raise UserError(
                f"{self.state / chunk.file}: {name} has {member.file_size} bytes, expected {nbytes} uncompressed"
            )
        start = chunk.offset + member.header_offset
        return start + LOCAL_HEADER.size + name_bytes + extra_bytes


class _Window(io.RawIOBase):
    """Some bytes of an open file, as a file for `zipfile`."""

    def __init__(self, fd: int, offset: int, length: int) -> None:
        super().__init__()
        self._fd, self._offset, self._length, self._at = fd, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = (0, self._at, self._length)[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:
        size = max(0, min(len(buffer), self._length - self._at))
        count = os.preadv(self._fd, [memoryview(buffer)[:size]], self._offset + self._at)
        self._at += count
        return count

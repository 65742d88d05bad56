"""The rows of a JSON file as bytes, one at a time, from plain, gzip or Zstandard files.

A file of lines is cut at its line ends. An array, or objects one after the other, is cut by the decoder itself over a
buffer that grows until it holds one whole element: memory is that of the largest row, however long the file.
"""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, cast

import zstandard

from hymoe.engine.errors import UserError

BOM = b"\xef\xbb\xbf"
BLOCK = 1 << 18  # bytes read at a time
ZSTD_BLOCK = 1 << 12  # compressed bytes at a time: all that they spell is in memory
ZSTD_WINDOW = 1 << 31  # the largest that `zstd --long=31` writes
# An error this close to the end of the buffer may be a cut: the longest tokens that a cut breaks
# are `-Infinity` and the two halves of a surrogate pair, \ud83d\ude00.
CUT_CHARS = 16
WHITESPACE = " \t\r\n"


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (line number from 1, line) for each line that is not blank, without a byte-order mark.

    Raises:
        UserError: the file cannot be read to its end.
    """
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(BOM) if number == 1 else line
            if text and not text.isspace():
                yield number, text


def layout(path: Path) -> Literal["array", "lines", "objects"]:
    """How the rows of a `.json` file stand in it, from its first line with text.

    Raises:
        UserError: the file cannot be read.
    """
    with _opened(path) as file:
        start = file.peek(1 << 12)[: 1 << 12].removeprefix(BOM).lstrip()
        if start.startswith(b"["):
            return "array"
        if start.startswith(b"{"):
            # A line that ends without closing its brackets is the start of an object over several lines.
            line = start if b"\n" in start else file.readline().removeprefix(BOM)
            try:
                json.loads(line.partition(b"\n")[0])
            except (ValueError, RecursionError):
                return "objects"
    return "lines"


def elements(path: Path, is_array: bool) -> Iterator[tuple[int, bytes]]:
    """Yields (place from 1, text) for each element of an array, or of values one after the other.

    Raises:
        UserError: the text stops being JSON, or the file cannot be read to its end.
    """
    with _opened(path) as file:
        text = _Buffer(path, file)
        if is_array:
            text.take("[")
            if text.next_char() == "]":
                text.take("]")
                text.expect_end()
                return
        while is_array or text.next_char():
            text.row += 1
            yield text.row, text.element()
            if is_array:
                if text.next_char() != ",":
                    text.take("]")
                    text.expect_end()
                    return
                text.take(",")


class _Buffer:
    """Text of a file between what was taken and what was read."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.row = 0
        self._path = path
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._text = ""
        self._at = 0  # what lies before was taken
        self._is_whole = False  # no more to read
        self._decoder = json.JSONDecoder()

    def next_char(self) -> str:
        """The next character that is not a space, or "" at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in WHITESPACE:
                    return self._text[self._at]
                self._at += 1
            if self._is_whole:
                return ""
            self._grow()

    def take(self, char: str) -> None:
        found = self.next_char()
        if found != char:
            raise self._error(f"found {found!r}" if found else "found the end", f"{char!r}")
        self._at += 1

    def expect_end(self) -> None:
        if found := self.next_char():
            raise self._error(f"found {found!r} after the array", "nothing")

    def element(self) -> bytes:
        """The text of the next value."""
        self.next_char()
        while True:
            try:
                _, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if not self._is_whole and self._may_be_cut(error):
                    self._grow()
                    continue
                raise self._error(f"found no valid JSON ({error.msg})", "one object") from error
            except (ValueError, RecursionError) as error:
                raise self._error(f"found no valid JSON ({error})", "one object") from error
            if end == len(self._text) and not self._is_whole:  # a number may go on
                self._grow()
                continue
            text = self._text[self._at : end]
            self._at = end
            return text.encode()

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        return error.msg.startswith("Unterminated string") or (
            error.pos >= len(self._text) - CUT_CHARS
        )

    def _grow(self) -> None:
        """Reads as much again as is not yet taken, so that a long row is tried few times."""
        rest = self._text[self._at :]
        block = self._file.read(max(BLOCK, len(rest)))
        self._is_whole = not block
        try:
            self._text = rest + self._decode(block, final=self._is_whole)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self._path}: found bytes that are not UTF-8 after row {self.row}, expected JSON"
            ) from error
        self._at = 0

    def _error(self, found: str, expected: str) -> UserError:
        return UserError(f"{self._path}:{self.row}: {found}, expected {expected}")


class _ZstdFile(io.RawIOBase):
    """The text of a Zstandard file; unlike the package's own reader it refuses a file that was cut short."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._packed = b""
        self._text = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self._text:
            if not self._packed:
                self._packed = self._file.read(ZSTD_BLOCK)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the last frame has no end")
                return 0
            if self._frame is None:
                decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW)
                self._frame = decompressor.decompressobj()
            self._text = memoryview(self._frame.decompress(self._packed))
            self._packed = b""
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._text))
        buffer[:size] = self._text[:size]
        self._text = self._text[size:]
        return size


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The text of a file, which closes with the block; a fault of reading names the file."""
    try:
        with path.open("rb") as file:
            if path.name.lower().endswith(".gz"):
                yield cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=file), BLOCK))
            elif path.name.lower().endswith(".zst"):
                yield cast(BinaryIO, io.BufferedReader(_ZstdFile(file), BLOCK))
            else:
                yield file
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise UserError(
            f"{path}: cannot be read to its end ({error}), expected a whole file"
        ) from error

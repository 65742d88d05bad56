"""The header of a safetensors file, and JSON as it is read beside it: refused, or what every reader finds.

The format is 8 bytes of header length, a JSON header (name -> dtype, shape, begin and end of its bytes), then the
bytes. This reader is stricter than the format's own library: no key twice, no unknown key, no number that one
reader cuts off, no hole, no overlap, nothing after the end, and every name fits into a line of a message.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hymoe.engine.errors import UserError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit; 42,000 tensors need 6 MB. Of an index too.
MAX_COUNT = 2**63 - 1  # of elements, bytes, offsets: what a file can have
MAX_DIMS = 64  # torch's own limit
MAX_NAME = 512  # characters
ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies: dtype as the file spells it, and the range of its bytes in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file in the order of their bytes, its size compared with what they need.

    Raises:
        UserError: the file cannot be opened, is no safetensors file, or not all of one.
    """
    with opened(file) as fd:
        size = os.fstat(fd).st_size
        if size < 8:
            raise UserError(f"{file}: {size} bytes; expected a safetensors file of 8 bytes or more")
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise UserError(
                f"{file}: header length {length} in a file of {size} bytes; expected at most "
                f"{min(size - 8, MAX_HEADER_BYTES)}: truncated, or no safetensors file"
            )
        header = parse_json(file, os.pread(fd, length, 8), "utf-8", _count, _no_constant)
    if not isinstance(header, dict):
        raise UserError(f"{file}: header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(map(_is_text, [*metadata, *metadata.values()])):
        raise UserError(f"{file}: __metadata__ in its header; expected an object of strings")
    start = 8 + length
    entries = [_entry(file, start, name, value) for name, value in header.items()]
    entries.sort(key=lambda entry: (entry.start, entry.nbytes))
    end = start
    for entry in entries:
        if entry.start != end:
            raise UserError(
                f"{file}: tensor {entry.name} begins at byte {entry.start}; expected {end}: "
                "tensors overlap or leave a hole"
            )
        end += entry.nbytes
    if size != end:
        what = "truncated" if size < end else "trailing bytes"
        raise UserError(f"{file}: {size} bytes; expected {end} by its header: {what}")
    return {entry.name: entry for entry in entries}


def _entry(file: Path, data: int, name: str, value: Any) -> Entry:
    """One line of a header, checked."""
    check_name(file, name)
    known = value if isinstance(value, dict) and value.keys() == ENTRY_KEYS else {}
    dtype, shape, offsets = (known.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise UserError(
            f"{file}: tensor {name}: expected dtype, shape and data_offsets in its header"
        )
    if not isinstance(dtype, str) or dtype not in BITS:
        raise UserError(f"{file}: tensor {name}: unknown dtype {described(dtype)}")
    begin, end = offsets
    bits = BITS[dtype]
    for size in shape:
        bits *= size
        if bits > MAX_COUNT:
            break  # before it has a million digits; also where a 0 follows, as other readers do
    if bits > MAX_COUNT or (end - begin) * 8 != bits:
        expected = f"{bits / 8:g}" if bits <= MAX_COUNT else "more than a file can have"
        raise UserError(
            f"{file}: tensor {name}: {end - begin} bytes by its offsets; expected {expected} for "
            f"{dtype} {shape}"
        )
    return Entry(name, dtype, tuple(shape), file, data + begin, end - begin)


def _is_text(value: Any) -> bool:
    """Whether it is a string without half a surrogate pair, which JSON can spell and UTF-8 cannot."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _are_counts(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= MAX_DIMS
        and all(type(v) is int and 0 <= v <= MAX_COUNT for v in values)
    )


def check_name(file: Path, name: str) -> None:
    """A tensor's name stands in messages, which are one line.

    Raises:
        UserError: it would not fit.
    """
    if not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        raise UserError(
            f"{file}: tensor name {described(name)}; expected 1 to {MAX_NAME} printable characters"
        )


def parse_json(
    file: Path,
    content: bytes,
    encoding: str = "utf-8-sig",
    parse_int: Callable[[str], int] | None = None,
    parse_constant: Callable[[str], Any] | None = None,
) -> Any:
    """Parses JSON, refusing a key that occurs twice: two readers would choose differently.

    Args:
        file: for the message.
        content: the JSON text.
        encoding: of the text; by default UTF-8, with or without a byte order mark.
        parse_int: as of `json.loads`; its ValueError counts as one of the text.
        parse_constant: likewise, for NaN and the infinities.

    Raises:
        UserError: no JSON, or a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise UserError(f"{file}: key {short(ascii(key)[1:-1])} occurs twice")
            found[key] = value
        return found

    try:
        return json.loads(
            content.decode(encoding),
            object_pairs_hook=unique,
            parse_int=parse_int,
            parse_constant=parse_constant,
        )
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not valid JSON ({error})") from None


def _count(digits: str) -> int:
    """A number of a header; readers differ on -0, and a longer one is none of a file's."""
    if digits == "-0" or len(digits) > len(str(MAX_COUNT)):
        raise ValueError(f"the number {short(digits)}")
    return int(digits)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def described(value: Any) -> str:
    """A value of a file that should have been another, for a message."""
    return type(value).__name__ if isinstance(value, dict | list) else short(ascii(value))


def short(text: str) -> str:
    """The beginning of a text that a file may have made as long as it likes."""
    return text if len(text) <= 200 else f"{text[:200]}..."


@contextmanager
def opened(file: Path) -> Iterator[int]:
    """A file descriptor for reading, closed at the end.

    Raises:
        UserError: the file cannot be opened.
    """
    try:
        fd = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{file}: cannot be opened ({error.strerror})") from None
    try:
        yield fd
    finally:
        os.close(fd)

"""Files of rows, streamed: Parquet, JSONL and JSON, the last two also under gzip or Zstandard.

**Kinds**, by the end of a file's name:

| name | rows |
|---|---|
| `.parquet` | one a row; `where` counts them from 1 |
| `.jsonl` | one JSON object a line; `where` is the line |
| `.json` | an array of objects, one object a line, or objects one after the other; `where` is the line or the row |
| `.jsonl.gz`, `.jsonl.zst`, `.json.gz`, `.json.zst` | the same, compressed |

**Chunks** are what a reader hands to its workers: `chunks` only finds the rows (raw lines, or a slice of a Parquet row
group), `Chunk.records` parses them. Memory is that of the chunks in flight and of the largest row, whatever the size
of the files. A row keeps its number in the source however the chunks are cut.

**Faults.** A row that cannot be read comes as its `UserError`, in its place, and the caller refuses or counts it. A
file that cannot be read on (damaged compression, an array that stops being JSON) raises: where its next row would
start is unknown. Blank lines are no rows; a byte-order mark, CRLF and a missing last line end are fine.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

from hymoe.engine.data import parquet
from hymoe.engine.data.json_stream import elements, layout, lines
from hymoe.engine.data.schema import shown
from hymoe.engine.errors import UserError

KINDS = tuple(
    [".parquet"] + [kind + packed for kind in (".jsonl", ".json") for packed in ("", ".gz", ".zst")]
)
# What dataset tools write beside the data: no rows in it.
NOT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_EXPECTED = f"one of {', '.join(KINDS)}"
ROWS_PER_CHUNK = 256  # lines; a slice of a row group holds four times as many
BYTES_PER_CHUNK = 4 << 20  # of lines, where rows are long
ROWS_FOR_COLUMNS = 256  # JSON rows whose keys say which columns there are


@dataclass(frozen=True, slots=True)
class Chunk(ABC):
    """Consecutive rows of one file, small enough to send to another process."""

    path: str
    columns: tuple[str, ...] | None  # those that are read; None is all
    first_row: int  # number of its first row in the whole source, from 0
    num_rows: int

    @abstractmethod
    def records(
        self, wanted: Sequence[bool] | None = None
    ) -> Iterator[tuple[str, dict[str, Any] | UserError]]:
        """Yields where a row stands ("file:line" or "file:row"), and the row or its fault.

        Args:
            wanted: one for each row of the chunk; only those are parsed and given. None is all.
        """

    def _chosen(self, record: dict[str, Any]) -> dict[str, Any]:
        if self.columns is None:
            return record
        return {name: record[name] for name in self.columns if name in record}


@dataclass(frozen=True, slots=True)
class TextChunk(Chunk):
    """Rows as they stand in a JSON file."""

    numbers: tuple[int, ...]  # the line, or the place in the array, from 1
    texts: tuple[bytes, ...]

    def records(
        self, wanted: Sequence[bool] | None = None
    ) -> Iterator[tuple[str, dict[str, Any] | UserError]]:
        """As `Chunk.records`."""
        chosen = zip(self.numbers, self.texts, strict=True)
        for number, text in chosen if wanted is None else compress(chosen, wanted):
            where = f"{self.path}:{number}"
            try:
                record = self._chosen(parse_line(text, where))
            except UserError as error:
                yield where, error
            else:
                yield where, record


@dataclass(frozen=True, slots=True)
class ParquetChunk(Chunk):
    """A slice of a row group."""

    group: int
    start: int  # its first row in the group
    first_in_file: int

    def records(
        self, wanted: Sequence[bool] | None = None
    ) -> Iterator[tuple[str, dict[str, Any] | UserError]]:
        """As `Chunk.records`."""
        rows = parquet.rows(self.path, self.group, self.columns, self.start, self.num_rows, wanted)
        numbers = range(self.first_in_file + 1, self.first_in_file + self.num_rows + 1)
        for number, row in zip(
            numbers if wanted is None else compress(numbers, wanted), rows, strict=True
        ):
            where = f"{self.path}:{number}"
            yield where, row if isinstance(row, dict) else UserError(f"{where}: {row}")


def expand(pattern: str | Path, base: Path) -> list[Path]:
    """The files that a pattern names, sorted by the text of their paths.

    A folder stands for every file of KINDS below it, hidden ones and NOT_DATA left out; these must be of one kind, so
    that the same rows in two kinds are not read twice. A glob (`*`, `?`, `[...]`, `**`) stands for what it matches.

    Args:
        pattern: a file, a folder or a glob; `~` is the home folder.
        base: what a relative pattern starts from.

    Raises:
        UserError: nothing found, a file of another kind, or a folder of several kinds.
    """
    pattern = Path(pattern).expanduser()
    path = base / pattern
    if path.is_file():
        found = [path]
    elif path.is_dir():
        found = _below(path)
    elif not set(str(pattern)) & set("*?["):
        raise UserError(f"{path}: no such file or folder, expected {_EXPECTED}")
    else:
        found = _matches(pattern, base)
    if not found:
        raise UserError(f"{path}: found no file, expected {_EXPECTED}")
    for file in found:
        if _kind(file) is None:
            raise UserError(f"{file}: found a file of another kind, expected {_EXPECTED}")
    return sorted(set(found), key=lambda file: file.as_posix())


def columns_of(files: Sequence[Path]) -> tuple[str, ...]:
    """The names of a source's columns: a Parquet schema, or the keys of the first JSON rows that can be read.

    Raises:
        UserError: there is no such row.
    """
    names: dict[str, None] = {}  # in their order
    for file in files:
        if _kind(file) == ".parquet":
            return parquet.columns(file)
        seen = 0
        for chunk in chunks([file]):
            for _, record in chunk.records():
                if isinstance(record, dict):
                    names.update(dict.fromkeys(record))
            seen += chunk.num_rows
            if seen >= ROWS_FOR_COLUMNS:
                break
        if names:
            return tuple(names)
    raise UserError(f"{', '.join(map(str, files[:3]))}: found no row to read, expected one or more")


def count_rows(files: Sequence[Path]) -> int:
    """How many rows `chunks` gives: from the metadata of Parquet, else by one pass over the text."""
    total = 0
    for file in files:
        if _kind(file) == ".parquet":
            total += sum(parquet.group_sizes(file))
        else:
            total += sum(1 for _ in _texts(file))
    return total


def chunks(
    files: Sequence[Path],
    columns: Collection[str] | None = None,
    rows_per_chunk: int = ROWS_PER_CHUNK,
) -> Iterator[Chunk]:
    """Yields the rows of a source in their order, a chunk at a time, reading no further than that.

    Args:
        files: as `expand` gives them.
        columns: those to read, where a row has them; None is all.
        rows_per_chunk: most rows of a chunk of lines, and a quarter of those of a Parquet slice.

    Raises:
        UserError: a file that cannot be opened or read on.
    """
    chosen = None if columns is None else tuple(columns)
    first_row = 0
    for file in files:
        cut = _parquet_chunks if _kind(file) == ".parquet" else _text_chunks
        for chunk in cut(file, chosen, first_row, rows_per_chunk):
            first_row += chunk.num_rows
            yield chunk


def passes(record: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    """Whether a row meets every condition of a source's `where`.

    | condition | met by |
    |---|---|
    | `column = value` | that value |
    | `column = [a, b]` | any of them |
    | `column = {min = x, max = y}` (one or both) | a number from x to y, both included |

    Text that spells a number is that number beside a number (some sets publish scores as text). A row without the
    column, or with null or NaN there, meets no condition. `check_where` says beforehand what is wrong with one.
    """
    for column, wanted in where.items():
        value = record.get(column)
        if isinstance(wanted, Mapping):
            number = _number(value)
            if number is None or not wanted.get("min", number) <= number <= wanted.get(
                "max", number
            ):
                return False
        elif not any(_same(value, x) for x in (wanted if isinstance(wanted, list) else [wanted])):
            return False
    return True


def check_where(where: Mapping[str, Any], columns: Collection[str], name: str) -> None:
    """Checks the conditions of the source `name` against its columns.

    Raises:
        UserError: a column that the source has not, or a condition that is none of `passes`.
    """
    for column, wanted in where.items():
        at = f"{name}: where.{column}"
        if column not in columns:
            raise UserError(f"{at}: found no such column, expected one of {', '.join(columns)}")
        if isinstance(wanted, Mapping):
            bounds = [_number(bound) for bound in wanted.values() if not isinstance(bound, str)]
            good = set(wanted) <= {"min", "max"} and len(bounds) == len(wanted) > 0
            good = good and None not in bounds
        else:
            values = wanted if isinstance(wanted, list) else [wanted]
            good = len(values) > 0 and all(isinstance(x, str | int | float) for x in values)
        if not good:
            expected = "a value, a list of values, or min and max as numbers"
            raise UserError(f"{at} is {shown(wanted)}, expected {expected}")


def read_jsonl(
    path: Path | str, on_broken: Callable[[UserError], None] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number from 1, object) for each line that is not blank.

    A byte-order mark at the start, CRLF and a missing last line end are all fine.

    Args:
        path: the file; `.gz` and `.zst` are read through.
        on_broken: called for a line that cannot be read, which is then skipped; None raises it.

    Raises:
        UserError: no such file, a line that is no JSON object, or no line at all.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file, expected JSONL")
    found = False
    for number, text in lines(path):
        found = True
        try:
            row = parse_line(text, f"{path}:{number}")
        except UserError as error:
            if on_broken is None:
                raise
            on_broken(error)
            continue
        yield number, row
    if not found:
        raise UserError(f"{path}: found no rows, expected one JSON object a line")


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    """The object that a line spells.

    Raises:
        UserError: it is not UTF-8, not JSON, or JSON of another type.
    """
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: found bytes that are not UTF-8 (byte {error.start}), expected JSONL"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: found no valid JSON ({error}), expected one object") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: found {shown(row)}, expected a JSON object")
    return row


def _parquet_chunks(
    file: Path, columns: tuple[str, ...] | None, first_row: int, rows_per_chunk: int
) -> Iterator[Chunk]:
    in_file, step = 0, 4 * rows_per_chunk
    for group, size in enumerate(parquet.group_sizes(file)):
        for start in range(0, size, step):
            num_rows, first = min(step, size - start), in_file + start
            yield ParquetChunk(str(file), columns, first_row + first, num_rows, group, start, first)
        in_file += size


def _text_chunks(
    file: Path, columns: tuple[str, ...] | None, first_row: int, rows_per_chunk: int
) -> Iterator[Chunk]:
    numbers: list[int] = []
    texts: list[bytes] = []
    num_bytes = 0

    def cut() -> Chunk:
        return TextChunk(str(file), columns, first_row, len(texts), tuple(numbers), tuple(texts))

    for number, text in _texts(file):
        if texts and (len(texts) >= rows_per_chunk or num_bytes + len(text) > BYTES_PER_CHUNK):
            yield cut()
            first_row += len(texts)
            numbers, texts, num_bytes = [], [], 0
        numbers.append(number)
        texts.append(text)
        num_bytes += len(text)
    if texts:
        yield cut()


def _texts(file: Path) -> Iterator[tuple[int, bytes]]:
    """Number and text of each row of a JSON file."""
    how = "lines" if ".jsonl" in str(_kind(file)) else layout(file)
    return lines(file) if how == "lines" else elements(file, how == "array")


def _matches(pattern: Path, base: Path) -> list[Path]:
    """The files that a glob matches, and those below the folders that it matches."""
    root = base
    if pattern.is_absolute():
        root, pattern = Path(pattern.anchor), pattern.relative_to(pattern.anchor)
    found = []
    for match in root.glob(str(pattern)):
        parts = match.relative_to(root).parts
        if match.name in NOT_DATA or any(_hidden(x) and x not in pattern.parts for x in parts):
            continue
        found += _below(match) if match.is_dir() else [match]
    return found


def _below(folder: Path) -> list[Path]:
    """The data files below a folder, which are of one kind; links to folders are followed once."""
    found, seen = [], set()
    for at, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not _hidden(name))
        if os.path.realpath(at) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(at))
        found += [Path(at, name) for name in names if not _hidden(name) and name not in NOT_DATA]
    found = [file for file in found if _kind(file) is not None]
    kinds = sorted({str(_kind(file)) for file in found})
    if len(kinds) > 1:
        raise UserError(
            f"{folder}: found files of several kinds ({', '.join(kinds)}), expected one: name them "
            f"by a pattern such as *{kinds[0]}"
        )
    return found


def _hidden(name: str) -> bool:
    return name.startswith(".") and name != ".."


def _kind(file: Path) -> str | None:
    name = file.name.lower()
    return next((kind for kind in KINDS if name.endswith(kind)), None)


def _number(value: Any) -> float | None:
    """A number, or text that spells one; None for anything else and for NaN."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return None if number != number else number


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, str) == isinstance(wanted, str):
        return value is not None and value == wanted
    number = _number(value)
    return number is not None and number == _number(wanted)

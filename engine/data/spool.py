"""Rendered rows on their way from worker processes to the packed folder.

`render_chunk` runs in a worker: rows of a chunk become documents or the reason why not. `Spool` keeps the tokens on
disk and where each document lies; `Outcomes` says what became of each row.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hymoe.engine.data import formats, sources
from hymoe.engine.data.mixture import Source
from hymoe.engine.data.render import Document, Documents, Renderer, Rules
from hymoe.engine.data.schema import Conversation, LeftOut, split_position
from hymoe.engine.data.sources import Chunk
from hymoe.engine.errors import UserError

_renderer: Renderer | None = None


def start_worker(rules: Rules) -> None:
    """Makes this process ready to render."""
    global _renderer
    _renderer = Renderer(rules)


@dataclass
class ChunkResult:
    """What became of the wanted rows of a chunk, in their order.

    Attributes:
        rows: row numbers in the source.
        reasons: why a row is left out, None where it has documents.
        digests: of the turns of a conversation, empty where it is left out.
        lengths: tokens of the documents of each row.
        cut: whether a row's conversation was too long to stay in one piece.
        ids: int32, all documents one after another.
        trained: bool, the same.
        broken: messages about rows that could not be read.
    """

    rows: list[int] = field(default_factory=list)
    reasons: list[str | None] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)
    cut: list[bool] = field(default_factory=list)
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    trained: np.ndarray = field(default_factory=lambda: np.zeros(0, np.bool_))
    broken: list[str] = field(default_factory=list)


def render_chunk(chunk: Chunk, wanted: np.ndarray, source: Source, seed: int) -> ChunkResult:
    """Renders the wanted rows of a chunk.

    Args:
        chunk: rows of a file.
        wanted: (rows of the chunk,) bool.
        source: how they are read.
        seed: of the holdout.
    """
    assert _renderer is not None
    result, documents = ChunkResult(), []
    numbers = np.flatnonzero(wanted) + chunk.first_row
    for number, (where, record) in zip(numbers.tolist(), chunk.records(wanted), strict=True):
        found, reason, digest = Documents([], False), None, b""
        try:
            if isinstance(record, UserError):
                raise record
            conversation = _conversation(record, where, source, seed)
            found = _renderer.documents(conversation, source.system)
            digest = _digest(conversation)
        except LeftOut as error:
            reason = error.reason
        except UserError as error:
            reason = "broken"
            result.broken.append(str(error))
        result.rows.append(number)
        result.reasons.append(reason)
        result.digests.append(digest)
        result.lengths.append([len(ids) for ids, _ in found.parts])
        result.cut.append(found.cut)
        documents += found.parts
    if documents:
        result.ids = np.concatenate([ids for ids, _ in documents])
        result.trained = np.concatenate([trained for _, trained in documents])
    return result


def _conversation(record: dict, where: str, source: Source, seed: int) -> Conversation:
    if not sources.passes(record, source.where):
        raise LeftOut("filtered")
    format_ = formats.recognise(record.keys(), source.format, where)
    parsed = format_.parse(
        record, where, roles=source.roles, tools=source.tools, reasoning=source.reasoning
    )
    if isinstance(parsed, str):
        raise LeftOut(parsed)
    if source.holdout:
        key = parsed.group or parsed.id
        if key is None:
            raise UserError(
                f"{where}: has no id, which the holdout of source {source.name} goes by"
            )
        held = split_position(key, seed) < source.holdout
        if held != (source.part == "heldout"):
            raise LeftOut("held_out" if held else "not_held_out")
    return parsed


def _digest(conversation: Conversation) -> bytes:
    turns = [(m.role, m.content, m.extra and dict(m.extra)) for m in conversation.messages]
    text = json.dumps(turns, ensure_ascii=False, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class Spool:
    """Documents of one source, on disk; where they are, in memory: 13 bytes a document."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder."""
        folder.mkdir(parents=True)
        self._folder = folder
        self._ids = (folder / "ids.bin").open("wb")
        self._trained = (folder / "trained.bin").open("wb")
        self._lengths: list[np.ndarray] = []
        self._supervised: list[np.ndarray] = []
        self._unit_sizes: list[np.ndarray] = []
        self._num_units = 0
        self._tables: tuple[np.ndarray, ...] | None = None
        self._maps: tuple[np.ndarray, np.ndarray] | None = None

    def add(self, result: ChunkResult) -> list[int]:
        """Appends the documents of a chunk; the number of the unit of each of its rows, -1 where left out."""
        self._ids.write(result.ids.astype("<i4").tobytes())
        self._trained.write(result.trained.astype(np.uint8).tobytes())
        lengths = np.array([n for row in result.lengths for n in row], dtype=np.int32)
        ends = np.cumsum(lengths, dtype=np.int64)
        # A document's first token is predicted from nothing, so it never counts.
        counted = result.trained.astype(np.int32)
        counted[ends - lengths] = 0
        sums = np.concatenate([[0], np.cumsum(counted)])
        self._lengths.append(lengths)
        self._supervised.append((sums[ends] - sums[ends - lengths]).astype(np.int32))
        sizes = np.array([len(row) for row in result.lengths if row], dtype=np.int32)
        self._unit_sizes.append(sizes)
        self._tables = self._maps = None
        units = []
        for row in result.lengths:
            units.append(self._num_units if row else -1)
            self._num_units += bool(row)
        return units

    def lengths(self) -> np.ndarray:
        """(documents,) int32."""
        return self._table(0)

    def supervised(self) -> np.ndarray:
        """(documents,) int32."""
        return self._table(1)

    def documents_of(self, units: np.ndarray) -> np.ndarray:
        """Document numbers of units, in their order."""
        first, size = self._table(3)[units], self._table(2)[units]
        starts = np.repeat(first - np.concatenate([[0], np.cumsum(size)[:-1]]), size)
        return starts + np.arange(int(size.sum()))

    def document(self, number: int) -> Document:
        """Ids and trained of one document."""
        if self._maps is None:
            self._ids.flush()
            self._trained.flush()
            self._maps = (
                np.memmap(self._folder / "ids.bin", "<i4", "r"),
                np.memmap(self._folder / "trained.bin", np.uint8, "r"),
            )
        start, length = int(self._table(4)[number]), int(self.lengths()[number])
        ids, trained = self._maps
        return ids[start : start + length], trained[start : start + length].astype(np.bool_)

    def remove(self) -> None:
        """Deletes the files."""
        self._maps = None
        self._ids.close()
        self._trained.close()
        shutil.rmtree(self._folder)

    def _table(self, i: int) -> np.ndarray:
        """Lengths, supervised, unit sizes, first document of each unit, first token of each document."""
        if self._tables is None:
            join = lambda parts: np.concatenate([np.zeros(0, np.int32), *parts])  # noqa: E731
            lengths, sizes = join(self._lengths), join(self._unit_sizes)
            before = lambda x: np.cumsum(x, dtype=np.int64) - x  # noqa: E731
            self._tables = (lengths, join(self._supervised), sizes, before(sizes), before(lengths))
        return self._tables[i]


class Outcomes:
    """Row number -> what became of it; 6 bytes a row of the source, 22 where duplicates are looked for."""

    def __init__(self, rows: int, digests: bool) -> None:
        """For a source of `rows` rows; with or without the digests of their turns."""
        self.unit = np.full(rows, -1, dtype=np.int32)  # number in the spool, -1 where left out
        self.cut = np.zeros(rows, dtype=np.bool_)
        self._reason = np.zeros(rows, dtype=np.uint8)
        self._reasons: list[str | None] = [None]
        self._digest = np.zeros((rows, 16), dtype=np.uint8) if digests else None

    def add(self, result: ChunkResult, spool: Spool) -> None:
        """Takes a chunk's documents into the spool and remembers what became of its rows."""
        self.unit[result.rows] = spool.add(result)
        self.cut[result.rows] = result.cut
        for row, reason, digest in zip(result.rows, result.reasons, result.digests, strict=True):
            if reason not in self._reasons:
                self._reasons.append(reason)
            self._reason[row] = self._reasons.index(reason)
            if self._digest is not None and digest:
                self._digest[row] = np.frombuffer(digest, np.uint8)

    def reason(self, row: int) -> str | None:
        """Why a row is left out; None where it is not."""
        return self._reasons[self._reason[row]]

    def digest(self, row: int) -> bytes:
        """Of the turns of a row's conversation; needs the digests."""
        assert self._digest is not None
        return self._digest[row].tobytes()

"""The recipe of a data set: sources, how much of each, how conversations are rendered and packed. TOML.

    seq_len = 8192
    seed = 4242
    tokenizer = "base"                 # a checkpoint's folder, or a tokenizer.json
    chat_template = "base"             # the checkpoint's; or "chatml", or a file
    system_prompt = "prompt.txt"       # for sources that say "replace" or "fill"
    too_long = "drop"

    [[source]]
    name = "tulu3"
    path = "tulu3/*.parquet"           # a file, a folder, or a pattern
    count = 40000                      # or fraction = 0.1; neither: all
    system = "replace"

Paths are relative to the recipe's folder. Of a source's rows, in an order that seed and name decide, the first `count`
that are usable are taken. Where there are fewer, all are taken as often as they fit into `count` and the first of the
same order once more. `fraction` takes that share of the rows before unusable ones are left out. `repeat` then counts
every taken row so many times.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hymoe.engine.errors import UserError
from hymoe.engine.typed_toml import from_table, read_toml


@dataclass(frozen=True, kw_only=True)
class Source:
    """One set of conversations."""

    name: str
    path: str
    """File, folder or pattern, relative to the recipe."""
    format: str = "auto"
    """How rows are read; auto: by their columns."""
    count: int | None = None
    """Rows to take."""
    fraction: float | None = None
    """Share of the rows to look at, 0 to 1."""
    repeat: int = 1
    """How many times each taken row comes."""
    system: Literal["keep", "fill", "replace", "remove"] = "keep"
    """What becomes of a row's system message: as it is; the serving prompt where there is none; that prompt in
    every row; none in any."""
    tools: Literal["keep", "drop", "refuse"] = "drop"
    """Rows with tools or tool calls."""
    reasoning: Literal["keep", "strip", "drop"] = "keep"
    """Thinking inside answers."""
    roles: dict[str, str] = field(default_factory=dict)
    """Role names of the file that the format does not know, and what they are."""
    where: dict[str, Any] = field(default_factory=dict)
    """Only rows whose columns have these values: a value, a list of values, or {min = x}."""
    holdout: float = 0.0
    """Share of the rows, by id, that is held out."""
    part: Literal["train", "heldout"] = "train"
    """Which side of the holdout this source is."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A whole data set.

    Attributes:
        folder: of the recipe; paths are relative to it.
        sources: in the recipe's order.
    """

    folder: Path
    sources: tuple[Source, ...]
    seq_len: int = 8192
    seed: int = 4242
    tokenizer: str = "base"
    chat_template: str = "base"
    system_prompt: str | None = None
    too_long: Literal["drop", "cut", "cut_turn", "windows"] = "drop"
    broken: Literal["refuse", "drop"] = "refuse"
    """A row that cannot be read stops the preparation, or is counted and left out."""
    deduplicate: bool = False
    """Of conversations with the same turns, over all sources, only the first is usable."""

    def resolved(self, path: str) -> Path:
        """A path of the recipe."""
        return self.folder / path

    def prompt_text(self) -> str | None:
        """The serving system prompt; see the function of this name."""
        if self.system_prompt is None:
            return None
        return prompt_text(self.resolved(self.system_prompt))

    def as_dict(self) -> dict[str, Any]:
        """What decides the result, without the folder: for manifest and hash."""
        values = dataclasses.asdict(self)
        del values["folder"]
        return {**values, "sources": list(values["sources"])}

    @property
    def sha256(self) -> str:
        """Hash of `as_dict`."""
        text = json.dumps(self.as_dict(), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()


def load_mixture(path: Path | str) -> Mixture:
    """Reads and checks a mixture's recipe.

    Raises:
        UserError: what is wrong, with the file, the source and the key.
    """
    path = Path(path)
    raw = read_toml(path)
    tables = raw.pop("source", None)
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        raise UserError(f"{path}: found no [[source]], expected one or more")
    sources = []
    for number, table in enumerate(tables, start=1):
        where = f"{path}: [[source]] {table.get('name') or number}:"
        for key in ("name", "path"):
            if not table.get(key):
                raise UserError(f"{where} {key} is missing")
        sources.append(from_table(where, Source, table))
        _check_source(where, sources[-1])
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"{path}: the name {name!r} occurs {names.count(name)} times; expected different ones"
            )
    for key in ("folder", "sources"):  # fields, but not the recipe's to give
        if key in raw:
            raise UserError(f"{path}: {key} is unknown")
    mixture = from_table(f"{path}:", Mixture, raw, folder=path.parent, sources=tuple(sources))
    if mixture.seq_len < 2:
        raise UserError(f"{path}: seq_len = {mixture.seq_len}, expected 2 or more")
    prompted = [source.name for source in sources if source.system in ("fill", "replace")]
    if prompted and mixture.system_prompt is None:
        raise UserError(
            f"{path}: source {prompted[0]} says system = {sources[names.index(prompted[0])].system!r}, "
            "but there is no system_prompt"
        )
    return mixture


def _check_source(where: str, source: Source) -> None:
    if source.count is not None and source.fraction is not None:
        raise UserError(
            f"{where} has both count and fraction; expected one of them, or neither for all"
        )
    if source.count is not None and source.count < 1:
        raise UserError(f"{where} count = {source.count}, expected 1 or more")
    if source.fraction is not None and not 0 < source.fraction <= 1:
        raise UserError(f"{where} fraction = {source.fraction}, expected more than 0 and at most 1")
    if source.repeat < 1:
        raise UserError(f"{where} repeat = {source.repeat}, expected 1 or more")
    if not 0 <= source.holdout < 1:
        raise UserError(f"{where} holdout = {source.holdout}, expected 0 or more and less than 1")
    if source.part == "heldout" and source.holdout == 0:
        raise UserError(
            f"{where} part = 'heldout' without holdout; expected the share that is held out"
        )


def prompt_text(path: Path) -> str:
    """A system prompt; the line end that an editor leaves at the end of the file is no part of it.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        return path.read_bytes().decode("utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); system_prompt names it"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: found bytes that are not UTF-8, expected a prompt") from None

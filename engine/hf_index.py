"""A read-only view of a checkpoint folder: config, index, shards; everything checked before data is read.

Files are read by `pread`: a mapped page counts as the memory of every rank that touches it. `hf_header` reads what
they hold, and refuses a bad file before it allocates what the file claims.

Which files count: `config.json`, and `model.safetensors` or the shards that
`model.safetensors.index.json` names. A shard is a plain file name in the folder; a link must lead
to a file of the folder, or, in a download cache (`models--*/snapshots/*/`), of its `blobs/`. The same
holds for `config.json` and the index.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch

from hymoe.engine.errors import UserError
from hymoe.engine.hf_header import (
    MAX_HEADER_BYTES,
    Entry,
    check_name,
    described,
    opened,
    parse_json,
    read_header,
)
from hymoe.model.config import HybridConfig
from hymoe.model.names import Spec, tensor_specs

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SLICE_BYTES = 4 << 20  # what passes through memory at a time where a dtype or device is changed
PREFIXES = ("backbone.", "model.")
PASSED_THROUGH = ("mtp.",)  # unexpected, but known: not trained, exported as it came
TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
# Ends of names that quantisers add beside a weight, or put in its place.
QUANTISED = ("_scale", "_scale_2", "_scale_inv", "_packed", ".qweight", ".qzeros", ".scales")


class Checkpoint:
    """The tensors of one folder, opened with `Checkpoint.open`.

    Attributes:
        folder: the folder.
        entries: tensor name -> Entry, in the order of the index (of one file: in its order).
    """

    def __init__(self, folder: Path, entries: dict[str, Entry]) -> None:
        """Use `open`, which checks the folder."""
        self.folder = folder
        self.entries = entries

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Opens a folder and checks all of it that can be checked without reading data.

        Raises:
            UserError: no such folder, no or broken config.json, no weights, an index that names
                something else than a file of the folder, a missing, truncated or overlong shard,
                a broken header, an index and shards that disagree.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; expected a checkpoint in HF format")
        config = folder / "config.json"
        if not config.is_file():
            raise UserError(f"{folder}: no config.json; expected a checkpoint in HF format")
        if not isinstance(_read_json(folder, config.name), dict):
            raise UserError(f"{config}: expected a JSON object")
        weight_map = _weight_map(folder)
        first = {shard: tensor for tensor, shard in reversed(weight_map.items())}
        shards = {
            shard: _shard_file(folder, shard, first[shard], weight_map)
            for shard in dict.fromkeys(weight_map.values())
        }
        entries = {shard: read_header(file) for shard, file in shards.items()}
        if not (folder / INDEX).is_file():
            return cls(folder, entries[SINGLE])
        return cls(folder, _match(folder / INDEX, weight_map, entries))

    @cached_property
    def prefix(self) -> str:
        """What embeddings and layers live under: `backbone.` or `model.`.

        Raises:
            UserError: both occur, or neither.
        """
        found = {p: next((n for n in self.entries if n.startswith(p)), None) for p in PREFIXES}
        names = [name for name in found.values() if name is not None]
        if len(names) == 1:
            return next(prefix for prefix, name in found.items() if name is not None)
        what = " and ".join(names) if names else _few(list(self.entries))
        raise UserError(
            f"{self.folder}: found tensors {what or '(none)'}; expected all layers under one of "
            f"{' or '.join(PREFIXES)}"
        )

    def check_against(self, config: HybridConfig) -> dict[str, Spec]:
        """Compares names, shapes and dtypes with what the config asks for.

        With tied embeddings an `lm_head.weight` may be there if it is equal to the embeddings, byte
        for byte; anything else would be dropped or would silently replace them.

        Returns:
            `tensor_specs(config)` with the prefix of this checkpoint.

        Raises:
            UserError: a tensor is missing, unexpected, quantised, or of another shape.
        """
        specs = tensor_specs(config, self.prefix)
        self._refuse_quantised(specs)
        tied_head = config.tie_word_embeddings and "lm_head.weight" in self.entries
        missing = [name for name in specs if name not in self.entries]
        extra = [n for n in self.entries if n not in specs and not n.startswith(PASSED_THROUGH)]
        if tied_head:
            extra.remove("lm_head.weight")
        if missing:
            raise UserError(f"{self.folder}: {_few(missing)} missing; config.json asks for it")
        if extra:
            raise UserError(f"{self.folder}: {_few(extra)} unexpected; not in config.json's model")
        wrong = [name for name, spec in specs.items() if self.entries[name].shape != spec.shape]
        if wrong:
            entry = self.entries[wrong[0]]
            raise UserError(
                f"{entry.file}: {_few(wrong)} mis-shaped: found {list(entry.shape)}, expected "
                f"{list(specs[wrong[0]].shape)} by config.json"
            )
        if tied_head:
            self._check_tied_head()
        return specs

    def dtype(self, names: list[str]) -> torch.dtype:
        """The smallest dtype that holds all of these tensors exactly: the experts of a stack, say."""
        dtypes = [TORCH_DTYPES[self.entries[name].dtype] for name in names]
        return reduce(torch.promote_types, dtypes)

    def nbytes(self, name: str, rows: int) -> int:
        """Bytes of so many rows of dim 0."""
        entry = self.entries[name]
        return entry.nbytes // max(1, entry.shape[0]) * rows

    def place(self, name: str, row: int) -> tuple[Path, int]:
        """The file and the byte in it where a row of dim 0 begins."""
        entry = self.entries[name]
        return entry.file, entry.start + self.nbytes(name, row)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows [begin, end) of dim 0 as a new CPU tensor in the file's dtype."""
        entry = self.entries[name]
        end = entry.shape[0] if end is None else end
        rows = torch.empty((end - begin, *entry.shape[1:]), dtype=TORCH_DTYPES[entry.dtype])
        self.read_into(name, rows, begin)
        return rows

    def read_into(self, name: str, out: torch.Tensor, begin: int = 0) -> None:
        """Fills `out` with as many rows of dim 0, from row `begin` on.

        Straight into its memory where dtype and device allow it, else converted in slices of
        SLICE_BYTES; nothing else of the file is read.

        Args:
            name: tensor in the checkpoint.
            out: (rows, ...) any floating dtype, any device; written in place.
            begin: first row.

        Raises:
            UserError: the file ends early (it changed since it was opened).
        """
        entry = self.entries[name]
        dtype = TORCH_DTYPES[entry.dtype]
        if out.shape[1:] != entry.shape[1:] or begin + len(out) > entry.shape[0]:
            raise ValueError(f"{name}: {list(out.shape)} from row {begin} of {list(entry.shape)}")
        if out.numel() == 0:
            return
        row_bytes = self.nbytes(name, 1)
        out = out.detach()
        direct = out.device.type == "cpu" and out.dtype == dtype and out.is_contiguous()
        step = len(out) if direct else min(len(out), max(1, SLICE_BYTES // row_bytes))
        buffer = None if direct else torch.empty((step, *out.shape[1:]), dtype=dtype)
        with opened(entry.file) as fd:
            for row in range(0, len(out), step):
                into = out[row : row + step]
                rows = into if buffer is None else buffer[: len(into)]
                _pread(fd, _bytes_of(rows), entry.start + (begin + row) * row_bytes, entry)
                if buffer is not None:
                    into.copy_(rows)

    def raw(self, name: str) -> Iterator[bytes]:
        """The bytes of a tensor of any dtype, in slices."""
        entry = self.entries[name]
        with opened(entry.file) as fd:
            for done in range(0, entry.nbytes, SLICE_BYTES):
                piece = bytearray(min(SLICE_BYTES, entry.nbytes - done))
                _pread(fd, memoryview(piece), entry.start + done, entry)
                yield bytes(piece)

    def _refuse_quantised(self, specs: dict[str, Spec]) -> None:
        for name, entry in self.entries.items():
            if name.startswith(PASSED_THROUGH):
                continue
            if name in specs and entry.dtype not in TORCH_DTYPES:
                found = f"{name} is {entry.dtype}"
            elif name not in specs and name.endswith(QUANTISED):
                found = f"it holds {name}"
            else:
                continue
            raise UserError(
                f"{entry.file}: {found}: the checkpoint is quantised and cannot be trained; "
                f"expected one of {', '.join(TORCH_DTYPES)}, as in the BF16 release"
            )

    def _check_tied_head(self) -> None:
        head, embeddings = "lm_head.weight", f"{self.prefix}embeddings.weight"
        a, b = self.entries[head], self.entries[embeddings]
        same = (a.dtype, a.shape) == (b.dtype, b.shape)
        pairs = zip(self.raw(head), self.raw(embeddings), strict=True) if same else ()
        if not same or any(x != y for x, y in pairs):
            raise UserError(
                f"{a.file}: {head} differs from {embeddings}; config.json has "
                "tie_word_embeddings = true: expected it equal or absent"
            )


def contained(folder: Path, name: str) -> Path | None:
    """The real file that `name` in the folder stands for, or None where it leads out of the folder.

    The explicit rule for links is in this file's head.
    """
    home = Path(os.path.realpath(folder))
    real = Path(os.path.realpath(home / name))
    cache = home.parent.parent
    in_cache = home.parent.name == "snapshots" and cache.name.startswith("models--")
    if real.is_relative_to(home) or (in_cache and real.parent == cache / "blobs"):
        return real
    return None


def _read_json(folder: Path, name: str) -> Any:
    """The content of config.json or the index, both at most as large as a header may be."""
    file = folder / name
    if contained(folder, name) is None:
        raise UserError(f"{file}: a link out of the folder, to {os.path.realpath(file)}")
    with opened(file) as fd:
        size = os.fstat(fd).st_size
        if size > MAX_HEADER_BYTES:
            raise UserError(f"{file}: {size} bytes; expected at most {MAX_HEADER_BYTES}")
        return parse_json(file, os.pread(fd, size, 0))


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor -> shard by the index; of a folder with one file, which names no tensors: {"": SINGLE}."""
    index, single = folder / INDEX, folder / SINGLE
    if not index.is_file():
        if single.is_file():
            return {"": SINGLE}
        other = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".safetensors"))
        raise UserError(
            f"{folder}: no {SINGLE} and no {INDEX}; expected one of them, found {_few(other)}"
        )
    content = _read_json(folder, INDEX)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: no weight_map; expected an object tensor -> shard file")
    for tensor, shard in weight_map.items():
        check_name(index, tensor)
        if not isinstance(shard, str):
            raise UserError(
                f"{index}: tensor {tensor}: shard {described(shard)}; expected a file name"
            )
    if single.exists() and set(weight_map.values()) != {SINGLE}:
        raise UserError(
            f"{folder}: both {SINGLE} and {INDEX}, which does not mean that file; remove one"
        )
    return weight_map


def _shard_file(folder: Path, shard: str, tensor: str, weight_map: dict[str, str]) -> Path:
    """The file of a shard, refused unless it is one of the folder; no shard has been opened yet.

    `tensor` is the first that should be in it, for the message.
    """
    where = (
        f"{folder / INDEX}: tensor {tensor}: shard {described(shard)}"
        if tensor
        else f"{folder}: {shard}"
    )
    is_plain = shard not in ("", ".", "..") and not any(c in shard for c in "/\\\0")
    if not is_plain or not shard.isprintable():
        raise UserError(f"{where} is not a plain file name; expected a file of this folder")
    file = folder / shard
    try:
        if contained(folder, shard) is None:
            raise UserError(f"{where} is a link out of the folder, to {os.path.realpath(file)}")
        exists = file.exists()
        is_regular = exists and stat.S_ISREG(file.stat().st_mode)
    except OSError as error:
        raise UserError(f"{where} cannot be looked at ({error.strerror})") from None
    if not exists:
        count = sum(other == shard for other in weight_map.values())
        raise UserError(f"{where} is missing from the folder; {count} tensors should be in it")
    if not is_regular:
        raise UserError(f"{where} is not a regular file")
    return file


def _match(
    index: Path, weight_map: dict[str, str], entries: dict[str, dict[str, Entry]]
) -> dict[str, Entry]:
    """The entries in the order of the index, once index and shards agree on where each tensor is."""
    for tensor, shard in weight_map.items():
        if tensor not in entries[shard]:
            elsewhere = [other for other, held in entries.items() if tensor in held]
            found = f"it is in {elsewhere[0]}" if elsewhere else "no shard has it"
            raise UserError(f"{index}: tensor {tensor} should be in shard {shard}; {found}")
    for shard, held in entries.items():
        for tensor in held:
            if tensor not in weight_map:
                raise UserError(f"{index}: shard {shard} holds {tensor}, which is not in the index")
            if weight_map[tensor] != shard:
                raise UserError(
                    f"{index}: tensor {tensor} is twice there, in {weight_map[tensor]} and {shard}"
                )
    return {tensor: entries[shard][tensor] for tensor, shard in weight_map.items()}


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable, flat."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _pread(fd: int, into: memoryview, offset: int, entry: Entry) -> None:
    done = 0
    while done < len(into):
        # One call moves 2 GiB at most.
        count = os.preadv(fd, [into[done:]], offset + done)
        if count == 0:
            raise UserError(
                f"{entry.file}: tensor {entry.name}: the file ends at byte {offset + done}; expected "
                f"{entry.start + entry.nbytes}: it changed while it was read"
            )
        done += count


def _few(names: Iterable[str]) -> str:
    """The first names and the number of the rest."""
    names = list(names)
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "") if names else "nothing"

"""Everything about an export that is decided before a byte is written.

- **Names**: the base's prefix; without a base `backbone.`. Tensors in the model's order, then the base's
  `mtp.*`. Where embeddings are tied and the base has an `lm_head.weight` all the same, it gets the
  embeddings.
- **Dtype**: the base file's, tensor by tensor. Without a base: small tensors (`names.is_small`) F32,
  all others the config's dtype.
- **Shards**: filled in that order; a file has at most `max_shard_size` bytes, its header included, and a
  tensor that is larger by itself has a file of its own. Inside a file the wider dtypes come first, so that
  every tensor is aligned, which readers ask for.
- **Carried over**: the regular files at the top of the base folder and in CARRY_FOLDERS (config,
  tokenizer, templates, generation settings, the `.py` files of auto_map, model card), byte for byte. Not:
  weights and their indices (WEIGHTS), hashes of the base's files (`hf_hashes`), names that begin with a dot,
  files above CARRY_BYTES, links that lead out (`hf_index.contained`). The plan lists what is left out and why.
"""

import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from hymoe.engine.errors import UserError
from hymoe.engine.hf_hashes import states_hashes
from hymoe.engine.hf_header import BITS, Entry
from hymoe.engine.hf_index import PASSED_THROUGH, SINGLE, TORCH_DTYPES, Checkpoint, contained
from hymoe.engine.hf_rows import check_names
from hymoe.model.names import Spec, is_small, tensor_specs

FILE_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
METADATA = {"format": "pt"}  # transformers refuses a file that does not say so
CARRY_BYTES = 256 << 20  # the largest tokenizer file in use has 33 MB
CARRY_FOLDERS = ("additional_chat_templates",)
WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"),
    *(".npz", ".npy", ".tflite", ".ot", ".index.json"),
)
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, slots=True)
class Planned:
    """One tensor of the export: from byte `start` on in the file of shard number `shard`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    shard: int = -1
    start: int = -1


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of the export: its name, the bytes before the first tensor, its size in bytes."""

    name: str
    head: bytes
    size: int


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What an export will write; the same on every rank.

    Attributes:
        target: the folder to be.
        base: where dtypes, prefix, `mtp.*` and the other files come from, or None.
        specs: file name -> Spec of what the model supplies.
        tensors: file name -> Planned: those of `specs`, then `mtp.*`.
        shards: the files.
        carried: files that come over from the base, relative to it.
        skipped: files of the base that do not -> the reason.
    """

    target: Path
    base: Checkpoint | None
    specs: dict[str, Spec]
    tensors: dict[str, Planned]
    shards: list[Shard]
    carried: list[str]
    skipped: dict[str, str]

    @property
    def total_size(self) -> int:
        """Bytes of all tensors, as the index states it."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def shard_bytes(self, shard: int) -> int:
        """Bytes of the tensors in one shard."""
        return self.shards[shard].size - len(self.shards[shard].head)


def plan_export(
    lm: nn.Module,
    path: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    base: str | Path | None = None,
    shards: int | None = None,
) -> ExportPlan:
    """Plans and checks an export without writing: called before training, it cannot fail only at the end.

    Args:
        lm: HybridLM, on any device, also meta; `lm.source` is the base where none is given.
        path: the folder to be, absent or empty.
        max_shard_size: bytes of a file, or a string such as "4GB" (10^9) or "500MiB" (2^20).
        base: the HF folder that the model came from.
        shards: exactly so many files, the largest as small as can be; `max_shard_size` does not count then.

    Raises:
        UserError: the target is not empty, the base does not fit the model, more shards than tensors, the disk
            is too small.
        ValueError: the model has a tensor that checkpoints have no name for, or lacks one.
    """
    target = _free_target(Path(path))
    limit = _size(max_shard_size)
    checkpoint = _base(lm, base)
    specs = export_specs(lm, checkpoint)
    check_names(lm, specs)
    wanted = list(wanted_tensors(specs, lm.config.dtype, checkpoint))
    costs = [_cost(tensor) for tensor in wanted]
    even = shards is not None
    groups = _even_groups(wanted, costs, shards) if even else _groups(wanted, costs, limit)
    tensors, files = _pack(groups)
    carried, skipped = _carry(checkpoint.folder) if checkpoint else ([], {})
    if checkpoint is not None and "config.json" not in carried:
        reason = skipped.get("config.json")
        raise UserError(f"{checkpoint.folder}: config.json cannot be carried over: {reason}")
    if checkpoint is None and not lm.config.to_dict():
        raise UserError(f"{path}: no base folder and no config.json to write; give a base")
    plan = ExportPlan(target, checkpoint, specs, tensors, files, carried, skipped)
    _check_disk(plan)
    return plan


def export_dtypes(lm: nn.Module, base: str | Path | None = None) -> dict[str, torch.dtype]:
    """Our name -> the dtype that its tensor has in the export's files.

    Of a stack whose experts differ: the smallest dtype that holds them all.
    """
    checkpoint = _base(lm, base)
    specs = export_specs(lm, checkpoint)
    dtypes = {
        p.name: TORCH_DTYPES[p.dtype]
        for p in wanted_tensors(specs, lm.config.dtype, checkpoint)
        if p.name in specs
    }
    found: dict[str, torch.dtype] = {}
    for name, spec in specs.items():
        found[spec.param] = torch.promote_types(found.get(spec.param, dtypes[name]), dtypes[name])
    return found


def _base(lm: nn.Module, base: str | Path | None) -> Checkpoint | None:
    folder = base if base is not None else lm.source
    return None if folder is None else Checkpoint.open(folder)


def export_specs(lm: nn.Module, checkpoint: Checkpoint | None) -> dict[str, Spec]:
    """File name -> Spec of everything that the model supplies."""
    if checkpoint is None:
        return tensor_specs(lm.config)
    specs = checkpoint.check_against(lm.config)
    if "lm_head.weight" in checkpoint.entries and "lm_head.weight" not in specs:
        embeddings = specs[f"{checkpoint.prefix}embeddings.weight"]
        specs["lm_head.weight"] = embeddings  # tied, and written out all the same
    return specs


def wanted_tensors(
    specs: dict[str, Spec], config_dtype: str, checkpoint: Checkpoint | None
) -> Iterator[Planned]:
    """Every tensor of the export, not yet placed."""
    big = FILE_DTYPES[getattr(torch, config_dtype)]
    for name, spec in specs.items():
        rule = "F32" if is_small(spec.param) else big
        dtype = rule if checkpoint is None else checkpoint.entries[name].dtype
        yield Planned(name, dtype, spec.shape, math.prod(spec.shape) * BITS[dtype] // 8)
    for entry in passed_through(checkpoint):
        yield Planned(entry.name, entry.dtype, entry.shape, entry.nbytes)


def passed_through(checkpoint: Checkpoint | None) -> list[Entry]:
    """The tensors of the base that are exported as they came."""
    entries = checkpoint.entries.values() if checkpoint else ()
    return [entry for entry in entries if entry.name.startswith(PASSED_THROUGH)]


def _groups(
    tensors: list[Planned], costs: list[int], limit: int, at_least: int = 1
) -> list[list[Planned]]:
    """Deals tensors, in order, to files of at most `limit` bytes, and to no fewer files than asked for."""
    empty = len(_head({})) + 8  # and the padding
    groups: list[list[Planned]] = [[]]
    size = empty
    for position, (tensor, cost) in enumerate(zip(tensors, costs, strict=True)):
        rest_alone = len(groups) + len(tensors) - position <= at_least
        if groups[-1] and (size + cost > limit or rest_alone):
            groups.append([])
            size = empty
        groups[-1].append(tensor)
        size += cost
    return groups


def _even_groups(tensors: list[Planned], costs: list[int], count: int) -> list[list[Planned]]:
    """Deals tensors, in order, to exactly so many files: with the smallest limit that needs no more."""
    if not 1 <= count <= len(tensors):
        raise UserError(f"shards = {count}; expected 1 to {len(tensors)}, the number of tensors")
    # A smaller limit never needs fewer files. Two bounds: one file a tensor, all in one.
    low, high = 0, sum(costs) + len(_head({})) + 8
    while high - low > 1:
        limit = (low + high) // 2
        needs = len(_groups(tensors, costs, limit))
        low, high = (low, limit) if needs <= count else (limit, high)
    return _groups(tensors, costs, high, at_least=count)


def _cost(tensor: Planned) -> int:
    """Bytes of a tensor in a file, its line of the header included, whose offsets may have any length."""
    return tensor.nbytes + len(json.dumps({tensor.name: _line(tensor, 10**15)}))


def _pack(groups: list[list[Planned]]) -> tuple[dict[str, Planned], list[Shard]]:
    """Places the tensors of each file in it."""
    placed: dict[str, Planned] = {}
    shards = []
    for number, group in enumerate(groups):
        name = (
            SINGLE if len(groups) == 1 else f"model-{number + 1:05}-of-{len(groups):05}.safetensors"
        )
        lines, end = {}, 0
        for tensor in sorted(group, key=lambda tensor: -BITS[tensor.dtype]):
            lines[tensor.name] = _line(tensor, end)
            end += tensor.nbytes
        head = _head(lines)
        for tensor in group:
            start = len(head) + lines[tensor.name]["data_offsets"][0]
            placed[tensor.name] = replace(tensor, shard=number, start=start)
        shards.append(Shard(name, head, len(head) + end))
    return placed, shards


def _line(tensor: Planned, begin: int) -> dict[str, object]:
    offsets = [begin, begin + tensor.nbytes]
    return {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}


def _head(lines: dict[str, dict[str, object]]) -> bytes:
    """Length and header of a safetensors file, padded with spaces to 8 bytes as the format asks."""
    header = json.dumps({"__metadata__": METADATA, **lines}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def _size(size: int | str) -> int:
    """Bytes of "4GB", "500MiB", "1000" or 1000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)?", str(size).strip(), re.IGNORECASE)
    number = float(match[1]) * UNITS[(match[2] or "").upper()] if match else 0
    if number < 1:
        raise UserError(
            f"max_shard_size = {size!r}; expected bytes, or a size such as 4GB or 500MiB"
        )
    return int(number)


def _free_target(path: Path) -> Path:
    """The folder to be, absolute; refused unless absent or empty."""
    target = Path(os.path.realpath(path))
    if not target.name:
        raise UserError(f"{path}: not a folder that can be made")
    if target.exists() and not target.is_dir():
        raise UserError(f"{path}: is a file; expected a folder, absent or empty")
    first = next(target.iterdir(), None) if target.exists() else None
    if first is not None:
        raise UserError(
            f"{path}: not empty, it holds {first.name}; expected a folder, absent or empty"
        )
    above = _existing(target.parent)
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{path}: {above} is no folder that can be written to")
    return target


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def _carry(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The files that come over from a base folder, and the others with the reason why not."""
    carried, skipped = [], {}
    for path in sorted(folder.iterdir()):
        deeper = path.name in CARRY_FOLDERS and path.is_dir()
        for file in sorted(path.iterdir()) if deeper else [path]:
            name = file.relative_to(folder).as_posix()
            reason = _why_not(folder, name)
            if reason:
                skipped[name] = reason
            else:
                carried.append(name)
    return carried, skipped


def _why_not(folder: Path, name: str) -> str:
    """Why a file stays behind; empty where it comes along."""
    if name.startswith("."):
        return "hidden"
    if name.lower().endswith(WEIGHTS):
        return "weights"
    if states_hashes(name):
        return "states hashes of the base's files"
    real = contained(folder, name)
    if real is None:
        return "a link out of the folder"
    if not real.exists():
        return "a link to nothing"
    if not stat.S_ISREG(real.stat().st_mode):
        return "not a regular file"
    size = real.stat().st_size
    return f"{size} bytes, more than {CARRY_BYTES}" if size > CARRY_BYTES else ""


def _check_disk(plan: ExportPlan) -> None:
    needed = sum(shard.size for shard in plan.shards)
    if plan.base is not None:
        needed += sum((plan.base.folder / name).stat().st_size for name in plan.carried)
    free = shutil.disk_usage(_existing(plan.target.parent)).free
    if free < needed:
        raise UserError(
            f"{plan.target}: the export needs {needed / 1e9:.2f} GB; {free / 1e9:.2f} GB are free"
        )

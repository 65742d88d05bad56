"""Writing an HF folder: shards, index, and everything else of the base that is not weights.

`plan_export` decides everything before a byte is written: which tensor has which dtype, in which shard
and at which byte. So every rank writes the rows that it holds straight to their place in the shared
files, in slices; nothing is gathered, and the bytes do not depend on the number of ranks. The target must
be on a file system that all ranks share.

- **Dtype**: the base file's, tensor by tensor. Without a base: small tensors (`names.is_small`) F32,
  all others the config's dtype.
- **Names**: the base's prefix; without a base `backbone.`. Tensors in the model's order, `mtp.*` after
  them byte for byte from the base; inside a shard by falling width of dtype, so that all are aligned.
  Where embeddings are tied and the base has an `lm_head.weight` all the same, it gets the embeddings.
- **Size**: a shard file has at most `max_shard_size` bytes, its header included; a tensor that is larger
  by itself gets a file of its own.
- **Carried over**: the regular files at the top of the base folder and in `additional_chat_templates/`
  (config, tokenizer, templates, generation settings, the `.py` files of auto_map, model card), byte for
  byte; not: weights and their indices (WEIGHTS), names that begin with a dot, files above CARRY_BYTES,
  links that lead out (`hf_index.contained`). What was left is listed in the plan.
- **Whole or not at all**: written into `.NAME.partial` beside the target, synced, then renamed. A target
  that exists must be an empty folder. A failure on any rank stops all and removes the partial folder.
"""

import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hymoe.engine.errors import UserError
from hymoe.engine.hf_index import (
    BITS,
    INDEX,
    PASSED_THROUGH,
    SINGLE,
    SLICE_BYTES,
    TORCH_DTYPES,
    Checkpoint,
    contained,
)
from hymoe.engine.hf_ranks import rank_and_world, together
from hymoe.engine.hf_rows import local_rows, named_tensors
from hymoe.model.names import Spec, by_parameter, is_small, parameter_shape, tensor_specs

FILE_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
METADATA = {"format": "pt"}  # readers refuse a file without it
CARRY_BYTES = 256 << 20  # the largest tokenizer in use has 33 MB
CARRY_FOLDERS = ("additional_chat_templates",)
WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"),
    *(".npz", ".npy", ".tflite", ".ot", ".index.json"),
)
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

Value = Callable[[str, torch.Tensor], torch.Tensor | None]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Planned:
    """One tensor of the export: its place is byte `start` of the file of shard `shard`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    shard: int = -1
    start: int = -1


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What an export will write; the same on every rank.

    Attributes:
        target: the folder to be.
        base: where dtypes, prefix, `mtp.*` and the other files come from, or None.
        specs: file name -> Spec of what the model supplies.
        tensors: file name -> Planned, all tensors in order.
        shards: (file name, header, file size in bytes) of each shard.
        carried: files that come over from the base, relative to it.
        skipped: files of the base that do not, with the reason.
    """

    target: Path
    base: Checkpoint | None
    specs: dict[str, Spec]
    tensors: dict[str, Planned]
    shards: list[tuple[str, bytes, int]]
    carried: list[str]
    skipped: dict[str, str]

    @property
    def total_size(self) -> int:
        """Bytes of all tensors, as the index states it."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def save_pretrained(
    lm: nn.Module,
    path: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    base: str | Path | None = None,
    value: Value | None = None,
    progress: Progress | None = None,
) -> ExportPlan:
    """Writes the model as an HF folder; collective: every rank of the default process group calls it.

    At most one slice of a tensor is copied at a time. The rules are in this file's head.

    Args:
        lm: HybridLM; plain parameters or FSDP2's DTensors, any device.
        path: the folder, absent or empty.
        max_shard_size: bytes of a file, or a string such as "4GB" (10^9) or "500MiB" (2^20).
        base: the HF folder that the model came from; `lm.source` where not given. With neither, the
            weights and config.json alone are written.
        value: (our name, parameter) -> what to write in its place: this rank's rows, in the dtype that
            `export_dtypes` names; or None for the parameter itself, cast by rounding to nearest.
        progress: called with (bytes written, bytes to write) of this rank.

    Returns:
        The plan that was carried out.

    Raises:
        UserError: the target is not empty, the base does not fit the model, the disk is too small.
    """
    rank, _ = rank_and_world()
    plan = together(lambda: plan_export(lm, path, max_shard_size=max_shard_size, base=base))[rank]
    partial = plan.target.with_name(f".{plan.target.name}.partial")
    try:
        together(lambda: _create(plan, lm, partial) if rank == 0 else None)
        written = together(lambda: _write(plan, lm, partial, value, progress))
        together(lambda: _finish(plan, partial, written) if rank == 0 else None)
    except BaseException:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return plan


def plan_export(
    lm: nn.Module,
    path: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    base: str | Path | None = None,
) -> ExportPlan:
    """All of an export that can be decided and checked without writing: call it before training.

    Raises:
        UserError: as `save_pretrained`.
    """
    target = _free_target(Path(path))
    folder = base if base is not None else lm.source
    checkpoint = Checkpoint.open(folder) if folder is not None else None
    if checkpoint is None and not lm.config.to_dict():
        raise UserError(f"{path}: no base folder and no config.json to write; give a base")
    specs = _specs(lm, checkpoint)
    files, tensors = by_parameter(specs), named_tensors(lm)
    for name, tensor in tensors.items():
        if name not in files:
            raise ValueError(f"{name}: a checkpoint has no place for it")
        expected = parameter_shape(specs, files[name])
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{name}: {list(tensor.shape)}; expected {list(expected)}")
    if missing := sorted(files.keys() - tensors.keys()):
        raise ValueError(f"the model lacks {', '.join(missing[:3])}")
    shards = _pack(_wanted(lm, specs, checkpoint), _bytes(max_shard_size))
    placed = [tensor for _, _, _, held in shards for tensor in held]
    order = [*specs, *_passed(checkpoint)]
    placed.sort(key={name: i for i, name in enumerate(order)}.__getitem__ and None)
    carried, skipped = _carry(checkpoint.folder) if checkpoint else ([], {})
    return ExportPlan(target, checkpoint, specs, {}, [], carried, skipped)

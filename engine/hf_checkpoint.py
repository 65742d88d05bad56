"""HF checkpoints in and out: `load_pretrained`, `save_pretrained`, and their parts.

Loading fills existing memory and nothing else: each rank reads the rows that it holds, straight into
its parameters, so its private memory peaks at its shard, and where a dtype or device changes a slice
(`hf_index.SLICE_BYTES`) of each of READERS threads. A tensor that was loaded is never initialised
again, and one that was not loaded is an error.

Dtypes: with `dtype=None` a parameter has the dtype of the file; a stack whose experts disagree has the
smallest that holds them all (nothing is lost, and the export gives each expert its own back). With a
dtype given, small tensors (`names.is_small`) are float32. The router's correction bias is float32
always: BF16 would merge its values (NVIDIA-NeMo/Automodel#2553).
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hymoe.engine.errors import UserError
from hymoe.engine.hf_export import save_pretrained
from hymoe.engine.hf_index import SLICE_BYTES, Checkpoint
from hymoe.engine.hf_plan import ExportPlan, export_dtypes, plan_export
from hymoe.engine.hf_rows import LocalRows, check_names, local_rows, named_tensors
from hymoe.model.config import HybridConfig
from hymoe.model.names import Spec, by_parameter, is_small
from hymoe.model.net import HybridLM

__all__ = [
    "Checkpoint",
    "ExportPlan",
    "export_dtypes",
    "load_pretrained",
    "load_weights",
    "local_rows",
    "materialize",
    "near_zero_rows",
    "plan_export",
    "read_config",
    "read_local_rows",
    "save_pretrained",
]

Piece = tuple[str, torch.Tensor, int]  # tensor of the file, where its rows go, the first of them

READERS = (
    4  # threads of a rank; with more, slices that are converted would be held by more at a time
)
ROUTER_BIAS = "e_score_correction_bias"
NEAR_ZERO = 1e-3  # of the median norm; rows that no training touched were seen at 1e-17


def read_config(path: str | Path) -> HybridConfig:
    """`HybridConfig.from_pretrained`, its errors as the user's.

    Raises:
        UserError: no config, no JSON, or a model that this one is not.
    """
    try:
        return HybridConfig.from_pretrained(path)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(str(error)) from None


def load_pretrained(
    path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    kernels: str = "auto",
) -> HybridLM:
    """Reads a checkpoint folder into a model of its own; for sharded models see `load_weights`.

    Args:
        path: folder in HF format.
        device: where the parameters go; never more than a slice is elsewhere.
        dtype: dtype of the big tensors, small ones are then float32; None: each as the file has it.
        kernels: passed to HybridLM.

    Returns:
        The model; `lm.source` is the folder.

    Raises:
        UserError: the folder is not a whole checkpoint of this family; see `Checkpoint`.
    """
    checkpoint = Checkpoint.open(path)
    config = read_config(path)
    specs = checkpoint.check_against(config)
    lm = HybridLM(config, kernels=kernels, device="meta")
    materialize(lm, device, load_dtypes(checkpoint, specs, dtype))
    load_weights(lm, checkpoint)
    return lm


def load_dtypes(
    checkpoint: Checkpoint, specs: Mapping[str, Spec], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """The dtype of each parameter and buffer by the rule in this file's head: our name -> dtype."""
    dtypes = {}
    for name, files in by_parameter(specs).items():
        if name.endswith(ROUTER_BIAS) or (dtype is not None and is_small(name)):
            dtypes[name] = torch.float32
        elif dtype is not None:
            dtypes[name] = dtype
        else:
            dtypes[name] = checkpoint.dtype(files)
    return dtypes


def materialize(
    lm: nn.Module, device: torch.device | str, dtypes: Mapping[str, torch.dtype]
) -> None:
    """Gives every tensor of a model on the meta device uninitialised memory; tied ones stay tied.

    Args:
        lm: model without process groups; parameters and buffers are replaced.
        device: where to.
        dtypes: our name -> dtype, for every parameter and buffer.
    """
    made: dict[int, torch.Tensor] = {}

    def real(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            new = torch.empty(tensor.shape, dtype=dtypes[name], device=device)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            made[id(tensor)] = new
        return made[id(tensor)]

    for under, module in lm.named_modules():
        dot = f"{under}." if under else ""
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    own[name] = real(dot + name, tensor)


def load_weights(
    lm: nn.Module,
    checkpoint: Checkpoint,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fills the parameters and persistent buffers of a model in place, whatever they are.

    Plain tensors and FSDP2's DTensors (dim 0, uneven shards too), any device, any floating dtype: this
    rank reads only the rows that it holds, of a stack only its experts. Sets `lm.source`.

    Args:
        lm: HybridLM with memory (not on the meta device); its dtypes stay.
        checkpoint: the opened folder.
        progress: called with (bytes read, bytes to read) of this rank, after each tensor of the file.

    Raises:
        UserError: the folder does not match the config, or a shard ends early.
        ValueError: the model has a tensor that the checkpoint's names do not know, or the reverse.
    """
    specs = checkpoint.check_against(lm.config)
    check_names(lm, specs)
    files = by_parameter(specs)
    pieces: list[Piece] = []
    for name, tensor in named_tensors(lm).items():
        part = local_rows(name, tensor)
        if part.local.is_meta:
            raise ValueError(f"{name} is on the meta device: give the model memory before loading")
        pieces += _pieces(specs, files[name], part.local, part)
    _read(checkpoint, pieces, progress)
    lm.source = checkpoint.folder


def _read(
    checkpoint: Checkpoint, pieces: list[Piece], progress: Callable[[int, int], None] | None
) -> None:
    """Fills all pieces, in the order in which they lie in the files, by READERS threads.

    While one waits for the disk another copies, and a remote file system is asked for several things at a time.
    """
    pieces = sorted(pieces, key=lambda piece: checkpoint.place(piece[0], piece[2]))
    sizes = [checkpoint.nbytes(file, len(into)) for file, into, _ in pieces]
    total, done = sum(sizes), 0
    with ThreadPoolExecutor(READERS) as pool:
        try:
            reads = [pool.submit(checkpoint.read_into, *piece) for piece in pieces]
            for read, size in zip(reads, sizes, strict=True):
                read.result()
                done += size
                if progress is not None:
                    progress(done, total)
        finally:
            pool.shutdown(cancel_futures=True)


def read_local_rows(
    checkpoint: Checkpoint, specs: Mapping[str, Spec], name: str, tensor: torch.Tensor
) -> torch.Tensor:
    """What the checkpoint has in the place of this rank's rows of a parameter.

    Args:
        checkpoint: the opened folder.
        specs: what `check_against` gave.
        name: our name of the parameter.
        tensor: the parameter, a plain tensor or a DTensor; only its placement counts.

    Returns:
        (rows, ...) CPU, in the dtype of the file, of a stack in the smallest that holds all its experts.
    """
    files = [file for file, spec in specs.items() if spec.param == name]
    part = local_rows(name, tensor)
    rows = torch.empty(part.local.shape, dtype=checkpoint.dtype(files))
    for file, into, begin in _pieces(specs, files, rows, part):
        checkpoint.read_into(file, into, begin)
    return rows


def _pieces(
    specs: Mapping[str, Spec], files: list[str], rows: torch.Tensor, part: LocalRows
) -> list[Piece]:
    """What to read into `rows`, which are those of `part`; of a stack, an expert is a row."""
    if specs[files[0]].expert is None:
        return [(files[0], rows, part.begin)]
    return [(files[expert], rows[row], 0) for row, expert in enumerate(part.numbers)]


def near_zero_rows(source: nn.Module | Checkpoint) -> list[int]:
    """Token ids whose embedding is next to nothing: tokens that the base model never saw.

    Next to nothing is a norm below NEAR_ZERO times the median norm of the rows that are not exactly
    zero. A norm layer divides such a row by nearly nothing, so its gradient can be 1e18 times a normal
    one (NVIDIA-NeMo/Megatron-Bridge#4967).

    Args:
        source: a model (with DTensors: collective, each rank computes its rows) or a checkpoint.

    Returns:
        Row numbers in ascending order, the same on every rank.
    """
    if isinstance(source, Checkpoint):
        name = f"{source.prefix}embeddings.weight"
        count, width = source.entries[name].shape
        step = max(1, SLICE_BYTES // (4 * width))
        norms = torch.empty(count)
        rows = source.read(name, 0, min(step, count))
        for at in range(0, count, step):
            part = rows[: count - at]
            source.read_into(name, part, at)
            norms[at : at + step] = _norms(part)
    else:
        weight = source.embeddings.weight
        norms = _norms(local_rows("embeddings.weight", weight).local)
        if isinstance(weight, DTensor):
            shape, stride = weight.shape[:1], (1,)
            mesh, placements = weight.device_mesh, weight.placements
            norms = DTensor.from_local(norms, mesh, placements, shape=shape, stride=stride)
            norms = norms.full_tensor()
    some = norms[norms > 0]
    limit = NEAR_ZERO * some.nanmedian() if len(some) else torch.inf
    return torch.nonzero(norms < limit).flatten().tolist()


def _norms(rows: torch.Tensor) -> torch.Tensor:
    """Norm of each row: (rows, D) any dtype -> (rows,) float32.

    One buffer serves all slices: new ones each time would lie between the results and never go back to the system.
    """
    norms = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    step = max(1, SLICE_BYTES // (4 * rows.shape[1]))
    buffer = norms.new_empty(min(step, len(rows)), rows.shape[1])
    for at in range(0, len(rows), step):
        part = rows[at : at + step]
        floats = buffer[: len(part)].copy_(part)
        torch.linalg.vector_norm(floats, dim=1, out=norms[at : at + step])
    return norms

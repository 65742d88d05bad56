"""Which rows of a parameter this rank holds: whole rows of dim 0, of a plain tensor or of a DTensor.

Sharding is by dim 0 alone (whole experts of a stack), so a shard is a range of rows and one number says
where it begins. FSDP2's DTensors are `Shard(0)`, over several mesh dimensions also with `Replicate`. Where the experts
of a stack are spread anew (`relabel.py`), its rows have other numbers than their places: `LocalRows.numbers`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hymoe.engine.relabel import order_of, row_numbers
from hymoe.model.names import Spec, by_parameter, parameter_shape


@dataclass(frozen=True, slots=True)
class LocalRows:
    """This rank's part of a tensor.

    Attributes:
        local: (rows, ...) the memory itself; writing changes the parameter.
        begin: its first row in the whole tensor, as the ranks' rows follow each other.
        sharded: the other ranks hold the other rows (else: all of them hold all).
        first_copy: whether, of equal copies on several ranks of the mesh, this one counts.
        order: of a stack whose experts are spread anew, the expert in each place of the whole.
    """

    local: torch.Tensor
    begin: int
    sharded: bool
    first_copy: bool
    order: tuple[int, ...] | None = None

    @property
    def numbers(self) -> Sequence[int]:
        """What each local row is in checkpoints."""
        return row_numbers(self.begin, len(self.local), self.order)


def named_tensors(lm: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, each once: a tied head is the embedding."""
    tensors: dict[str, torch.Tensor] = dict(lm.named_parameters())
    for name, buffer in lm.named_buffers():
        owner = lm.get_submodule(name.rpartition(".")[0])
        if name.rpartition(".")[2] not in owner._non_persistent_buffers_set:
            tensors[name] = buffer
    return tensors


def check_names(lm: nn.Module, specs: Mapping[str, Spec]) -> None:
    """The tensors of a model are exactly those that the names of a checkpoint speak of.

    Raises:
        ValueError: the model has a tensor that would never be loaded or written, lacks one, or has one
            of another shape; the message names it.
    """
    files, tensors = by_parameter(specs), named_tensors(lm)
    if extra := sorted(tensors.keys() - files.keys()):
        raise ValueError(f"{extra[0]} is in the model, but checkpoints have no name for it")
    if missing := sorted(files.keys() - tensors.keys()):
        raise ValueError(
            f"{missing[0]} is not in the model, but {files[missing[0]][0]} belongs there"
        )
    for name, tensor in tensors.items():
        expected = parameter_shape(specs, files[name])
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{name}: {list(tensor.shape)}; expected {list(expected)}")


def local_rows(name: str, tensor: torch.Tensor) -> LocalRows:
    """The rows of a tensor that lie in this process.

    Args:
        name: for the message.
        tensor: (rows, ...) a plain tensor, or a DTensor with `Shard(0)` and `Replicate` placements.

    Raises:
        ValueError: it is sharded in another way.
    """
    if not isinstance(tensor, DTensor):
        return LocalRows(tensor.detach(), 0, False, True, order_of(tensor))
    mesh, placements = tensor.device_mesh, tensor.placements
    for placement in placements:
        if not placement.is_replicate() and not (type(placement) is Shard and placement.dim == 0):
            raise ValueError(f"{name}: placement {placement}; expected Shard(0): whole rows")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    with torch.no_grad():
        local = tensor.to_local()
    if tuple(local.shape) != tuple(shape):
        raise ValueError(f"{name}: local shape {list(local.shape)}; expected {list(shape)}")
    here = mesh.get_coordinate() or []
    copies = [at for at, p in zip(here, placements, strict=True) if p.is_replicate()]
    return LocalRows(local.detach(), offset[0], True, not any(copies), order_of(tensor))

"""What of a trained run reaches its HF folder: the masters, rounded so that small updates survive, and how much did.

Rounding a float32 master to the nearest BF16 loses most of an update that is smaller than a BF16 weight's last bit. So
values that the file holds in BF16 are rounded stochastically by key: right in the mean, and a weight that never moved
keeps its bits.
"""

import torch
from torch import Tensor

from hymoe.engine.hf_checkpoint import Checkpoint, export_dtypes, read_local_rows
from hymoe.engine.hf_rows import local_rows
from hymoe.engine.optim import Optimizer
from hymoe.kernels.rounding import (
    EXPORT_DOMAIN,
    export_bf16,
    join_master,
    stochastic_round,
    update_sums,
)
from hymoe.model.net import HybridLM


def file_values(
    weight: Tensor,
    remainder: Tensor | None,
    dtype: torch.dtype,
    *,
    seed: int,
    key: int,
    offset: int,
    step: int | Tensor,
) -> Tensor:
    """Rows of a trained parameter as its file gets them; the same from a live run and from a saved state.

    Args:
        weight: (rows, ...) bf16 or float32, contiguous.
        remainder: int16 of the same shape where the weight is one half of an exact master.
        dtype: what the file holds.
        seed: the run's.
        key: of the parameter's random bits, see `optim.parameter_keys`.
        offset: index of the first element in the whole parameter.
        step: count of applied steps, int or () int64.

    Returns:
        (rows, ...) in `dtype`; the weight itself where there is nothing to round.
    """
    bits = {"seed": seed, "key": key, "offset": offset, "step": step}
    if dtype != torch.bfloat16:
        return (weight if remainder is None else join_master(weight, remainder)).to(dtype)
    if weight.dtype != torch.bfloat16:
        return stochastic_round(weight.contiguous(), **bits, domain=EXPORT_DOMAIN)
    return weight if remainder is None else export_bf16(weight, remainder, **bits)


def file_rows(optimizer: Optimizer, name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """This rank's rows of a trained parameter as its file gets them; see `file_values`.

    Args:
        optimizer: has its remainder, the place of the rows and the key of their random bits.
        name: of the parameter.
        weight: (rows, ...) the local memory.
        dtype: what the file holds.
    """
    remainder = optimizer.state()[name].get("remainder")
    bits = {"seed": optimizer.seed, "key": optimizer.keys[name], "step": optimizer.count}
    pieces = [
        file_values(
            weight[rows], None if remainder is None else remainder[rows], dtype, **bits, offset=at
        )
        for rows, at in optimizer.shards[name].pieces(len(weight))
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class TrainedValues:
    """Gives `save_pretrained` each parameter as the file gets it, and keeps account of the update.

    Attributes:
        sums: (2,) float64 of this rank, <file - base, master - base> and <master - base, master - base>; summed over
            the ranks their ratio is the share of the update that reached the file.
    """

    def __init__(self, lm: HybridLM, optimizer: Optimizer) -> None:
        """`lm.source` is the base that the update is measured from."""
        self._optimizer = optimizer
        self._base = Checkpoint.open(lm.source)
        self._specs = self._base.check_against(lm.config)
        self._dtypes = export_dtypes(lm)
        self.sums = torch.zeros(2, dtype=torch.float64, device=lm.norm_f.weight.device)

    @torch.no_grad()
    def __call__(self, name: str, parameter: Tensor) -> Tensor | None:
        """This rank's rows of a parameter in the file's dtype; None for a buffer, which nothing trained."""
        if name not in self._optimizer.keys:
            return None
        weight = local_rows(name, parameter).local
        remainder = self._optimizer.state()[name].get("remainder")
        file = file_rows(self._optimizer, name, weight, self._dtypes[name])
        base = read_local_rows(self._base, self._specs, name, parameter).to(weight.device)
        self.sums += update_sums(base, weight, remainder, file)
        return file

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
from hymoe.kernels.rounding import EXPORT_DOMAIN, join_master, stochastic_round, update_sums
from hymoe.model.net import HybridLM


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
        file = self._rounded(name, weight, remainder)
        base = read_local_rows(self._base, self._specs, name, parameter).to(weight.device)
        self.sums += update_sums(base, weight, remainder, file)
        return file

    def _rounded(self, name: str, weight: Tensor, remainder: Tensor | None) -> Tensor:
        dtype = self._dtypes[name]
        if dtype == torch.bfloat16:
            if weight.dtype == torch.bfloat16:
                return self._optimizer.exported(name)
            place = self._optimizer.shards[name]
            return stochastic_round(
                weight.contiguous(),
                seed=self._optimizer.seed,
                key=self._optimizer.keys[name],
                offset=place.offset,
                step=self._optimizer.count,
                domain=EXPORT_DOMAIN,
            )
        return (weight if remainder is None else join_master(weight, remainder)).to(dtype)

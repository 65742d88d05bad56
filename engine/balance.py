"""How evenly tokens fall on experts and on the ranks that hold them, from the rows of every expert.

A row is one choice of one token, so a layer's rows in a step are tokens * top_k. L layers have experts, E each; experts
are numbered as in the base model, however `relabel.py` has spread them over the ranks.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE = "expert_loads.json"  # in the run folder
WORST = 3  # layers that are named

Record = dict[str, list[list[int]]]


def expert_imbalance(loads: Tensor) -> Tensor:
    """Rows of the busiest expert over the mean: (L, E) -> (L,) float64; 1.0 for a layer without any row."""
    return _max_over_mean(loads.double())


def rank_imbalance(
    loads: Tensor, expert_parallel: int, orders: Tensor | None = None
) -> list[float]:
    """Rows of the busiest rank over the mean, by layer; 1.0 where all ranks have the same or none has any.

    Args:
        loads: (L, E) rows of each expert in each layer.
        expert_parallel: ranks that share the experts, in their order.
        orders: (L, E) int64, the experts as they lie on the ranks; None: in their own order.
    """
    placed = loads if orders is None else loads.gather(1, orders)
    return _max_over_mean(placed.double().unflatten(1, (expert_parallel, -1)).sum(-1)).tolist()


def dead_experts(loads: Tensor) -> list[list[int]]:
    """Experts that no token chose, by layer; of a layer without any token none.

    Args:
        loads: (L, E) rows of each expert in each layer.
    """
    return [
        (layer == 0).nonzero().flatten().tolist() if bool(layer.any()) else [] for layer in loads
    ]


def drift(loads: Tensor, first: Tensor) -> float:
    """How far the choice of experts has moved, the mean over layers of the total variation distance.

        1/2 * sum_e | loads[e] / sum(loads) - first[e] / sum(first) |        0: the same shares, 1: no expert in common

    Other tokens move the shares too: of R rows spread evenly over E experts two draws differ by about
    sqrt(E / (pi * R)). Layers without rows in either do not count; 0.0 where there is no other.

    Args:
        loads: (L, E) rows.
        first: (L, E) rows of the first step.
    """
    now, then = loads.double(), first.double()
    both = (now.sum(1) > 0) & (then.sum(1) > 0)
    if not bool(both.any()):
        return 0.0
    now, then = now[both], then[both]
    shares = now / now.sum(1, keepdim=True) - then / then.sum(1, keepdim=True)
    return float(shares.abs().sum(1).mean() / 2)


class ExpertLoads:
    """The rows of a run's experts: the first step's, and the sum over all steps, resumes included."""

    def __init__(
        self,
        layers: Sequence[int],
        num_experts: int,
        expert_parallel: int = 1,
        orders: Tensor | None = None,
        record: Record | None = None,
    ) -> None:
        """A run at its start, or where `record` has left it.

        Args:
            layers: numbers of the L layers with experts.
            num_experts: E.
            expert_parallel: ranks that share the experts; 1: every rank has all.
            orders: (L, E) int64, the experts as they lie on those ranks; None: in their own order.
            record: what `record` has given.
        """
        self.layers = list(layers)
        self._ranks, self._orders = expert_parallel, orders
        self._first: Tensor | None = None
        self._total = torch.zeros(len(self.layers), num_experts, dtype=torch.int64)
        if record:
            self._first, self._total = (torch.tensor(record[k]) for k in ("first_step", "total"))

    def add(self, rows: Tensor) -> dict[str, float | int | None]:
        """Counts a step and gives its metrics, each for the worst layer or over all; None where there are no rows.

        Args:
            rows: (L * E,) of all ranks together, on the CPU.
        """
        loads = rows.to(torch.int64).view_as(self._total)
        keys = ("expert_load_max_over_mean", "rank_load_max_over_mean", "expert_load_drift")
        if not bool(loads.any()):
            return {**dict.fromkeys(keys), "dead_experts": None}
        self._total = self._total + loads
        self._first = loads if self._first is None else self._first
        ranks = None
        if self._ranks > 1:
            ranks = max(rank_imbalance(loads, self._ranks, self._orders))
        values = (float(expert_imbalance(loads).max()), ranks, drift(loads, self._first))
        return dict(zip(keys, values, strict=True)) | {
            "dead_experts": sum(map(len, dead_experts(loads)))
        }

    def record(self) -> Record:
        """What a resumed run needs, in JSON types; empty before the first row."""
        if self._first is None:
            return {}
        return {"first_step": self._first.tolist(), "total": self._total.tolist()}

    def write(self, folder: Path, steps: int) -> None:
        """Writes FILE whole or not at all; nothing before the first row.

        `first_step` and `total` have a layer's rows under its number; `relabel.py` reads `total`.
        """
        record = self.record()
        if not record:
            return
        content: dict[str, Any] = {"steps": steps}
        for key, loads in record.items():
            content[key] = dict(zip(map(str, self.layers), loads, strict=True))
        partial = folder / f".{FILE}.partial"
        partial.write_text(_lines(content), encoding="utf-8")
        os.replace(partial, folder / FILE)

    def summary(self) -> str:
        """The run in a line: the layers with the worst loads, and experts that no token ever chose."""
        if self._first is None:
            return "expert load: no token"
        parts = [f"experts {self._worst(expert_imbalance(self._total).tolist())}"]
        if self._ranks > 1:
            ranks = rank_imbalance(self._total, self._ranks, self._orders)
            parts.append(f"ranks {self._worst(ranks)}")
        dead = dead_experts(self._total)
        named = [f"layer {n}: {len(found)}" for n, found in zip(self.layers, dead, strict=True) if found]  # fmt: skip
        shown = ", ".join(named[:WORST]) + (f" and {len(named) - WORST} layers" if named[WORST:] else "")  # fmt: skip
        parts.append(f"never chosen: {shown or 'none'}")
        return "load of the run, max over mean: " + "; ".join(parts)

    def _worst(self, values: list[float]) -> str:
        by_value = sorted(zip(values, self.layers, strict=True), key=lambda pair: (-pair[0], pair[1]))  # fmt: skip
        return ", ".join(f"layer {layer} {value:.2f}" for value, layer in by_value[:WORST])


def _max_over_mean(loads: Tensor) -> Tensor:
    mean = loads.mean(1)
    return (loads.amax(1) / mean).where(mean > 0, 1.0)


def _lines(content: dict[str, Any]) -> str:
    """JSON with a line for each layer."""
    parts = [f'"steps": {content["steps"]}']
    for key in ("first_step", "total"):
        layers = ",\n".join(
            f"  {json.dumps(n)}: {json.dumps(loads)}" for n, loads in content[key].items()
        )
        parts.append(f"{json.dumps(key)}: {{\n{layers}\n}}")
    return "{\n" + ",\n".join(parts) + "\n}\n"

"""Experts spread over their ranks so that the ranks are evenly loaded: the same model, other neighbours.

With expert parallelism rank e of n holds E/n experts of a layer, by default e*E/n to (e+1)*E/n. Popular experts that
lie together make a rank slow, and all others wait for it in every layer. From the loads of an earlier run
(`expert_loads.json`) each layer's experts are dealt out anew, `order[slot]` being the expert in a slot of the stack.

**What is permuted: the slots alone.** The router, its correction bias and the ids that it gives stay in the base's
order, and ids become slots where tokens are sent. Permuting the router's rows as well would be the same model too, but
would change which of two equal scores wins, and would tear apart the groups of a group-limited router; so this needs no
restriction, and loads in the metrics keep the base's numbers. Every product is the same; a token's partial sums are
added rank by rank, so results differ as they do between two numbers of ranks: in the order of a float32 sum.

**On disk there is no order.** A stack's parameters carry it as `expert_order`; whoever turns rows of memory into rows
of the model asks `row_numbers` or `runs_of`: loading, export, saved states, and the optimiser, whose random bits depend
on an element's index in the tensor as the base has it. So exports and states do not depend on the order, and any run
may continue with another one or none, as it may on another number of ranks.

Dealing: the busiest expert first, each to the rank with the fewest rows that still has room (longest processing time
first, Graham 1969, with E/n places a rank).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hymoe.engine.balance import rank_imbalance
from hymoe.engine.errors import UserError
from hymoe.kernels.route import Routing
from hymoe.model.config import HybridConfig
from hymoe.model.moe import Exchange, Experts, Finish, MoE

ATTRIBUTE = "expert_order"  # of a stack: tuple of E experts, the one in each slot

Orders = dict[int, tuple[int, ...]]  # layer -> its experts as they lie in the stack


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that follow each other both here and in the whole tensor.

    Attributes:
        at: the first of them in this rank's memory.
        begin: the same in the whole tensor, as the base numbers its rows.
        count: how many.
    """

    at: int
    begin: int
    count: int


def order_of(tensor: Tensor) -> tuple[int, ...] | None:
    """The experts of a stack as they lie; None where row r is row r."""
    return getattr(tensor, ATTRIBUTE, None)


def row_numbers(first: int, count: int, order: Sequence[int] | None) -> Sequence[int]:
    """Numbers, as the base has them, of the `count` rows that begin in slot `first`."""
    slots = range(first, first + count)
    return slots if order is None else [order[slot] for slot in slots]


def runs_of(first: int, count: int, order: Sequence[int] | None) -> list[Run]:
    """The same rows in runs, each as long as it can be; one without an order."""
    if order is None:
        return [Run(0, first, count)]
    runs: list[Run] = []
    for at, number in enumerate(row_numbers(first, count, order)):
        if runs and number == runs[-1].begin + runs[-1].count:
            runs[-1] = Run(runs[-1].at, runs[-1].begin, runs[-1].count + 1)
        else:
            runs.append(Run(at, number, 1))
    return runs


def even_order(loads: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Experts in slots, E/ranks a rank, so that the ranks' loads are close; of one rank in ascending order.

    Args:
        loads: (E,) rows of each expert; all zero: the order stays.
        ranks: a divisor of E.
    """
    experts = range(len(loads))
    if not any(loads):
        return tuple(experts)
    room = len(loads) // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    total = [0] * ranks
    for expert in sorted(experts, key=lambda e: (-loads[e], e)):
        rank = min((r for r in range(ranks) if len(held[r]) < room), key=lambda r: (total[r], r))
        held[rank].append(expert)
        total[rank] += loads[expert]
    return tuple(expert for own in held for expert in sorted(own))


def resolve_orders(path: str, config: HybridConfig, ranks: int) -> tuple[Orders, list[str]]:
    """Resolves `parallel.expert_order`.

    Args:
        path: an `expert_loads.json`; empty: none.
        config: of the model that is to be spread.
        ranks: that share the experts.

    Returns:
        An order for every layer with experts, none where it would change nothing; and what to tell a person of it.

    Raises:
        UserError: no such file, or it is of another model.
    """
    if not path:
        return {}, []
    loads = read_loads(path, config)
    if ranks == 1:
        return {}, ["parallel.expert_order changes nothing: every rank gathers every expert"]
    orders = {layer: even_order(rows, ranks) for layer, rows in loads.items()}
    rows = torch.tensor(list(loads.values()))
    before = max(rank_imbalance(rows, ranks))
    after = max(rank_imbalance(rows, ranks, torch.tensor(list(orders.values()))))
    told = (
        f"parallel.expert_order: experts dealt out by {path}; load of its busiest of {ranks} ranks "
        f"over the mean, worst layer: {before:.2f}, as dealt {after:.2f}"
    )
    return orders, [told]


def read_loads(path: str | Path, config: HybridConfig) -> dict[int, list[int]]:
    """Rows of each expert by layer, from an `expert_loads.json`.

    Raises:
        UserError: no such file, or it is of another model.
    """
    wanted = "expected the expert_loads.json of a run"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"parallel.expert_order = {path}: {error.strerror}; {wanted}") from None
    except ValueError:
        raise UserError(f"parallel.expert_order = {path}: no JSON; {wanted}") from None
    total = content.get("total") if isinstance(content, dict) else None
    if not isinstance(total, dict):
        raise UserError(f"{path}: has no `total`; {wanted}")
    layers = [number for number, kind in enumerate(config.pattern) if kind == "E"]
    if total.keys() != set(map(str, layers)):
        raise UserError(
            f"{path}: total has layers {', '.join(total)}; the model's with experts are {layers}"
        )
    for number, rows in total.items():
        if not isinstance(rows, list) or len(rows) != config.n_routed_experts:
            found = len(rows) if isinstance(rows, list) else repr(rows)
            raise UserError(
                f"{path}: layer {number} has {found} loads; expected {config.n_routed_experts}"
            )
        if odd := [n for n in rows if type(n) is not int or n < 0]:
            raise UserError(f"{path}: layer {number} has a load of {odd[0]!r}; expected 0 or more")
    return {layer: total[str(layer)] for layer in layers}


def relabel(lm: nn.Module, orders: Orders) -> None:
    """Lets the slots of a sharded model's stacks hold other experts; before anything is loaded into them.

    Args:
        lm: HybridLM whose MoE layers have an exchange that sends tokens to ranks.
        orders: layer -> its order.
    """
    for number, order in orders.items():
        mixer: MoE = lm.layers[number].mixer
        for stack in mixer.experts.parameters():
            setattr(stack, ATTRIBUTE, order)
        slots = torch.argsort(torch.tensor(order)).to(mixer.gate.weight.device)
        mixer.exchange = Relabelled(mixer.exchange, slots)


class Relabelled:
    """An exchange that is told slots where the router says experts."""

    def __init__(self, exchange: Exchange, slots: Tensor) -> None:
        """`slots` (E,) int64: where each expert lies; `exchange` may look at a routing's ids alone."""
        self._exchange, self._slots = exchange, slots
        # A recomputation comes with the routing of the first pass, and the exchange knows its own by identity.
        self._placed: WeakKeyDictionary[Routing, Routing] = WeakKeyDictionary()

    def __call__(self, experts: Experts, x: Tensor, weights: Tensor, routing: Routing) -> Finish:
        """See `hymoe.model.moe.Exchange`."""
        placed = self._placed.get(routing)
        if placed is None:
            placed = Routing(
                self._slots[routing.ids], routing.order, routing.inverse, routing.offsets
            )
            self._placed[routing] = placed
        return self._exchange(experts, x, weights, placed)

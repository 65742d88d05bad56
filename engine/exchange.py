"""How tokens travel to the ranks that hold their experts, and their results back.

The ranks of an expert group share the experts: rank e of n holds experts e*E/n to (e+1)*E/n. A *route* is a linear map
from this rank's T tokens to the rows that the ranks of the group receive, and its adjoint:

    spread    (T, ...) -> (R+1, ...)     copies of tokens, to where an expert needs them; the last row is zeros
    collect   (R+1, ...) -> (T, ...)     for each token the sum of its copies' rows, in float32 in rank order;
                                         in two steps, `send_back` and `add_up`

Inputs and routing weights are spread, partial sums collected; in the backward pass gradients of the sums are spread,
those of inputs and weights collected. So the two autograd Functions are each other's backward pass.

Two routes. `Gather`: every token to every rank. Shapes are known on the host, nothing is asked of the device; the
number of tokens of each rank is agreed on once a forward pass, between hosts. `Dedup`: a token once to each rank that
holds one of its experts or more. The host has to know how many: one wait a layer, behind the work that the caller
enqueues between start and finish, and none in a recomputation or in the backward pass, because a route is kept as long
as the routing that it was made for. No token is dropped, and any rank may receive nothing.

Rows of partial sums travel in the model's dtype, routing weights in float32, ids as int32. In the forward pass the
shared expert's two products cover the two journeys: `Gather` spreads under the up product, both send back under the
down product. In a recomputation whose sums nobody reads nothing is sent back. In the backward pass a rank waits for its
rows: the two `backward` below are where a GPU could hide that.

**The row of zeros.** The kernels know nothing of ranks: they take rows of K choices among the experts at hand. A choice
of an expert elsewhere is sorted behind all experts, where no product reaches it, and where its result would be looked
up it points to the place of a choice that the row of zeros has of the first expert. Every product there is exactly
zero, forward and backward, so that no kernel needs a special case and shapes stay static.
"""

from collections.abc import Iterator
from itertools import cycle
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from hymoe.engine.parallel_wire import Wire, sum_in_order
from hymoe.kernels.route import Routing, sort_by_expert
from hymoe.model.moe import Experts, Finish, Sums

PURPOSE = "exchange"  # key of these bytes in `Wire.sent`


class Route(Protocol):
    """See the head of this file.

    Attributes:
        ids: (R, K) int32 choices of the received rows, -1 where a row is nobody's; None until they were sent.
        asks: whether the host has to `settle` before rows can be sent.
        choices: of the received rows, those of experts of this rank, where the host knows how many.
    """

    ids: Tensor | None
    asks: bool
    choices: int | None

    def settle(self) -> None:
        """Waits until rows can be sent; at once where that has been done."""

    def spread(self, x: Tensor, fill: int = 0, is_async: bool = False) -> Tensor:
        """The received rows; where asynchronous they are there after `wait`. `fill` is in rows that are nobody's."""

    def send_back(self, rows: Tensor) -> Tensor:
        """Sends the rows to where they came from; they are there, for `add_up`, after `wait`."""

    def add_up(self, parts: Tensor) -> Tensor:
        """The tokens' sums."""

    def wait(self) -> None:
        """Waits for rows that are under way."""


class _Waiting:
    """Collectives that are under way."""

    def __init__(self) -> None:
        self._under_way: list[Any] = []

    def wait(self) -> None:
        while self._under_way:
            self._under_way.pop(0).wait()

    def _note(self, work: Any) -> None:
        if work is not None:
            self._under_way.append(work)


class Gather(_Waiting):
    """Every token to every rank of the group; each rank's tokens padded to the most that one has."""

    asks = False
    choices: int | None = None

    def __init__(self, wire: Wire, group: Any, tokens: list[int]) -> None:
        """`tokens` of every rank of the group."""
        super().__init__()
        self.ids: Tensor | None = None
        self._wire, self._group = wire, group
        self._size, self._own, self._most = len(tokens), tokens[dist.get_rank(group)], max(tokens)

    def settle(self) -> None:
        """Nothing to wait for."""

    def spread(self, x: Tensor, fill: int = 0, is_async: bool = False) -> Tensor:
        """See `Route`."""
        x = x.contiguous()
        if self._own < self._most:
            x = torch.cat([x, x.new_full((self._most - self._own, *x.shape[1:]), fill)])
        rows = x.new_empty(self._size * self._most + 1, *x.shape[1:])
        rows[-1] = 0
        self._note(self._wire.all_gather(rows[:-1], x, self._group, PURPOSE, is_async))
        return rows

    def send_back(self, rows: Tensor) -> Tensor:
        """See `Route`."""
        rows = rows[:-1].contiguous()
        parts = torch.empty_like(rows)
        self._note(self._wire.all_to_all(parts, rows, self._group, PURPOSE, is_async=True))
        return parts

    def add_up(self, parts: Tensor) -> Tensor:
        """See `Route`."""
        by_rank = parts.view(self._size, self._most, *parts.shape[1:])
        return sum_in_order(by_rank[:, : self._own]).to(parts.dtype)


class Dedup(_Waiting):
    """A token once to each rank that holds at least one of its experts."""

    asks = True
    choices: int | None = None  # until it has settled

    def __init__(self, wire: Wire, group: Any, ids: Tensor, experts: int) -> None:
        """Sends the numbers of rows; does not wait for them.

        Args:
            wire: what to send with.
            group: the ranks that share the experts.
            ids: (T, K) int64, this rank's choices.
            experts: of each rank.
        """
        super().__init__()
        self.ids: Tensor | None = None
        self._wire, self._group = wire, group
        self._size = dist.get_world_size(group)
        owner = ids // experts  # (T, K)
        hit = torch.zeros(self._size, len(ids), dtype=torch.bool, device=ids.device)
        self._hit: Tensor | None = hit.scatter_(0, owner.T, True)
        choices = ids.new_zeros(self._size)
        choices.scatter_add_(0, owner.flatten(), ids.new_ones(1).expand(ids.numel()))
        numbers = ids.new_empty(2, self._size, 2)  # sent and received: rows, choices
        torch.stack([hit.sum(1), choices], dim=1, out=numbers[0])
        wire.all_to_all(numbers[1], numbers[0], group, PURPOSE)
        self._numbers, self._copied = numbers, None
        if ids.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def settle(self) -> None:
        """Reads the numbers of rows and choices: the one wait for the device; then the order of the rows, without one.

        Rows go by destination, a rank's in the order of the tokens.
        """
        if self._hit is None:
            return
        if self._copied is not None:
            self._copied.synchronize()
        self._sent, received = self._numbers[0, :, 0].tolist(), self._numbers[1]
        self._received, self.choices = received[:, 0].tolist(), int(received[:, 1].sum())
        hit, total = self._hit, sum(self._sent)
        place = hit.flatten().cumsum(0).view_as(hit) - 1
        self._place = torch.where(hit, place, total)  # (n, T): of each copy, or the row of zeros
        token = torch.arange(hit.shape[1], device=hit.device).expand_as(hit)
        rows = torch.empty(total + 1, dtype=torch.int64, device=hit.device)
        self._token = rows.scatter_(0, self._place.flatten(), token.flatten())[:total]
        self._hit = None

    def spread(self, x: Tensor, fill: int = 0, is_async: bool = False) -> Tensor:
        """See `Route`; all rows are somebody's."""
        rows = x.new_empty(sum(self._received) + 1, *x.shape[1:])
        rows[-1] = 0
        work = self._wire.all_to_all(
            *(rows[:-1], x.index_select(0, self._token), self._group, PURPOSE),
            out_rows=self._received,
            x_rows=self._sent,
            is_async=is_async,
        )
        self._note(work)
        return rows

    def send_back(self, rows: Tensor) -> Tensor:
        """See `Route`."""
        parts = rows.new_empty(sum(self._sent) + 1, *rows.shape[1:])
        parts[-1] = 0
        work = self._wire.all_to_all(
            *(parts[:-1], rows[:-1].contiguous(), self._group, PURPOSE),
            out_rows=self._sent,
            x_rows=self._received,
            is_async=True,
        )
        self._note(work)
        return parts

    def add_up(self, parts: Tensor) -> Tensor:
        """See `Route`."""
        shape = (self._place.shape[1], *parts.shape[1:])
        total = parts.new_zeros(shape, dtype=torch.promote_types(parts.dtype, torch.float32))
        for place in self._place:
            total += parts.index_select(0, place)
        return total.to(parts.dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, route: Route, is_async: bool) -> Tensor:
        ctx.route = route
        return route.spread(x, is_async=is_async)

    @staticmethod
    def backward(ctx, drows: Tensor):
        parts = ctx.route.send_back(drows)
        ctx.route.wait()
        return ctx.route.add_up(parts), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, parts: Tensor, route: Route) -> Tensor:
        """`parts` is what `rows`, from which gradients come, became when they were sent back."""
        ctx.route = route
        route.wait()
        return route.add_up(parts)

    @staticmethod
    def backward(ctx, dx: Tensor):
        return ctx.route.spread(dx), None, None


class ExpertExchange:
    """What the plan sets as `MoE.exchange`; one object for all layers of a model."""

    def __init__(self, kind: str, group: dist.ProcessGroup, wire: Wire, num_experts: int) -> None:
        """Collective.

        Args:
            kind: gather or dedup.
            group: the ranks that share the experts, with a communicator that nothing else uses: in the default one
                rows would queue behind FSDP2's parameters.
            wire: what to send with.
            num_experts: of a layer, a multiple of the group's size.
        """
        self._kind, self._group, self._wire = kind, group, wire
        self._experts = num_experts // dist.get_world_size(group)
        self._first = self._experts * dist.get_rank(group)
        self._tokens: Iterator[list[int]] = iter(())  # of every rank, for the next row
        self._routes: WeakKeyDictionary[Routing, Route] = WeakKeyDictionary()

    def agree_on_tokens(self, hosts: dist.ProcessGroup, tokens: list[int]) -> None:
        """Tells the group how many tokens this rank brings to the forward pass that begins; collective.

        Args:
            hosts: the same ranks in a group for CPU tensors, so that no device is asked.
            tokens: T of each row; as many rows on every rank.
        """
        if self._kind == "gather":
            numbers = torch.empty(dist.get_world_size(hosts) * len(tokens), dtype=torch.int64)
            self._wire.all_gather(numbers, torch.tensor(tokens), hosts, PURPOSE)
            # Every layer takes the rows in turn.
            self._tokens = cycle(numbers.view(-1, len(tokens)).T.tolist())

    def __call__(self, experts: Experts, x: Tensor, weights: Tensor, routing: Routing) -> Finish:
        """Sends what can be sent; see `hymoe.model.moe.Exchange` for what is returned."""
        route = self._routes.get(routing)
        if route is None:
            route = self._routes[routing] = self._new_route(routing)
        # A route that asks sends after the shared expert, also when it runs again and need not ask: in another order
        # the gradients that meet in x would be added in another order.
        sent = None if route.asks else self._send(route, x, weights, routing)

        def finish(is_read: bool) -> Sums:
            route.settle()
            rows, row_weights = sent or self._send(route, x, weights, routing)
            route.wait()
            here = choices_here(
                *(route.ids, self._first, self._experts, experts.kernels),
                known=route.choices,
                is_static=x.is_cuda,
            )
            stacks = {name: _own(stack) for name, stack in experts.named_parameters()}
            partial = functional_call(experts, stacks, (rows, row_weights, here, is_read))
            if not is_read:
                return lambda: torch.empty_like(x)
            parts = route.send_back(partial.detach())
            return lambda: _Collect.apply(partial, parts, route)

        return finish

    def _new_route(self, routing: Routing) -> Route:
        if self._kind == "gather":
            return Gather(self._wire, self._group, next(self._tokens))
        return Dedup(self._wire, self._group, routing.ids, self._experts)

    @staticmethod
    def _send(route: Route, x: Tensor, weights: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        rows = _Spread.apply(x, route, True)
        row_weights = _Spread.apply(weights, route, True)
        if route.ids is None:
            ids = routing.ids.to(torch.int32)
            route.ids = route.spread(ids, fill=-1, is_async=True)[:-1]
        return rows, row_weights


def choices_here(
    ids: Tensor, first: int, experts: int, kernels: str, known: int | None, is_static: bool
) -> Routing:
    """Received choices as choices among this rank's experts, with the row of zeros behind them.

    Args:
        ids: (R, K) int32, of all experts; -1 where a row is nobody's.
        first: expert of this rank.
        experts: of this rank.
        kernels: which implementation of the sort, see `launch.choose`.
        known: choices of experts of this rank, where the host knows their number.
        is_static: where it does not, keep the rows of choices elsewhere, unused, behind the others, instead of asking
            the device; Triton kernels allow it, and every tensor between the products is as much longer.

    Returns:
        routing: of R+1 rows.
    """
    here = ids.to(torch.int64) - first
    here = torch.where((here >= 0) & (here < experts), here, experts)
    zeros = here.new_full((1, ids.shape[1]), experts)
    zeros[0, 0] = 0
    here = torch.cat([here, zeros])  # (R+1, K)
    table = sort_by_expert(here, experts + 1, kernels)
    # Of the first expert's rows the last one is the row of zeros: the sort is stable.
    inverse = torch.where(here == experts, table.offsets[1:2] - 1, table.inverse)
    offsets = table.offsets[:-1]
    order = table.order
    if known is not None:
        order = order[: known + 1]  # and the row of zeros
    elif not is_static:
        order = order[: int(offsets[-1])]
    return Routing(here, order, inverse, offsets)


def _own(stack: nn.Parameter) -> Tensor:
    """This rank's experts of a stack, differentiable."""
    return stack.to_local() if isinstance(stack, DTensor) else stack

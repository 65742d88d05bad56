"""How a model is spread over the ranks, and how their gradients meet.

`Alone` is one process. `Sharded` is the simple plan: FSDP2 over all ranks, one unit a block, the embedding and the head
apart; the small float32 tensors are replicated outside FSDP2, whose units want one dtype. `ExpertParallel` is `Sharded`
for all but the routed experts: those stay whole on their ranks, and tokens travel to them (`exchange.py`). The model
meets a plan only through `MoE.exchange`.

Gradients are sums over ranks, never means: the loss is a sum, and one factor, 1 / supervised tokens of the step, is
applied by the optimiser. Every sum over ranks is made in float32 in the order of the ranks, so that two runs give the
same bits.

**Replicas.** With `replicas` above 1 FSDP2 shards over neighbouring ranks only, such as those of a node, and each group
of them has a copy: FSDP2's hybrid sharding. Gradients are reduced in float32 inside a group, by what travels as the
parameter's dtype, and FSDP2's own all-reduce adds those of the copies, in float32 too.

**Expert groups.** Neighbouring ranks: rank = group * n + place, so that a group lies in one node. The rank at place e
holds the experts e*E/n to (e+1)*E/n of every layer. Their gradients are complete without any sum, because all tokens of
the group came to them. With fewer ranks in a group than in the world every group has all experts, and the gradients of
the copies are added once a step, after all its passes: memory for speed, FSDP2 over the groups would gather them
again and again. A stack of experts is a DTensor of rows over (groups, places), so that reading, saving, exporting and
the optimiser find a rank's rows as they find FSDP2's.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate, Shard

from hymoe.engine.errors import UserError
from hymoe.engine.exchange import ExpertExchange
from hymoe.engine.parallel_wire import CountedAllGather, OrderedReduceScatter, Wire
from hymoe.engine.recipe import Parallel
from hymoe.model.moe import MoE
from hymoe.model.names import is_small
from hymoe.model.net import HybridLM

SIZES = (1, 2, 4, 8)  # of expert groups

T = TypeVar("T")


class Alone:
    """The plan of a single process: nothing is sharded, nothing is sent."""

    rank = 0
    world_size = 1
    group_size = 1  # ranks that share the experts

    def __init__(self, device: torch.device) -> None:
        """`device` is where everything lives."""
        self.device, self.wire = device, Wire()
        self._grads = _GradientSum()

    def shard(self, lm: HybridLM) -> HybridLM:
        """Spreads a model that is still on the meta device and gives it memory."""
        lm.to_empty(device=self.device)
        if lm.config.tie_word_embeddings:
            lm.head.weight = lm.embeddings.weight  # `to_empty` gives each name memory of its own
        return lm

    def collect_gradients(self, lm: HybridLM, last: bool) -> None:
        """Takes what a backward pass left in `.grad`; `last` of the step or not."""
        self._grads.take(lm, last)

    def gradients(self, lm: HybridLM) -> list[Tensor]:
        """This rank's part of the step's gradients, in the order of `lm.named_parameters()`; consumed by the call."""
        return self._grads.give(lm)

    def reshard(self, lm: HybridLM) -> None:
        """Frees what a forward pass without a backward pass has left gathered; parameters are the rank's rows again."""

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Elementwise sum of a small tensor, the same bits on every rank."""
        return values

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """Runs `work` on one rank and gives its result to all; a `UserError` in it is raised on all."""
        return work()

    def close(self) -> None:
        """Ends the process group, where there is one."""


class Sharded(Alone):
    """FSDP2 over all ranks, or over those of a replica."""

    def __init__(self, device: torch.device, replicas: int = 1, timeout_s: float = 1800.0) -> None:
        """Joins the process group that torchrun's environment describes.

        Args:
            device: where everything lives.
            replicas: copies of what FSDP2 shards; divides the world.
            timeout_s: of a collective.
        """
        super().__init__(device)
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.replicas = replicas
        shape, names = (self.world_size,), ("fsdp",)
        if replicas > 1:
            shape, names = (replicas, self.world_size // replicas), ("replica", "fsdp")
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)

    def shard(self, lm: HybridLM) -> HybridLM:
        """Wraps blocks, embedding, head and root; each rank allocates its own rows of dimension 0 only."""
        apart = {p for name, p in lm.named_parameters() if self._is_apart(name)}
        options: dict[str, Any] = {"mesh": self.mesh, "ignored_params": apart}
        if self.replicas > 1:  # copies' gradients are added in the dtype of the reduction
            options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for layer in lm.layers:
            fully_shard(layer, **options)
        if not lm.config.tie_word_embeddings:
            fully_shard(lm.embeddings, **options)
            # Used once, at the end of the forward pass, and first in the backward pass.
            fully_shard(lm.head, reshard_after_forward=False, **options)
            lm.embeddings.set_unshard_in_backward(False)  # its gradient does not need its weight
        # Tied: the one matrix belongs to the root, which stays gathered from embedding to loss.
        fully_shard(lm, **options)
        owner: nn.Module = lm if lm.config.tie_word_embeddings else lm.head
        for method in ("logits", "loss"):
            register_fsdp_forward_method(owner, method)
        for module in lm.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                module.set_custom_all_gather(CountedAllGather(self.wire))
                travels = lm.embeddings.weight.dtype
                module.set_custom_reduce_scatter(OrderedReduceScatter(self.wire, travels))
                if self.replicas > 1:
                    module.set_all_reduce_hook(self._count_all_reduce)
        return lm.to_empty(device=self.device)

    def _count_all_reduce(self, reduced: Tensor) -> None:
        """FSDP2's all-reduce over the copies, which `Wire` does not see, as a ring sends it."""
        away = 2 * (self.replicas - 1) * reduced.numel() * reduced.element_size()
        self.wire.sent["replicas"] += away // self.replicas

    @staticmethod
    def _is_apart(name: str) -> bool:
        """Whether FSDP2 leaves a parameter alone."""
        return is_small(name)

    def gradients(self, lm: HybridLM) -> list[Tensor]:
        """As for one process; the replicated small tensors are summed over the ranks here, in one flat exchange."""
        grads = super().gradients(lm)
        small = [
            g for (name, _), g in zip(lm.named_parameters(), grads, strict=True) if is_small(name)
        ]
        total = self.wire.sum_large(torch.cat([g.flatten() for g in small]))
        for grad, part in zip(small, total.split([g.numel() for g in small]), strict=True):
            grad.copy_(part.view_as(grad))
        return grads

    def reshard(self, lm: HybridLM) -> None:
        """See `Alone`; FSDP2 keeps the head (tied: the root) gathered after a forward pass."""
        for module in lm.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """All ranks' values are gathered and added in rank order, so that no algorithm choice of a library matters."""
        return self.wire.sum_small(values)

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """The result, or the message of a `UserError`, is broadcast."""
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = work()
            except UserError as error:
                outcome[1] = str(error)
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise UserError(outcome[1])
        return outcome[0]

    def close(self) -> None:
        """Destroys the process group."""
        dist.destroy_process_group()


class ExpertParallel(Sharded):
    """Whole experts on their ranks, all else as in `Sharded`; see the head of this file."""

    def __init__(
        self,
        device: torch.device,
        group_size: int,
        exchange: str = "gather",
        replicas: int = 1,
        timeout_s: float = 1800.0,
    ) -> None:
        """Joins the process group, and makes those of the experts.

        Args:
            device: where everything lives.
            group_size: ranks that share the experts; divides the world.
            exchange: gather or dedup.
            replicas: copies of all but the experts, see `Sharded`.
            timeout_s: of a collective.
        """
        super().__init__(device, replicas, timeout_s)
        self._kind, self.group_size = exchange, group_size
        timeout = timedelta(seconds=timeout_s)
        names = ("group", "place")
        shape = (self.world_size // group_size, group_size)
        self.experts_mesh: DeviceMesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        places = torch.arange(self.world_size).view(shape)
        # Every rank makes every group, in one order. The mesh's own would be the default one where there is one group.
        self._group = _mine([dist.new_group(r.tolist(), timeout) for r in places], places)
        self._hosts = _mine([dist.new_group(r.tolist(), timeout, "gloo") for r in places], places)
        self._copies = _mine([dist.new_group(r.tolist(), timeout) for r in places.T], places.T)

    def shard(self, lm: HybridLM) -> HybridLM:
        """As `Sharded`, with the routed experts of this rank as rows of a DTensor and the exchange in every layer.

        Raises:
            UserError: the experts cannot be shared equally.
        """
        size, total = self.group_size, lm.config.n_routed_experts
        if total % size:
            raise UserError(
                f"parallel.expert_parallel is {size}; expected a divisor of the model's {total} experts"
            )
        exchange = ExpertExchange(self._kind, self._group, self.wire, total)
        for layer in lm.layers:
            if isinstance(layer.mixer, MoE):
                layer.mixer.exchange = exchange
                for name, stack in list(layer.mixer.experts.named_parameters()):
                    setattr(layer.mixer.experts, name, self._spread_stack(stack))
        super().shard(lm)
        # Waiting for the device, as an exchange may, would keep FSDP2 from gathering the next block in time.
        for before, after in zip(lm.layers[:-1], lm.layers[1:], strict=True):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
        lm.register_forward_pre_hook(
            lambda _, args, kwargs: exchange.agree_on_tokens(
                self._hosts, _tokens(args[0] if args else kwargs["input_ids"])
            ),
            with_kwargs=True,
        )
        return lm

    def gradients(self, lm: HybridLM) -> list[Tensor]:
        """As `Sharded`; gradients of experts are summed over the groups, where there are several."""
        grads = super().gradients(lm)
        if self.group_size < self.world_size:
            for (name, _), grad in zip(lm.named_parameters(), grads, strict=True):
                if _is_expert(name):
                    grad.copy_(self.wire.sum_large(grad, self._copies))
        return grads

    @staticmethod
    def _is_apart(name: str) -> bool:
        return is_small(name) or _is_expert(name)

    def _spread_stack(self, stack: nn.Parameter) -> nn.Parameter:
        """(E, ...) on the meta device -> the same shape, of which this rank has E/n rows, still without memory."""
        own = stack.new_empty(len(stack) // self.group_size, *stack.shape[1:])
        placements = [Replicate(), Shard(0)]
        shape = {"shape": stack.shape, "stride": stack.stride()}
        return nn.Parameter(
            DTensor.from_local(own, self.experts_mesh, placements, run_check=False, **shape)
        )


def _mine(groups: list[dist.ProcessGroup], ranks: Tensor) -> dist.ProcessGroup:
    """Of groups with these ranks (a row each) the one that this rank is in."""
    return groups[int((ranks == dist.get_rank()).any(dim=1).nonzero())]


def _tokens(input_ids: Tensor | Sequence[Tensor]) -> list[int]:
    """Of each row that a model is called with."""
    return [len(input_ids)] if isinstance(input_ids, Tensor) else [len(ids) for ids in input_ids]


def _is_expert(name: str) -> bool:
    return ".mixer.experts." in name


class _GradientSum:
    """Adds the gradients of a step's backward passes.

    One, in which all micro-steps pass each block together (`model/rows.py`): its `.grad` is the step's gradient. More:
    a float32 accumulator of this rank's rows, because FSDP2's own rounds to the parameter's dtype each time.
    """

    def __init__(self) -> None:
        self._sums: list[Tensor] | None = None

    def take(self, lm: HybridLM, last: bool) -> None:
        if last and self._sums is None:
            return
        grads = [_local_gradient(name, p) for name, p in lm.named_parameters()]
        if self._sums is None:
            self._sums = [g.to(torch.float32, copy=True) for g in grads]
        else:
            for total, grad in zip(self._sums, grads, strict=True):
                total += grad
        lm.zero_grad(set_to_none=True)

    def give(self, lm: HybridLM) -> list[Tensor]:
        if self._sums is None:
            grads = [_local_gradient(name, p) for name, p in lm.named_parameters()]
            lm.zero_grad(set_to_none=True)
            return grads
        grads, self._sums = self._sums, None
        return grads


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a parameter or gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_gradient(name: str, parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError(f"{name} got no gradient: a part of the model was not in the loss")
    return local(parameter.grad)


def choose_expert_parallel(asked: str | int, world_size: int, num_experts: int) -> tuple[int, str]:
    """Resolves `parallel.expert_parallel`.

    Args:
        asked: auto, or the number of ranks that share the experts.
        world_size: all ranks.
        num_experts: of a layer; 0 for a model without routed experts.

    Returns:
        The number, and the reason in words for the log.

    Raises:
        UserError: ranks or experts cannot be divided that way.
    """
    if asked == "auto":
        fits = [n for n in SIZES if num_experts and not (world_size % n or num_experts % n)]
        best = max(fits, default=1)
        if best > 1:
            return (
                best,
                f"{best} ranks share the {num_experts} experts: tokens travel, experts stay",
            )
        return 1, "experts are sharded like all else"
    size = int(asked)
    if size == 1:
        return 1, "as asked"
    for what, number in (("ranks", world_size), ("experts", num_experts)):
        if not number or number % size:
            raise UserError(
                f"parallel.expert_parallel is {size}; expected a divisor of the {number} {what}"
            )
    return size, "as asked"


def choose_exchange(asked: str) -> str:
    """Resolves `parallel.exchange`: auto is dedup.

    `gather` never waits for the device, but sends 1.2 times (4 ranks) to 1.8 times (8) as much, and without knowing how
    many choices are for experts at hand it needs room for all of them: 7 GiB a rank for the real job on 4 ranks.
    """
    return "dedup" if asked == "auto" else asked


def resolve_experts(
    asked: Parallel, world_size: int, num_experts: int
) -> tuple[int, str, list[str]]:
    """How many ranks share the experts, by which exchange, and what to tell a person of it."""
    size, reason = choose_expert_parallel(asked.expert_parallel, world_size, num_experts)
    exchange = choose_exchange(asked.exchange)
    if size == 1:
        return size, exchange, []
    return size, exchange, [f"parallel.expert_parallel = {size}, exchange {exchange}: {reason}"]


def start(
    device: torch.device,
    world_size: int,
    expert_parallel: int = 1,
    exchange: str = "auto",
    replicas: int = 1,
) -> Alone:
    """The plan for a process of `world_size`.

    Args:
        device: where everything lives.
        world_size: all ranks.
        expert_parallel: ranks that share the experts, what `choose_expert_parallel` gave.
        exchange: auto, gather or dedup.
        replicas: copies of what FSDP2 shards.
    """
    if world_size == 1:
        return Alone(device)
    if expert_parallel == 1:
        return Sharded(device, replicas)
    return ExpertParallel(device, expert_parallel, choose_exchange(exchange), replicas)

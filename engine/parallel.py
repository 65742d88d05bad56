"""How a model is spread over the ranks, and how their gradients meet.

`Alone` is one process. `Sharded` is the simple plan: FSDP2 over all ranks, one unit a block, the embedding and the head
apart; the small float32 tensors are replicated outside FSDP2, whose units want one dtype. A plan that keeps whole
experts on a rank is a third class beside these two with the same methods; the model meets it only through
`MoE.exchange`.

Gradients are sums over ranks, never means: the loss is a sum, and one factor, 1 / supervised tokens of the step, is
applied by the optimiser. Every sum over ranks is made in float32 in the order of the ranks, so that two runs give the
same bits.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from hymoe.engine.errors import UserError
from hymoe.model.names import is_small
from hymoe.model.net import HybridLM

T = TypeVar("T")


class Alone:
    """The plan of a single process: nothing is sharded, nothing is sent."""

    rank = 0
    world_size = 1

    def __init__(self, device: torch.device) -> None:
        """`device` is where everything lives."""
        self.device = device
        self._grads = _GradientSum()

    def shard(self, lm: HybridLM) -> HybridLM:
        """Spreads a model that is still on the meta device and gives it memory."""
        return lm.to_empty(device=self.device)

    def collect_gradients(self, lm: HybridLM, last: bool) -> None:
        """Takes what a micro-step's backward pass left in `.grad`; `last` of the step or not."""
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
    """FSDP2 over all ranks."""

    def __init__(self, device: torch.device, timeout_s: float = 1800.0) -> None:
        """Joins the process group that torchrun's environment describes."""
        super().__init__(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.mesh = init_device_mesh(device.type, (self.world_size,), mesh_dim_names=("fsdp",))

    def shard(self, lm: HybridLM) -> HybridLM:
        """Wraps blocks, embedding, head and root; each rank allocates its own rows of dimension 0 only."""
        small = {p for name, p in lm.named_parameters() if is_small(name)}
        options: dict[str, Any] = {"mesh": self.mesh, "ignored_params": small}
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
                module.set_custom_reduce_scatter(OrderedReduceScatter())
        return lm.to_empty(device=self.device)

    def gradients(self, lm: HybridLM) -> list[Tensor]:
        """As for one process; the replicated small tensors are summed over the ranks here, in one flat exchange."""
        grads = super().gradients(lm)
        small = [
            g for (name, _), g in zip(lm.named_parameters(), grads, strict=True) if is_small(name)
        ]
        total = self.sum_over_ranks(torch.cat([g.flatten() for g in small]))
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
        gathered = values.new_empty(self.world_size * values.numel())
        _all_gather(gathered, values.flatten())
        return _sum_in_order(gathered.view(self.world_size, *values.shape))

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


class OrderedReduceScatter:
    """FSDP2's reduce-scatter as an all-to-all in the gradients' dtype and a float32 sum in rank order.

    The bits are those of a float32 reduce-scatter that adds in rank order, and half its bytes travel.
    """

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for FSDP2's copy-in or for the sum."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """`input_tensor` (n*shard,) of every rank -> `output_tensor` (shard,), the sum of this rank's parts.

        Raises:
            RuntimeError: FSDP2 asks for another operation than a sum, or for an asynchronous one.
        """
        if op != dist.ReduceOp.SUM or async_op:
            raise RuntimeError(
                f"expected a synchronous sum, FSDP2 asked for {op}, async_op={async_op}"
            )
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(_sum_in_order(received.view(dist.get_world_size(group), -1)))


# torch 2.13 renamed the operation and warns of the old name, which is the only one that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def _sum_in_order(parts: Tensor) -> Tensor:
    """(n, ...) -> (...), added one after another in float32 or wider."""
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total


class _GradientSum:
    """Adds the gradients of micro-steps.

    One micro-step: its `.grad` is the step's gradient. More: a float32 accumulator of this rank's rows, because FSDP2's
    own accumulation rounds to the parameter's dtype each time.
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


def start(device: torch.device, world_size: int) -> Alone:
    """The plan for a process of `world_size`."""
    return Sharded(device) if world_size > 1 else Alone(device)

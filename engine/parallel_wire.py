"""What a plan sends between ranks: collectives that count their bytes, and sums whose order is the ranks'.

`Wire.sent` holds the bytes that this rank has sent to other ranks, by purpose: `gather` (FSDP2's parameters), `reduce`
(FSDP2's gradients), `exchange` (tokens to experts and back), `replicas` (gradients of whole tensors that several ranks
hold), `figures` (small sums, such as the loss). What stays on the rank is not counted. `parallel_bytes.py` predicts it.

Sums over ranks are made here, in float32 or wider, one rank after another: a library that picks an algorithm by message
size or by timing cannot change a bit.
"""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

# torch 2.13 renamed the operation and warns of the old name, which is the only one that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Wire:
    """Collectives over process groups; one object a plan.

    Attributes:
        sent: purpose -> bytes that this rank has sent to others since a caller last cleared it.
    """

    def __init__(self) -> None:
        """Nothing is sent yet."""
        self.sent: Counter[str] = Counter()

    def all_gather(
        self, out: Tensor, x: Tensor, group: Any, purpose: str, is_async: bool = False
    ) -> Any:
        """`x` of every rank, in rank order, into `out`: (rows, ...) -> (n*rows, ...), contiguous.

        Returns:
            What to wait for where `is_async`, otherwise None.
        """
        self.sent[purpose] += (dist.get_world_size(group) - 1) * x.numel() * x.element_size()
        return _all_gather(out, x, group=group, async_op=is_async)

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        group: Any,
        purpose: str,
        *,
        out_rows: list[int] | None = None,
        x_rows: list[int] | None = None,
        is_async: bool = False,
    ) -> Any:
        """Rank r's part of `x` to rank r; contiguous.

        Args:
            out: (sum of out_rows, ...), gets the parts of all ranks in rank order.
            x: (sum of x_rows, ...).
            group: the ranks.
            purpose: key in `sent`.
            out_rows: rows from each rank; None: equal parts.
            x_rows: rows to each rank; None: equal parts.
            is_async: return what to wait for instead of waiting.
        """
        if x_rows is None:
            n = dist.get_world_size(group)
            values = x.numel() // n * (n - 1)
        else:
            away = sum(x_rows) - x_rows[dist.get_rank(group)]
            values = away * x[:1].numel()
        self.sent[purpose] += values * x.element_size()
        return dist.all_to_all_single(out, x, out_rows, x_rows, group=group, async_op=is_async)

    def sum_small(self, values: Tensor, group: Any = None, purpose: str = "figures") -> Tensor:
        """Elementwise sum over the ranks, float32 or wider: all values travel to all ranks in one message."""
        n = dist.get_world_size(group)
        gathered = values.new_empty(n * values.numel())
        self.all_gather(gathered, values.flatten(), group, purpose)
        return sum_in_order(gathered.view(n, *values.shape))

    def sum_large(self, values: Tensor, group: Any = None, purpose: str = "replicas") -> Tensor:
        """Elementwise sum over the ranks in the dtype of `values`: each rank adds a part of it and sends that round."""
        n = dist.get_world_size(group)
        part = -(-values.numel() // n)
        flat = functional.pad(values.flatten(), (0, n * part - values.numel()))
        received = torch.empty_like(flat)
        self.all_to_all(received, flat, group, purpose)
        mine = sum_in_order(received.view(n, part)).to(values.dtype)
        self.all_gather(received, mine, group, purpose)
        return received[: values.numel()].view_as(values)


def sum_in_order(parts: Tensor) -> Tensor:
    """(n, ...) -> (...), added one after another in float32 or wider."""
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total


class CountedAllGather:
    """FSDP2's all-gather, counted."""

    def __init__(self, wire: Wire) -> None:
        """`wire` counts."""
        self._wire = wire

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2's buffer for the gathered parameters."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """`input_tensor` (shard,) of every rank -> `output_tensor` (n*shard,)."""
        return self._wire.all_gather(output_tensor, input_tensor, group, "gather", async_op)


class OrderedReduceScatter:
    """FSDP2's reduce-scatter as an all-to-all in the gradients' dtype and a float32 sum in rank order.

    The bits are those of a float32 reduce-scatter that adds in rank order, and half its bytes travel.
    """

    def __init__(self, wire: Wire, travels: torch.dtype) -> None:
        """`wire` counts; `travels` is the parameters' dtype, which gradients have before FSDP2 widens them."""
        self._wire, self._travels = wire, travels

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
        narrow = input_tensor.to(self._travels)  # exact
        received = torch.empty_like(narrow)
        self._wire.all_to_all(received, narrow, group, "reduce")
        output_tensor.copy_(sum_in_order(received.view(dist.get_world_size(group), -1)))

"""What a plan will send: bytes of one rank and step, by the purposes of `parallel_wire.Wire.sent`; pure arithmetic.

FSDP2 gathers a block's parameters twice a pass (forward, backward), embedding and head once; it reduces gradients once
a pass, whatever the number of micro-steps that go through the blocks together in it. A rank sends its rows of a
parameter, padded to those of the first rank, to each of the others. Tokens travel to their experts and back, in each
layer and micro-step:

    inputs spread, sums collected, their gradients spread, inputs' gradients collected: Din values of the model's dtype
    routing weights spread, their gradients collected: K float32
    ids spread: K int32

Where a MoE block runs again (`keep` = inputs) inputs and weights are spread a second time (and, where a latent
projection needs them, the sums collected); ids and the numbers of rows are kept.
"""

import math

from hymoe.engine.errors import UserError
from hymoe.model.config import HybridConfig
from hymoe.model.cost import DTYPE_BYTES
from hymoe.model.names import by_parameter, is_small, parameter_shape, tensor_specs

WIDE = 4  # bytes of float32 and int32


def bytes_per_step(
    config: HybridConfig,
    *,
    world_size: int,
    expert_parallel: int,
    exchange: str,
    micro_tokens: int,
    micro_steps: int,
    dtype: str,
    keep: str,
    copies: float | None = None,
    passes: int = 1,
    replicas: int = 1,
) -> dict[str, float]:
    """Predicts what one rank sends in one step; a mean over the ranks where the routing decides.

    Args:
        config: the model.
        world_size: all ranks.
        expert_parallel: ranks that share the experts; 1: FSDP2 alone.
        exchange: gather or dedup.
        micro_tokens: tokens of a rank in one micro-step; for gather the most that a rank of its group has.
        micro_steps: micro-steps of one step.
        dtype: of weights and activations: bfloat16 or float32.
        keep: inputs, acts or all; see `train.keep`.
        copies: other ranks that a token goes to under dedup; None: `expected_copies`.
        passes: in how many the micro-steps are taken, see `train.micro_steps_together`.
        replicas: copies of what FSDP2 shards.

    Returns:
        Purpose -> bytes. Small sums such as the loss are left out.

    Raises:
        UserError: an exchange that does not exist.
    """
    if exchange not in ("gather", "dedup"):
        raise UserError(f"parallel.exchange is {exchange!r}; expected gather or dedup")
    n, size = world_size, DTYPE_BYTES[dtype]
    shards = n // replicas
    sent = {"gather": 0.0, "reduce": 0.0, "replicas": 0.0, "exchange": 0.0}
    specs, small = tensor_specs(config), 0
    for name, files in by_parameter(specs).items():
        shape = parameter_shape(specs, files)
        if name.endswith("e_score_correction_bias"):
            continue  # a buffer
        if is_small(name):
            small += math.prod(shape)
        elif ".experts." in name and expert_parallel > 1:
            groups = n // expert_parallel
            part = -(-math.prod(shape) // expert_parallel // groups)
            wire = size if passes == 1 else WIDE
            sent["replicas"] += 2 * (groups - 1) * part * wire
        else:
            rows = -(-shape[0] // shards) * math.prod(shape[1:]) * passes
            away = (shards - 1) * rows * size
            sent["gather"] += away * (2 if name.startswith("layers.") else 1)
            sent["reduce"] += away
            sent["replicas"] += 2 * (replicas - 1) / replicas * rows * WIDE
    sent["replicas"] += 2 * (n - 1) * -(-small // n) * WIDE
    if expert_parallel > 1:
        layer = _exchange(config, expert_parallel, exchange, micro_tokens, size, keep, copies)
        sent["exchange"] = micro_steps * config.pattern.count("E") * layer
        if exchange == "gather":  # how many tokens each rank has
            sent["exchange"] += micro_steps * (expert_parallel - 1) * 8
    return sent


def _exchange(
    config: HybridConfig,
    ranks: int,
    exchange: str,
    tokens: int,
    size: int,
    keep: str,
    copies: float | None,
) -> float:
    """Bytes of one layer and micro-step."""
    top_k = config.num_experts_per_tok
    if exchange == "gather":
        rows, numbers = (ranks - 1) * tokens, 0
    else:
        if copies is None:
            copies = expected_copies(config.n_routed_experts, top_k, ranks)
        rows, numbers = copies * tokens, (ranks - 1) * 16
    wide, narrow = 4, 3  # passes of Din values, of K numbers
    if keep == "inputs":
        wide += 1 if config.moe_latent_size is None else 2
        narrow += 1
    return rows * (wide * config.expert_input * size + narrow * top_k * WIDE) + numbers


def expected_copies(num_experts: int, top_k: int, ranks: int) -> float:
    """Other ranks that hold at least one of a token's experts, in the mean over all choices of K among E."""
    elsewhere = math.comb(num_experts - num_experts // ranks, top_k)
    return (ranks - 1) * (1 - elsewhere / math.comb(num_experts, top_k))

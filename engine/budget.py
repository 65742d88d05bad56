"""Memory of one rank before launch, without a GPU: by part, by phase, and the peak.

The peak is the largest of the phases, not the sum of the parts, which would refuse runs that fit:

    head     the end of the forward pass: head and cross-entropy, all block inputs alive, and the unit
             of the last block still gathered
    top      the backward pass of the last block: all block inputs alive, gradients alive only where
             micro-steps accumulate them
    bottom   the backward pass of the first block: gradients complete, block inputs gone
    update   the optimiser: state and gradients, no activations

The plan is FSDP2 with one unit a block, embedding and head apart, sharded by rows, small tensors
replicated in float32. A rank gathers a unit, computes its gradients unsharded, and reduces them
through a buffer in `reduce_dtype` into its shard of them. With several micro-steps the sum of the
gradients is float32, 4 bytes a local value, beside the sharded gradient of the current micro-step.

These are predictions. On a GPU 4 % and 1.5 GiB are added for context, communication and
fragmentation; operations are taken as fused (`model/cost.py`), so the plain torch versions that run on
a CPU need more than their line says.
"""

from dataclasses import dataclass

from hymoe.engine.errors import UserError
from hymoe.model.config import HybridConfig
from hymoe.model.cost import (
    DTYPE_BYTES,
    activation_bytes,
    count_parameters,
    unit_parameters,
    weight_bytes,
)

GIB = 2**30
GPU_MARGIN_SHARE = 0.04  # fragmentation and what nobody counted
GPU_MARGIN_BYTES = GIB * 3 // 2  # CUDA context, NCCL's buffers
CE_CHUNK_ROWS = 4096  # rows of logits at a time in the fused loss
SMALL_COPIES = 4  # weight, gradient, two moments, all float32


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Bytes of one rank. `parts` is what each thing needs while it is alive, `phases` what is alive together."""

    parts: dict[str, int]
    phases: dict[str, int]  # with the margin
    margin: int  # in the largest phase
    checkpoint: int  # on disk, all ranks: weights, moments and remainder of the whole model
    export: int  # on disk, all ranks: the folder in HF format

    @property
    def peak(self) -> int:
        """The most that one rank holds at any time."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        """The phase that decides."""
        return max(self.phases, key=self.phases.__getitem__)

    def rows(self) -> list[tuple[str, str, int]]:
        """Lines for a table: (kind, name, bytes), kind one of part, phase, peak, disk."""
        rows = [("part", name, size) for name, size in self.parts.items() if size]
        rows += [("phase", name, size) for name, size in self.phases.items()]
        rows.append(("peak", self.peak_phase, self.peak))
        return [*rows, ("disk", "checkpoint", self.checkpoint), ("disk", "export", self.export)]


def estimate(
    config: HybridConfig,
    *,
    world_size: int,
    micro_tokens: int,
    micro_steps: int,
    dtype: str,
    rounding: str,
    recompute: bool,
    reduce_dtype: str = "float32",
    on_gpu: bool = True,
) -> Budget:
    """Estimates what one rank needs to train `config`.

    Args:
        config: the model.
        world_size: ranks that share the weights (with replicas: ranks of one replica).
        micro_tokens: tokens of a rank in one micro-step.
        micro_steps: micro-steps in one step.
        dtype: of weights, gradients and moments that are not small: bfloat16 or float32.
        rounding: exact (2 bytes more for each bfloat16 value), stochastic or nearest.
        recompute: whole blocks run again in the backward pass; else all that it reads is kept.
        reduce_dtype: of the buffer that gradients are reduced through.
        on_gpu: add the margin of a CUDA device.

    Raises:
        UserError: a count below 1, or a dtype or a rounding that does not exist; `auto` is resolved by
            `choose_rounding` first.
    """
    _check(world_size, micro_tokens, micro_steps, dtype, rounding, reduce_dtype)
    parts = _state(config, world_size, dtype, rounding, micro_steps)
    parts |= _transient(config, world_size, dtype, reduce_dtype)
    parts |= _activations(config, micro_tokens, dtype, recompute)
    phases = _phases(parts)
    share, extra = (GPU_MARGIN_SHARE, GPU_MARGIN_BYTES) if on_gpu else (0.0, 0)
    margined = {name: int(size * (1 + share)) + extra for name, size in phases.items()}
    counts = count_parameters(config)
    large = counts.total - counts.small
    state = 3 * DTYPE_BYTES[dtype] + (2 if rounding == "exact" and dtype == "bfloat16" else 0)
    return Budget(
        parts=parts,
        phases=margined,
        margin=max(margined.values()) - max(phases.values()),
        checkpoint=large * state + counts.small * 12,
        export=counts.total * DTYPE_BYTES[dtype],
    )


def _check(
    world_size: int, micro_tokens: int, micro_steps: int, dtype: str, rounding: str, wire: str
) -> None:
    counts = {"world_size": world_size, "micro_tokens": micro_tokens, "micro_steps": micro_steps}
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"{name} = {value}; expected 1 or more")
    for name, value in {"dtype": dtype, "reduce_dtype": wire}.items():
        if value not in ("bfloat16", "float32"):
            raise UserError(f"{name} = {value!r}; expected bfloat16 or float32")
    if rounding not in ("exact", "stochastic", "nearest"):
        raise UserError(f"rounding = {rounding!r}; expected exact, stochastic or nearest")


def _state(
    config: HybridConfig, world_size: int, dtype: str, rounding: str, micro_steps: int
) -> dict[str, int]:
    """What lives through the whole run, and the gradients."""
    families = weight_bytes(config, dtype)
    small = families.pop("small")
    weights = -(-sum(families.values()) // world_size)
    local = weights // DTYPE_BYTES[dtype]  # values
    return {
        "weights": weights,
        "moments": 2 * weights,
        "exact remainder": 2 * local if rounding == "exact" and dtype == "bfloat16" else 0,
        "small tensors, replicated": SMALL_COPIES * small,
        "gradients": weights,
        "gradient sum over micro-steps": 4 * local if micro_steps > 1 else 0,
    }


def _transient(
    config: HybridConfig, world_size: int, dtype: str, reduce_dtype: str
) -> dict[str, int]:
    """Buffers of the largest unit and of the head while they are computed."""
    size, wire = DTYPE_BYTES[dtype], DTYPE_BYTES[reduce_dtype]
    head = config.vocab_size * config.hidden_size
    if world_size == 1:  # nothing is gathered or reduced; the head's gradient is summed in float32
        return {"gathered unit": 0, "unit gradients and reduction": 0, "head in use": 4 * head}
    unit = max(unit_parameters(config, kind) for kind in set(config.pattern))
    return {
        "gathered unit": size * unit,
        "unit gradients and reduction": unit * (size + wire) + unit * wire // world_size,
        # Weight, the gather's buffer, gradient in float32 over the chunks and in the weight's dtype.
        "head in use": head * (3 * size + 4),
    }


def _activations(
    config: HybridConfig, micro_tokens: int, dtype: str, recompute: bool
) -> dict[str, int]:
    size = DTYPE_BYTES[dtype]
    blocks = {kind: activation_bytes(config, kind, dtype) for kind in set(config.pattern)}
    saved = sum(blocks[kind].saved for kind in config.pattern) if not recompute else 0
    rows = min(micro_tokens, CE_CHUNK_ROWS)
    return {
        "block inputs": len(config.pattern) * size * config.hidden_size * micro_tokens,
        "kept activations": saved * micro_tokens,
        "block working set": max(b.working for b in blocks.values()) * micro_tokens,
        "logits chunk": rows * config.vocab_size * size + 12 * micro_tokens,
    }


def _phases(parts: dict[str, int]) -> dict[str, int]:
    """What is alive together; the part names are those of the functions above."""

    def together(*names: str) -> int:
        return sum(parts[name] for name in names)

    always = together(
        "weights",
        "moments",
        "exact remainder",
        "small tensors, replicated",
        "gradient sum over micro-steps",
    )
    kept = together("block inputs", "kept activations")
    unit = together("gathered unit", "unit gradients and reduction")
    return {
        "head": always + kept + together("gathered unit", "head in use", "logits chunk"),
        "top": always + kept + unit + parts["block working set"],
        "bottom": always + unit + together("gradients", "block working set"),
        "update": always + parts["gradients"],
    }


def choose_rounding(
    config: HybridConfig,
    device_bytes: int,
    *,
    world_size: int,
    micro_tokens: int,
    micro_steps: int,
    dtype: str,
    recompute: bool,
    reduce_dtype: str = "float32",
    on_gpu: bool = True,
) -> tuple[str, str]:
    """Resolves `rounding = "auto"`: exact where the estimate fits into `device_bytes`, else stochastic.

    Args:
        config: the model.
        device_bytes: memory that one rank may use.
        world_size: see `estimate`, like the rest.
        micro_tokens: see `estimate`.
        micro_steps: see `estimate`.
        dtype: see `estimate`.
        recompute: see `estimate`.
        reduce_dtype: see `estimate`.
        on_gpu: see `estimate`.

    Returns:
        The rounding, and the reason in words for the log.
    """
    if dtype == "float32":
        return "exact", "float32 weights hold every update without a remainder"
    peaks = {
        rounding: estimate(
            config,
            world_size=world_size,
            micro_tokens=micro_tokens,
            micro_steps=micro_steps,
            dtype=dtype,
            rounding=rounding,
            recompute=recompute,
            reduce_dtype=reduce_dtype,
            on_gpu=on_gpu,
        ).peak
        for rounding in ("exact", "stochastic")
    }
    needs = f"exact rounding needs {peaks['exact'] / GIB:.1f} GiB of {device_bytes / GIB:.1f} GiB"
    if peaks["exact"] <= device_bytes:
        return "exact", f"{needs}: it fits"
    needs += f": it does not fit; stochastic needs {peaks['stochastic'] / GIB:.1f} GiB"
    if peaks["stochastic"] > device_bytes:
        needs += ", which does not fit either"
    return "stochastic", needs

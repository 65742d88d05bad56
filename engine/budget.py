"""Memory of one rank before launch, without a GPU: by part, by phase, and the peak; and whether it fits.

The peak is the largest of the phases, not the sum of the parts, which would refuse runs that fit; `budget_walk.py`
walks a step and says what is alive together. What lives through the whole run is counted here:

    weights, moments     this rank's rows; of the routed experts those that stay here, where tokens travel
    exact remainder      2 bytes beside each BF16 value
    small tensors        float32 on every rank: weight, gradient, two moments
    gradient sum         of several passes: 4 bytes a value of this rank, beside the current one's gradients

These are predictions. On a GPU 4 % and 1.5 GiB are added for context, communication and fragmentation.
`docs/memory.md` does the sums of the real job by hand.
"""

import math
from dataclasses import dataclass, replace

from hymoe.engine.budget_walk import PHASES, Shape, units, walk
from hymoe.engine.errors import UserError
from hymoe.engine.parallel_bytes import expected_copies
from hymoe.model.activations import Received
from hymoe.model.config import HybridConfig
from hymoe.model.cost import DTYPE_BYTES, count_parameters

GIB = 2**30
GPU_MARGIN_SHARE = 0.04  # fragmentation and what nobody counted
GPU_MARGIN_BYTES = GIB * 3 // 2  # CUDA context, NCCL's buffers
SMALL_COPIES = 4  # weight, gradient, two moments, all float32
LOAD_SKEW = (
    1.3  # tokens of the busiest rank over the mean, where the routing decides how many it gets
)
KEEPS = ("all", "acts", "inputs")  # from the most memory to the least


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What the memory of a rank depends on.

    Attributes:
        config: the model.
        world_size: all ranks.
        micro_tokens: tokens of a rank in one micro-step.
        micro_steps: micro-steps of one step.
        dtype: of weights, gradients and moments that are not small: bfloat16 or float32.
        rounding: exact (2 bytes more for each bfloat16 value), stochastic or nearest.
        keep: what the backward pass finds: all | acts (MoE blocks keep what they read, the others run again) | inputs.
        expert_parallel: ranks that share the experts; 1: every rank gathers every expert.
        exchange: gather or dedup.
        replicas: copies of what FSDP2 shards.
        together: micro-steps that pass each block together; 0: all of a step.
        implementation: fused, as on a GPU, or torch, as on a CPU.
        load_skew: tokens of the busiest rank over the mean, where the routing decides.
    """

    config: HybridConfig
    world_size: int
    micro_tokens: int
    micro_steps: int
    dtype: str
    rounding: str
    keep: str
    expert_parallel: int = 1
    exchange: str = "gather"
    replicas: int = 1
    together: int = 0
    implementation: str = "fused"
    load_skew: float = LOAD_SKEW

    def check(self) -> None:
        """Refuses what does not exist.

        Raises:
            UserError: a count below 1, or a word that is none of its choices; `auto` is resolved before.
        """
        for name in ("world_size", "micro_tokens", "micro_steps", "expert_parallel"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)}; expected 1 or more")
        if self.together < 0:
            raise UserError(f"together = {self.together}; expected 0 or more")
        choices = {
            "dtype": ("bfloat16", "float32"),
            "rounding": ("exact", "stochastic", "nearest"),
            "keep": KEEPS,
            "exchange": ("gather", "dedup"),
            "implementation": ("fused", "torch"),
        }
        for name, words in choices.items():
            if getattr(self, name) not in words:
                raise UserError(f"{name} = {getattr(self, name)!r}; expected {', '.join(words)}")
        if self.world_size % self.expert_parallel:
            raise UserError(
                f"expert_parallel = {self.expert_parallel}; expected a divisor of {self.world_size} ranks"
            )

    @property
    def shards(self) -> int:
        """Ranks that FSDP2 spreads a copy over."""
        return self.world_size // self.replicas

    @property
    def rows(self) -> int:
        """Micro-steps of one forward and backward pass."""
        return min(self.together or self.micro_steps, self.micro_steps)

    @property
    def passes(self) -> int:
        """Forward and backward passes of a step."""
        return -(-self.micro_steps // self.rows)

    @property
    def received(self) -> Received | None:
        """What the busiest rank gets where tokens travel."""
        ranks, tokens = self.expert_parallel, self.micro_tokens
        if ranks == 1 or "E" not in self.config.pattern:
            return None
        top_k = self.config.num_experts_per_tok
        if self.exchange == "gather":
            rows, sent = ranks * tokens + 1, 0.0
        else:
            sent = tokens * (1 + expected_copies(self.config.n_routed_experts, top_k, ranks))
            rows = min(self.load_skew * sent, ranks * tokens) + 1
        # With `gather` a GPU is not asked how many choices are for experts at hand: there is room for all of them.
        is_known = self.exchange == "dedup" or self.implementation == "torch"
        room = (self.load_skew * tokens if is_known else rows) * top_k
        return Received(rows=rows, choices=room, sent=sent, ranks=ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Bytes. `parts` is what each thing needs at the peak of one phase or another, `phases` what is alive together."""

    parts: dict[str, int]
    phases: dict[str, int]  # with the margin
    margin: int  # in the largest phase
    host: int  # of one rank: the copy of its state that a background save makes
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
        """Lines for a table: (kind, name, bytes), kind one of part, phase, peak, host, disk."""
        rows = [("part", name, size) for name, size in self.parts.items() if size]
        rows += [("phase", name, size) for name, size in self.phases.items()]
        rows += [("peak", self.peak_phase, self.peak), ("host", "copy of the state", self.host)]
        return [*rows, ("disk", "saved state", self.checkpoint), ("disk", "export", self.export)]


def estimate(job: Job, *, on_gpu: bool = True) -> Budget:
    """Estimates what one rank needs.

    Args:
        job: what is trained, and how.
        on_gpu: add the margin of a CUDA device.

    Raises:
        UserError: see `Job.check`.
    """
    job.check()
    state = state_parts(job)
    peaks = walk(
        Shape(
            config=job.config, world_size=job.shards, expert_parallel=job.expert_parallel,
            tokens=job.micro_tokens, together=job.rows, passes=job.passes, dtype=job.dtype,
            keep=job.keep, implementation=job.implementation, received=job.received,
        )
    )  # fmt: skip
    always = sum(state.values())
    phases = {name: always + peaks[name].size for name in PHASES if name in peaks}
    passing = {name for peak in peaks.values() for name in peak.parts}
    parts = state | {
        name: max(peak.parts.get(name, 0) for peak in peaks.values()) for name in sorted(passing)
    }
    share, extra = (GPU_MARGIN_SHARE, GPU_MARGIN_BYTES) if on_gpu else (0.0, 0)
    margined = {name: int(size * (1 + share)) + extra for name, size in phases.items()}
    counts = count_parameters(job.config)
    saved = 3 * DTYPE_BYTES[job.dtype] + (2 if _has_remainder(job) else 0)
    small = state["small tensors, replicated"] * (SMALL_COPIES - 1) // SMALL_COPIES
    return Budget(
        parts={name: int(size) for name, size in parts.items()},
        phases=margined,
        margin=max(margined.values()) - int(max(phases.values())),
        host=sum(state[name] for name in ("weights", "moments", "exact remainder")) + small,
        checkpoint=(counts.total - counts.small) * saved + counts.small * 12,
        export=counts.total * DTYPE_BYTES[job.dtype],
    )


def _has_remainder(job: Job) -> bool:
    return job.rounding == "exact" and job.dtype == "bfloat16"


def state_parts(job: Job) -> dict[str, int]:
    """What lives through the whole run: part -> bytes of one rank, the first and so never the smallest."""
    counts = count_parameters(job.config)
    found = units(job.config, job.shards, job.expert_parallel)
    values = sum(found[kind].own + found[kind].stay for kind in job.config.pattern)
    values += sum(found[key].own for key in ("embedding", "head") if key in found)
    weights, trained = values * DTYPE_BYTES[job.dtype], counts.small - counts.frozen
    return {
        "weights": weights,
        "moments": 2 * weights,
        "exact remainder": 2 * values if _has_remainder(job) else 0,
        "small tensors, replicated": 4 * (SMALL_COPIES * trained + counts.frozen),
        "gradient sum over passes": 4 * (values + trained) if job.passes > 1 else 0,
    }


def choose_rounding(job: Job, device_bytes: int, *, on_gpu: bool = True) -> tuple[str, str]:
    """Resolves `rounding = "auto"`: exact where the estimate fits into `device_bytes`, else stochastic.

    Args:
        job: its rounding does not count.
        device_bytes: memory that one rank may use.
        on_gpu: see `estimate`.

    Returns:
        The rounding, and the reason in words for the log.
    """
    if job.dtype == "float32":
        return "exact", "float32 weights hold every update without a remainder"
    peaks = {
        rounding: estimate(replace(job, rounding=rounding), on_gpu=on_gpu).peak
        for rounding in ("exact", "stochastic")
    }
    needs = f"exact rounding needs {gib(peaks['exact'])} of {gib(device_bytes)} GiB"
    if peaks["exact"] <= device_bytes:
        return "exact", f"{needs}: it fits"
    needs += f": it does not fit; stochastic needs {gib(peaks['stochastic'])} GiB"
    if peaks["stochastic"] > device_bytes:
        needs += ", which does not fit either"
    return "stochastic", needs


def choose_keep(job: Job, device_bytes: int, *, on_gpu: bool = True) -> tuple[str, str]:
    """Resolves `keep = "auto"`: the most that fits into `device_bytes`, in the order all, acts, inputs.

    Returns:
        What is kept, and the reason in words for the log.
    """
    said = []
    for keep in KEEPS:
        peak = estimate(replace(job, keep=keep), on_gpu=on_gpu).peak
        said.append(f"{keep} needs {gib(peak)}")
        if peak <= device_bytes:
            break
    return keep, f"{', '.join(said)} of {gib(device_bytes)} GiB"


def verdict(budget: Budget, job: Job, device_bytes: int, *, on_gpu: bool = True) -> str:
    """One line: whether it fits, what decides, and what could be changed where it does not."""
    peak = f"{gib(budget.peak)} of {gib(device_bytes)} GiB"
    if budget.peak <= device_bytes:
        spare = gib(device_bytes - budget.peak)
        return f"fits: {peak} a rank at the most ({budget.peak_phase}), {spare} GiB to spare"
    part = max(budget.parts, key=budget.parts.__getitem__)
    largest = f"the largest part is {part} ({gib(budget.parts[part])})"
    return f"does not fit: needs {peak}; {largest}; {_advice(job, device_bytes, on_gpu)}"


def _advice(job: Job, device_bytes: int, on_gpu: bool) -> str:
    """The smallest change of the recipe after which it fits."""
    half = job.micro_tokens // 2
    changes = {
        "train.micro_steps_together = 1": {"together": 1},
        "train.keep = inputs": {"keep": "inputs"},
        "optim.rounding = stochastic": {"rounding": "stochastic"},
        "both of train.keep = inputs and optim.rounding = stochastic": {
            "keep": "inputs", "rounding": "stochastic",
        },
        f"train.keep = inputs, optim.rounding = stochastic and data.micro_tokens = {half}": {
            "keep": "inputs", "rounding": "stochastic", "micro_tokens": half,
        },
    }  # fmt: skip
    for words, change in changes.items():
        changed = replace(job, **change)
        if changed != job and half and estimate(changed, on_gpu=on_gpu).peak <= device_bytes:
            return f"try {words}"
    ranks = job.world_size
    while ranks < 64:
        ranks *= 2
        shared = math.gcd(8, ranks) if job.expert_parallel > 1 else 1
        many = replace(
            job, keep="inputs", rounding="stochastic", world_size=ranks, expert_parallel=shared,
            exchange="dedup" if shared > 4 else job.exchange,
        )  # fmt: skip
        if estimate(many, on_gpu=on_gpu).peak <= device_bytes:
            return f"try {ranks} ranks"
    return "no number of ranks of one node would do: try a smaller model or data.micro_tokens"


def gib(size: float) -> str:
    """Bytes as GiB with one decimal."""
    return f"{size / GIB:.1f}"

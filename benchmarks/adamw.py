"""One AdamW step over a rank's shards: ours in its three roundings against torch's fused and foreach AdamW and a copy.

The step moves memory, so the floor is the bytes that no implementation can do without: weight, gradient and two
moments read, three of them written, 14 bytes a BF16 parameter; 18 where an exact master's remainder is read and written
too. The copy moves as many bytes, half read and half written: what the machine's memory gives without arithmetic.
torch's AdamW rounds BF16 weights and moments to nearest: a peer for speed, not for what survives of an update.

Arithmetic, from the machine code for sm_90 (no machine was at hand): 42 instructions an element for nearest, 48 exact,
56 stochastic, 60 with a stochastic second moment (62 exact); 7.9e9 parameters on 132 SMs at 1.755 GHz, 128 threads'
instructions a clock each: 11 to 16 ms, beside 25.7 ms of memory at 4.3 TB/s, 33 exact.

python benchmarks/adamw.py                 on a GPU: shards of 4 ranks, all candidates
python benchmarks/adamw.py --device cpu    smaller shards, torch versions only
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness
from benchmarks.shapes import CONV, F_SHARED, PROJECTED, D, E, F, H, P, V, W
from hymoe.kernels.adamw import ROUNDINGS, adamw_step, adamw_step_ref

RANKS = 4
LAYERS = 6  # of 23: 2.2e9 parameters, so that two states of torch's fit beside ours
BETA1, BETA2S, EPS = (
    0.9,
    (0.95, 0.999),
    1e-8,
)  # below and above the bound for a stochastic second moment
BF16, F32 = torch.bfloat16, torch.float32
COPY_BYTES = 1 << 30  # of one copy; the step's bytes are a number of these

Step = Callable[[harness.Lap], None]


def shapes(layers: int, divide: int = 1) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Local shapes of one rank and their dtypes: Mamba and MoE layers, embedding and head; dims over `divide`."""
    layer = [
        ((E // RANKS, F, D), BF16),
        ((E // RANKS, D, F), BF16),
        ((F_SHARED // RANKS, D), BF16),
        ((D // RANKS, F_SHARED), BF16),
        ((PROJECTED // RANKS, D), BF16),
        ((D // RANKS, H * P), BF16),
        ((CONV // RANKS, W), BF16),
        ((E, D), F32),
        *(((n,), F32) for n in (D, D, H * P, CONV, H, H, H)),
    ]
    whole = [((V // RANKS, D), BF16)] * 2 + layer * layers
    return [(tuple(-(-n // divide) for n in shape), dtype) for shape, dtype in whole]


@dataclass
class State:
    """What a step works on; the roundings take turns on it."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    remainders: list[Tensor | None]
    count: Tensor
    factor: Tensor

    @classmethod
    def make(cls, kinds: list[tuple[tuple[int, ...], torch.dtype]], device: str) -> "State":
        """Normal weights and gradients, moments of zero."""
        normal = lambda shape, dtype: torch.randn(shape, dtype=dtype, device=device)  # noqa: E731
        params = [normal(shape, dtype).mul_(0.02) for shape, dtype in kinds]
        return cls(
            params,
            [normal(shape, dtype) for shape, dtype in kinds],
            [torch.zeros_like(p) for p in params],
            [torch.zeros_like(p) for p in params],
            [torch.zeros_like(p, dtype=torch.int16) if p.dtype == BF16 else None for p in params],
            torch.zeros((), dtype=torch.int64, device=device),
            torch.ones((), device=device),
        )

    def step(
        self,
        rounding: str,
        beta2: float,
        function: Callable[..., None] = adamw_step,
        **kernels: str,
    ) -> None:
        """One step, with weight decay on every second tensor."""
        function(
            self.params,
            self.grads,
            self.exp_avg,
            self.exp_avg_sq,
            remainders=self.remainders if rounding == "exact" else None,
            keys=list(range(len(self.params))),
            offsets=[0] * len(self.params),
            weight_decays=[0.1 * (i % 2) for i in range(len(self.params))],
            lr=1e-4,
            beta1=BETA1,
            beta2=beta2,
            eps=EPS,
            step=self.count,
            clip_factor=self.factor,
            seed=4242,
            rounding=rounding,
            **kernels,
        )

    def floor_bytes(self, rounding: str) -> int:
        """Read and written by a step."""
        per_element = {F32: 28, BF16: 18 if rounding == "exact" else 14}
        return sum(p.numel() * per_element[p.dtype] for p in self.params)


def record() -> None:
    """Every kind of launch on meta tensors of the real shapes, and of sizes that no vector divides."""
    odd = [((1001,), BF16), ((1001,), F32)]
    for rounding in ROUNDINGS:
        for beta2 in BETA2S:
            State.make(shapes(1), "meta").step(rounding, beta2, kernels="triton")
    State.make(odd, "meta").step("exact", BETA2S[0], kernels="triton")
    State.make(odd, "meta").step("stochastic", BETA2S[1], kernels="triton")
    wide = State.make(shapes(1), "meta")  # gradients that were added up in float32
    wide.grads = [g.float() for g in wide.grads]
    wide.step("exact", BETA2S[0], kernels="triton")


def gate(device: str, kernels: str) -> None:
    """Asserts the reference's bits on small shards, in every rounding."""
    for rounding in ROUNDINGS:
        for beta2 in BETA2S:
            found = State.make(shapes(1, 48), device)
            right = State(*(_copies(column) for column in vars(found).values()))
            for _ in range(2):
                found.step(rounding, beta2, kernels=kernels)
                right.step(rounding, beta2, adamw_step_ref)
            for column in ("params", "exp_avg", "exp_avg_sq", "remainders"):
                for a, b in zip(getattr(found, column), getattr(right, column), strict=True):
                    assert a is None or torch.equal(a, b), f"{kernels} {rounding}: {column}"


def _copies(column: Any) -> Any:
    if isinstance(column, Tensor):
        return column.clone()
    return [None if tensor is None else tensor.clone() for tensor in column]


def ours(state: State, rounding: str, beta2: float, kernels: str) -> Step:
    """A candidate."""

    def run(lap: harness.Lap) -> None:
        state.step(rounding, beta2, kernels=kernels)
        lap("step")

    return run


def torch_adamw(state: State, **kind: bool) -> Step:
    """A candidate: torch's AdamW on the same weights and gradients, with moments of its own."""
    params = [torch.nn.Parameter(p) for p in state.params]
    for parameter, grad in zip(params, state.grads, strict=True):
        parameter.grad = grad
    optimizer = torch.optim.AdamW(
        params, lr=1e-4, betas=(BETA1, BETA2S[0]), eps=EPS, weight_decay=0.1, **kind
    )

    def run(lap: harness.Lap) -> None:
        optimizer.step()
        lap("step")

    return run


def copy(num_bytes: int, device: str) -> Step:
    """A candidate: copies that read and write `num_bytes` together."""
    half = num_bytes // 2
    size = min(half, COPY_BYTES)
    source, target = (torch.zeros(size, dtype=torch.int8, device=device) for _ in range(2))

    def run(lap: harness.Lap) -> None:
        for _ in range(half // size):
            target.copy_(source)
        rest = half % size
        target[:rest].copy_(source[:rest])
        lap("step")

    return run


def main() -> None:
    """Prints a table for the steps of 14 bytes a parameter and one for those of 18."""
    options = harness.kernel_parser(__doc__.partition("\n")[0], rounds=10).parse_args()
    torch.set_num_threads(options.threads)
    device = options.device
    kinds = shapes(LAYERS) if device == "cuda" else shapes(1, 4)
    if options.tiny:
        kinds = shapes(1, 64)
    versions = ("torch", "triton") if device == "cuda" else ("torch",)
    for kernels in versions:
        gate(device, kernels)
    state = State.make(kinds, device)
    count = sum(math.prod(shape) for shape, _ in kinds)
    figures: dict[str, Any] = {
        "benchmark": "adamw",
        "stamp": harness.stamp(),
        "roofline": harness.ROOFLINE,
        "parameters": count,
    }
    print(harness.roofline_line(device))
    for title, roundings in (("no remainder", ("stochastic", "nearest")), ("exact", ("exact",))):
        candidates = {
            f"ours, {kernels}, {rounding}, beta2 {beta2}": ours(state, rounding, beta2, kernels)
            for kernels in versions
            for rounding in roundings
            for beta2 in BETA2S
        }
        if title != "exact":
            candidates["torch AdamW, fused"] = torch_adamw(state, fused=True)
            candidates["torch AdamW, foreach"] = torch_adamw(state, foreach=True)
        num_bytes = state.floor_bytes(roundings[0])
        candidates["copy of as many bytes"] = copy(num_bytes, device)
        work = {"step": harness.Work(bytes=num_bytes)}
        found = harness.measure_kernels(candidates, work, options.rounds, device)
        harness.show_kernels(f"\n{count:,} parameters, {title}", found, {})
        pace = found["copy of as many bytes"]["step"]["ms"]
        for name, parts in found.items():
            parts["step"]["share_of_copy"] = pace / parts["step"]["ms"]
            print(f"{name}: {parts['step']['share_of_copy']:.0%} of the copy's pace")
        figures[title] = found
    if device == "cpu":
        print("not measured: Triton: needs a GPU")
    harness.finish(figures, options.json)


if __name__ == "__main__":
    main()

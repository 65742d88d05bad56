"""The routed experts, forward and backward: our versions against torch's grouped product and a loop over the experts.

The floor is that of the six products, 2 R D F operations each, two forward and four backward; inputs, outputs,
gradients and the saved activation are far below it in bytes. Experts are drawn at random for each token: their counts
differ. A peer's activation, weighting and combining are plain torch, as its users write them.

python benchmarks/expert_mlp.py                 on a GPU: the real shapes, torch and Triton versions, peers
python benchmarks/expert_mlp.py --device cpu    smaller shapes, torch versions and peers
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness, shapes
from hymoe.kernels.experts import expert_mlp, expert_mlp_ref, grouped_gemm
from hymoe.kernels.route import Routing, sort_by_expert

# Norm of the difference from float64 over its norm: bfloat16 products and a rounding or two between them.
GATE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}

Forward = Callable[..., Tensor]


@dataclass(frozen=True)
class Sizes:
    """Tokens, width, experts' width, experts, and experts a token."""

    tokens: int
    width: int
    inner: int
    experts: int
    top_k: int

    @property
    def product(self) -> float:
        """Operations of one product."""
        return 2.0 * self.tokens * self.top_k * self.width * self.inner


REAL = Sizes(shapes.T, shapes.D, shapes.F, shapes.E, shapes.K)
CPU = Sizes(1024, 672, 464, 32, 6)  # a fourth of each width: 192 rows an expert
ODD = Sizes(4096, 1000, 1864, 8, 2)  # 8 divides the widths, 16 does not
TINY = Sizes(24, 32, 16, 4, 2)


def record() -> None:
    """The MLP forward and backward and the plain grouped product, on meta tensors: the real shapes, and odd widths."""
    meta = torch.device("meta")
    for sizes, dtype in ((REAL, torch.bfloat16), (REAL, torch.float32), (ODD, torch.bfloat16)):
        ids = torch.empty(sizes.tokens, sizes.top_k, dtype=torch.int64, device=meta)
        routing = sort_by_expert(ids, sizes.experts, kernels="triton")
        inputs = make_inputs(sizes, meta, dtype)
        y = expert_mlp(**inputs, routing=routing, kernels="triton")
        y.backward(torch.empty_like(y))
        rows = torch.empty(sizes.tokens * sizes.top_k, sizes.width, dtype=dtype, device=meta)
        grouped_gemm(rows, inputs["up"], routing.offsets, kernels="triton")


def make_inputs(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """x, routing weights and both stacks of matrices, all of which get gradients."""
    make = lambda *shape: torch.empty(shape, dtype=dtype, device=device).normal_()  # noqa: E731
    found = {
        "x": make(sizes.tokens, sizes.width),
        "weights": torch.empty(sizes.tokens, sizes.top_k, device=device).uniform_(0.1, 1),
        "up": make(sizes.experts, sizes.inner, sizes.width).mul_(sizes.width**-0.5),
        "down": make(sizes.experts, sizes.width, sizes.inner).mul_(sizes.inner**-0.5),
    }
    return {name: x.requires_grad_() for name, x in found.items()}


def make_routing(sizes: Sizes, device: torch.device) -> Routing:
    """Different experts for each token, all as likely."""
    scores = torch.rand(sizes.tokens, sizes.experts, device=device)
    return sort_by_expert(scores.topk(sizes.top_k).indices, sizes.experts)


def grouped_mm(x: Tensor, weights: Tensor, up: Tensor, down: Tensor, routing: Routing) -> Tensor:
    """`torch.nn.functional.grouped_mm` twice, the rest in plain torch; a token's sum in float32."""
    offsets = routing.offsets[1:].to(torch.int32)
    rows = x[routing.order // routing.ids.shape[1]]
    a = functional.grouped_mm(rows, up.transpose(1, 2), offs=offsets).relu().square()
    y = functional.grouped_mm(a, down.transpose(1, 2), offs=offsets)  # (R, D)
    return combine(y, weights, routing)


def loop(x: Tensor, weights: Tensor, up: Tensor, down: Tensor, routing: Routing) -> Tensor:
    """One product after another, cuBLAS's on a GPU; the row counts are fetched from the device."""
    rows = x[routing.order // routing.ids.shape[1]].split(routing.counts.tolist())
    y = [
        (one @ u.T).relu().square() @ d.T
        for one, u, d in zip(rows, up.unbind(), down.unbind(), strict=True)
    ]
    return combine(torch.cat(y), weights, routing)


def combine(y: Tensor, weights: Tensor, routing: Routing) -> Tensor:
    """(R, D) rows in expert order -> (T, D)."""
    chosen = y[routing.inverse.flatten()].view(*routing.ids.shape, -1)  # (T, K, D)
    return (chosen * weights[..., None]).sum(1).to(y.dtype)


def candidates(device: torch.device) -> dict[str, Forward]:
    """Name -> function of the inputs and the routing."""
    found: dict[str, Forward] = {"ours, torch": lambda **i: expert_mlp(**i, kernels="torch")}
    if device.type == "cuda":
        found["ours, Triton"] = lambda **i: expert_mlp(**i, kernels="triton")
    return found | {"torch grouped_mm": grouped_mm, "loop over experts": loop}


def check(device: torch.device, dtype: torch.dtype) -> None:
    """Every candidate's output and gradients against float64, at sizes where every expert may see every token."""
    inputs, routing = make_inputs(TINY, device, dtype), make_routing(TINY, device)
    dy = torch.randn(TINY.tokens, TINY.width, device=device, dtype=dtype)

    def results(forward: Forward, leaves: dict[str, Tensor]) -> list[Tensor]:
        y = forward(**leaves, routing=routing)
        return [y, *torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype))]

    wide = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    exact = results(expert_mlp_ref, wide)
    for name, forward in candidates(device).items():
        for found, right in zip(results(forward, inputs), exact, strict=True):
            error = (found.double() - right).norm() / right.norm()
            assert error < GATE[dtype], f"{name} is wrong: relative error {error:.2g}"


def works(sizes: Sizes, inputs: dict[str, Tensor]) -> dict[str, harness.Work]:
    """What forward and backward cannot do without."""
    given = sum(x.numel() * x.element_size() for x in inputs.values())
    one = inputs["x"].element_size()
    y = sizes.tokens * sizes.width * one
    kept = sizes.tokens * sizes.top_k * sizes.inner * one
    return {
        "forward": harness.Work(2 * sizes.product, given + y + kept),
        "backward": harness.Work(4 * sizes.product, 2 * given + y + kept),
    }


def main() -> None:
    """Prints a table for each dtype."""
    options = harness.kernel_parser(__doc__.partition("\n")[0], rounds=15).parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device(options.device)
    sizes = TINY if options.tiny else REAL if device.type == "cuda" else CPU
    # The GPU's kernels are for bfloat16; float32 is there to check with.
    dtypes = [torch.bfloat16] if device.type == "cuda" else [torch.float32, torch.bfloat16]
    figures = {"benchmark": "expert_mlp", "stamp": harness.stamp(), "roofline": harness.ROOFLINE}
    figures["sizes"] = vars(sizes)
    print(harness.roofline_line(device.type))
    for dtype in dtypes:
        check(device, dtype)
        inputs, routing = make_inputs(sizes, device, dtype), make_routing(sizes, device)
        leaves, dy = list(inputs.values()), torch.randn_like(inputs["x"])
        timed = {
            name: harness.passes(partial(forward, **inputs, routing=routing), leaves, dy)
            for name, forward in candidates(device).items()
        }
        found = harness.measure_kernels(timed, works(sizes, inputs), options.rounds, options.device)
        name = str(dtype).removeprefix("torch.")
        shape = (
            f"{sizes.tokens} tokens, {sizes.experts} experts, {sizes.top_k} a token, "
            f"{sizes.width} x {sizes.inner}, {name}"
        )
        missing = {} if device.type == "cuda" else {"ours, Triton": "needs a GPU"}
        harness.show_kernels(f"\n{shape}", found, missing)
        ours = found["ours, Triton" if device.type == "cuda" else "ours, torch"]
        ratios = {
            part: found["torch grouped_mm"][part]["ms"] / one["ms"] for part, one in ours.items()
        }
        each = ", ".join(f"{part} {ratio:.2f}" for part, ratio in ratios.items())
        print(f"times as fast as torch grouped_mm: {each}")
        figures[name] = found | {"missing": missing, "times_as_fast_as_grouped_mm": ratios}
    harness.finish(figures, options.json)


if __name__ == "__main__":
    main()

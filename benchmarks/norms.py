"""RMS norm and gated group norm: our versions against torch, Liger and mamba-ssm.

Both move memory and little else, so the floor is the bytes that no implementation can do without: forward reads x (and
the gate) and writes y, backward reads these and dy and writes dx (and the gate's gradient). Weights and sums of squares
are left out: they are a thousandth of it.

python benchmarks/norms.py                 on a GPU: the real shapes, torch and Triton versions, peers
python benchmarks/norms.py --device cpu    smaller shapes, torch versions only
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness
from benchmarks.shapes import F_SHARED, PROJECTED, D, G, H, P, T
from hymoe.kernels.norm import gated_rms_norm, gated_rms_norm_ref, rms_norm, rms_norm_ref
from hymoe.kernels.relu2 import relu2

EPS = 1e-5
RMS_PEERS = {"Liger": "liger_kernel.ops.rms_norm"}
GATED_PEERS = {"mamba-ssm": "mamba_ssm.ops.triton.layernorm_gated"}
# Of a peer against float64, relative: its bfloat16 output cannot be right to more, and a wrong norm is far from it.
GATE = 2e-2

Forward = Callable[..., Tensor]
Inputs = dict[str, Tensor]


def record() -> None:
    """Both norms and the MLP's squared ReLU, forward and backward, on meta tensors of the real shapes."""
    meta = {"device": "meta", "requires_grad": True}
    x = torch.empty(T, D, dtype=torch.bfloat16, **meta)
    rms_norm(x, torch.empty(D, **meta), EPS, "triton").backward(torch.empty_like(x))
    y = torch.empty(T, H * P, dtype=torch.bfloat16, **meta)
    projected = torch.empty(T, PROJECTED, dtype=torch.bfloat16, **meta)
    z = projected[:, : H * P]
    weight = torch.empty(H * P, **meta)
    gated_rms_norm(y, z, weight, G, EPS, "triton").backward(torch.empty_like(y))
    hidden = torch.empty(T, F_SHARED, dtype=torch.bfloat16, **meta)
    relu2(hidden, "triton").backward(torch.empty_like(hidden))


def make_inputs(tokens: int, width: int, gated: bool, device: str, dtype: torch.dtype) -> Inputs:
    """x, weight and dy; with a gate also z, a column slice of a wider projection as in the model."""
    rng = torch.Generator(device).manual_seed(0)
    make = lambda *shape: torch.randn(shape, generator=rng, device=device)  # noqa: E731
    inputs = {"x": make(tokens, width).to(dtype), "weight": make(width)}
    if gated:
        wide = make(tokens, width * PROJECTED // (H * P)).to(dtype)
        inputs["z"] = wide[:, :width]
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    return leaves | {"dy": make(tokens, width).to(dtype)}


def rms_candidates(modules: Mapping[str, ModuleType], device: str) -> dict[str, Forward]:
    """Name -> function of x and weight."""
    found: dict[str, Forward] = {"ours, torch": lambda x, weight: rms_norm(x, weight, EPS, "torch")}
    if device == "cuda":
        found["ours, Triton"] = lambda x, weight: rms_norm(x, weight, EPS, "triton")
    found["torch rms_norm"] = lambda x, weight: functional.rms_norm(
        x, weight.shape, weight.to(x.dtype), EPS
    )
    if "Liger" in modules:
        liger = modules["Liger"].LigerRMSNormFunction
        # Its arithmetic that is ours: float32 throughout; and not over dy, which the harness gives again.
        found["Liger"] = lambda x, weight: liger.apply(x, weight, EPS, 0.0, "gemma", False)
    return found


def gated_candidates(
    modules: Mapping[str, ModuleType], device: str, groups: int
) -> dict[str, Forward]:
    """Name -> function of x, weight and z."""

    def ours(kernels: str) -> Forward:
        return lambda x, weight, z: gated_rms_norm(x, z, weight, groups, EPS, kernels)

    def plain(x: Tensor, weight: Tensor, z: Tensor) -> Tensor:
        gated = (x * functional.silu(z)).unflatten(-1, (groups, -1))
        normed = functional.rms_norm(gated, gated.shape[-1:], None, EPS)
        return normed.flatten(1) * weight.to(x.dtype)

    found = {"ours, torch": ours("torch")}
    if device == "cuda":
        found["ours, Triton"] = ours("triton")
    found["torch rms_norm"] = plain
    if "mamba-ssm" in modules:
        peer = modules["mamba-ssm"].rmsnorm_fn
        found["mamba-ssm"] = lambda x, weight, z: peer(
            x, weight, None, z, EPS, x.shape[1] // groups, norm_before_gate=False
        )
    return found


def results(forward: Forward, inputs: Inputs, dy: Tensor) -> list[Tensor]:
    """The output and the gradient of every input."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    y = forward(**leaves)
    return [y, *torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype))]


def measure(
    candidates: Mapping[str, Forward], reference: Forward, inputs: Inputs, rounds: int, device: str
) -> dict[str, dict[str, dict[str, float | None]]]:
    """Checks every candidate's output and gradients, then times forward and backward."""
    inputs = dict(inputs)
    dy = inputs.pop("dy")
    exact = results(reference, {name: x.double() for name, x in inputs.items()}, dy)
    for name, forward in candidates.items():
        for found, right in zip(results(forward, inputs, dy), exact, strict=True):
            error = (found.double() - right).norm() / right.norm()
            assert error < GATE, f"{name} is wrong: relative error {error:.2g}"
    del exact
    rows = [x for name, x in inputs.items() if name != "weight"]
    moved = sum(x.numel() * x.element_size() for x in rows)
    y_bytes = dy.numel() * dy.element_size()
    work = {
        "forward": harness.Work(bytes=moved + y_bytes),
        "backward": harness.Work(bytes=2 * moved + y_bytes),
    }
    timed = {
        name: harness.passes(lambda f=forward: f(**inputs), list(inputs.values()), dy)
        for name, forward in candidates.items()
    }
    return harness.measure_kernels(timed, work, rounds, device)


def main() -> None:
    """Prints a table for each norm."""
    options = harness.kernel_parser(__doc__.partition("\n")[0], rounds=20).parse_args()
    torch.set_num_threads(options.threads)
    device = options.device
    tokens = T if device == "cuda" else 2048
    width, gated_width, groups = D, H * P, G
    if options.tiny:
        tokens, width, gated_width, groups = 32, 48, 64, 4
    dtype = torch.bfloat16
    rms_modules, rms_missing = harness.find_peers(RMS_PEERS, device)
    gated_modules, gated_missing = harness.find_peers(GATED_PEERS, device)
    exact_gated = lambda x, weight, z: gated_rms_norm_ref(x, z, weight, groups, EPS)  # noqa: E731
    exact = lambda x, weight: rms_norm_ref(x, weight, EPS)  # noqa: E731
    runs = {
        f"rms_norm, {tokens} x {width}": (
            *(rms_candidates(rms_modules, device), exact, rms_missing),
            make_inputs(tokens, width, False, device, dtype),
        ),
        f"gated_rms_norm, {tokens} x {gated_width} in {groups} groups": (
            *(gated_candidates(gated_modules, device, groups), exact_gated, gated_missing),
            make_inputs(tokens, gated_width, True, device, dtype),
        ),
    }
    figures = {"benchmark": "norms", "stamp": harness.stamp(), "roofline": harness.ROOFLINE}
    print(harness.roofline_line(device))
    for title, (candidates, reference, missing, inputs) in runs.items():
        found = measure(candidates, reference, inputs, options.rounds, device)
        harness.show_kernels(f"\n{title}, bfloat16", found, missing)
        figures[title] = found | {"missing": missing}
    harness.finish(figures, options.json)


if __name__ == "__main__":
    main()

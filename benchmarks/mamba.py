"""Causal convolution and SSD scan: our versions against causal-conv1d and mamba-ssm.

Floors. The convolution moves memory: forward reads x and writes y, backward reads x and dy and writes dx. The scan
reads x, dt, b, c and writes y; backward reads these and dy and writes their gradients. Its products, in chunks of Q
tokens: c . b by group, the chunk's own part of y, what it adds to the state and what it reads of it; backward has two
for each. Weights, sums and states between chunks are left out: no implementation has to write them to memory.

The packages run in their deterministic modes, as in training; with --fastest in their default ones, where gradients
are sums of atomics and mamba-ssm tries its tiles before the first timed round.

python benchmarks/mamba.py                 on a GPU: the real shapes, torch and Triton versions, packages
python benchmarks/mamba.py --device cpu    smaller shapes, torch versions only
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness, shapes
from hymoe.kernels.conv1d import causal_conv1d, causal_conv1d_ref
from hymoe.kernels.packed import Packed
from hymoe.kernels.ssd.op import ssd_scan

LIMIT = (0.0, float("inf"))
CHUNK = 128
# Name -> module with its function.
CONV_PEER = {"causal-conv1d": "causal_conv1d"}
SSD_PEER = {"mamba-ssm": "mamba_ssm.ops.triton.ssd_combined"}
# Of an output or a gradient against float64, relative: bfloat16 cannot be right to a tenth of it, and wrong is far off.
GATE = 5e-2

Forward = Callable[..., Tensor]
Inputs = dict[str, Tensor]


def record_conv() -> None:
    """The convolution on meta tensors of the real shapes, on a column slice of the projection as in the model."""
    packed = Packed.from_lengths(shapes.DOCUMENTS, "meta")
    inputs = conv_inputs(shapes.T, shapes.H * shapes.P, shapes.CONV, "meta")
    dy = inputs.pop("dy")
    causal_conv1d(**inputs, packed=packed, kernels="triton").backward(dy)


def record_ssd() -> None:
    """The scan on meta tensors of the real shapes."""
    packed = Packed.from_lengths(shapes.DOCUMENTS, "meta")
    inputs = ssd_inputs(shapes.T, shapes.H, shapes.P, shapes.G, shapes.N, "meta")
    dy = inputs.pop("dy")
    ours_ssd(packed, "triton")(**inputs).backward(dy)


def normal(device: str, *shape: int, seed: int = 0) -> Tensor:
    """Standard normal float32."""
    if device == "meta":
        return torch.empty(shape, device=device)
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)


def conv_inputs(tokens: int, inner: int, channels: int, device: str) -> Inputs:
    """x, a column slice of the projection, weight, bias; and dy."""
    wide = normal(device, tokens, inner + channels + 64).bfloat16()
    inputs = {
        "x": wide[:, inner : inner + channels],
        "weight": normal(device, channels, shapes.W, seed=1).bfloat16(),
        "bias": normal(device, channels, seed=2),
    }
    dy = normal(device, tokens, channels, seed=3).bfloat16()
    return {name: x.requires_grad_() for name, x in inputs.items()} | {"dy": dy}


def ssd_inputs(
    tokens: int, heads: int, width: int, groups: int, states: int, device: str
) -> Inputs:
    """Column slices as in the model: x, b and c of the convolution's output, dt of the projection; and dy.

    Time steps are from 0.001 to 0.1 and decay rates from 1 to 16, as models are initialised.
    """
    shared = groups * states
    wide = normal(device, tokens, heads * width + 2 * shared).bfloat16()
    x, b, c = wide.split([heads * width, shared, shared], dim=-1)
    projected = normal(device, tokens, wide.shape[1] + heads * (width + 1), seed=1).bfloat16()
    step = torch.logspace(-3, -1, heads, device=device)
    inputs = {
        "x": x.unflatten(-1, (heads, width)),
        "dt": projected[:, -heads:],
        "a_log": torch.linspace(1, 16, heads, device=device).log(),
        "b": b.unflatten(-1, (groups, states)),
        "c": c.unflatten(-1, (groups, states)),
        "skip": torch.ones(heads, device=device),
        "dt_bias": step + torch.log(-torch.expm1(-step)),  # softplus makes it step
    }
    dy = normal(device, tokens, heads, width, seed=2).bfloat16()
    return {name: x.detach().requires_grad_() for name, x in inputs.items()} | {"dy": dy}


def conv_work(inputs: Inputs) -> dict[str, harness.Work]:
    """Bytes of x and y; of x, dy and dx."""
    row = inputs["dy"].numel() * inputs["dy"].element_size()
    return {"forward": harness.Work(bytes=2 * row), "backward": harness.Work(bytes=3 * row)}


def ssd_work(inputs: Inputs) -> dict[str, harness.Work]:
    """Bytes of what has a row a token, and operations in chunks of CHUNK."""
    size = lambda name: inputs[name].numel() * inputs[name].element_size()  # noqa: E731
    tokens, heads, width = inputs["x"].shape
    groups, states = inputs["b"].shape[1:]
    read = sum(map(size, ("x", "dt", "b", "c")))
    flop = 2.0 * tokens * (CHUNK * (groups * states + heads * width) + 2 * heads * width * states)
    return {
        "forward": harness.Work(flop, read + size("dy")),
        "backward": harness.Work(2 * flop, 2 * read + size("dy")),
    }


def ours_ssd(packed: Packed, kernels: str) -> Forward:
    """The scan by one of our implementations."""
    return lambda **inputs: ssd_scan(
        **inputs, dt_limit=LIMIT, packed=packed, chunk_size=CHUNK, kernels=kernels
    )


def conv_candidates(
    peers: Mapping[str, Any], packed: Packed, device: str, fastest: bool
) -> dict[str, Forward]:
    """Name -> function of x, weight and bias."""
    ours = lambda kernels: lambda **i: causal_conv1d(**i, packed=packed, kernels=kernels)  # noqa: E731
    found: dict[str, Forward] = {"ours, torch": ours("torch")}
    if device == "cuda":
        found["ours, Triton"] = ours("triton")
    found["torch conv1d"] = lambda **inputs: causal_conv1d_ref(**inputs, packed=packed)
    if "causal-conv1d" in peers and fastest:
        fn = peers["causal-conv1d"].causal_conv1d_fn
        found["causal-conv1d"] = lambda x, weight, bias: (
            fn(x.T[None], weight, bias.to(weight.dtype), packed.seq_idx[None], activation="silu")[
                0
            ].T
        )
    elif "causal-conv1d" in peers:
        found["causal-conv1d, deterministic"] = ours("packages")
    return found


def ssd_candidates(
    peers: Mapping[str, Any], packed: Packed, device: str, fastest: bool
) -> dict[str, Forward]:
    """Name -> function of the scan's inputs."""
    found = {"ours, torch": ours_ssd(packed, "torch")}
    if device == "cuda":
        found["ours, Triton"] = ours_ssd(packed, "triton")
    if "mamba-ssm" in peers and fastest:
        fn = peers["mamba-ssm"].mamba_chunk_scan_combined
        ids = packed.seq_idx[None]
        found["mamba-ssm"] = lambda x, dt, a_log, b, c, skip, dt_bias: fn(
            *(x[None], dt[None], -torch.exp(a_log), b[None], c[None], CHUNK),
            D=skip,
            dt_bias=dt_bias,
            seq_idx=ids,
            dt_softplus=True,
            dt_limit=LIMIT,
        )[0]
    elif "mamba-ssm" in peers:
        found["mamba-ssm, deterministic"] = ours_ssd(packed, "packages")
    return found


def check(candidates: Mapping[str, Forward], exact: Forward, inputs: Inputs) -> None:
    """Asserts that outputs and gradients of all candidates are those of float64.

    Raises:
        AssertionError: naming the candidate and what is wrong.
    """
    inputs = dict(inputs)
    dy = inputs.pop("dy")

    def results(forward: Forward, given: Inputs) -> list[Tensor]:
        y = forward(**given)
        return [y.detach(), *torch.autograd.grad(y, list(given.values()), dy.to(y.dtype))]

    right = results(exact, {n: x.detach().double().requires_grad_() for n, x in inputs.items()})
    for name, forward in candidates.items():
        found = results(forward, inputs)
        for what, one, other in zip(("y", *inputs), found, right, strict=True):
            error = ((one.double() - other).norm() / other.norm()).item()
            assert error < GATE, f"{name}: {what} is wrong, relative error {error:.2g}"


def measure(
    candidates: Mapping[str, Forward],
    exact: Forward,
    inputs: Inputs,
    work: Mapping[str, harness.Work],
    rounds: int,
) -> dict[str, dict[str, dict[str, float | None]]]:
    """Checks every candidate, then times forward and backward."""
    check(candidates, exact, inputs)
    leaves = dict(inputs)
    dy = leaves.pop("dy")
    timed = {
        name: harness.passes(lambda f=forward: f(**leaves), list(leaves.values()), dy)
        for name, forward in candidates.items()
    }
    return harness.measure_kernels(timed, work, rounds, dy.device.type)


def main() -> None:
    """Prints a table for each of the two."""
    parser = harness.kernel_parser(__doc__.partition("\n")[0], rounds=20)
    parser.add_argument(
        "--fastest", action="store_true", help="the packages in their default modes"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = options.device
    heads, width, groups, states = shapes.H, shapes.P, shapes.G, shapes.N
    lengths = shapes.DOCUMENTS
    if device == "cpu":
        lengths = (800, 3, 1, 2, 600, 128, 1, 300, 127, 86)
    if options.tiny:
        heads, width, groups, states, lengths = 4, 8, 2, 16, (20, 3, 1, 8)
    tokens, packed = sum(lengths), Packed.from_lengths(lengths, device)
    channels = heads * width + 2 * groups * states
    conv_peers, conv_missing = harness.find_peers(CONV_PEER, device)
    ssd_peers, ssd_missing = harness.find_peers(SSD_PEER, device)
    conv, ssd = (
        conv_inputs(tokens, heads * width, channels, device),
        ssd_inputs(tokens, heads, width, groups, states, device),
    )
    runs = {
        f"causal_conv1d, {tokens} x {channels}, {shapes.W} taps": (
            conv_candidates(conv_peers, packed, device, options.fastest),
            lambda **inputs: causal_conv1d_ref(**inputs, packed=packed),
            *(conv, conv_work(conv), conv_missing),
        ),
        f"ssd_scan, {tokens} x {heads} heads of {width}, {groups} groups, {states} states": (
            ssd_candidates(ssd_peers, packed, device, options.fastest),
            ours_ssd(packed, "torch"),  # the recurrence itself takes minutes
            *(ssd, ssd_work(ssd), ssd_missing),
        ),
    }
    figures = {"benchmark": "mamba", "stamp": harness.stamp(), "roofline": harness.ROOFLINE}
    print(harness.roofline_line(device))
    for title, (candidates, exact, inputs, work, missing) in runs.items():
        found = measure(candidates, exact, inputs, work, options.rounds)
        harness.show_kernels(f"\n{title}, {len(lengths)} documents, bfloat16", found, missing)
        figures[title] = found | {"missing": missing}
    harness.finish(figures, options.json)


if __name__ == "__main__":
    main()

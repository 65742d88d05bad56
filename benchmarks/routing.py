"""Routing: our Triton kernels against our torch version, from the residual stream to the tables of the expert products.

Forward reads x and writes weights, ids and tables; backward reads x and writes dx. The router's own weight and (T, E)
logits are left out of the floor; products count once, at the BF16 rate, though three to six BF16 products make one in
float32. The sort reads ids and writes two tables of their size; for such sizes launches cost more than bytes.
No peer is timed: those that fuse the choice take logits and give dense (T, E) maps, which is another operation.

python benchmarks/routing.py                 on a GPU: the real shapes, torch and Triton versions
python benchmarks/routing.py --device cpu    fewer tokens, torch version only
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness
from benchmarks.shapes import D, E, K, T
from hymoe.kernels.route import Routing, route, sort_by_expert, tile_table

ROWS = 128  # of a tile of the expert products
GATE = 1e-5  # relative, of float32 results; of a BF16 gradient 1e-2
SAME = 0.999  # of the choices: two orders of a float32 sum part where scores are next to equal

Candidates = dict[str, Callable[[harness.Lap], None]]


def record() -> None:
    """Forward with its tables, backward, a recomputed forward, and the largest options, on meta tensors."""
    meta = {"device": "meta"}
    weight, bias = torch.empty(E, D, requires_grad=True, **meta), torch.empty(E, **meta)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.empty(T, D, dtype=dtype, requires_grad=True, **meta)
        routing, weights = route(x, weight, bias, top_k=K, scaling=2.5, kernels="triton")
        tile_table(routing.offsets, T * K, ROWS, kernels="triton")
        weights.backward(torch.empty_like(weights))
    with torch.no_grad():
        x = x.bfloat16()
        route(x, weight, bias, top_k=K, kept=routing, kernels="triton")
        route(x, weight, bias, top_k=K, n_group=8, topk_group=4, kernels="triton")
    weight, bias = torch.empty(1024, D, requires_grad=True, **meta), torch.empty(1024, **meta)
    routing, weights = route(x.detach(), weight, bias, top_k=32, kernels="triton")
    tile_table(routing.offsets, T * 32, ROWS, kernels="triton")
    weights.backward(torch.empty_like(weights))


def make_inputs(tokens: int, width: int, experts: int, device: str) -> tuple[Tensor, ...]:
    """Makes x (T, D) BF16 of unit variance, weight (E, D) for logits of unit variance, a small bias."""
    rng = torch.Generator(device).manual_seed(0)
    make = lambda *shape: torch.randn(shape, generator=rng, device=device)  # noqa: E731
    weight = make(experts, width) / width**0.5
    x = make(tokens, width).bfloat16()
    return x.requires_grad_(), weight.requires_grad_(), 0.05 * make(experts)


def check(inputs: tuple[Tensor, ...], routing: Routing, top_k: int, upstream: Tensor) -> None:
    """Both versions make the same choices, and from the same choices the same weights, gradients and tables."""
    found, results = [], []
    for kernels in ("torch", "triton"):
        found.append(route(*inputs, top_k=top_k, kernels=kernels)[0])
        weights = route(*inputs, top_k=top_k, kept=routing, kernels=kernels)[1]
        results.append([weights, *torch.autograd.grad(weights, inputs[:2], upstream)])
    same = (found[0].ids == found[1].ids).double().mean().item()
    assert same >= SAME, f"{same:.3%} of the choices agree"
    for right, ours in zip(*results, strict=True):
        error = ((ours.double() - right.double()).norm() / right.double().norm()).item()
        assert error < (GATE if ours.dtype == torch.float32 else 1e-2), (
            f"relative error {error:.2g}"
        )
    tables = sort_by_expert(routing.ids, inputs[1].shape[0], "triton")
    assert all(
        torch.equal(a, b)
        for a, b in zip(vars(tables).values(), vars(routing).values(), strict=True)
    )


def once(name: str, function: Callable[[], object]) -> Callable[[harness.Lap], None]:
    """A candidate of one part."""

    def run(lap: harness.Lap) -> None:
        function()
        lap(name)

    return run


def main() -> None:
    """Prints a table for routing as a whole, for the sort and for the table of tiles."""
    options = harness.kernel_parser(__doc__.partition("\n")[0], rounds=20).parse_args()
    torch.set_num_threads(options.threads)
    device = options.device
    tokens, width, experts, top_k = T if device == "cuda" else 2048, D, E, K
    if options.tiny:
        tokens, width, experts, top_k = 32, 48, 8, 3
    inputs = make_inputs(tokens, width, experts, device)
    upstream = torch.randn(tokens, top_k, device=device)
    routing = route(*inputs, top_k=top_k, kernels="torch")[0]
    versions = {"ours, torch": "torch"}
    if device == "cuda":
        versions["ours, Triton"] = "triton"
        check(inputs, routing, top_k, upstream)
    rows = tokens * top_k
    whole: Candidates = {}
    sorts: Candidates = {}
    tables: Candidates = {}
    for name, kernels in versions.items():
        forward = lambda k=kernels: route(*inputs, top_k=top_k, kernels=k)[1]  # noqa: E731
        whole[name] = harness.passes(forward, inputs[:2], upstream)
        sorts[name] = once("sort", lambda k=kernels: sort_by_expert(routing.ids, experts, k))
        tables[name] = once("table", lambda k=kernels: tile_table(routing.offsets, rows, ROWS, k))
    x_bytes, flop = 2 * tokens * width, 2.0 * tokens * width * experts
    runs = {
        f"route, {tokens} x {width}, {top_k} of {experts}": (
            whole,
            {
                "forward": harness.Work(flop, x_bytes + rows * (4 + 3 * 8)),
                "backward": harness.Work(2 * flop, 2 * x_bytes + rows * (2 * 4 + 8)),
            },
        ),
        f"sort_by_expert, {rows} rows": (sorts, {"sort": harness.Work(bytes=3 * 8 * rows)}),
        f"tile_table, {rows} rows": (
            tables,
            {"table": harness.Work(bytes=8 * (rows // ROWS + 2 * experts))},
        ),
    }
    figures = {"benchmark": "routing", "stamp": harness.stamp(), "roofline": harness.ROOFLINE}
    print(harness.roofline_line(device))
    for title, (candidates, work) in runs.items():
        found = harness.measure_kernels(candidates, work, options.rounds, device)
        harness.show_kernels(f"\n{title}", found, {})
        figures[title] = found
    harness.finish(figures, options.json)


if __name__ == "__main__":
    main()

"""Linear cross-entropy with a masked loss, forward and backward: our versions against torch's own and plain logits.

Of the tokens 40 % are supervised, as in chat data. Peers get all rows and `ignore_index`, as their users call them. The
floor is that of three products over the supervised rows, 2 n D V operations each: one counted as forward, two as
backward, though ours does all three in the forward pass, so `both` is the figure to read. Every candidate's
loss and gradients are checked first, on a few tokens.

python benchmarks/cross_entropy.py                 on a GPU: the real shapes, torch and Triton versions, peers
python benchmarks/cross_entropy.py --device cpu    4,096 tokens x 512 x 32,768, torch versions and peers

On a CPU each candidate runs with one thread and with `--threads` of them. Its extra memory, gradients included, is
measured in a process of its own: the highest resident size that the kernel saw less the size before the call.
"""

import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness, shapes
from hymoe.kernels.loss import IGNORE, linear_cross_entropy, linear_cross_entropy_ref

SUPERVISED = 0.4
LIGER = {"Liger": "liger_kernel.transformers.functional"}
# Norm of the difference from float64 over its norm. BF16: a peer that returns its loss in BF16 is right to no more.
GATE = {torch.bfloat16: 3e-2, torch.float32: 1e-5}
AIMS = {torch.float32: 2.3, torch.bfloat16: 1.5}  # times as fast as the fastest peer, on a CPU
MEMORY_AIM = 1 / 4  # of what plain logits take

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]  # of hidden, weight and labels


@dataclass(frozen=True)
class Sizes:
    """Tokens, width, words."""

    tokens: int
    width: int
    words: int


REAL = Sizes(shapes.T, shapes.D, shapes.V)
UNEVEN = Sizes(shapes.T, 1000, 50_257)
CPU = Sizes(4096, 512, 32_768)
TINY = Sizes(96, 32, 256)


def record() -> None:
    """Every form on meta tensors of the real shapes; float32; sizes that 16 does not divide."""
    half, count = torch.bfloat16, int(SUPERVISED * REAL.tokens)
    scale = torch.empty((), device="meta")
    record_one(REAL, half, count=count)
    record_one(REAL, half, count=count, scale=scale)
    record_one(REAL, half, count=count, reduction="none")
    record_one(REAL, torch.float32, count=count)
    record_one(UNEVEN, half, count=count)


def record_one(sizes: Sizes, dtype: torch.dtype, **options: Any) -> None:
    """One form, forward and backward."""
    inputs = make_inputs(sizes, torch.device("meta"), dtype)
    linear_cross_entropy(*inputs, kernels="triton", **options).sum().backward()


def make_inputs(
    sizes: Sizes, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and weight, which get gradients, and labels; logits of variance 1."""
    torch.manual_seed(0)
    hidden = torch.empty(sizes.tokens, sizes.width, dtype=dtype, device=device).normal_()
    weight = torch.empty(sizes.words, sizes.width, dtype=dtype, device=device)
    weight.normal_(std=sizes.width**-0.5)
    labels = torch.empty(sizes.tokens, dtype=torch.int64, device=device).random_(sizes.words)
    order = torch.rand(sizes.tokens, device=device).argsort()
    labels[order[int(SUPERVISED * sizes.tokens) :]] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, wide: bool = False) -> Tensor:
    """All logits, in the inputs' dtype or turned into float32."""
    logits = functional.linear(hidden, weight)
    logits = logits.float() if wide else logits
    return functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")


def torch_fused(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """`torch.nn.functional.linear_cross_entropy`; without options it does not work in chunks."""
    chunks = torch.nn.LinearCrossEntropyOptions(**options) if options else None
    return functional.linear_cross_entropy(
        hidden, weight, labels, reduction="sum", ignore_index=IGNORE, options=chunks
    )


def liger(module: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Liger's, which returns a tuple where it has more to tell."""
    found = module.liger_fused_linear_cross_entropy(
        hidden, weight, labels, ignore_index=IGNORE, reduction="sum"
    )
    return found[0] if isinstance(found, tuple) else found


def candidates(
    device: torch.device, dtype: torch.dtype, sizes: Sizes
) -> tuple[dict[str, Forward], dict[str, str]]:
    """Name -> function, ours first; and of those that cannot run here the reason."""
    count = int(SUPERVISED * sizes.tokens)
    modules, missing = harness.find_peers(LIGER, device.type)
    found: dict[str, Forward] = {}
    if device.type == "cuda":
        found["ours, Triton"] = partial(linear_cross_entropy, count=count, kernels="triton")
    else:
        missing["ours, Triton"] = "needs a GPU"
    found["ours, torch"] = partial(linear_cross_entropy, count=count, kernels="torch")
    found["plain logits"] = plain
    if dtype == torch.bfloat16:
        found["plain logits, float32"] = partial(plain, wide=True)
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        found["torch linear_cross_entropy"] = torch_fused
        found["torch, its chunks"] = partial(torch_fused, chunking_method="auto")
        # The fastest of its settings that was found on a CPU.
        found["torch, its best chunks"] = partial(
            torch_fused, batch_chunk_size=min(512, sizes.tokens), acc_policy="accurate"
        )
    else:
        missing["torch linear_cross_entropy"] = f"torch {torch.__version__} has none"
    for name, module in modules.items():
        found[name] = partial(liger, module)
    return found, missing


def check(device: torch.device, dtype: torch.dtype) -> None:
    """Every candidate's loss and gradients against float64."""
    *leaves, labels = make_inputs(TINY, device, dtype)

    def results(forward: Forward, of: list[Tensor]) -> list[Tensor]:
        loss = forward(*of, labels)
        return [loss.detach(), *torch.autograd.grad(loss, of)]

    exact = results(
        linear_cross_entropy_ref, [x.detach().double().requires_grad_() for x in leaves]
    )
    for name, forward in candidates(device, dtype, TINY)[0].items():
        for found, right in zip(results(forward, leaves), exact, strict=True):
            error = (found.double() - right).norm() / right.norm()
            assert error < GATE[dtype], f"{name} is wrong: relative error {error:.2g}"


def works(sizes: Sizes, itemsize: int) -> dict[str, harness.Work]:
    """What forward and backward cannot do without."""
    rows = int(SUPERVISED * sizes.tokens)
    product = 2 * rows * sizes.width * sizes.words
    given = (rows + sizes.words) * sizes.width * itemsize
    return {
        "forward": harness.Work(product, given),
        "backward": harness.Work(2 * product, 2 * given),
    }


def extra_bytes(name: str, sizes: Sizes, dtype: torch.dtype, threads: int) -> int:
    """Peak memory of one call on a CPU; for a process of its own, in which nothing large was freed before."""
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    for size in (TINY, sizes):  # the first loads what the products need
        *leaves, labels = make_inputs(size, device, dtype)
        forward = candidates(device, dtype, size)[0][name]
        Path("/proc/self/clear_refs").write_text("5")  # the highest resident size starts anew
        before = _resident("VmRSS")
        torch.autograd.grad(forward(*leaves, labels), leaves)
        peak = _resident("VmHWM")
    return peak - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def measure(
    device: torch.device, dtype: torch.dtype, sizes: Sizes, rounds: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Figures of every candidate by name, and what is missing."""
    check(device, dtype)
    *leaves, labels = make_inputs(sizes, device, dtype)
    forwards, missing = candidates(device, dtype, sizes)
    timed = {
        name: harness.passes(partial(forward, *leaves, labels), leaves)
        for name, forward in forwards.items()
    }
    work = works(sizes, dtype.itemsize)
    found = harness.measure_kernels(timed, work, rounds, device.type)
    if device.type == "cpu":
        threads = torch.get_num_threads()
        fresh = multiprocessing.get_context("forkserver")
        fresh.set_forkserver_preload(
            ["__main__"]
        )  # torch is imported once, and nothing is computed
        for name, parts in found.items():
            with ProcessPoolExecutor(max_workers=1, mp_context=fresh) as pool:
                peak = pool.submit(extra_bytes, name, sizes, dtype, threads).result()
            parts["both"]["extra_bytes"] = peak
    return found, missing


def compare(found: dict[str, Any], ours: str) -> dict[str, Any]:
    """Ours against the peers: time over the fastest of them, memory over plain logits."""
    peers = {name: one["both"] for name, one in found.items() if not name.startswith("ours")}
    fastest = min(peers, key=lambda name: peers[name]["ms"])
    mine = found[ours]["both"]
    return {
        "fastest_peer": fastest,
        "times_as_fast": peers[fastest]["ms"] / mine["ms"],
        # Their best round against our median, and the other way round: what a noisy machine leaves of it.
        "times_as_fast_lowest": peers[fastest]["lowest_ms"] / mine["ms"],
        "times_as_fast_of_lowest": peers[fastest]["lowest_ms"] / mine["lowest_ms"],
        "times_as_fast_each": {name: one["ms"] / mine["ms"] for name, one in peers.items()},
        "memory_over_plain": mine["extra_bytes"] / max(1, peers["plain logits"]["extra_bytes"]),
    }


def main() -> None:
    """Prints a table for each dtype and number of threads."""
    options = harness.kernel_parser(__doc__.partition("\n")[0], rounds=7).parse_args()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    sizes = TINY if options.tiny else REAL if on_gpu else CPU
    torch.set_num_threads(options.threads)
    figures = {"benchmark": "cross_entropy", "stamp": harness.stamp(), "sizes": vars(sizes)}
    figures |= {"supervised": SUPERVISED, "roofline": harness.ROOFLINE}
    print(
        harness.roofline_line("cuda")
        if on_gpu
        else "a CPU run: nothing here says anything of a GPU"
    )
    for dtype in [torch.bfloat16] if on_gpu else [torch.float32, torch.bfloat16]:
        for threads in [options.threads] if on_gpu else sorted({1, options.threads}):
            torch.set_num_threads(threads)
            found, missing = measure(device, dtype, sizes, options.rounds)
            name = f"{str(dtype).removeprefix('torch.')}, threads: {threads}"
            shape = f"{sizes.tokens} tokens x {sizes.width} x {sizes.words}"
            harness.show_kernels(f"\n{shape}, {SUPERVISED:.0%} supervised, {name}", found, missing)
            against = compare(found, "ours, Triton" if on_gpu else "ours, torch")
            print(
                f"ours: {against['times_as_fast']:.2f} times as fast as {against['fastest_peer']}, "
                f"{against['memory_over_plain']:.0%} of the memory of plain logits"
                + ("" if on_gpu else f" (aims: {AIMS[dtype]}, {MEMORY_AIM:.0%})")
            )
            figures[name] = found | {"missing": missing, "ours": against}
    harness.finish(figures, options.json)


if __name__ == "__main__":
    main()

"""The norms' Triton kernels: in the interpreter, or on a GPU where there is one."""

import mmap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hymoe.kernels import norm
from hymoe.kernels.launch import KNOWN_TARGETS, recording
from hymoe.kernels.norm import gated_rms_norm, gated_rms_norm_ref, rms_norm, rms_norm_ref
from tests.close import assert_close_rel
from tests.kernel_check import check, normal, run

EPS = 1e-5
NORESERVE = 0x4000  # Linux's flag, which mmap names from Python 3.13 on: only pages that are touched need memory
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16)
SIZES = {
    "one-row": (1, 24),
    "odd": (21, 40),
    "two-values": (3, 2),
    "wider-than-a-tile": (3, 2688),
    "more-rows-than-programs": (67, 5),
}
# Groups of a power of two and not, each with a width within; the row count leaves a last tile short.
GROUPS = {"one": (1, 24), "eight": (8, 4), "three": (3, 20), "seven": (7, 3), "wide": (2, 600)}


def on_device(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of inputs by name that lie on the CPU."""
    return lambda **inputs: function(**{k: x.to(DEVICE) for k, x in inputs.items()}).cpu()


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, EPS, "triton")


def rms_ref(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm_ref(x, weight, EPS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "width"), SIZES.values(), ids=SIZES)
def test_rms_norm(tokens: int, width: int, dtype: torch.dtype) -> None:
    inputs = normal(1, x=(tokens, width), weight=(width,))
    check(on_device(rms), rms_ref, inputs, dtype, small=("weight",))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 13])
@pytest.mark.parametrize(("groups", "size"), GROUPS.values(), ids=GROUPS)
def test_gated_rms_norm(groups: int, size: int, tokens: int, dtype: torch.dtype) -> None:
    """x, gate and output gradient are column slices: rows apart, and the gate at no multiple of 16 bytes."""
    width = groups * size
    inputs = normal(
        2, x=(tokens, width + 11), z=(tokens, width + 37), weight=(width,), rest=(tokens, 3)
    )

    def slices(function: Callable[..., Tensor], *last: str) -> Callable[..., Tensor]:
        def of(x: Tensor, z: Tensor, weight: Tensor, rest: Tensor) -> Tensor:
            x, z = x[:, 3 : 3 + width], z[:, 5 : 5 + width]
            return torch.cat([rest, function(x, z, weight, groups, EPS, *last)], dim=1)

        return of

    check(
        on_device(slices(gated_rms_norm, "triton")),
        slices(gated_rms_norm_ref),
        inputs,
        dtype,
        small=("weight",),
    )


def test_values_apart_are_copied() -> None:
    """Rows that no kernel could read: a transposed input, a transposed and an expanded gradient."""
    inputs = normal(3, x=(20, 7), z=(20, 7), weight=(20,))
    check(
        on_device(lambda x, z, weight: gated_rms_norm(x.T, z.T, weight, 5, EPS, "triton").T),
        lambda x, z, weight: gated_rms_norm_ref(x.T, z.T, weight, 5, EPS).T,
        inputs,
        torch.float32,
    )
    for expanded in ("rows", "columns"):
        over = 0 if expanded == "rows" else 1
        check(
            on_device(lambda x, weight: rms(x, weight).sum(over)),  # noqa: B023
            lambda x, weight: rms_ref(x, weight).sum(over),  # noqa: B023
            normal(4, x=(9, 20), weight=(20,)),
            torch.float32,
        )


@pytest.mark.parametrize("gated", [False, True])
def test_no_rows(gated: bool) -> None:
    x, z = (torch.ones(0, 12, device=DEVICE, requires_grad=True) for _ in range(2))
    weight = torch.ones(12, device=DEVICE, requires_grad=True)
    y = gated_rms_norm(x, z, weight, 3, EPS, "triton") if gated else rms(x, weight)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 12)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_eps_rules_where_the_input_is_tiny_or_zero() -> None:
    inputs = normal(5, x=(5, 16), weight=(16,))
    inputs["x"] *= 1e-4  # mean square 1e-8, far below eps
    inputs["x"][2] = 0
    check(on_device(rms), rms_ref, inputs, torch.float32)


def test_the_gate_is_saturated() -> None:
    inputs = normal(6, x=(6, 16), z=(6, 16), weight=(16,))
    inputs["z"] *= 60  # silu' is 0 or 1 to the last bit
    check(
        on_device(lambda x, z, weight: gated_rms_norm(x, z, weight, 2, EPS, "triton")),
        lambda x, z, weight: gated_rms_norm_ref(x, z, weight, 2, EPS),
        inputs,
        torch.float32,
    )


def test_a_bad_row_stays_alone() -> None:
    """A NaN reaches its own row and group, and of the weight's gradient its own group."""
    inputs = {n: x.float() for n, x in normal(7, x=(9, 12), z=(9, 12), weight=(12,)).items()}
    function = on_device(lambda x, z, weight: gated_rms_norm(x, z, weight, 3, EPS, "triton"))
    clean = run(function, inputs)
    inputs["x"][4, 5] = torch.nan  # group 1 of row 4
    found = run(function, inputs)
    for name in ("y", "x", "z"):
        bad = torch.zeros(9, 12, dtype=torch.bool)
        bad[4, 4:8] = True
        assert torch.equal(found[name].isnan(), bad), name
        assert torch.equal(found[name][~bad], clean[name][~bad]), name
    assert torch.equal(found["weight"].isnan(), bad[4])


@pytest.mark.parametrize("gated", [False, True])
def test_two_runs_give_the_same_bits(gated: bool) -> None:
    """Also of the weight's gradient, and of a run whose memory held something else before."""
    inputs = {n: x.bfloat16() for n, x in normal(8, x=(70, 24), z=(70, 24), weight=(24,)).items()}
    if gated:
        function = on_device(lambda x, z, weight: gated_rms_norm(x, z, weight, 3, EPS, "triton"))
    else:
        del inputs["z"]
        function = on_device(rms)
    first, second = run(function, inputs), run(function, inputs)
    for name, one in first.items():
        assert torch.equal(one, second[name]), name


def test_rows_past_32_bits() -> None:
    """Rows 2^30 values apart: an offset that wraps reads another place of the same memory, which holds zeros."""
    stride, tokens, width = 1 << 30, 3, 12
    rows = normal(9, x=(tokens, width), z=(tokens, width), dy=(tokens, width), weight=(width,))
    x, z, dy, weight = (rows[name].to(torch.bfloat16) for name in ("x", "z", "dy", "weight"))
    near = [t.to(DEVICE).requires_grad_() for t in (x, z, weight)]
    far = [far_apart(x, stride), far_apart(z, stride)]
    far = [*(t.requires_grad_() for t in far), near[2].detach().clone().requires_grad_()]
    results = []
    for inputs, upstream in ((near, dy.to(DEVICE)), (far, far_apart(dy, stride))):
        y = gated_rms_norm(*inputs, 3, EPS, "triton")
        results.append((y, *torch.autograd.grad(y, inputs, upstream)))
    for name, one, other in zip(("y", "dx", "dz", "dweight"), *results, strict=True):
        assert torch.equal(one, other), name


def far_apart(rows: Tensor, stride: int) -> Tensor:
    """The same rows `stride` values apart, with as much memory before them as between them, none of it in use."""
    before = stride * (len(rows) - 1)
    size = 2 * before + rows.shape[1]
    if DEVICE == "cuda":
        memory = torch.zeros(size, dtype=rows.dtype, device=DEVICE)
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
        pages = mmap.mmap(-1, size * rows.element_size(), flags=flags)
        memory = torch.frombuffer(pages, dtype=rows.dtype)
    far = memory.as_strided(rows.shape, (stride, 1), before)
    return far.copy_(rows)


@pytest.mark.parametrize("arch", KNOWN_TARGETS)
def test_the_backward_pass_is_one_wave(arch: int) -> None:
    """As many programs as the chip holds, whatever the number of rows; `tests/compiled` checks that it holds them."""
    chip = KNOWN_TARGETS[arch]
    with recording(chip) as launches:
        for tokens in (100_000, 200_000):
            x, z = (torch.ones(tokens, 4096, device="meta", requires_grad=True) for _ in range(2))
            weight = torch.ones(4096, device="meta", requires_grad=True)
            gated_rms_norm(x, z, weight, 8, EPS, "triton").backward(x.detach())
    forward, backward = launches[::2], launches[1::2]
    assert [one.grid for one in forward] == [(25_000 * 8,), (50_000 * 8,)]
    warps = backward[0].options["num_warps"]
    most = norm.RESIDENT_WARPS[True] // warps * chip.num_sms
    assert [one.grid for one in backward] == [(most // 8 * 8,)] * 2


def test_float64_is_not_for_the_kernels() -> None:
    inputs = normal(10, x=(3, 8), weight=(8,))
    found = rms_norm(inputs["x"], inputs["weight"], EPS, "triton")
    assert_close_rel(found, rms_norm_ref(inputs["x"], inputs["weight"], EPS), 1e-14)

"""The scan's Triton kernels against the recurrence, token by token: in the interpreter where there is no GPU."""

import mmap
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hymoe.kernels.packed import Packed
from hymoe.kernels.ssd import scan
from hymoe.kernels.ssd.op import ssd_scan
from hymoe.kernels.ssd.ref import ssd_scan_ref
from tests.close import assert_close_rel
from tests.kernel_check import CHUNK, RAGGED, assert_documents_alone, check, run
from tests.kernels.ssd_inputs import inputs_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = (0.0, float("inf"))
SMALL = ("a_log", "skip", "dt_bias")
KERNEL_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HERE = {"chunk_size": CHUNK, "kernels": "triton"}


def sliced(
    function: Any,
    packed: Packed,
    limit: tuple[float, float] = LIMIT,
    groups: int = 2,
    width: int = 8,
    **options: Any,
) -> Any:
    """The function of `inputs_of`, on a GPU where there is one."""

    def call(**given: Tensor) -> Tensor:
        xbc, projected, a_log, skip, dt_bias = (
            given[name].to(DEVICE) for name in ("xbc", "projected", *SMALL)
        )
        heads = len(a_log)
        inner = heads * width
        shared = (xbc.shape[1] - inner) // 2
        x, b, c = xbc.split([inner, shared, shared], dim=-1)
        b, c = (t.unflatten(-1, (groups, -1)) for t in (b, c))
        x, dt = x.unflatten(-1, (heads, width)), projected[:, 5:]
        return function(x, dt, a_log, b, c, skip, dt_bias, limit, packed, **options).cpu()

    return call


def pack(lengths: tuple[int, ...]) -> Packed:
    return Packed.from_lengths(lengths, DEVICE)


def plain_scan(
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    limit: tuple[float, float],
    packed: Packed,
) -> Tensor:
    """The chunked form in plain torch: products of tensors in x's dtype, decays and states in float32."""
    b, c = (t.repeat_interleave(x.shape[1] // b.shape[1], 1).transpose(0, 1) for t in (b, c))
    step = functional.softplus(dt.float() + dt_bias).clamp(*limit).T  # (H, T)
    rate = step * -torch.exp(a_log)[:, None]
    by_head, dtype, rows, first = x.transpose(0, 1), x.dtype, [], 0
    for length in packed.lengths:
        state = None
        for start in range(first, first + length, CHUNK):
            t = slice(start, min(start + CHUNK, first + length))
            s = rate[:, t].cumsum(1)  # (H, Q)
            decay = torch.exp((s[:, :, None] - s[:, None]).tril()).tril() * step[:, None, t]
            y = ((c[:, t] @ b[:, t].mT) * decay).to(dtype) @ by_head[:, t]  # (H, Q, P)
            kept = (by_head[:, t] * (step[:, t] * torch.exp(s[:, -1:] - s))[..., None]).to(dtype)
            added = (b[:, t].mT @ kept).float()  # (H, N, P)
            if state is not None:
                y = y + (c[:, t] @ state.to(dtype)) * torch.exp(s)[..., None].to(dtype)
                added = added + torch.exp(s[:, -1])[:, None, None] * state
            state = added
            rows.append(y + skip.to(dtype)[:, None, None] * by_head[:, t])
        first += length
    return torch.cat(rows, 1).transpose(0, 1)


def check_scan(
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    limit: tuple[float, float] = LIMIT,
    chunk_size: int = CHUNK,
    changes: dict[str, float] | None = None,
    beside: dict[str, str] | None = None,
    **shape: int,
) -> None:
    """The 2x rule for y and every gradient, twice the same bits; `changes` are added to inputs."""
    packed = pack(lengths)
    kept = {name: n for name, n in shape.items() if name in ("groups", "width")}
    inputs = inputs_of(packed.num_tokens, **shape)
    for name, added in (changes or {}).items():
        inputs[name] += added
    check(
        sliced(ssd_scan, packed, limit, **kept, chunk_size=chunk_size, kernels="triton"),
        sliced(ssd_scan_ref, packed, limit, **kept),
        inputs,
        dtype,
        SMALL,
        beside,
        sliced(plain_scan, packed, limit, **kept) if dtype == torch.bfloat16 else None,
    )


@pytest.mark.parametrize("dtype", KERNEL_DTYPES.values(), ids=KERNEL_DTYPES)
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param(lengths, id=name, marks=[pytest.mark.slow] if sum(lengths) > 90 else [])
        for name, lengths in RAGGED.items()
    ],
)
def test_ragged_documents(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Heads and groups lie in the same places whatever the dtype: float32 has two of each."""
    shape = {"heads": 4, "groups": 2} if dtype == torch.float32 else {"heads": 2, "groups": 1}
    check_scan(lengths, dtype, **shape)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES.values(), ids=KERNEL_DTYPES)
def test_several_tiles_a_chunk(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 48 in tiles of 16: pairs of tokens in the same tile and in others, tiles that begin behind the end."""
    monkeypatch.setattr(scan, "BLOCK_M", 16)
    check_scan((70, 9, 20), dtype, chunk_size=48, heads=2, groups=1)


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 3, "groups": 1, "width": 6, "states": 12},  # no power of two anywhere
        {"heads": 2, "groups": 2, "width": 40, "states": 72},  # two tiles of a state each way
    ],
    ids=lambda shape: "-".join(f"{name}{n}" for name, n in shape.items()),
)
def test_sizes_that_no_block_divides(shape: dict[str, int]) -> None:
    check_scan((20, 13), torch.float32, chunk_size=7 if shape["heads"] == 3 else 16, **shape)


@pytest.mark.parametrize("limit", [(0.1, 0.4), (0.5, float("inf"))], ids=str)
def test_time_step_limits(limit: tuple[float, float]) -> None:
    """Its gradient is 0 outside of the clamp."""
    check_scan((19, 4), torch.float32, limit, heads=2, groups=1)


def test_a_tiny_step_keeps_its_digits() -> None:
    """softplus(-12) is 6.144e-6: log(1 + exp(-12)) in float32 is not. One token: y = c . b dt x."""
    one = torch.ones(1, 1, 16, device=DEVICE)
    zero = torch.zeros(1, device=DEVICE)
    raw, bias = torch.full((1, 1), -11.5, device=DEVICE), torch.full((1,), -0.5, device=DEVICE)
    y = ssd_scan(one, raw, zero, one, one, zero, bias, LIMIT, pack((1,)), **HERE)
    exact = 16 * functional.softplus(torch.tensor(-12.0, dtype=torch.float64))
    assert_close_rel(y[0, 0, 0], exact, 1e-6)


def test_strong_decay_neither_overflows_nor_loses_the_present() -> None:
    """Sums of dt * a reach -1e4 within a chunk: an exponential of a difference above the diagonal is infinite."""
    check_scan(
        (50, 3),
        torch.float32,
        changes={"a_log": 5, "dt_bias": 4},
        # Nothing but the skip outlives a token: what a_log still moves is exp(-50) of the terms of its gradient.
        beside={"a_log": "dt_bias"},
        heads=2,
        groups=1,
    )


def test_a_sum_of_many_rates_keeps_small_differences() -> None:
    """s of hundreds, neighbours 2 apart: the second float32 of s is needed."""
    check_scan((90,), torch.float32, chunk_size=96, changes={"a_log": 2}, heads=2, groups=1)


def test_documents_do_not_meet() -> None:
    lengths = (4, 18, 1, 16)
    inputs = {name: x.float() for name, x in inputs_of(sum(lengths), 2, 1).items()}
    fixed = {name: inputs.pop(name) for name in SMALL}
    assert_documents_alone(
        lambda packed, rows: sliced(ssd_scan, packed, groups=1, **HERE)(**rows, **fixed),
        pack,
        lengths,
        inputs,
    )


def test_two_runs_are_equal() -> None:
    inputs = {name: x.bfloat16() for name, x in inputs_of(37, 2, 1).items()}
    inputs |= {name: inputs[name].float() for name in SMALL}
    one, other = (run(sliced(ssd_scan, pack((17, 20)), groups=1, **HERE), inputs) for _ in range(2))
    for name, x in one.items():
        assert torch.equal(x, other[name]), name


def test_a_nan_time_step_shows() -> None:
    inputs = {name: x.float() for name, x in inputs_of(3, 2, 1).items()}
    inputs["projected"][1, 5] = torch.nan
    y = sliced(ssd_scan, pack((3,)), (0.1, 0.4), groups=1, **HERE)(**inputs)
    assert y[1:, 0].isnan().all()
    assert y[:, 1].isfinite().all()


def test_an_upstream_gradient_with_gaps() -> None:
    """Rows apart, and a last dimension apart."""
    inputs = {name: x.float() for name, x in inputs_of(18, 2, 1).items()}
    found = []
    for cut in (lambda t: t, lambda t: t.repeat(1, 2, 1)[:, :2], lambda t: t.mT.contiguous().mT):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        y = sliced(ssd_scan, pack((18,)), groups=1, **HERE)(**leaves)
        dy = cut(torch.linspace(-1, 1, y.numel()).view(y.shape))
        found.append(torch.autograd.grad(y, list(leaves.values()), dy))
    for other in found[1:]:
        assert all(torch.equal(x, right) for x, right in zip(other, found[0], strict=True))


@pytest.mark.skipif(DEVICE == "cuda", reason="the rows' gaps would be allocated")
def test_offsets_past_32_bits() -> None:
    """Rows 2^27 elements apart, 4.8 GB of address space of which a few pages are touched."""
    tokens, apart = 18, 1 << 27
    region = mmap.mmap(-1, 2 * tokens * apart, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    wide = torch.frombuffer(region, dtype=torch.bfloat16).view(tokens, apart)
    assert (tokens - 1) * apart >= 2**31
    inputs = {name: x.bfloat16() for name, x in inputs_of(tokens, 2, 1).items()}
    inputs |= {name: inputs[name].float() for name in SMALL}
    far = dict(inputs)
    for name, column in (("xbc", 0), ("projected", 100)):
        columns = slice(column, column + inputs[name].shape[1])
        wide[:, columns] = inputs[name]
        far[name] = wide[:, columns]
    right = gradients_of(inputs)
    for x, near in zip(gradients_of(far), right, strict=True):
        assert torch.equal(x, near)


def gradients_of(inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    y = sliced(ssd_scan, pack((18,)), groups=1, **HERE)(**leaves)
    dy = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, list(leaves.values()), dy)


def test_the_table_of_chunks() -> None:
    chunks = Packed.from_lengths((3, 40, 16, 17, 1)).chunks(16)
    assert chunks.table.tolist() == [
        [0, 3, -1, -1],
        [3, 16, -1, 0],
        [19, 16, 0, 1],
        [35, 8, 1, -1],
        [43, 16, -1, -1],
        [59, 16, -1, 2],
        [75, 1, 2, -1],
        [76, 1, -1, -1],
    ]
    assert chunks.long.tolist() == [[3, 40, 0], [59, 17, 2]]
    assert (chunks.count, chunks.slots) == (8, 3)
    assert chunks.table.dtype == chunks.long.dtype == torch.int32


def test_short_documents_have_no_states() -> None:
    chunks = Packed.from_lengths((1,) * 50).chunks(16)
    assert (chunks.count, chunks.slots, len(chunks.long)) == (50, 0, 0)

"""The chunked scan against the recurrence, token by token."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hymoe.kernels.packed import Packed
from hymoe.kernels.ssd import op
from hymoe.kernels.ssd.op import ssd_scan
from hymoe.kernels.ssd.ref import ssd_scan_ref
from tests.kernel_check import (
    CHUNK,
    DTYPE_IDS,
    DTYPES,
    RAGGED,
    assert_documents_alone,
    check,
)
from tests.kernels import ssd_inputs

HEADS, WIDTH, GROUPS, STATES = 4, 6, 2, 8
LIMIT = (0.0, float("inf"))
SMALL = ("a_log", "skip", "dt_bias")


inputs_of = partial(ssd_inputs.inputs_of, width=WIDTH, states=STATES)


def sliced(
    function: Any,
    packed: Packed,
    limit: tuple[float, float] = LIMIT,
    heads: int = HEADS,
    groups: int = GROUPS,
    **options: int,
) -> Any:
    def run(xbc: Tensor, projected: Tensor, a_log: Tensor, skip: Tensor, dt_bias: Tensor) -> Tensor:
        inner = heads * WIDTH
        states = (xbc.shape[1] - inner) // (2 * groups)
        x, b, c = xbc.split([inner, groups * states, groups * states], dim=-1)
        return function(
            x.unflatten(-1, (heads, WIDTH)),
            projected[:, 5:],
            a_log,
            b.unflatten(-1, (groups, states)),
            c.unflatten(-1, (groups, states)),
            skip,
            dt_bias,
            limit,
            packed,
            **options,
        )

    return run


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
def test_ragged_documents(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    packed = Packed.from_lengths(lengths)
    check(
        sliced(ssd_scan, packed, chunk_size=CHUNK),
        sliced(ssd_scan_ref, packed),
        inputs_of(sum(lengths)),
        dtype,
        SMALL,
    )


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("chunk_size", [1, 7, 128])
def test_chunks_and_groups(chunk_size: int, groups: int) -> None:
    """A head alone in its group, all heads in one; chunks of one token, an odd size, longer than the row."""
    packed = Packed.from_lengths((20, 37))
    check(
        sliced(ssd_scan, packed, groups=groups, chunk_size=chunk_size),
        sliced(ssd_scan_ref, packed, groups=groups),
        inputs_of(57, groups=groups),
        torch.float64,
        SMALL,
    )


def test_many_chunks_of_many_documents() -> None:
    lengths = (3, 130, 1, 64, 65, 31, 200)
    packed = Packed.from_lengths(lengths)
    check(
        sliced(ssd_scan, packed, chunk_size=CHUNK),
        sliced(ssd_scan_ref, packed),
        inputs_of(sum(lengths)),
        torch.float32,
        SMALL,
    )


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
def test_states_pass_from_block_to_block(
    lengths: tuple[int, ...], chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few chunks a block: documents begin and end in the middle of blocks and at their edges."""
    per_chunk = HEADS * (CHUNK * CHUNK + CHUNK * WIDTH + STATES * WIDTH)
    monkeypatch.setattr(op, "CPU_BLOCK", chunks * per_chunk)
    packed = Packed.from_lengths(lengths)
    check(
        sliced(ssd_scan, packed, chunk_size=CHUNK),
        sliced(ssd_scan_ref, packed),
        inputs_of(sum(lengths)),
        torch.float64,
        SMALL,
    )
    if sum(lengths) > 50:
        assert len(packed.blocks(CHUNK, chunks)) > 1
        assert packed.blocks(CHUNK, chunks)[0].chunks == chunks


@pytest.mark.parametrize("limit", [(0.1, 0.4), (0.0, 0.3), (0.5, float("inf"))], ids=str)
def test_time_step_limits(limit: tuple[float, float]) -> None:
    """Both ends of the clamp are met; its gradient is 0 outside."""
    packed = Packed.from_lengths((19, 24))
    inputs = inputs_of(43)
    step = functional.softplus(inputs["projected"][:, 5:] + inputs["dt_bias"])
    assert ((step < limit[0]) | (step > limit[1])).any()
    assert ((step > limit[0]) & (step < limit[1])).any()
    check(
        sliced(ssd_scan, packed, limit, chunk_size=CHUNK),
        sliced(ssd_scan_ref, packed, limit),
        inputs,
        torch.float64,
        SMALL,
    )


@pytest.mark.parametrize(("limit", "expected"), [(LIMIT, 6.144e-6), ((0.001, 9.0), 0.001)])
def test_a_tiny_step_is_clamped_by_the_limit_alone(
    limit: tuple[float, float], expected: float
) -> None:
    """transformers#35154: raw -12 is softplus(-12), not time_step_min. One token: y = c.b dt x."""
    one = torch.ones(1, 1, 1)
    y = ssd_scan(
        one,
        torch.full((1, 1), -11.5),
        torch.zeros(1),
        one,
        one,
        torch.zeros(1),
        torch.full((1,), -0.5),
        limit,
        Packed.from_lengths((1,)),
    )
    assert y.item() == pytest.approx(expected, rel=1e-3)


def test_strong_decay_neither_overflows_nor_loses_the_present() -> None:
    """Sums of dt * a reach -1e4 within a chunk: an exponential of a difference above the diagonal is infinite."""
    packed = Packed.from_lengths((50, 3))
    inputs = inputs_of(53)
    inputs["a_log"] += 5
    inputs["dt_bias"] += 4
    check(
        sliced(ssd_scan, packed, chunk_size=CHUNK),
        sliced(ssd_scan_ref, packed),
        inputs,
        torch.float32,
        SMALL,
        # Nothing but the skip outlives a token: what a_log still moves is exp(-50) of the terms of its gradient.
        beside={"a_log": "dt_bias"},
    )


def test_weak_decay_carries_a_state_through_many_chunks() -> None:
    packed = Packed.from_lengths((200,))
    inputs = inputs_of(200)
    inputs["a_log"] -= 6
    check(
        sliced(ssd_scan, packed, chunk_size=CHUNK),
        sliced(ssd_scan_ref, packed),
        inputs,
        torch.float64,
        SMALL,
    )


@pytest.mark.parametrize("lengths", [(4, 5), (20, 1, 40, 2), (1, 1, 1), (CHUNK, CHUNK)], ids=str)
@pytest.mark.parametrize("block", [1, op.CPU_BLOCK], ids=["chunk-by-chunk", "one-block"])
def test_documents_do_not_meet(
    lengths: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "CPU_BLOCK", block)
    inputs = {name: x.float() for name, x in inputs_of(sum(lengths)).items()}
    fixed = {name: inputs.pop(name) for name in SMALL}
    assert_documents_alone(
        lambda packed, rows: sliced(ssd_scan, packed, chunk_size=CHUNK)(**rows, **fixed),
        Packed.from_lengths,
        lengths,
        inputs,
    )


def test_two_runs_are_equal() -> None:
    packed = Packed.from_lengths((60, 41))
    inputs = {name: x.float() for name, x in inputs_of(101).items()}
    leaves = [{n: x.clone().requires_grad_() for n, x in inputs.items()} for _ in range(2)]
    for leaf in leaves:
        sliced(ssd_scan, packed, chunk_size=CHUNK)(**leaf).square().sum().backward()
    for name in inputs:
        assert torch.equal(leaves[0][name].grad, leaves[1][name].grad), name


def test_shapes_that_do_not_fit_are_refused() -> None:
    packed = Packed.from_lengths((3,))
    x, dt, head = torch.ones(3, 4, 2), torch.ones(3, 4), torch.ones(4)
    b = torch.ones(3, 2, 8)

    def call(**changes: Any) -> Tensor:
        named = {"x": x, "dt": dt, "a_log": head, "b": b, "c": b, "skip": head, "dt_bias": head}
        return ssd_scan(**{**named, **changes}, dt_limit=LIMIT, packed=packed)

    with pytest.raises(ValueError, match=r"ssd_scan x: expected shape \(3, \*, \*\)"):
        call(x=torch.ones(4, 4, 2))
    with pytest.raises(ValueError, match=r"ssd_scan dt: expected shape \(3, 4\)"):
        call(dt=torch.ones(3, 5))
    with pytest.raises(ValueError, match=r"ssd_scan c: expected shape \(3, 2, 8\)"):
        call(c=torch.ones(3, 2, 7))
    with pytest.raises(ValueError, match=r"ssd_scan skip: expected shape \(4\)"):
        call(skip=torch.ones(3))
    with pytest.raises(ValueError, match="4 heads do not divide by 3 groups"):
        call(b=torch.ones(3, 3, 8), c=torch.ones(3, 3, 8))

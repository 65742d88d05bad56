"""Random bits, stochastic rounding and exact masters: all on the bits, against plain Python or exhaustively."""

import math

import pytest
import torch
import triton
import triton.language as tl

from hymoe.kernels import rounding
from hymoe.kernels.rounding import (
    EXPORT_DOMAIN,
    NUM_ROUNDS,
    export_bf16,
    high_bits,
    join_master,
    low_bits,
    philox4x32,
    random_words,
    split_master,
    stochastic_round,
    update_sums,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEYED = {"seed": 4242, "key": 0xDEADBEEF, "offset": 0, "step": 3}
LARGEST_BF16 = 3.3895313892515355e38

# Random123's kat_vectors: rounds, counter and key as one hexadecimal word each, output.
KNOWN_ANSWERS = [
    (7, "00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, "ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, "pi", "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, "00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, "ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, "pi", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
PI = "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0"


@pytest.mark.parametrize(("rounds", "inputs", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(rounds, inputs, expected):
    words = [int(w, 16) for w in (PI.split() if inputs == "pi" else [inputs] * 6)]
    counter = tuple(torch.full((1,), w, dtype=torch.int64) for w in words[:4])
    outputs = philox4x32(counter, (words[4], words[5]), rounds)
    assert [int(w) & 0xFFFFFFFF for w in outputs] == [int(w, 16) for w in expected.split()]


def python_word(index: int, seed: int, key: int, step: int, domain: int) -> int:
    """The word of one element by the module docstring, in Python integers."""
    group = index // 4
    c = [group % 2**32, group // 2**32, key, step % 2**32]
    k = [seed % 2**32, (seed // 2**32) ^ domain]
    for _ in range(NUM_ROUNDS):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [p1 // 2**32 ^ c[1] ^ k[0], p1 % 2**32, p0 // 2**32 ^ c[3] ^ k[1], p0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c[index % 4]


# 2^34 is where the high half of the counter changes; 2^31 and 2^33 where narrow or signed indices break.
@pytest.mark.parametrize("first", [0, 1, 2**31 - 2, 2**33 + 3, 2**34 - 5, 2**62 + 7])
@pytest.mark.parametrize(("seed", "domain"), [(0, 0), (4242, 0), (2**64 - 1, EXPORT_DOMAIN)])
def test_words_follow_the_docstring(first, seed, domain):
    step = 2**32 + 17
    words = random_words(first, 11, seed=seed, key=2**32 - 3, step=step, domain=domain)
    expected = [python_word(first + i, seed, 2**32 - 3, step, domain) for i in range(11)]
    assert [int(w) & 0xFFFFFFFF for w in words] == expected
    assert low_bits(words).tolist() == [w & 0xFFFF for w in expected]
    assert high_bits(words).tolist() == [w >> 16 for w in expected]


def test_words_do_not_depend_on_where_a_piece_starts():
    whole = random_words(0, 999, seed=1, key=2, step=torch.tensor(3))
    pieces = [0, 1, 3, 6, 10, 14, 512, 999]
    for start, stop in zip(pieces[:-1], pieces[1:], strict=True):
        assert torch.equal(
            random_words(start, stop - start, seed=1, key=2, step=3), whole[start:stop]
        )
    assert random_words(5, 0, seed=1, key=2, step=3).shape == (0,)


@triton.jit
def _words_kernel(out_ptr, first, seed, key, step, NUM: tl.constexpr, ROUNDS: tl.constexpr):
    group = first // 4 + tl.arange(0, NUM // 4).to(tl.int64)
    low = (group & 0xFFFFFFFF).to(tl.uint32)
    high = (group >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    w0, w1, w2, w3 = tl.philox(
        seed, low, high, zero + key.to(tl.uint32), zero + step.to(tl.uint32), ROUNDS
    )
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    tl.store(out_ptr + tl.arange(0, NUM), words.to(tl.int32, bitcast=True))


def test_triton_makes_the_same_words():
    first, seed, key, step = 2**34 - 16, 4242 + (7 << 32), 3_000_000_000, 12
    out = torch.empty(64, dtype=torch.int32, device=DEVICE)
    _words_kernel[(1,)](out, first, seed, key, step, NUM=64, ROUNDS=NUM_ROUNDS)
    assert torch.equal(out.cpu(), random_words(first, 64, seed=seed, key=key, step=step))


@pytest.mark.parametrize(
    "wrong", [{"first": -1}, {"first": 2**63}, {"key": 2**32}, {"key": -1}, {"seed": -1}]
)
def test_words_refuse_values_out_of_range(wrong):
    arguments = {"first": 0, "seed": 0, "key": 0} | wrong
    with pytest.raises(ValueError, match="out of range"):
        random_words(arguments["first"], 4, seed=arguments["seed"], key=arguments["key"], step=0)


def test_words_are_uniform_and_uncorrelated():
    n = 1 << 18
    words = random_words(0, n, seed=4242, key=77, step=1)
    bound = 5 / math.sqrt(n)  # five standard deviations of a mean of n independent values
    halves = [
        (bits(w).double() - 32767.5) / (65536 / math.sqrt(12))
        for w in (words, random_words(0, n, seed=4242, key=77, step=2))
        for bits in (low_bits, high_bits)
    ]
    halves += [halves[0].roll(shift) for shift in (1, 2, 3, 4)]
    for half in halves:
        assert abs(half.mean()) < bound
    correlations = torch.corrcoef(torch.stack(halves)) - torch.eye(len(halves))
    assert correlations.abs().max() < bound
    counts = torch.bincount(low_bits(words) >> 8, minlength=256).double()
    chi2 = ((counts - n / 256) ** 2 / (n / 256)).sum()
    assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255)


def all_bf16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)


def float_bits(*patterns: int) -> torch.Tensor:
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


def test_every_bf16_keeps_its_bits():
    values = all_bf16()
    rounded = stochastic_round(values.float(), **KEYED)
    nan = values.isnan()
    assert torch.equal(rounded.isnan(), nan)
    assert torch.equal(rounded.view(torch.int16)[~nan], values.view(torch.int16)[~nan])


def test_finite_values_stay_finite_and_nans_stay_nans():
    top = float_bits(*range(0x7F7F0000, 0x7F800000, 7))  # the largest BF16 .. the largest float32
    for sign in (1, -1):
        rounded = stochastic_round(sign * top, **KEYED)
        assert (rounded.float() == sign * LARGEST_BF16).all()
    assert torch.equal(
        stochastic_round(float_bits(0x7F800000, 0xFF800000), **KEYED).float(),
        torch.tensor([math.inf, -math.inf]),
    )
    nans = float_bits(0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0xFF800001, 0xFFFFFFFF)
    assert stochastic_round(nans, **KEYED).isnan().all()


# Normal, negative, just under a power of two, subnormal in both signs, and near the smallest float32.
@pytest.mark.parametrize("value", [1.001, -1.001, 1.9999, 1e-39, -3e-40, 1.4e-45, 3.38e38])
def test_rounding_goes_to_the_neighbours_and_is_unbiased(value):
    n = 1 << 18
    x = torch.full((n,), value)
    bits = x[:1].view(torch.int32)
    inner = (bits & -65536).view(torch.float32).double()  # towards zero
    outer = ((bits & -65536) + 65536).view(torch.float32).double()
    share = float((x[0].double() - inner) / (outer - inner))
    rounded = stochastic_round(x, **KEYED).double()
    is_outer = rounded == outer
    assert (is_outer | (rounded == inner)).all()
    assert abs(is_outer.double().mean() - share) < 5 * math.sqrt(share * (1 - share) / n) + 1e-9


def test_rounding_does_not_depend_on_slices_or_shards(monkeypatch):
    x = torch.randn(1003, generator=torch.Generator().manual_seed(1))
    whole = stochastic_round(x, **KEYED)
    assert not torch.equal(whole, x.bfloat16())
    monkeypatch.setattr(rounding, "SLICE_CPU", 64)
    assert torch.equal(stochastic_round(x, **KEYED), whole)
    parts = [
        stochastic_round(x[a:b], **(KEYED | {"offset": a})) for a, b in ((0, 335), (335, 1003))
    ]
    assert torch.equal(torch.cat(parts), whole)
    for other in ({"seed": 1}, {"key": 1}, {"step": 4}, {"offset": 4}, {"domain": EXPORT_DOMAIN}):
        assert not torch.equal(stochastic_round(x, **(KEYED | other)), whole)
    assert stochastic_round(x[:0].view(0, 5), **KEYED).shape == (0, 5)


def test_rounding_refuses_other_input():
    with pytest.raises(ValueError, match="float64"):
        stochastic_round(torch.zeros(3, dtype=torch.float64), **KEYED)
    with pytest.raises(ValueError, match="contiguous"):
        stochastic_round(torch.zeros(3, 4).T, **KEYED)


def masters() -> torch.Tensor:
    """Every upper half with the low halves around a tie, and every low half with a few upper halves."""
    high = torch.arange(2**16, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    some = torch.tensor([0, 0x0001, 0x3F80, 0x3F81, 0x7F7F, 0x8000, 0x8001, 0xBF80, 0xFF7F]) << 16
    grid = torch.cat(
        [(high[:, None] | low).flatten(), (some[:, None] | torch.arange(2**16)).flatten()]
    )
    return grid.to(torch.int32).view(torch.float32)


def test_masters_come_back_bit_for_bit():
    master = masters()
    weight, remainder = split_master(master)
    joined = join_master(weight, remainder)
    nan = master.isnan()
    assert torch.equal(weight.isnan(), nan)
    assert torch.equal(joined.isnan(), nan)
    assert not remainder[nan].any()
    assert torch.equal(joined.view(torch.int32)[~nan], master.view(torch.int32)[~nan])


def test_the_weight_is_the_nearest_bf16_and_ties_go_away_from_zero():
    master = masters()
    weight, remainder = split_master(master)
    is_tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    finite = master.isfinite()
    even = master.bfloat16()
    off_ties = finite & ~is_tie
    assert torch.equal(weight.view(torch.int16)[off_ties], even.view(torch.int16)[off_ties])

    tie = finite & is_tie
    assert tie.sum() > 60_000
    assert (remainder[tie] == -32768).all()
    assert (weight[tie].double().abs() > master[tie].double().abs()).all()
    near = tie & weight.isfinite()
    distance = (weight.double() - master.double()).abs()[near]
    assert torch.equal(distance, (even.double() - master.double()).abs()[near])
    assert not torch.equal(weight[near], even[near])  # half of the ties go the other way


def test_untouched_weights_are_exported_as_they_are():
    weight = all_bf16()
    weight = weight[~weight.isnan()]
    exported = export_bf16(weight, torch.zeros_like(weight, dtype=torch.int16), **KEYED)
    assert torch.equal(exported.view(torch.int16), weight.view(torch.int16))


def test_export_is_unbiased_where_rounding_to_nearest_loses_the_update(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    base = (torch.randn(1 << 18, generator=generator) * 0.02).bfloat16()
    weight, remainder = split_master(base.float() - 6e-5)
    exported = export_bf16(weight, remainder, **KEYED)
    reached, update = update_sums(base, weight, remainder, exported)
    assert abs(reached / update - 1) < 0.01
    reached_by_nearest, _ = update_sums(base, weight, remainder, weight)
    assert reached_by_nearest / update < 0.97
    master = join_master(weight, remainder)
    assert torch.equal(exported, stochastic_round(master, **KEYED, domain=EXPORT_DOMAIN))
    monkeypatch.setattr(rounding, "SLICE_CPU", 1000)
    assert torch.equal(export_bf16(weight, remainder, **KEYED), exported)
    rows = [
        export_bf16(weight[a:b], remainder[a:b], **(KEYED | {"offset": a}))
        for a, b in ((0, 101), (101, 1 << 18))
    ]
    assert torch.equal(torch.cat(rows), exported)


def test_update_sums_by_hand():
    base = torch.tensor([1.0, 2.0, 4.0])
    master = torch.tensor([1.5, 2.0, 3.0])  # change 0.5, 0, -1
    file = torch.tensor([2.0, 7.0, 3.5])  # change 1, 5, -0.5
    assert update_sums(base, master, None, file).tolist() == [1.0, 1.25]
    assert update_sums(base, master, None, master).tolist() == [1.25, 1.25]
    assert update_sums(base, master, None, base).tolist() == [0.0, 1.25]
    weight, remainder = split_master(master)
    assert update_sums(base.bfloat16(), weight, remainder, file).tolist() == [1.0, 1.25]


def test_masters_refuse_other_input():
    weight = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"int16 .*\(4,\) and torch.int32 \(4,\)"):
        export_bf16(weight, torch.zeros(4, dtype=torch.int32), **KEYED)
    with pytest.raises(ValueError, match=r"\(4,\).*\(5,\)"):
        export_bf16(weight, torch.zeros(5, dtype=torch.int16), **KEYED)
    with pytest.raises(ValueError, match="one shape"):
        update_sums(weight, weight, None, weight[:3])

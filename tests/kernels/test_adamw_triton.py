"""AdamW's Triton launch over many tensors: the bits of the reference, and which launches there are."""

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from hymoe.kernels import adamw_triton, launch
from hymoe.kernels.adamw import adamw_step, adamw_step_ref, step_scalars
from tests.test_adamw import BF16, F32, MODES, State, assert_same_bits, factor, normal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Sizes with offsets: parts of a group of four, whole groups, ends before and after a block of 64 and a chunk of 128,
# words whose counter gets its high half (element 2^34) inside the tensor.
PLACES = [
    (0, 0),
    (1, 2**31 - 1),
    (3, 2**32 + 3),
    (7, 2**33 - 2),
    (8, 2**31 - 4),
    (64, 2**32 - 32),
    (65, 1),
    (128, 4),
    (127, 2**63 - 127),
    (72, 2**34 - 32),
    (71, 2**34 - 35),
    (264, 0),
]

triton_step = functools.partial(adamw_step, kernels="triton")


def state_of(params: Sequence[torch.Tensor], rounding: str, **places: list[int]) -> State:
    state = State([p.to(DEVICE) for p in params], rounding, **places)
    state.count = state.count.to(DEVICE)
    return state


def everywhere(dtype: torch.dtype, rounding: str) -> State:
    params = [normal(n, seed=i, std=0.02).to(dtype) for i, (n, _) in enumerate(PLACES)]
    keys = [2**32 - 1 - i for i in range(len(params))]
    state = state_of(params, rounding, offsets=[offset for _, offset in PLACES], keys=keys)
    state.count += 2**32 - 2  # the words take the low 32 bits: all ones, then zero
    return state


def assert_same_values(actual: State, expected: State) -> None:
    """Bits, but for those of NaNs, which no format promises."""
    assert torch.equal(actual.count, expected.count)
    for i, (a, b) in enumerate(zip(actual.tensors(), expected.tensors(), strict=True)):
        bits = torch.int32 if a.dtype == F32 else torch.int16
        is_same = (a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())
        assert is_same.all(), f"tensor {i}: {(~is_same).nonzero().flatten().tolist()[:9]}"


def mixed(function: Callable[..., None]) -> Callable[..., None]:
    """The step with three weight decays, and a seed whose halves both have their sign bit."""

    def step(params: list[torch.Tensor], *args, **options) -> None:
        decays = [(0.0, 0.1, 0.01)[i % 3] for i in range(len(params))]
        function(params, *args, **options | {"weight_decays": decays, "seed": 2**63 + 2**31 + 5})

    return step


KINDS = [(mode, BF16, beta2) for mode in MODES for beta2 in (0.95, 0.999)]
KINDS += [
    ("exact", F32, 0.999)
]  # float32 is not rounded: whatever the mode, the kernel is the same one


@pytest.mark.parametrize(("rounding", "dtype", "beta2"), KINDS)
def test_equals_the_reference_bit_for_bit(rounding, dtype, beta2):
    states = [everywhere(dtype, rounding) for _ in range(2)]
    for step in range(2):
        grad_dtypes = (BF16, F32)
        grads = [
            normal(*p.shape, seed=10 * step + i).to(DEVICE, grad_dtypes[(i + step) % 2])
            for i, p in enumerate(states[0].params)
        ]
        kept = [g.clone() for g in grads]
        lr = torch.tensor(1e-3, dtype=torch.float64) if step else 1e-3
        for state, function in zip(states, (triton_step, adamw_step_ref), strict=True):
            clip = factor(0.37).to(DEVICE)
            state.step(grads, lr, clip, function=mixed(function), beta2=beta2)
        assert_same_bits(grads, kept)
    assert states[0].count == 2**32
    assert_same_bits(states[0].bits(), states[1].bits())


EXTREMES = [0.0, -0.0, 1e-45, -1e-41, 1.1754944e-38, 1e-30, 1e-20, 1e18, 1e30, 3.39e38, math.inf]
EXTREMES += [-math.inf, math.nan, 1.0, -1.0, 1e-8, -3.39e38]


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("rounding", MODES)
def test_extreme_values(rounding, dtype, beta2):
    """Every pair of weight and gradient: subnormals, the largest numbers, infinities, NaN; two steps on them.

    A step of 1e36 puts some float32 weights between the largest bfloat16 and infinity.
    """
    n = len(EXTREMES)
    values = torch.tensor(EXTREMES)
    params, grads = values.repeat(n + 1).to(dtype), values.repeat_interleave(n)
    cuda_nan = torch.full((n,), 0x7FFFFFFF, dtype=torch.int32).view(F32)
    grads = torch.cat([grads, cuda_nan]).to(DEVICE)
    states = [state_of([params.clone()], rounding, offsets=[2**34 - 100]) for _ in range(2)]
    for lr in (1e36, 1e-3):
        for state, function in zip(states, (triton_step, adamw_step_ref), strict=True):
            clip = factor().to(DEVICE)
            state.step([grads], lr, clip, 0.1, function, beta2=beta2)
    assert_same_values(*states)
    if rounding == "exact" and dtype == BF16:
        is_nan = states[0].params[0].isnan()
        assert is_nan[-n:].all()
        assert (states[0].remainders[0][is_nan] == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("rounding", MODES)
def test_a_factor_that_is_not_finite_changes_nothing(rounding, dtype, bad):
    state = state_of([normal(72, std=0.02).to(dtype), normal(5).to(dtype)], rounding)
    grads = [normal(*p.shape, seed=3).to(DEVICE) for p in state.params]
    state.step(grads, 1e-3, factor().to(DEVICE), 0.1, triton_step, beta2=0.999)
    before = state.bits()
    state.step(grads, 1e-3, factor(bad).to(DEVICE), 0.1, triton_step, beta2=0.999)
    assert_same_bits(state.bits(), before)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_sharding_does_not_change_a_bit(rounding, dtype, ranks):
    rows, columns = 25, 7  # shards of 13 and 9 rows start inside groups of four
    initial, grads = normal(rows, columns, std=0.02).to(dtype), normal(2, rows, columns, seed=1)
    whole = state_of([initial.clone()], rounding, offsets=[0])
    step = -(-rows // ranks)
    starts = list(range(0, rows, step))
    shards = state_of(
        [initial[a : a + step].clone() for a in starts],
        rounding,
        keys=whole.keys * ranks,
        offsets=[a * columns for a in starts],
    )
    for grad in grads.to(DEVICE):
        clip = factor().to(DEVICE)
        whole.step([grad], 1e-3, clip, 0.1, triton_step, beta2=0.99)
        pieces = [grad[a : a + step] for a in starts]
        shards.step(pieces, 1e-3, clip, 0.1, triton_step, beta2=0.99)
    tensors = shards.tensors()
    for i, expected in enumerate(whole.tensors()):
        joined = torch.cat(tensors[i * ranks : (i + 1) * ranks])
        assert torch.equal(joined, expected)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """The keyword arguments of every launch, which runs all the same."""
    seen: list[dict] = []

    def watched(kernel, grid, *args, **kwargs):
        seen.append(kwargs | {"grid": grid})
        launch.launch(kernel, grid, *args, **kwargs)

    monkeypatch.setattr(adamw_triton, "launch", watched)
    return seen


def test_many_tensors_are_one_launch(launches):
    sizes = [8, 64, 72, 200, 520, 16, 0, 24] * 3
    params = [normal(n, seed=i).bfloat16() for i, n in enumerate(sizes)]
    states = [state_of([p.clone() for p in params], "exact") for _ in range(2)]
    grads = [normal(n, seed=-i).to(DEVICE, BF16) for i, n in enumerate(sizes)]
    for state, function in zip(states, (triton_step, adamw_step_ref), strict=True):
        state.step(grads, 1e-3, factor().to(DEVICE), function=function)
    assert_same_bits(states[0].bits(), states[1].bits())
    assert len(launches) == 1
    assert launches[0]["ALIGNED"]
    if DEVICE == "cpu":
        assert launches[0]["grid"] == (3 * (1 + 1 + 1 + 2 + 5 + 1 + 1),)


@pytest.mark.parametrize("column", ["params", "grads", "exp_avg", "exp_avg_sq", "remainders"])
@pytest.mark.parametrize("shift", [1, 4, 8])  # elements: 8 of two bytes are 16, and aligned
def test_tensors_that_are_not_aligned(column, shift, launches):
    """A view from any element on of a larger storage, beside tensors that are aligned."""
    states = [state_of([normal(136).bfloat16(), normal(200).bfloat16()], "exact") for _ in range(2)]
    for state in states:
        grads = [normal(136, seed=1).to(DEVICE, BF16), normal(200, seed=2).to(DEVICE, BF16)]
        columns = {"grads": grads, "remainders": state.remainders}
        tensors = columns.get(column) or getattr(state, column)
        storage = torch.zeros(136 + shift, dtype=tensors[0].dtype, device=DEVICE)
        storage[shift:] = tensors[0]
        tensors[0] = storage[shift:]
        function = triton_step if state is states[0] else adamw_step_ref
        state.step(grads, 1e-3, factor().to(DEVICE), 0.1, function, beta2=0.999)
        assert (storage[:shift] == 0).all()
    assert_same_bits(states[0].bits(), states[1].bits())
    aligned = [True] if shift == 8 else [False, True]
    assert [seen["ALIGNED"] for seen in launches] == aligned


def test_neighbours_of_a_shard_keep_their_bits():
    """Elements before and after a shard in its storage, at every position within a group of four."""
    for start in range(8, 16):
        for size in (1, 2, 3, 60, 63):
            storage = normal(96).bfloat16().to(DEVICE)
            kept = storage.clone()
            state = state_of([storage[:0]], "stochastic", offsets=[start])
            state.params = [storage[start : start + size]]
            state.exp_avg = [torch.zeros_like(state.params[0])]
            state.exp_avg_sq = [torch.zeros_like(state.params[0])]
            grads = [torch.ones(size, device=DEVICE)]
            state.step(grads, 1.0, factor().to(DEVICE), function=triton_step)
            kept[start : start + size] = storage[start : start + size]
            assert torch.equal(storage, kept)
            assert (state.exp_avg[0] != 0).all()


@pytest.mark.skipif(DEVICE != "cpu", reason="memory that is never touched: only a CPU has it")
def test_elements_past_2_31_of_a_local_tensor():
    """The last chunk alone of a tensor of 2^31 elements and some; nearly all of its memory is never mapped."""
    block, chunk = adamw_triton.block_and_chunk(torch.device("cpu"))
    programs = 2**31 // chunk + 2
    size, offset = (programs - 1) * chunk + 72, 2**35 + 4
    start = size - 72
    big = [torch.from_numpy(np.empty(size, np.int16)) for _ in range(5)]
    initial = [normal(72, seed=i, std=0.02).bfloat16().view(torch.int16) for i in range(2)]
    initial += [torch.zeros(72, dtype=torch.int16) for _ in range(3)]
    for tensor, tail in zip(big, initial, strict=True):
        tensor[start:] = tail

    scalars = step_scalars(torch.zeros((), dtype=torch.int64), factor(), 1e-3, 0.9, 0.999, 1e-8)
    first = 1 - programs  # the program that runs is the tensor's last
    row = [*(tensor.data_ptr() for tensor in big), size, offset, 77, 1, first]
    adamw_triton.launch_table(
        [row],
        (1,),
        torch.stack([scalars.decay(0.0), scalars.decay(0.1)]),
        scalars,
        4242,
        PARAM_BF16=True,
        GRAD_BF16=True,
        ROUNDING="exact",
        STOCHASTIC_V=True,
        ALIGNED=True,
        BLOCK=block,
        CHUNK=chunk,
    )
    expected = State([initial[0].view(BF16).clone()], "exact", [77], [offset + start])
    expected.step([initial[1].view(BF16)], 1e-3, factor(), 0.1, adamw_step_ref, beta2=0.999)
    found = [big[i][start:].clone() for i in (0, 2, 3, 4)]
    assert_same_bits(found, expected.bits()[:4])


@pytest.mark.parametrize("rounding", MODES)
def test_runs_on_tensors_without_values(rounding):
    """Nothing waits for the device, and the launch that the real shapes need is known ahead of time."""
    empty = functools.partial(torch.zeros, (32, 1856, 2688), dtype=BF16, device="meta")
    with launch.recording(launch.KNOWN_TARGETS[90]) as recorded:
        adamw_step(
            [empty()],
            [empty()],
            [empty()],
            [empty()],
            remainders=[empty().view(torch.int16)] if rounding == "exact" else None,
            keys=[1],
            offsets=[0],
            weight_decays=[0.1],
            lr=1e-3,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            step=torch.zeros((), dtype=torch.int64, device="meta"),
            clip_factor=torch.zeros((), device="meta"),
            seed=2**64 - 1,
            rounding=rounding,
            kernels="triton",
        )
    (one,) = recorded
    assert one.grid == (-(-32 * 1856 * 2688 // (adamw_triton.BLOCK * adamw_triton.BLOCKS)),)
    assert one.args["rows_ptr"].shape == one.grid
    assert one.options["enable_fp_fusion"] is False


def test_refuses_tensors_of_other_devices():
    state = State([normal(8)], "nearest")
    grads = [torch.zeros(8, device="meta")]
    with pytest.raises(ValueError, match="gradient of parameter 0 is on meta, the count of steps"):
        state.step(grads, 1e-3, function=triton_step)
    state.count = state.count.to("meta")
    with pytest.raises(ValueError, match="clip_factor is on cpu, the count of steps on meta"):
        state.step(grads, 1e-3, function=triton_step)

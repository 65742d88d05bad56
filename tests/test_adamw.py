"""AdamW on BF16 weights: what survives of small updates, the same bits over any sharding, skipped steps."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hymoe.kernels import rounding as rounding_module
from hymoe.kernels.adamw import adamw_step, adamw_step_ref
from hymoe.kernels.rounding import join_master, stochastic_round
from tests.close import assert_close_rel, relative_error

BF16, F32 = torch.bfloat16, torch.float32
MODES = ("exact", "stochastic", "nearest")
# A constant update: with both betas and eps 0 the update is exactly lr * sign(gradient).
CONSTANT = {"beta1": 0.0, "beta2": 0.0, "eps": 0.0}
USUAL = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def factor(value: float = 1.0) -> torch.Tensor:
    return torch.tensor(value, dtype=F32)


@dataclass
class State:
    """A list of tensors under training; `offsets` place each in its whole tensor."""

    params: list[torch.Tensor]
    rounding: str
    keys: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.exp_avg = [torch.zeros_like(p) for p in self.params]
        self.exp_avg_sq = [torch.zeros_like(p) for p in self.params]
        self.remainders = [
            torch.zeros_like(p, dtype=torch.int16)
            if self.rounding == "exact" and p.dtype == BF16
            else None
            for p in self.params
        ]
        self.count = torch.zeros((), dtype=torch.int64)
        self.keys = self.keys or [1000 + i for i in range(len(self.params))]
        self.offsets = self.offsets or [0] * len(self.params)

    def step(self, grads, lr, clip_factor=None, weight_decay=0.0, function=adamw_step, **options):
        function(
            self.params,
            grads,
            self.exp_avg,
            self.exp_avg_sq,
            remainders=self.remainders if self.rounding == "exact" else None,
            keys=self.keys,
            offsets=self.offsets,
            weight_decays=[weight_decay] * len(self.params),
            lr=lr,
            **(USUAL | options),
            step=self.count,
            clip_factor=factor() if clip_factor is None else clip_factor,
            seed=4242,
            rounding=self.rounding,
        )

    def tensors(self) -> list[torch.Tensor]:
        return [
            t
            for column in (self.params, self.exp_avg, self.exp_avg_sq, self.remainders)
            for t in column
            if t is not None
        ]

    def bits(self) -> list[torch.Tensor]:
        """Copies that `torch.equal` compares bit by bit, signs of zeros and NaNs included."""
        views = [t.view(torch.int32 if t.dtype == F32 else torch.int16) for t in self.tensors()]
        return [v.clone() for v in views] + [self.count.clone()]


def assert_same_bits(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(actual) == len(expected)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, b), f"tensor {i}: {(a != b).sum()} of {a.numel()} elements differ"


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std


def ragged(rounding: str, dtype: torch.dtype) -> State:
    """Empty, single, odd and two-dimensional tensors, from elements that no group of four starts at."""
    shapes = [(0,), (0, 5), (1,), (3,), (7, 13), (1000,)]
    params = [normal(*shape, seed=i, std=0.02).to(dtype) for i, shape in enumerate(shapes)]
    return State(params, rounding, offsets=[0, 5, 2**34 - 1, 2**33 + 1, 2**40 + 2, 7])


@pytest.mark.parametrize("beta2", [0.95, 0.999])  # below and above the bound for stochastic moments
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("rounding", MODES)
def test_equals_the_reference_bit_for_bit_whatever_the_slice(rounding, dtype, beta2, monkeypatch):
    results = []
    for function, slice_length in ((adamw_step_ref, 1), (adamw_step, 1 << 17), (adamw_step, 6)):
        monkeypatch.setattr(rounding_module, "SLICE_CPU", slice_length)
        state = ragged(rounding, dtype)
        for step in range(3):
            kinds = (BF16, F32)  # gradients of either dtype, whatever the parameter's
            grads = [
                normal(*p.shape, seed=10 * step + i).to(kinds[(i + step) % 2])
                for i, p in enumerate(state.params)
            ]
            kept = [g.clone() for g in grads]
            lr = torch.tensor(1e-3, dtype=torch.float64) if step else 1e-3
            state.step(grads, lr, factor(0.37), 0.1, function, beta2=beta2)
            assert all(torch.equal(g, k) for g, k in zip(grads, kept, strict=True))
        assert state.count == 3
        results.append(state.bits())
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


def test_float32_follows_torch_adamw():
    initial, lr, weight_decay = normal(64, 32, std=0.02), 1e-3, 0.1
    state = State([initial.clone()], "nearest")
    peers = {}
    for dtype in (torch.float64, F32):
        weight = torch.nn.Parameter(initial.to(dtype, copy=True))
        peers[dtype] = torch.optim.AdamW(
            [weight], lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay
        )
    for step in range(20):
        grad = normal(64, 32, seed=step + 1)
        state.step([grad], lr, factor(0.5), weight_decay)
        for dtype, peer in peers.items():
            peer.param_groups[0]["params"][0].grad = grad.to(dtype) * 0.5
            peer.step()
    for dtype, peer in peers.items():
        (weight,) = peer.param_groups[0]["params"]
        assert_close_rel(state.params[0], weight, 1e-6, f"weights against {dtype}")
        moments = peer.state[weight]
        assert_close_rel(state.exp_avg[0], moments["exp_avg"], 1e-6, "first moment")
        assert_close_rel(state.exp_avg_sq[0], moments["exp_avg_sq"], 1e-6, "second moment")
    weight = peers[torch.float64].param_groups[0]["params"][0]
    assert_close_rel(
        state.params[0].double() - initial, weight.detach() - initial.double(), 1e-5, "update"
    )


def numpy_master(weight: torch.Tensor, grads: list[torch.Tensor], lr: float) -> np.ndarray:
    """A float32 master with BF16 moments, in numpy: no code in common with the kernel."""

    def stored(x: np.ndarray) -> np.ndarray:
        return torch.from_numpy(x).bfloat16().float().numpy()

    f = np.float32
    w = weight.float().numpy().copy()
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, grad in enumerate(grads, 1):
        g = grad.float().numpy() * f(0.37)
        m = m * f(0.9) + g * f(1 - 0.9)
        v = v * f(0.95) + (g * g) * f(1 - 0.95)
        root = math.sqrt(1 - 0.95**t)
        u = m / (np.sqrt(v) + f(1e-8 * root)) * f(lr * root / (1 - 0.9**t))
        w = w - (u + w * f(lr * 0.1))
        m, v = stored(m), stored(v)
    return w


@pytest.mark.parametrize("lr", [3e-7, 1e-3])
def test_exact_is_a_float32_master(lr):
    initial = normal(5000, std=0.02).bfloat16()
    grads = [normal(5000, seed=i + 1).bfloat16() for i in range(30)]
    state = State([initial.clone()], "exact")
    for grad in grads:
        state.step([grad], lr, factor(0.37), 0.1)
    master = torch.from_numpy(numpy_master(initial, grads, lr))
    joined = join_master(state.params[0], state.remainders[0])
    assert torch.equal(joined.view(torch.int32), master.view(torch.int32))
    assert not torch.equal(master, initial.float())
    is_tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(state.params[0][~is_tie], master.bfloat16()[~is_tie])


def test_two_hundred_updates_of_3e_7():
    """design.md, Numerics 5: a million weights of N(0, 0.02), each step moves each by 3e-7."""
    n, lr, steps = 1 << 20, 3e-7, 200
    initial = normal(n, std=0.02).bfloat16()
    grads = [torch.ones(n, dtype=BF16)]
    states = {mode: State([initial.clone()], mode) for mode in MODES}
    master = initial.float().numpy()
    for _ in range(steps):
        master = master - np.float32(lr)
        for state in states.values():
            state.step(grads, lr, **CONSTANT)

    exact = join_master(states["exact"].params[0], states["exact"].remainders[0])
    assert torch.equal(exact.view(torch.int32), torch.from_numpy(master).view(torch.int32))
    wanted = (torch.from_numpy(master).double() - initial.double()).mean()
    assert abs(wanted / (-lr * steps) - 1) < 1e-3
    stochastic = (states["stochastic"].params[0].double() - initial.double()).mean()
    assert abs(stochastic / wanted - 1) < 0.01
    nearest = states["nearest"].params[0]
    assert (nearest != initial).double().mean() < 0.01
    assert abs((nearest.double() - initial.double()).mean() / wanted) < 0.05


def test_ones_move_by_6e_6_a_step():
    """NVIDIA-NeMo/Automodel#3444, and its mirror image."""
    n = 1_000_000
    state = State([torch.ones(n, dtype=BF16), -torch.ones(n, dtype=BF16)], "stochastic")
    grads = [torch.ones(n, dtype=BF16), -torch.ones(n, dtype=BF16)]
    for _ in range(100):
        state.step(grads, 6e-6, **CONSTANT)
    down, up = (p.double().mean() for p in state.params)
    assert abs(down - 0.9994) < 1e-5
    assert abs(up + 0.9994) < 1e-5


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])


def test_rounding_errors_are_not_correlated_and_survive_a_resume():
    """karpathy/llm.c#597: between tensors, steps and shards."""
    n = 100_000
    grads = [torch.ones(n)] * 3
    # The second half of A, as its other rank would hold it, and B under another key.
    state = State([torch.ones(n, dtype=BF16) for _ in range(3)], "stochastic", [1, 1, 2], [0, n, 0])
    patterns, resumed = [], None
    for _ in range(2):
        for p in state.params:
            p.fill_(1.0)
        if patterns:
            resumed = State([p.clone() for p in state.params], "stochastic", [1, 1, 2], [0, n, 0])
            for mine, theirs in zip(resumed.tensors(), state.tensors(), strict=True):
                mine.copy_(theirs)
            resumed.count.copy_(state.count)
        state.step(grads, 0.001, **CONSTANT)
        patterns += [p != 1.0 for p in state.params]
    for pattern in patterns:
        assert abs(pattern.double().mean() - 0.256) < 0.01  # 0.001 of a spacing of 1/256
    for i in range(6):
        for j in range(i):
            assert abs(correlation(patterns[i], patterns[j])) < 0.02
    resumed.step(grads, 0.001, **CONSTANT)
    assert_same_bits(resumed.bits(), state.bits())


def test_stochastic_weights_are_stochastic_round_of_the_float32_update():
    initial = normal(999, std=0.02).bfloat16()
    state = State([initial.clone()], "stochastic", keys=[5], offsets=[3])
    state.step([torch.ones(999)], 1e-4, **CONSTANT)
    expected = stochastic_round(initial.float() - 1e-4, seed=4242, key=5, offset=3, step=1)
    assert torch.equal(state.params[0], expected)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sharding_does_not_change_a_bit(rounding, dtype, ranks):
    rows, columns = 10, 7  # neither divides by 3 or 4; offsets fall inside groups of four
    initial, grads = normal(rows, columns, std=0.02).to(dtype), normal(5, rows, columns, seed=1)
    whole = State([initial.clone()], rounding)
    starts = [min(rank * -(-rows // ranks), rows) for rank in range(ranks + 1)]
    shards = [
        State([initial[a:b].clone()], rounding, keys=whole.keys, offsets=[a * columns])
        for a, b in zip(starts[:-1], starts[1:], strict=True)
    ]
    for grad in grads:
        whole.step([grad], 1e-3, weight_decay=0.1, beta2=0.99)
        for shard, a, b in zip(shards, starts[:-1], starts[1:], strict=True):
            shard.step([grad[a:b]], 1e-3, weight_decay=0.1, beta2=0.99)
    columns_of = zip(*(shard.tensors() for shard in shards), strict=True)
    for joined, expected in zip(map(torch.cat, columns_of), whole.tensors(), strict=True):
        assert torch.equal(joined, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("rounding", MODES)
def test_a_factor_that_is_not_finite_changes_nothing(rounding, dtype, bad):
    """pytorch/pytorch#46849; the run then goes on as if the step had not been there."""
    states = [State([normal(500, std=0.02).to(dtype)], rounding) for _ in range(2)]
    grads = [normal(500, seed=i) for i in range(3)]
    for i, grad in enumerate(grads):
        for state in states:
            state.step([grad], 1e-3, weight_decay=0.1, beta2=0.999)
        if i != 2:
            before = states[0].bits()
            poisoned = grad.clone()
            poisoned[7] = bad
            states[0].step([poisoned], 1e-3, factor(bad), weight_decay=0.1, beta2=0.999)
            assert_same_bits(states[0].bits(), before)
    assert states[0].count == 3
    assert_same_bits(states[0].bits(), states[1].bits())


def test_a_bf16_second_moment_decays_at_beta2_0_999():
    """To nearest, 4 * 0.999 + 0.001 is 4 again, for ever (kernels.md section 3)."""
    assert torch.tensor(4 * 0.999 + 0.001).bfloat16() == 4
    n, steps = 4096, 3000
    state = State([torch.zeros(n, dtype=BF16), torch.zeros(n, dtype=BF16)], "nearest")
    state.exp_avg_sq[0].fill_(4.0)
    grads = [torch.ones(n), torch.ones(n)]
    for _ in range(steps):
        state.step(grads, 0.0, beta2=0.999)
    from_four, from_zero = (v.double().mean() for v in state.exp_avg_sq)
    assert abs(from_four / (1 + 3 * 0.999**steps) - 1) < 0.01
    assert abs(from_zero / (1 - 0.999**steps) - 1) < 0.01


@pytest.mark.parametrize(("beta2", "is_nearest"), [(0.95, True), (0.9899, True), (0.99, False)])
def test_a_bf16_second_moment_is_rounded_to_nearest_below_beta2_0_99(beta2, is_nearest):
    state = State([torch.zeros(1000, dtype=BF16)], "stochastic")
    grad = normal(1000)
    state.step([grad], 1e-3, beta2=beta2)
    expected = (grad * grad * np.float32(1 - beta2)).bfloat16()
    assert torch.equal(state.exp_avg_sq[0], expected) == is_nearest
    assert torch.equal(state.exp_avg[0], (grad * np.float32(1 - 0.9)).bfloat16())


@pytest.mark.parametrize("rounding", ["exact", "stochastic"])
def test_weight_decay_is_not_rounded_away(rounding):
    """A factor 1 - 1e-5 is 1 in BF16 (OneTrainer#996); zero gradients, so decay alone moves the weights."""
    initial = normal(200_000, std=0.02).bfloat16()
    state = State([initial.clone()], rounding)
    for _ in range(50):
        state.step([torch.zeros(200_000)], 1e-4, weight_decay=0.1)
    weight = state.params[0].double()
    if rounding == "exact":
        weight = join_master(state.params[0], state.remainders[0]).double()
    kept = (weight * initial.double()).sum() / initial.double().square().sum()
    assert abs((1 - kept) / (1 - (1 - 1e-5) ** 50) - 1) < 0.05
    undecayed = State([initial.clone()], rounding)
    undecayed.step([torch.zeros(200_000)], 1e-4)
    assert torch.equal(undecayed.params[0], initial)


def test_exact_steps_through_ties_and_signs():
    """From 1, steps of half a BF16 spacing: every second master is a tie, and the way back is the same."""
    half = 2.0**-8
    state = State([torch.tensor([1.0, -1.0], dtype=BF16)], "exact")
    up, down = torch.tensor([-1.0, 1.0]), torch.tensor([1.0, -1.0])
    seen = []
    for grad in [up] * 3 + [down] * 6:
        state.step([grad], half, **CONSTANT)
        seen.append(float(join_master(state.params[0], state.remainders[0])[0]))
        assert state.params[0][0] == -state.params[0][1]
        assert state.remainders[0][0] == state.remainders[0][1]
    heights = [1, 2, 3, 2, 1, 0, -1, -2, -3]
    assert seen == [1 + h * half for h in heights]
    state.step([up], half * 4, **CONSTANT)  # 1 + half: a tie between 1 and 1 + 2 * half
    assert state.params[0].tolist() == [1 + 2 * half, -1 - 2 * half]
    assert state.remainders[0].tolist() == [-32768, -32768]


@pytest.mark.parametrize("rounding", ["exact", "stochastic"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_extreme_values(rounding, dtype):
    largest = torch.finfo(dtype).max
    initial = torch.tensor([0.0, -0.0, 1e-40, largest, -largest, 1e30], dtype=dtype)
    state = State([initial.clone()], rounding)
    grads = [torch.tensor([0.0, 0.0, 1e-30, -1e18, 1e18, 1e-45])]
    for _ in range(4):
        state.step(grads, 1e-3)
    assert state.params[0].isfinite().all()
    assert torch.equal(state.params[0][:2].view(torch.uint8), initial[:2].view(torch.uint8))
    assert torch.equal(state.params[0][3:], initial[3:])


class Watch(TorchDispatchMode):
    """Largest storage that an operation made, and whether one asked the device for a value."""

    def __init__(self, known: list[torch.Tensor]):
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.largest_bytes = 0
        self.asked: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if "_local_scalar_dense" in str(function) or "is_nonzero" in str(function):
            self.asked.append(str(function))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in self.known:
            self.largest_bytes = max(self.largest_bytes, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("rounding", MODES)
def test_temporaries_are_slices_and_nothing_waits_for_the_device(rounding, monkeypatch):
    monkeypatch.setattr(rounding_module, "SLICE_CPU", 1000)
    state = State([normal(50_000).bfloat16()], rounding)
    grads, one = [normal(50_000)], factor()
    with Watch([*state.tensors(), *grads]) as watch:
        state.step(grads, 1e-3, one, 0.1, beta2=0.999)
    assert watch.asked == []
    assert 4000 <= watch.largest_bytes <= 8 * 1008


def errors():
    p = torch.zeros(4, dtype=BF16)
    f = torch.zeros(4)
    yield "rounding 'kahan'", {"rounding": "kahan"}
    yield "beta2 1.0", {"beta2": 1.0}
    yield r"step is torch.int32 \(\)", {"step": torch.zeros((), dtype=torch.int32)}
    yield r"clip_factor is torch.float32 \(1,\)", {"clip_factor": torch.ones(1)}
    yield "unequal lengths", {"keys": [1, 2]}
    yield "parameter 0 is torch.float16", {"params": [p.half()]}
    yield (
        r"gradient of parameter 0 is torch.bfloat16 \(5,\)",
        {"grads": [torch.zeros(5, dtype=BF16)]},
    )
    yield "gradient of parameter 0 is torch.float64", {"grads": [f.double()]}
    yield "first moment of parameter 0 is torch.float32", {"exp_avg": [f]}
    yield "second moment of parameter 0 is torch.float32", {"exp_avg_sq": [f]}
    yield "has no remainder", {"rounding": "exact"}
    yield "has a remainder", {"remainders": [p.to(torch.int16)]}
    yield "remainder of parameter 0 is torch.int32", {"rounding": "exact", "remainders": [p.int()]}
    yield "gradient of parameter 0 has stride", {"grads": [torch.zeros(8, dtype=BF16)[::2]]}


@pytest.mark.parametrize(("message", "wrong"), list(errors()))
def test_refuses_other_input(message, wrong):
    p = torch.ones(4, dtype=BF16)
    arguments = {
        "params": [p],
        "grads": [p.clone()],
        "exp_avg": [torch.zeros_like(p)],
        "exp_avg_sq": [torch.zeros_like(p)],
        "remainders": None,
        "keys": [1],
        "offsets": [0],
        "weight_decays": [0.1],
        "lr": 1e-3,
        "step": torch.zeros((), dtype=torch.int64),
        "clip_factor": factor(),
        "seed": 1,
        "rounding": "nearest",
    }
    with pytest.raises(ValueError, match=message):
        adamw_step(**(USUAL | arguments | wrong))
    assert torch.equal(p, torch.ones(4, dtype=BF16))


def test_the_measure_of_closeness_sees_a_wrong_bias_correction():
    """The bounds above would not hide a missing correction: without it the first update is 0.45 of it."""
    g = normal(100)
    right = g / g.abs()
    wrong = (g * 0.1) / (g.abs() * math.sqrt(0.05))
    assert relative_error(wrong, right) > 0.5

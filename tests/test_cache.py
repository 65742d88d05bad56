"""Cached decoding against the full pass, position by position, and the one-token kernels against their recurrences."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from hymoe.kernels.conv1d import causal_conv1d_ref
from hymoe.kernels.conv1d_step import conv1d_step, conv1d_tails
from hymoe.kernels.experts import expert_mlp_ref
from hymoe.kernels.few_rows import MOST_ROWS, expert_mlp_few, gated_rms_norm_few, rms_norm_few
from hymoe.kernels.norm import gated_rms_norm_ref, rms_norm_ref
from hymoe.kernels.packed import Packed
from hymoe.kernels.route import sort_by_expert
from hymoe.kernels.ssd.ref import ssd_scan_ref
from hymoe.kernels.ssd.step import ssd_final_states, ssd_step
from hymoe.model.cache import ROOM, Cache
from hymoe.model.net import HybridLM
from tests.close import assert_close_rel, relative_error
from tests.tiny import tiny_config, tiny_lm

BOUND = 1e-5
CONFIGS: dict[str, dict[str, Any]] = {
    "every-kind": {},
    "pattern-string": {"layers_block_type": None, "hybrid_override_pattern": "MEM*E-ME*E"},
    "latent-biases": {"moe_latent_size": 16, "mlp_bias": True, "use_bias": True},
    "attention-bias": {"attention_bias": True, "residual_in_fp32": True},
    "groups": {"n_group": 4, "topk_group": 2, "n_groups": 4, "num_key_value_heads": 4},
    "mamba-only": {"layers_block_type": ["mamba"] * 3, "n_groups": 1, "conv_kernel": 2},
    "attention-only": {"layers_block_type": ["attention"] * 2, "num_key_value_heads": 1},
    "no-state": {"layers_block_type": ["moe", "mlp"], "use_conv_bias": False},
    "limited-steps": {"time_step_limit": [0.01, 0.05], "tie_word_embeddings": True},
}


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated and never written is NaN, and shows."""
    for owner, name in ((torch, "empty"), (torch.Tensor, "new_empty")):
        make = getattr(owner, name)

        def made(*args: Any, make: Any = make, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.dtype.is_floating_point else tensor

        monkeypatch.setattr(owner, name, made)


def random_ids(lengths: list[int], seed: int = 1) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 97, (n,), generator=rng) for n in lengths]


def full_logits(lm: HybridLM, sequences: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [lm.logits(lm(ids, Packed.from_lengths([len(ids)]))) for ids in sequences]


class Replay:
    """Feeds known sequences through a cache and keeps the logits of every position."""

    def __init__(self, lm: HybridLM, sequences: list[Tensor]) -> None:
        self.lm, self.sequences = lm, sequences
        self.cache = lm.new_cache(max(map(len, sequences)))
        self.open: list[int] = []
        self.found: list[list[Tensor]] = [[] for _ in sequences]

    @torch.no_grad()
    def read(self, numbers: list[int], lengths: list[int]) -> None:
        ids = torch.cat([self.sequences[i][:n] for i, n in zip(numbers, lengths, strict=True)])
        logits = self.lm.logits(self.lm(ids, Packed.from_lengths(lengths), self.cache))
        self.open += numbers
        for i, part in zip(numbers, logits.split(lengths), strict=True):
            self.found[i] += part
        self.close()

    @torch.no_grad()
    def step(self) -> None:
        ids = torch.stack([self.sequences[i][len(self.found[i])] for i in self.open])
        for i, row in zip(self.open, self.lm.logits(self.lm(ids, None, self.cache)), strict=True):
            self.found[i].append(row)
        self.close()

    def close(self) -> None:
        gone = [
            row for row, i in enumerate(self.open) if len(self.found[i]) == len(self.sequences[i])
        ]
        for source, target in self.cache.drop(gone):
            self.open[target] = self.open[source]
        del self.open[self.cache.rows :]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_at_every_position_equal_the_full_pass(name: str) -> None:
    """Prompts of 1 token, below, at and above the convolution's width; ends in every order; later prompts join."""
    lm = tiny_lm(seed=3, **CONFIGS[name])
    lengths = [9, 30, 4, 1, 40, 12, 23, 70]
    sequences = random_ids(lengths)
    replay = Replay(lm, sequences)
    replay.read([0, 1, 2, 3], [1, 2, 3, 1])
    for _ in range(7):
        replay.step()
    replay.read([4, 5], [4, 12])
    replay.read([6], [17])
    for _ in range(10):
        replay.step()
    replay.read([7], [5])
    while replay.open:
        replay.step()
    for i, expected in enumerate(full_logits(lm, sequences)):
        for position, row in enumerate(expected):
            what = f"{name}: sequence {i}, position {position}"
            assert_close_rel(replay.found[i][position], row, BOUND, what)


def test_random_batches_change_nothing() -> None:
    """Joins and ends in random order, over many sequences."""
    rng = random.Random(0)
    lm = tiny_lm(seed=5)
    sequences = random_ids([rng.randint(1, 90) for _ in range(30)])
    replay, waiting = Replay(lm, sequences), list(range(30))
    while waiting or replay.open:
        joining = [waiting.pop() for _ in range(min(len(waiting), rng.randint(0, 4)))]
        if joining:
            replay.read(joining, [rng.randint(1, len(sequences[i])) for i in joining])
        for _ in range(rng.randint(0, 9) if replay.open else 0):
            if replay.open:
                replay.step()
    for i, expected in enumerate(full_logits(lm, sequences)):
        assert_close_rel(torch.stack(replay.found[i]), expected, BOUND, f"sequence {i}")


def test_bfloat16_errs_no_more_than_twice_the_full_pass() -> None:
    lm = tiny_lm(seed=3, dtype=torch.bfloat16, mamba_head_dim=16)
    exact = HybridLM(lm.config)
    exact.load_state_dict(lm.state_dict())
    sequences = random_ids([60, 50])
    replay = Replay(lm, sequences)
    replay.read([0, 1], [20, 3])
    mamba = replay.cache.layers[0]
    assert mamba.states.dtype == torch.float32
    assert mamba.tails.dtype == torch.bfloat16
    while replay.open:
        replay.step()
    right, plain = full_logits(exact, sequences), full_logits(lm, sequences)
    for i in range(2):
        bound = 2 * relative_error(plain[i], right[i]) + 4 * torch.finfo(torch.bfloat16).eps
        assert_close_rel(torch.stack(replay.found[i]).float(), right[i], bound, f"sequence {i}")


def test_memory_follows_what_is_in_use() -> None:
    lm = tiny_lm()
    cache = lm.new_cache(1000)
    keys = lambda: tuple(cache.layers[2].keys.shape)  # noqa: E731  (rows, G, room, P)

    @torch.no_grad()
    def read(*lengths: int) -> None:
        lm(torch.zeros(sum(lengths), dtype=torch.int64), Packed.from_lengths(lengths), cache)

    read(900)
    assert keys() == (1, 2, 1000, 16)  # never more than a row may have
    cache.drop([0])
    read(*[5] * 9)
    assert keys() == (9, 2, ROOM, 16)
    cache.drop(range(8))
    read(300)
    assert keys() == (2, 2, 384, 16)
    before = cache.num_bytes
    cache.drop([1])
    read(20)
    assert cache.num_bytes == before
    assert cache.lengths == [5, 20]


def test_rows_move_into_gaps() -> None:
    cache = Cache(tiny_config(), torch.device("cpu"), torch.float32, 10)
    cache.begin_prefill(Packed.from_lengths([1, 2, 3, 4, 5]))
    cache.end()
    assert cache.drop([]) == []
    assert cache.drop([0, 4, 2]) == [(3, 0)]
    assert cache.lengths == [4, 2]
    assert cache.drop([0, 1]) == []
    assert cache.rows == 0


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_step_has_one_token_for_each_row(tokens: int) -> None:
    lm = tiny_lm()
    cache = lm.new_cache(10)
    lm(torch.tensor([1, 2, 3]), Packed.from_lengths([1, 2]), cache)
    with pytest.raises(ValueError, match=f"{tokens} tokens for a cache of 2 rows"):
        lm(torch.zeros(tokens, dtype=torch.int64), None, cache)
    with pytest.raises(ValueError, match="0 tokens for a cache of 0 rows"):
        lm(torch.zeros(0, dtype=torch.int64), None, lm.new_cache(10))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_convolution_steps(dtype: torch.dtype, taps: int, has_bias: bool) -> None:
    """From the tails of documents of 1 to 6 tokens; the input is a column slice, as in the model."""
    rng = torch.Generator().manual_seed(0)
    lengths, more = [1, 2, 3, 6], 5
    xs = [
        torch.randn(n + more, 12, generator=rng).to(dtype)[:, 2:10] for n in lengths
    ]  # (n+more, C)
    weight, bias = torch.randn(8, taps, generator=rng).to(dtype), torch.randn(8, generator=rng)
    bias = bias if has_bias else None
    packed = Packed.from_lengths(lengths)
    tails = conv1d_tails(torch.cat([x[:n] for x, n in zip(xs, lengths, strict=True)]), packed, taps)
    expected = [causal_conv1d_ref(x, weight, bias, Packed.from_lengths([len(x)])) for x in xs]
    for t in range(more):
        x = torch.stack([x[n + t] for x, n in zip(xs, lengths, strict=True)])
        y = conv1d_step(x, weight, bias, tails)
        right = torch.stack([e[n + t] for e, n in zip(expected, lengths, strict=True)])
        assert_close_rel(y, right, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("dt_limit", [(0.0, float("inf")), (0.2, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scan_steps(dtype: torch.dtype, dt_limit: tuple[float, float], groups: int) -> None:
    """The state of prompts of 1 to 200 tokens, then steps, against the recurrence over the whole."""
    rng = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(shape, generator=rng).to(dtype)  # noqa: E731
    lengths, more = [1, 2, 40, 200], 4
    heads = (make(6), make(6), make(6))  # a_log, skip, dt_bias
    whole = [
        (
            make(n + more, 6, 5),
            make(n + more, 6),
            make(n + more, groups, 7),
            make(n + more, groups, 7),
        )
        for n in lengths
    ]
    a_log, skip, dt_bias = heads
    first = [torch.cat([w[k][:n] for w, n in zip(whole, lengths, strict=True)]) for k in range(4)]
    packed = Packed.from_lengths(lengths)
    states = ssd_final_states(first[0], first[1], a_log, first[2], dt_bias, dt_limit, packed)
    expected = [
        ssd_scan_ref(*(x, dt, a_log, b, c, skip, dt_bias, dt_limit, Packed.from_lengths([len(x)])))
        for x, dt, b, c in whole
    ]
    for t in range(more):
        x, dt, b, c = (
            torch.stack([w[k][n + t] for w, n in zip(whole, lengths, strict=True)])
            for k in range(4)
        )
        y = ssd_step(x, dt, a_log, b, c, skip, dt_bias, dt_limit, states)
        right = torch.stack([e[n + t] for e, n in zip(expected, lengths, strict=True)])
        assert_close_rel(y, right, 20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("rows", [1, 3, MOST_ROWS // 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_experts_of_few_rows(rows: int, dtype: torch.dtype) -> None:
    """4 of 6 experts a token; expert 0 gets none."""
    rng = torch.Generator().manual_seed(rows)
    make = lambda *shape: torch.randn(shape, generator=rng).to(dtype)  # noqa: E731
    x, z, weight = make(rows, 24), make(rows, 30)[:, :24], torch.randn(24, generator=rng)
    bound = 4 * torch.finfo(dtype).eps
    assert_close_rel(rms_norm_few(x, weight, 1e-5), rms_norm_ref(x, weight, 1e-5), bound)
    gated = gated_rms_norm_few(x, z, weight, 3, 1e-5)
    assert_close_rel(gated, gated_rms_norm_ref(x, z, weight, 3, 1e-5), bound)
    ids = torch.stack([1 + torch.randperm(5, generator=rng)[:4] for _ in range(rows)])
    shares, up, down = torch.rand(rows, 4, generator=rng), make(6, 16, 24), make(6, 24, 16)
    routing = sort_by_expert(ids, 6)
    exact = expert_mlp_ref(x.double(), shares.double(), up.double(), down.double(), routing)
    plain = expert_mlp_ref(x, shares, up, down, routing)
    bound = 2 * relative_error(plain, exact) + 4 * torch.finfo(dtype).eps
    assert_close_rel(expert_mlp_few(x, shares, up, down, routing), exact, bound)

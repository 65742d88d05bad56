import numpy as np
import pytest

from hymoe.engine.data.pack import pack_best_fit

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    "lengths",
    [
        [],
        [7],
        [16] * 5,
        [1] * 40,
        [9, 9, 9, 7, 7, 7],
        RNG.integers(1, 17, 300).tolist(),
        np.clip(RNG.lognormal(1.5, 0.8, 500).astype(int), 1, 16).tolist(),
    ],
    ids=["none", "one", "full", "ones", "pairs", "uniform", "lognormal"],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_nothing_lost_cut_or_doubled(lengths: list[int], seed: int) -> None:
    rows = pack_best_fit(lengths, 16, seed)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= 16 for row in rows)
    assert rows == pack_best_fit(lengths, 16, seed)


def test_pairs_find_each_other() -> None:
    assert len(pack_best_fit([9, 9, 9, 7, 7, 7], 16, 0)) == 3


def test_fullest_row_first() -> None:
    # After 10 and 12 stand in rows of their own, 4 belongs to 12 and leaves room for 6 beside 10.
    rows = pack_best_fit([10, 12, 4, 6], 16, 0)
    assert sorted(sorted(row) for row in rows) == [[0, 3], [1, 2]]


def test_efficiency_on_a_real_length_distribution() -> None:
    lengths = np.clip(np.random.default_rng(1).lognormal(6, 1, 5000).astype(int), 1, 8192)
    rows = pack_best_fit(lengths.tolist(), 8192, 0)
    assert lengths.sum() / (len(rows) * 8192) > 0.98


def test_order_depends_on_the_seed() -> None:
    lengths = [3] * 50
    assert pack_best_fit(lengths, 16, 0) != pack_best_fit(lengths, 16, 1)


@pytest.mark.parametrize("bad", [0, 17])
def test_lengths_that_do_not_fit(bad: int) -> None:
    with pytest.raises(
        ValueError, match=f"document 1 has {bad} tokens, expected 1 to seq_len = 16"
    ):
        pack_best_fit([4, bad], 16, 0)

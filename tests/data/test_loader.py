"""The loader's promises: what a step holds depends on nothing but its number."""

from collections import Counter

import numpy as np
import pytest
import torch

from hymoe.engine.data.loader import Loader, MicroBatch, eval_batches
from hymoe.engine.data.rows import MemoryRows
from hymoe.engine.errors import UserError

SEQ_LEN = 16


def make_rows(count: int) -> MemoryRows:
    """Rows of one to three documents; each token id tells its row, so that a row can be recognised."""
    rng = np.random.default_rng(0)
    documents, packing = [], []
    for row in range(count):
        indices = []
        for length in rng.integers(2, 6, rng.integers(1, 4)):
            labels = np.where(rng.random(length) < 0.5, row, -100)
            labels[0], labels[-1] = row, -100
            indices.append(len(documents))
            documents.append(([row] * int(length), labels.tolist()))
        packing.append(indices)
    return MemoryRows(documents, packing, SEQ_LEN)


def loader(
    rows: MemoryRows, rank: int = 0, world_size: int = 1, micro_rows: int = 1, step_rows: int = 8
) -> Loader:
    sizes = (step_rows * SEQ_LEN, micro_rows * SEQ_LEN, SEQ_LEN)
    return Loader(rows, *sizes, rank=rank, world_size=world_size, seed=7)


def tokens_by_row(batches: list[MicroBatch]) -> Counter[int]:
    return Counter(i for batch in batches for i in batch.input_ids.tolist())


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("micro_rows", [1, 2])
def test_a_step_does_not_depend_on_ranks_or_micro_batches(world_size: int, micro_rows: int) -> None:
    rows = make_rows(21)
    for n in (0, 1, 2, 5):  # step 2 crosses the end of an epoch
        whole = loader(rows, micro_rows=8).step(n)
        parts = [loader(rows, rank, world_size, micro_rows).step(n) for rank in range(world_size)]
        batches = [batch for part in parts for batch in part.micro_batches]
        assert len(batches) == 8 // micro_rows
        assert tokens_by_row(batches) == tokens_by_row(list(whole.micro_batches))
        # Also in order: the concatenation over ranks is the single rank's row.
        assert torch.equal(torch.cat([b.labels for b in batches]), whole.micro_batches[0].labels)
        for part in parts:
            assert part.num_tokens == whole.num_tokens == sum(len(b.input_ids) for b in batches)
            assert part.supervised_tokens == whole.supervised_tokens
        assert whole.supervised_tokens == sum(int((b.labels != -100).sum()) for b in batches)
        assert whole.supervised_tokens == sum(b.packed.supervised for b in batches)


def test_micro_batches_keep_document_borders() -> None:
    rows = make_rows(8)
    (batch,) = loader(rows, micro_rows=8).step(0).micro_batches
    lengths = [int(n) for i in loader(rows).row_indices(0) for n in np.diff(rows[i][2])]
    assert list(batch.packed.lengths) == lengths
    assert (batch.input_ids.dtype, batch.labels.dtype) == (torch.int64, torch.int64)
    assert batch.packed.num_tokens == len(batch.input_ids) == len(batch.labels)


def test_every_row_once_an_epoch_in_a_new_order() -> None:
    rows = make_rows(20)
    order = [i for n in range(5) for i in loader(rows).row_indices(n)]  # two epochs
    assert sorted(order[:20]) == sorted(order[20:]) == list(range(20))
    assert order[:20] != order[20:]
    assert loader(rows).step(4).epoch == 2.0


def test_steps_can_be_taken_in_any_order() -> None:
    rows = make_rows(20)
    one = loader(rows)
    later = one.row_indices(9)
    assert [one.row_indices(n) for n in (3, 9, 0, 9)][1::2] == [later, later]
    assert loader(rows).row_indices(9) == later


def test_seed_changes_the_order() -> None:
    rows = make_rows(20)
    other = Loader(rows, 128, 16, SEQ_LEN, rank=0, world_size=1, seed=8)
    assert other.row_indices(0) != loader(rows).row_indices(0)


@pytest.mark.parametrize(("epochs", "steps"), [(1, 3), (2, 6), (0.3, 1), (0.4, 2), (8, 21)])
def test_steps_in_epochs(epochs: float, steps: int) -> None:
    assert loader(make_rows(21)).steps_in(epochs) == steps


def test_fewer_rows_than_a_step() -> None:
    order = loader(make_rows(3)).row_indices(0)
    assert [sorted(order[:3]), sorted(order[3:6])] == [[0, 1, 2]] * 2
    assert len(order) == 8


@pytest.mark.parametrize(
    ("step", "micro", "seq", "world", "said"),
    [
        (130, 16, 16, 1, "train.step_tokens = 130, expected a multiple of seq_len = 16"),
        (128, 24, 16, 1, "data.micro_tokens = 24, expected a multiple of seq_len = 16"),
        (
            128,
            32,
            16,
            3,
            "train.step_tokens = 128, expected a multiple of 96 = 3 ranks x data.micro_tokens = 32",
        ),
        (128, 128, 16, 2, "a multiple of 256 = 2 ranks"),
        (128, 8, 16, 1, "data.micro_tokens = 8"),
        (128, 8, 8, 1, "rows are packed for 16 tokens"),
    ],
)
def test_sizes_that_do_not_divide(step: int, micro: int, seq: int, world: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Loader(make_rows(4), step, micro, seq, rank=0, world_size=world, seed=0)


@pytest.mark.parametrize("count", [1, 3, 8, 9])
@pytest.mark.parametrize("micro_rows", [1, 2, 4])
def test_evaluation_counts_every_token_once(count: int, micro_rows: int) -> None:
    rows = make_rows(count)
    alone = list(eval_batches(rows, micro_rows * SEQ_LEN, SEQ_LEN, rank=0, world_size=1))
    labels = Counter(int(i) for b in alone for i in b.labels.tolist() if i != -100)
    assert sum(labels.values()) == sum(rows.supervised_tokens(i) for i in range(count))
    for world_size in (2, 4):
        parts = [
            list(
                eval_batches(rows, micro_rows * SEQ_LEN, SEQ_LEN, rank=rank, world_size=world_size)
            )
            for rank in range(world_size)
        ]
        assert len({len(part) for part in parts}) == 1  # the same number of collectives
        batches = [b for part in parts for b in part]
        assert Counter(int(i) for b in batches for i in b.labels.tolist() if i != -100) == labels
        for b in batches:
            assert b.packed.supervised == int((b.labels != -100).sum())
            assert b.packed.num_tokens == len(b.input_ids) <= micro_rows * SEQ_LEN


def test_no_rows() -> None:
    empty = MemoryRows([], [], SEQ_LEN)
    with pytest.raises(UserError, match="no packed rows"):
        list(eval_batches(empty, 16, 16, rank=0, world_size=1))
    with pytest.raises(UserError, match="no packed rows"):
        loader(empty)

"""The description of a packed row: what it says of the boundaries, and what it refuses."""

import pytest
import torch

from hymoe.kernels.packed import Packed


def test_the_row_is_described() -> None:
    packed = Packed.from_lengths([3, 1, 5], supervised=4)
    assert packed.lengths == (3, 1, 5)
    assert (packed.num_tokens, packed.max_len, packed.supervised) == (9, 5, 4)
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 9]
    assert packed.seq_idx.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2]
    assert packed.cu_seqlens.dtype == packed.seq_idx.dtype == torch.int32


def test_boundaries_and_lengths_are_the_same_row() -> None:
    packed = Packed.from_cu_seqlens(torch.tensor([0, 3, 4, 9], dtype=torch.int32))
    assert packed.lengths == (3, 1, 5)
    assert packed.supervised is None


def test_tables_are_made_once() -> None:
    packed = Packed.from_lengths([3, 1, 5])
    assert packed.cu_seqlens is packed.cu_seqlens
    assert packed.seq_idx is packed.seq_idx


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([0], r"cu_seqlens .*expected"),
        ([], r"cu_seqlens .*expected"),
        ([1, 4], r"cu_seqlens \[1, 4\].*expected"),
        ([0, 4, 4, 6], r"document lengths \(4, 0, 2\): expected at least one, each of 1 token"),
        ([0, 4, 3], r"document lengths \(4, -1\)"),
        ([[0, 4]], r"cu_seqlens .*expected"),
        (0, r"cu_seqlens .*expected"),
    ],
)
def test_boundaries_that_are_none_are_refused(boundaries: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Packed.from_cu_seqlens(torch.tensor(boundaries, dtype=torch.int32))


@pytest.mark.parametrize("lengths", [[], [0], [4, 0, 3], [5, -1]], ids=str)
def test_lengths_that_are_none_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="each of 1 token or more"):
        Packed.from_lengths(lengths)

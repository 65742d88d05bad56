"""The poison itself works: without it, the tests that rely on it prove nothing."""

import torch


def test_unwritten_memory_is_poisoned() -> None:
    x = torch.ones(3)
    for tensor in (torch.empty(3), torch.empty_like(x), x.new_empty(3)):
        assert tensor.isnan().all()
    assert (torch.empty(2, dtype=torch.int64) < 0).all()

"""The whole model on the Triton kernels, in the interpreter, against the torch path: loss and every gradient."""

import pytest
import torch

from hymoe.kernels.packed import Packed
from hymoe.model.config import HybridConfig
from hymoe.model.net import HybridLM
from tests.close import assert_close_rel
from tests.tiny import tiny_config, tiny_lm

LENGTHS = (9, 1, 3, 2, 14, 4)


def results(config: HybridConfig, kernels: str) -> dict[str, torch.Tensor]:
    lm = HybridLM(config, kernels=kernels)
    lm.load_state_dict(tiny_lm(3).state_dict())
    rng = torch.Generator().manual_seed(5)
    tokens = sum(LENGTHS)
    input_ids = torch.randint(0, config.vocab_size, (tokens,), generator=rng)
    labels = torch.randint(0, config.vocab_size, (tokens,), generator=rng)
    labels[torch.rand(tokens, generator=rng) < 0.5] = -100
    supervised = int((labels != -100).sum())
    loss, count = lm.loss(input_ids, labels, Packed.from_lengths(LENGTHS, supervised=supervised))
    loss.backward()
    assert count == supervised
    grads = {name: p.grad for name, p in lm.named_parameters()}
    missing = [name for name, grad in grads.items() if grad is None]
    assert not missing
    return {"loss": loss.detach(), **grads}


@pytest.mark.slow
def test_triton_kernels_give_the_torch_models_loss_and_gradients() -> None:
    config = tiny_config()
    ours, plain = results(config, "triton"), results(config, "torch")
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        assert_close_rel(ours[name], value, 1e-5, name)

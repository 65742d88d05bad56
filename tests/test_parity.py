"""Logits and every gradient against transformers' `nemotron_h`, float32 on a CPU (design: Numerics 1)."""

import copy

import pytest
import torch
from torch.nn import functional

from tests.close import assert_close_rel, relative_error
from tests.tiny import our_name, reference_twin, tiny_lm

BOUND = 1e-5
# Every option that the reference computes, over at least one config each.
CONFIGS = {
    "every-kind": {},
    "pattern-string": {"layers_block_type": None, "hybrid_override_pattern": "MEM*E-ME*E"},
    "groups-no-norm": {"n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    "latent-biases": {"moe_latent_size": 16, "mlp_bias": True, "use_bias": True},
    "square-experts": {
        "moe_intermediate_size": 32,
        "use_conv_bias": False,
    },  # a transposed matrix would fit
    "square-latent": {"moe_latent_size": 24, "n_groups": 4, "num_key_value_heads": 1},
    "mamba-only": {
        "layers_block_type": ["mamba"] * 3,
        "n_groups": 1,
        "chunk_size": 7,
        "conv_kernel": 2,
    },
    "attention-only": {"layers_block_type": ["attention"] * 2, "num_key_value_heads": 4},
    "experts-only": {
        "layers_block_type": ["moe"] * 3,
        "num_experts_per_tok": 8,
    },  # every expert, K = E
    "wide-heads": {"head_dim": 24, "mamba_head_dim": 40, "ssm_state_size": 8, "norm_eps": 1e-3},
    "deep-26": {
        "initializer_range": 0.05,
        "layers_block_type": None,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*E-ME-M",
    },
}


@pytest.mark.parametrize("keep", ["all", "inputs"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_equal_the_reference(name: str, keep: str) -> None:
    """53 tokens: no chunk length divides them."""
    options = dict(CONFIGS[name])
    if "norm_eps" in options:
        options["layer_norm_epsilon"] = options["norm_eps"]
    lm = tiny_lm(seed=3, **options)
    lm.set_keep(keep)
    twin = reference_twin(lm)
    input_ids = torch.randint(0, 97, (53,), generator=torch.Generator().manual_seed(1))
    labels = functional.pad(input_ids[1:], (0, 1), value=-100)
    cu_seqlens = torch.tensor([0, 53], dtype=torch.int32)

    expected = twin(input_ids[None], use_cache=False).logits[0]
    assert_close_rel(lm.logits(lm(input_ids, cu_seqlens)), expected, BOUND, f"{name}: logits")

    loss_sum, count = lm.loss(input_ids, labels, cu_seqlens)
    reference_loss = functional.cross_entropy(expected, labels, reduction="sum")
    assert int(count) == 52
    assert_close_rel(loss_sum, reference_loss, BOUND, f"{name}: loss")
    loss_sum.backward()
    reference_loss.backward()
    gradients = {our_name(n): p.grad for n, p in twin.named_parameters()}
    assert gradients.keys() == {n for n, _ in lm.named_parameters()}
    for parameter, ours in lm.named_parameters():
        assert_close_rel(ours.grad, gradients[parameter], BOUND, f"{name}: gradient of {parameter}")


def test_deep_and_wild_errs_no_more_than_twice_the_reference() -> None:
    """26 layers of std 0.1: A_log, D and dt_bias have four values each, whose gradients are sums that nearly cancel."""
    lm = tiny_lm(seed=2, **{**CONFIGS["deep-26"], "initializer_range": 0.1})
    twin, exact = reference_twin(lm), copy.deepcopy(lm).double()
    input_ids = torch.randint(0, 97, (53,), generator=torch.Generator().manual_seed(1))
    labels = functional.pad(input_ids[1:], (0, 1), value=-100)
    cu_seqlens = torch.tensor([0, 53], dtype=torch.int32)
    for model in (lm, exact):
        model.loss(input_ids, labels, cu_seqlens)[0].backward()
    logits = twin(input_ids[None], use_cache=False).logits[0]
    functional.cross_entropy(logits, labels, reduction="sum").backward()

    def worst(gradients: dict[str, torch.Tensor]) -> float:
        truth = {name: p.grad for name, p in exact.named_parameters()}
        return max(relative_error(gradients[name], truth[name]) for name in truth)

    ours = worst({name: p.grad for name, p in lm.named_parameters()})
    theirs = worst({our_name(name): p.grad for name, p in twin.named_parameters()})
    assert ours <= 2 * theirs, f"worst gradient: {ours:.2g}, the reference's {theirs:.2g}"

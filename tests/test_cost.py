"""Parameter counts against the published checkpoints, FLOPs against hand-worked shapes."""

import json
from dataclasses import replace
from math import prod

import pytest

from hymoe.model.activations import block_activations
from hymoe.model.config import HybridConfig
from hymoe.model.cost import (
    count_parameters,
    flops_per_token,
    layer_shapes,
    mean_context,
    weight_bytes,
)
from hymoe.model.names import is_small

LIGHTNING = "Nemotron-3.5-Lightning-30B-A3B-NVFP4.config.no_quant.json"


@pytest.fixture
def lightning(shared_dir):
    return HybridConfig.from_dict(json.loads((shared_dir / "facts" / LIGHTNING).read_text()))


def small_config(pattern="ME*-", **changes):
    values = {
        "vocab_size": 11,
        "hidden_size": 6,
        "pattern": pattern,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 5,
        "intermediate_size": 7,
        "mamba_num_heads": 4,
        "mamba_head_dim": 3,
        "n_groups": 2,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "chunk_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 9,
        "moe_shared_expert_intermediate_size": 10,
    }
    return HybridConfig(**(values | changes))


def test_lightning_total_and_families(lightning, shared_dir):
    facts = json.loads((shared_dir / "facts/Lightning_30B_BF16_tensor_families.json").read_text())
    counts = count_parameters(lightning)
    assert counts.total == facts["backbone_params"] == 31_577_940_288
    billions = {name: round(size / 1e9, 3) for name, size in counts.families.items() if size}
    assert billions == {
        "routed": 29.375,
        "mamba": 0.891,
        "shared": 0.459,
        "embedding": 0.352,
        "head": 0.352,
        "attention": 0.140,
        "router": 0.008,
        "norm": 0.0,
    }
    assert counts.active == counts.total - counts.routed * 122 // 128
    assert round(counts.active / 1e9, 1) == 3.6  # as published; 3.2 without the embedding table
    assert round((counts.active - counts.embedding) / 1e9, 1) == 3.2
    assert round(counts.small / 1e6) == 8
    assert counts.frozen == 23 * 128
    assert layer_values(lightning, "E") == pytest.approx(1.297e9, rel=1e-3)


def layer_values(config, kind):
    """Of one block, small tensors left out."""
    shapes = layer_shapes(config, kind).items()
    return sum(prod(shape) for name, shape in shapes if not is_small(f"layers.0.{name}"))


def test_lightning_flops(lightning):
    """19.7 GFLOP a token where nothing runs again, 23.0 where every block does, on short documents.

    Of another forward pass, 25.5 in all, the head and the last products of the blocks are left out.
    """
    flops = flops_per_token(lightning, context=mean_context([600] * 27))
    assert flops.executed("all") == flops.training
    assert flops.training / 1e9 == pytest.approx(19.7, abs=0.05)
    head = 2 * 131072 * 2688
    routed, mamba, attention = 23 * 2 * 6 * 2688 * 1856, 23 * 2 * 4096 * 2688, 6 * 2 * 4096 * 2688
    shared = 23 * 2 * 2688 * 3712
    last = routed + mamba + attention + shared
    assert flops.executed("inputs") == pytest.approx(flops.training + flops.forward - head - last)
    assert flops.executed("inputs") / 1e9 == pytest.approx(23.0, abs=0.15)
    experts = 23 * 2 * (2688 * 3712 + 6 * 2688 * 1856 + 128 * 2688)
    assert flops.executed("inputs") - flops.executed("acts") == pytest.approx(experts)
    assert flops.ssd * 16384 / 23 == pytest.approx(0.056e12, rel=0.01)


def test_counts_equal_a_hand_count():
    counts = count_parameters(small_config())
    inner, channels = 12, 12 + 2 * 2 * 8
    assert counts.mamba == (inner + channels + 4) * 6 + channels * 5 + 3 * 4 + inner + 6 * inner
    assert counts.attention == (20 + 10 + 10 + 20) * 6
    assert counts.mlp == 2 * 6 * 7
    assert counts.routed == 8 * 2 * 6 * 9
    assert counts.routed_active == 3 * 2 * 6 * 9
    assert counts.shared == 2 * 6 * 10
    assert counts.router == 8 * 6 + 8
    assert counts.norm == 5 * 6
    assert counts.embedding == counts.head == 66
    assert counts.small == counts.norm + counts.router + channels + 3 * 4 + inner


def test_tied_head_costs_flops_but_no_parameters():
    plain, tied = small_config(), small_config(tie_word_embeddings=True)
    assert count_parameters(plain).total - count_parameters(tied).total == 66
    assert flops_per_token(plain, 1.0) == flops_per_token(tied, 1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_bias": True, "use_conv_bias": False},
        {"attention_bias": True, "mlp_bias": True},
        {"moe_latent_size": 5, "mlp_bias": True},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
def test_counts_equal_the_module(changes):
    import torch

    from hymoe.model.net import HybridLM

    config = small_config(pattern="ME*-EM", **changes)
    with torch.device("meta"):
        lm = HybridLM(config, kernels="torch")
    counts = count_parameters(config)
    parameters = sum(p.numel() for p in lm.parameters())
    assert counts.total - counts.frozen == parameters
    assert sum(weight_bytes(config, "bfloat16").values()) == (
        2 * (counts.total - counts.small) + 4 * counts.small
    )
    matrices = sum(
        p.numel() * (3 / 8 if ".experts." in name and "shared" not in name else 1)
        for name, p in lm.named_parameters()
        if p.dim() > 1 and (config.tie_word_embeddings or not name.startswith("embeddings"))
    )
    assert flops_per_token(config, 0.0).matmul == 2 * matrices


def test_attention_flops_equal_a_loop_over_documents():
    lengths = [1, 5, 2]
    config = small_config(pattern="**")
    pairs = sum(query + 1 for length in lengths for query in range(length))
    flops = flops_per_token(config, mean_context(lengths))
    assert flops.attention * sum(lengths) == pytest.approx(2 * pairs * 2 * 2 * 4 * 5)
    assert mean_context([]) == 0.0


def test_ssd_flops_by_hand():
    flops = flops_per_token(small_config(pattern="M"), 0.0)
    scores, within, states = 2 * 16 * 2 * 8, 2 * 16 * 12, 2 * 2 * 12 * 8
    assert flops.ssd == scores + within + states


def test_only_the_experts_of_a_token_count():
    few = small_config(pattern="E")
    more = replace(few, num_experts_per_tok=4)
    expert = 2 * 6 * 9
    assert count_parameters(more).active - count_parameters(few).active == expert
    assert flops_per_token(more, 0.0).forward - flops_per_token(few, 0.0).forward == 2 * expert
    kept = [block_activations(config, "E", 32, "bfloat16").kept for config in (few, more)]
    assert kept[1] > kept[0]

"""The mixture layer as a whole: weights, idle experts, and recomputation that routes as the first pass did."""

import pytest
import torch
from torch import Tensor

from hymoe.kernels.packed import Packed
from hymoe.model.moe import MoE
from hymoe.model.net import HybridLM
from tests.tiny import tiny_config, tiny_lm

WIDTH = 32


def one_score_layer(scores: list[float], dtype: torch.dtype = torch.float32, **changes) -> MoE:
    """A layer whose router gives these scores to the input (1, 0, 0, ...); its other weights are zero."""
    config = tiny_config(n_routed_experts=len(scores), **changes)
    layer = MoE(config, dtype)
    with torch.no_grad():
        for x in [*layer.parameters(), *layer.buffers()]:
            x.zero_()
        layer.gate.weight[:, 0] = torch.logit(torch.tensor(scores, dtype=torch.float64)).float()
    return layer


def first_unit(dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.zeros(1, WIDTH, dtype=dtype)
    x[0, 0] = 1
    return x


@pytest.mark.parametrize("latent", [None, WIDTH], ids=["wide", "latent"])
@pytest.mark.parametrize(("norm", "expected"), [(True, 12.5), (False, 11.75)])
def test_routed_experts_are_scaled_once_and_the_shared_one_never(
    norm: bool, expected: float, latent: int | None
) -> None:
    """vllm#45037: every routed expert returns 1, the shared one 10; chosen scores 0.4 and 0.3, factor 2.5."""
    layer = one_score_layer(
        [0.3, 0.1, 0.4],
        num_experts_per_tok=2,
        norm_topk_prob=norm,
        routed_scaling_factor=2.5,
        moe_latent_size=latent,
    )
    with torch.no_grad():
        layer.experts.up_proj[:, 0, 0] = 1
        layer.experts.down_proj[:, :, 0] = 1
        layer.shared_experts.up_proj.weight[0, 0] = 1
        layer.shared_experts.down_proj.weight[:, 0] = 10
        if latent is not None:
            layer.fc1_latent_proj.weight.copy_(torch.eye(WIDTH))
            layer.fc2_latent_proj.weight.copy_(torch.eye(WIDTH))
    out = layer(first_unit(), [])
    torch.testing.assert_close(out, torch.full((1, WIDTH), expected), rtol=1e-6, atol=0)


def test_a_bfloat16_layer_selects_with_the_float32_bias() -> None:
    """Automodel#2553: rounded to bfloat16 the three biases are one number, and expert 0 would be chosen."""
    layer = one_score_layer([0.30, 0.28, 0.10], torch.bfloat16, num_experts_per_tok=1)
    layer.gate.e_score_correction_bias.copy_(torch.tensor([34.40, 34.45, 34.60]))
    layer(first_unit(torch.bfloat16), [])
    assert layer.load.tolist() == [0, 1, 0]
    assert layer.gate.e_score_correction_bias.dtype == torch.float32
    assert layer.gate.weight.dtype == torch.float32
    assert layer.experts.up_proj.dtype == torch.bfloat16


def row(tokens: int = 40, seed: int = 1) -> tuple[Tensor, Tensor, Packed]:
    rng = torch.Generator().manual_seed(seed)
    input_ids, labels = torch.randint(0, 97, (2, tokens), generator=rng)
    return input_ids, labels, Packed.from_lengths((7, tokens - 7))


def steer(lm: HybridLM, *favoured: int) -> None:
    """Makes these experts win everywhere, the first of them first."""
    with torch.no_grad():
        for layer in lm.layers:
            if layer.kind == "E":
                bias = layer.mixer.gate.e_score_correction_bias
                bias.zero_()
                for rank, expert in enumerate(favoured):
                    bias[expert] = 100.0 - rank


@pytest.mark.parametrize("keep", ["all", "inputs"])
def test_idle_experts_have_zero_gradients(keep: str) -> None:
    """pytorch#126616: every parameter has a gradient, whoever was chosen."""
    lm = tiny_lm(layers_block_type=["moe", "mamba", "moe"], num_experts_per_tok=1)
    lm.set_keep(keep)
    steer(lm, 5)
    lm.loss(*row())[0].backward()
    for name, parameter in lm.named_parameters():
        assert parameter.grad is not None, name
        if ".experts." in name:
            busy = parameter.grad.flatten(1).any(1)
            assert busy.tolist() == [e == 5 for e in range(8)], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_recomputation_routes_as_the_first_pass(dtype: torch.dtype) -> None:
    """The bias is turned against the first choice between the passes: not one bit of a gradient may notice."""
    gradients = []
    for keep in ("all", "inputs"):
        lm = tiny_lm(dtype=dtype, layers_block_type=["moe", "mamba", "moe"], num_experts_per_tok=2)
        lm.set_keep(keep)
        steer(lm, 3, 6)
        loss = lm.loss(*row())[0]
        if keep == "inputs":
            steer(lm, 0, 1)
        loss.backward()
        gradients.append({name: p.grad for name, p in lm.named_parameters()})
        experts = gradients[-1]["layers.0.mixer.experts.up_proj"].flatten(1).any(1)
        assert torch.nonzero(experts)[:, 0].tolist() == [3, 6]
    for name, expected in gradients[0].items():
        assert torch.equal(gradients[1][name], expected), name


def test_the_load_counts_each_token_once() -> None:
    lm = tiny_lm(layers_block_type=["moe"])
    lm.set_keep("inputs")
    for passes in (1, 2):
        lm.loss(*row())[0].backward()
        assert lm.layers[0].mixer.load.sum() == passes * 40 * 3
        assert lm.layers[0].mixer.load.shape == (8,)


def test_the_routers_bias_gets_no_gradient() -> None:
    lm = tiny_lm(layers_block_type=["moe"])
    before = lm.layers[0].mixer.gate.e_score_correction_bias.clone()
    lm.loss(*row())[0].backward()
    bias = lm.layers[0].mixer.gate.e_score_correction_bias
    assert not bias.requires_grad
    assert torch.equal(bias, before)
    assert "layers.0.mixer.gate.e_score_correction_bias" not in dict(lm.named_parameters())
    assert "layers.0.mixer.gate.e_score_correction_bias" in lm.state_dict()

"""The table of names against the real models' recorded tensors, against transformers and against HybridLM."""

import json
import math
import re

import pytest
import torch

from hymoe.model.config import HybridConfig
from hymoe.model.names import (
    by_parameter,
    decays,
    is_small,
    mtp_specs,
    parameter_shape,
    tensor_specs,
)
from hymoe.model.net import HybridLM
from tests.tiny import tiny_config

LIGHTNING = "Nemotron-3.5-Lightning-30B-A3B-NVFP4.config.no_quant.json"
NANO = "Nemotron-3-Nano-30B-A3B-NVFP4.config.json"
SUPER = "Nemotron-3-Super-120B-A12B-NVFP4.config.no_quant.json"
H_8B = "Nemotron-H-8B.config_from_megatron_bridge_test.json"


def real_config(shared_dir, name):
    return HybridConfig.from_dict(json.loads((shared_dir / "facts" / name).read_text()))


def shapes(specs):
    return {name: spec.shape for name, spec in specs.items()}


def total(specs):
    return sum(math.prod(spec.shape) for spec in specs.values())


@pytest.fixture(scope="module")
def recorded(shared_dir):
    """Lightning's facts, families expanded to one name a tensor."""
    file = shared_dir / "facts" / "Lightning_30B_BF16_tensor_families.json"
    facts = json.loads(file.read_text())
    tensors = {}
    for family, value in facts["tensors"].items():
        span = re.search(r"\{(\d+)\.\.(\d+)\}", family)
        members = range(int(span[1]), int(span[2]) + 1) if span else [None]
        assert len(members) == value["count"]
        for member in members:
            name = family if member is None else family.replace(span[0], str(member))
            tensors[name] = tuple(value["shape"])
    return facts, tensors


def test_lightning_has_exactly_the_recorded_tensors(recorded, shared_dir):
    facts, tensors = recorded
    config = real_config(shared_dir, LIGHTNING)
    specs, mtp = tensor_specs(config), mtp_specs(config)
    assert shapes(specs) | shapes(mtp) == tensors
    assert (len(specs), total(specs)) == (facts["backbone_tensors"], facts["backbone_params"])
    assert (len(specs), total(specs)) == (6243, 31_577_940_288)
    assert (len(specs) + len(mtp), total(specs) + total(mtp)) == (6513, 32_913_266_240)
    assert (facts["total_tensors"], facts["total_params"]) == (6513, 32_913_266_240)


def test_nano_is_lightning_without_mtp(recorded, shared_dir):
    config = real_config(shared_dir, NANO)
    backbone = {n: s for n, s in recorded[1].items() if not n.startswith("mtp.")}
    assert shapes(tensor_specs(config)) == backbone
    assert not mtp_specs(config)


def test_partial_facts_of_nano_4b(shared_dir):
    """Another pattern (with plain MLPs): its number of tensors is recorded."""
    facts = json.loads((shared_dir / "facts" / "partial_facts.json").read_text())
    facts = facts["Nemotron-3-Nano-4B"]
    raw = {"model_type": "nemotron_h", **facts}
    assert len(tensor_specs(HybridConfig.from_dict(raw))) == facts["tensor_count"] == 263


@pytest.mark.parametrize(
    ("name", "counts"),
    [  # not recorded: worked out apart, one closed formula a layer kind, times its layers
        (SUPER, (41_643, 120_668_707_840, 1_040, 2_942_325_248)),
        (H_8B, (311, 8_100_852_736, 0, 0)),
    ],
    ids=["super", "h-8b"],
)
def test_totals_of_the_other_real_models(name, counts, shared_dir):
    config = real_config(shared_dir, name)
    specs, mtp = tensor_specs(config), mtp_specs(config)
    assert (len(specs), total(specs), len(mtp), total(mtp)) == counts


@pytest.mark.parametrize("name", [LIGHTNING, NANO, SUPER, H_8B])
def test_real_models_match_hybrid_lm_one_to_one(name, shared_dir):
    check_against_lm(real_config(shared_dir, name))


OPTIONS = {
    "plain": {},
    "biases": {"use_bias": True, "attention_bias": True, "mlp_bias": True},
    "no-conv-bias": {"use_conv_bias": False},
    "latent": {"moe_latent_size": 12},
    "latent-biases": {"moe_latent_size": 12, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "no-experts": {"layers_block_type": ["mamba", "mlp", "attention"]},
    "experts-only": {"layers_block_type": ["moe", "moe"]},
}


def check_against_lm(config):
    """Every parameter and buffer of HybridLM is one line of the table, with its shape, and no line is left."""
    lm = HybridLM(config, kernels="torch", device="meta")
    tensors = {**dict(lm.named_parameters()), **dict(lm.named_buffers())}
    specs = tensor_specs(config)
    files = by_parameter(specs)
    assert {n: parameter_shape(specs, f) for n, f in files.items()} == {
        n: tuple(t.shape) for n, t in tensors.items()
    }
    assert sum(t.numel() for t in tensors.values()) == total(specs)
    small = {n for n in tensors if is_small(n)}
    assert {n for n, t in tensors.items() if n in small and t.dtype != torch.float32} == set()
    for name, tensor in tensors.items():
        assert decays(name) == (tensor.ndim > 1 and not name.startswith("embeddings")), name


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_every_option_matches_hybrid_lm(changes):
    check_against_lm(tiny_config(**changes))


# The options that transformers has, too: it keeps no bias in attention and never ties.
@pytest.mark.parametrize(
    "changes", [OPTIONS[k] for k in ("plain", "no-conv-bias", "latent-biases")]
)
def test_names_and_shapes_are_those_that_transformers_writes(changes, tmp_path):
    from safetensors import safe_open
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = tiny_config(**changes)
    NemotronHForCausalLM(NemotronHConfig(**config.to_dict())).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert written == shapes(tensor_specs(config))


def test_small_and_decaying_tensors_are_exactly_these():
    config = tiny_config(use_bias=True, attention_bias=True, mlp_bias=True, moe_latent_size=12)
    names = by_parameter(tensor_specs(config))
    small = {re.sub(r"layers\.\d+\.", "", name) for name in names if is_small(name)}
    assert small == {
        *("norm.weight", "norm_f.weight", "mixer.norm.weight", "mixer.conv1d.bias"),
        *("mixer.A_log", "mixer.D", "mixer.dt_bias"),
        *("mixer.gate.weight", "mixer.gate.e_score_correction_bias"),
    }
    decaying = {name for name in names if decays(name)}
    assert {
        "head.weight",
        "layers.1.mixer.experts.up_proj",
        "layers.0.mixer.conv1d.weight",
    } < decaying
    assert not [name for name in decaying if "bias" in name or "norm" in name or "embed" in name]


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "norm.weight",
        "layers.0.head.weight",
        "layers.0.mixer.x",
        "mtp.layers.0.norm",
    ],
)
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match=re.escape(name)):
        is_small(name)
    with pytest.raises(ValueError, match=re.escape(name)):
        decays(name)


def test_prefix_moves_everything_but_the_head():
    config = tiny_config()
    plain, other = tensor_specs(config), tensor_specs(config, prefix="model.")
    renamed = {n.replace("backbone.", "model.", 1): s for n, s in plain.items()}
    assert list(renamed.items()) == list(other.items())
    assert "lm_head.weight" in other


def test_experts_of_a_stack_follow_each_other_and_point_to_their_rows():
    specs = tensor_specs(tiny_config())
    files = by_parameter(specs)["layers.1.mixer.experts.down_proj"]
    assert files == [f"backbone.layers.1.mixer.experts.{e}.down_proj.weight" for e in range(8)]
    assert [specs[f].expert for f in files] == list(range(8))
    assert parameter_shape(specs, files) == (8, 32, 24)
    order = list(specs)
    first = order.index(files[0])
    assert order[first : first + 8] == files


def test_mtp_modules_repeat_with_their_joints():
    config = tiny_config(num_nextn_predict_layers=2, mtp_hybrid_override_pattern="*E-")
    specs = mtp_specs(config)
    at = {i: {n for n in specs if n.startswith(f"mtp.layers.{i}.")} for i in range(7)}
    for first in (0, 3):
        assert f"mtp.layers.{first}.eh_proj.weight" in at[first]
        assert specs[f"mtp.layers.{first}.eh_proj.weight"].shape == (32, 64)
        assert f"mtp.layers.{first + 2}.final_layernorm.weight" in at[first + 2]
        assert len(at[first]) == 3 + 1 + 4
        assert len(at[first + 1]) == 1 + 2 * 8 + 2 + 2
        assert len(at[first + 2]) == 1 + 1 + 2
    assert not at[6]
    assert not set(specs) & set(tensor_specs(config))

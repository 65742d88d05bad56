"""`config.json` in every spelling in use, unchanged on the way out, and refused where it would be computed wrongly."""

import json
from pathlib import Path
from typing import Any

import pytest

from hymoe.model.config import LAYER_KINDS, HybridConfig
from tests.tiny import BASE

LIGHTNING = "Nemotron-3.5-Lightning-30B-A3B-NVFP4.config.no_quant.json"
NANO = "Nemotron-3-Nano-30B-A3B-NVFP4.config.json"
SUPER = "Nemotron-3-Super-120B-A12B-NVFP4.config.no_quant.json"
H_8B = "Nemotron-H-8B.config_from_megatron_bridge_test.json"
INFINITY = float("inf")


def config(**changes: Any) -> HybridConfig:
    """The tiny config with some keys changed; a key changed to ... is absent."""
    raw = {key: value for key, value in {**BASE, **changes}.items() if value is not ...}
    return HybridConfig.from_dict(raw)


# What is expected of each real model: number of layers by kind (M E * -), then sizes.
FACTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    LIGHTNING: (
        (23, 23, 6, 0),
        {
            "hidden_size": 2688,
            "head_dim": 128,
            "num_key_value_heads": 2,
            "mamba_inner": 4096,
            "conv_dim": 6144,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "moe_shared_expert_intermediate_size": 3712,
            "moe_latent_size": None,
            "expert_input": 2688,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 1,
            "mtp_pattern": "*E",
        },
    ),
    NANO: (
        (23, 23, 6, 0),
        {"hidden_size": 2688, "num_nextn_predict_layers": 0, "mtp_pattern": "", "n_group": 1},
    ),
    SUPER: (
        (40, 40, 8, 0),
        {
            "hidden_size": 4096,
            "mamba_inner": 8192,
            "moe_latent_size": 1024,
            "expert_input": 1024,
            "n_routed_experts": 512,
            "num_experts_per_tok": 22,
            "mtp_pattern": "*E",
        },
    ),
    H_8B: (
        (24, 0, 4, 24),
        {
            "hidden_size": 4096,
            "head_dim": 128,  # written attention_head_dim
            "intermediate_size": 21504,
            "num_key_value_heads": 8,
            "conv_dim": 10240,
        },
    ),
}


@pytest.mark.parametrize("name", FACTS)
def test_real_configs(name: str, shared_dir: Path) -> None:
    raw = json.loads((shared_dir / "facts" / name).read_text())
    found = HybridConfig.from_dict(raw)
    counts, sizes = FACTS[name]
    assert tuple(found.pattern.count(kind) for kind in "ME*-") == counts
    assert {key: getattr(found, key) for key in sizes} == sizes
    assert (found.vocab_size, found.dtype, found.norm_eps) == (131_072, "bfloat16", 1e-5)
    assert found.time_step_limit == (0.0, INFINITY)  # of which none of the files speaks
    assert found.to_dict() == raw


def test_the_same_model_in_two_spellings_has_one_pattern(shared_dir: Path) -> None:
    read = lambda name: json.loads((shared_dir / "facts" / name).read_text())  # noqa: E731
    listed, written = (HybridConfig.from_dict(read(name)) for name in (LIGHTNING, NANO))
    assert isinstance(listed.raw["layers_block_type"], list)
    assert listed.pattern == written.raw["hybrid_override_pattern"] == written.pattern


def test_partial_facts(shared_dir: Path) -> None:
    """The models of which only some sizes are public: what is there, fits."""
    facts = json.loads((shared_dir / "facts" / "partial_facts.json").read_text())
    whole = 0
    for name, raw in facts.items():
        if isinstance(raw, dict) and {"hybrid_override_pattern", "vocab_size"} <= raw.keys():
            found = HybridConfig.from_dict(raw)
            assert len(found.pattern) == raw["num_hidden_layers"], name
            whole += 1
    assert whole >= 3


@pytest.mark.parametrize(
    "layers",
    [
        {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
        {"layers_block_type": ..., "layer_types": ["mamba", "moe", "full_attention", "mlp"]},
        {"layers_block_type": ..., "hybrid_override_pattern": "ME*-"},
        {"layers_block_type": None, "hybrid_override_pattern": "ME*-"},
        {"hybrid_override_pattern": "ME*-", "layer_types": ["mamba", "moe", "attention", "mlp"]},
        {"num_hidden_layers": 4},
    ],
    ids=lambda layers: "+".join(layers),
)
def test_layers_in_every_spelling(layers: dict[str, Any]) -> None:
    assert config(**layers).pattern == "ME*-"


SPELLINGS = [
    ("norm_eps", ("layer_norm_epsilon", "norm_eps", "rms_norm_eps"), 0.125, 0.125),
    ("head_dim", ("head_dim", "attention_head_dim"), 24, 24),
    ("dtype", ("dtype", "torch_dtype"), "bfloat16", "bfloat16"),
    ("dtype", ("dtype", "torch_dtype"), "torch.float16", "float16"),
    ("n_groups", ("n_groups", "mamba_n_groups"), 4, 4),
    ("conv_kernel", ("conv_kernel", "mamba_d_conv"), 3, 3),
    ("chunk_size", ("chunk_size", "mamba_chunk_size"), 64, 64),
    ("use_conv_bias", ("use_conv_bias", "mamba_conv_bias"), False, False),
    ("time_step_limit", ("time_step_limit", "mamba_dt_limit"), [0.5, 2], (0.5, 2.0)),
    ("n_routed_experts", ("n_routed_experts", "num_local_experts"), 16, 16),
]


@pytest.mark.parametrize(("name", "keys", "value", "expected"), SPELLINGS)
def test_keys_in_every_spelling(name: str, keys: tuple, value: Any, expected: Any) -> None:
    absent = dict.fromkeys(keys, ...)
    assert HybridConfig.__dataclass_fields__[name].default != expected  # so it is not that
    for key in keys:
        assert getattr(config(**{**absent, key: value}), name) == expected, key
        everywhere_else_null = dict.fromkeys(keys) | {key: value}
        assert getattr(config(**everywhere_else_null), name) == expected, key
    assert getattr(config(**dict.fromkeys(keys, value)), name) == expected


@pytest.mark.parametrize(("name", "keys", "value", "expected"), SPELLINGS)
def test_spellings_that_disagree_are_refused(
    name: str, keys: tuple, value: Any, expected: Any
) -> None:
    other = {"norm_eps": 0.5, "dtype": "float32", "use_conv_bias": True, "head_dim": 8}
    other |= {"time_step_limit": [0.1, 2.0]}
    pair = {keys[0]: value, keys[1]: other.get(name, 1)}
    with pytest.raises(ValueError, match=f"keys that mean the same disagree: .*{keys[1]} = "):
        config(**pair)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[0.0, Infinity]", (0.0, INFINITY)),
        ('[0.0, "inf"]', (0.0, INFINITY)),
        ('[0, "Infinity"]', (0.0, INFINITY)),
        ('[0.0, {"__float__": "Infinity"}]', (0.0, INFINITY)),
        ("[0.0, null]", (0.0, INFINITY)),
        ("[null, null]", (0.0, INFINITY)),
        ("null", (0.0, INFINITY)),
        (None, (0.0, INFINITY)),
        ("[0.001, 0.1]", (0.001, 0.1)),
        ('["0.001", 1]', (0.001, 1.0)),
    ],
)
def test_time_step_limit_in_every_spelling(
    text: str | None, expected: tuple, tmp_path: Path
) -> None:
    """transformers#35154, through a file: `time_step_min` has no say."""
    raw = {**BASE, "time_step_min": 0.01}
    del raw["time_step_limit"]
    line = "" if text is None else f', "time_step_limit": {text}'
    (tmp_path / "config.json").write_text(json.dumps(raw)[:-1] + line + "}")
    found = HybridConfig.from_pretrained(tmp_path)
    assert found.time_step_limit == expected
    assert found.to_dict() == json.loads((tmp_path / "config.json").read_text())


def test_every_key_comes_out_unchanged() -> None:
    """Unknown keys, nested ones, null and the spelling that was used; nothing is shared with the input."""
    raw = {
        **BASE,
        "auto_map": {"AutoConfig": "x.Y"},
        "rope_theta": 10000,
        "mamba_ssm_cache_dtype": "float32",
        "torch_dtype": "float32",
        "moe_latent_size": None,
        "unheard_of": [1, {"a": None}],
    }
    found = HybridConfig.from_dict(raw)
    assert found.to_dict() == raw
    assert list(found.to_dict()) == list(raw)
    found.to_dict()["auto_map"]["AutoConfig"] = "changed"
    raw["unheard_of"].append(2)
    assert found.to_dict()["auto_map"] == {"AutoConfig": "x.Y"}
    assert found.to_dict()["unheard_of"] == [1, {"a": None}]


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        config().hidden_size = 64


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another-family": ({"model_type": "mamba2"}, "model_type = 'mamba2'; expected 'nemotron_h'"),
    "quantised": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        r"quantization_config \(modelopt\): a quantised checkpoint cannot be trained",
    ),
    "quantised-unnamed": ({"quantization_config": {}}, r"quantization_config \(unnamed\)"),
    "unknown-kind": (
        {"layers_block_type": ["mamba", "rwkv"]},
        r"layers_block_type\[1\] = 'rwkv' is an unknown layer kind; expected one of \['mamba'",
    ),
    "unhashable-kind": (
        {"layers_block_type": ["mamba", ["moe"]]},
        r"layers_block_type\[1\] = \['moe'\] is an unknown layer kind",
    ),
    "unknown-letter": (
        {"layers_block_type": ..., "hybrid_override_pattern": "MEX*"},
        "hybrid_override_pattern has unknown layer kind 'X'; expected letters of 'M', 'E'",
    ),
    "layers-a-number": ({"layers_block_type": 4}, "layers_block_type: expected a list or a string"),
    "no-layers": ({"layers_block_type": ...}, "neither layers_block_type nor hybrid_override_patt"),
    "empty-list": ({"layers_block_type": []}, "layers_block_type is empty"),
    "empty-pattern": (
        {"layers_block_type": ..., "hybrid_override_pattern": ""},
        "hybrid_override_pattern is empty",
    ),
    "two-lists": (
        {"hybrid_override_pattern": "ME-*"},
        r"layer lists disagree: layers_block_type = ME\*-, hybrid_override_pattern = ME-\*",
    ),
    "layer-count": (
        {"num_hidden_layers": 5},
        "num_hidden_layers = 5, but layers_block_type lists 4 layers",
    ),
    "query-heads": (
        {"num_key_value_heads": 3},
        "num_attention_heads = 4 does not divide by num_key_value_heads = 3",
    ),
    "ssm-groups": ({"n_groups": 3}, "mamba_num_heads = 4 does not divide by n_groups = 3"),
    "expert-groups": ({"n_group": 3}, "n_routed_experts = 8 does not divide by n_group = 3"),
    "groups-of-one": (
        {"n_group": 8, "topk_group": 4},
        "n_group = 8 leaves 1 expert a group; a group's score is the sum of its best two",
    ),
    "too-many-groups": (
        {"n_group": 2, "topk_group": 3},
        "topk_group = 3 is more than n_group = 2",
    ),
    "too-many-chosen": (
        {"num_experts_per_tok": 9},
        "num_experts_per_tok = 9 is more than the 8 experts",
    ),
    "too-many-of-the-groups": (
        {"n_group": 4, "topk_group": 1},
        "num_experts_per_tok = 3 is more than the 2 experts of topk_group = 1",
    ),
    "no-heads": ({"num_attention_heads": 0}, "num_attention_heads = 0; expected a positive"),
    "no-vocabulary": ({"vocab_size": ...}, "vocab_size is missing"),
    "null-width": ({"hidden_size": None}, "hidden_size is missing"),
    "no-mamba-heads": ({"mamba_num_heads": ...}, "mamba_num_heads = 0; expected a positive"),
    "no-experts": ({"n_routed_experts": ...}, "n_routed_experts = 0; expected a positive"),
    "no-mlp-width": ({"intermediate_size": ...}, "intermediate_size = 0; expected a positive"),
    "negative": ({"ssm_state_size": -16}, "ssm_state_size = -16; expected a positive number"),
    "text-for-a-number": ({"hidden_size": "32"}, "hidden_size = '32'; expected int"),
    "half-a-head": ({"num_attention_heads": 1.5}, "num_attention_heads = 1.5; expected int"),
    "true-for-a-number": ({"vocab_size": True}, "vocab_size = True; expected int"),
    "number-for-a-flag": ({"mlp_bias": 1}, "mlp_bias = 1; expected bool"),
    "text-for-eps": ({"norm_eps": "1e-5"}, "norm_eps = '1e-5'; expected float"),
    "latent-text": ({"moe_latent_size": "16"}, "moe_latent_size = '16'; expected int"),
    "dtype": ({"dtype": "int8"}, "dtype = 'int8'; expected one of float32, bfloat16, float16"),
    "sliding-window": ({"sliding_window": 4096}, "sliding_window = 4096 is not supported"),
    "attention-dropout": ({"attention_dropout": 0.1}, "attention_dropout = 0.1 is not supported"),
    "hidden-dropout": ({"hidden_dropout": 0.1}, "hidden_dropout = 0.1 is not supported"),
    "mlp-act": (
        {"mlp_hidden_act": "silu"},
        "mlp_hidden_act = 'silu' is not supported; expected 'relu2'",
    ),
    "mamba-act": (
        {"mamba_hidden_act": "gelu"},
        "mamba_hidden_act = 'gelu' is not supported; expected 'silu'",
    ),
    "proj-bias": ({"mamba_proj_bias": True}, "mamba_proj_bias = true with use_bias = false"),
    "shared-experts": (
        {"n_shared_experts": 2},
        "n_shared_experts = 2 is not supported; expected 1",
    ),
    "limit-of-one": ({"time_step_limit": [0.0]}, r"time_step_limit = \[0.0\]; expected two numb"),
    "limit-text": ({"time_step_limit": [0.0, "x"]}, "time_step_limit = .*; expected two numbers"),
    "limit-list": ({"time_step_limit": [0.0, [1]]}, "time_step_limit = .*; expected two numbers"),
    "limit-number": ({"time_step_limit": 0.1}, "time_step_limit = 0.1; expected two numbers"),
    "limit-turned": ({"time_step_limit": [0.2, 0.1]}, "time_step_limit = .*; expected 0 <= low"),
    "limit-negative": ({"time_step_limit": [-1, 1]}, "time_step_limit = .*; expected 0 <= low"),
    "limit-nan": ({"time_step_limit": [0, "nan"]}, "time_step_limit = .*; expected 0 <= low"),
    "mtp-kind": (
        {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "x"]},
        r"mtp_layers_block_type\[1\] = 'x' is an unknown layer kind",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_key_value_and_what_was_expected(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as caught:
        config(**changes)
    assert "\n" not in str(caught.value)


def test_options_that_are_off_or_unused_are_no_obstacle() -> None:
    found = config(
        quantization_config=None,
        sliding_window=None,
        attention_dropout=0,
        hidden_dropout=0.0,
        mamba_proj_bias=False,
        mlp_hidden_act="relu2",
        mamba_hidden_act="swish",
        n_shared_experts=1,
    )
    assert found.pattern == "ME*-"
    assert config(mamba_proj_bias=True, use_bias=True).use_bias
    # A kind that the model does not have need not be described.
    lean = {"model_type": "nemotron_h", "vocab_size": 8, "hidden_size": 4}
    lean |= {"hybrid_override_pattern": "--", "intermediate_size": 6}
    assert HybridConfig.from_dict(lean).intermediate_size == 6
    assert HybridConfig.from_dict({**lean, "n_shared_experts": 3}).pattern == "--"


def test_whole_numbers_stand_for_floats() -> None:
    assert config(routed_scaling_factor=2).routed_scaling_factor == 2


def test_every_kind_has_a_letter() -> None:
    assert set(LAYER_KINDS.values()) == set("ME*-")


@pytest.mark.parametrize(
    ("layers", "pattern"),
    [
        ({"mtp_layers_block_type": ["attention", "moe"]}, "*E"),
        ({"mtp_hybrid_override_pattern": "*E-"}, "*E-"),
        ({}, "*E"),
    ],
    ids=["list", "pattern", "absent"],
)
def test_prediction_layers_in_every_spelling(layers: dict[str, Any], pattern: str) -> None:
    assert config(num_nextn_predict_layers=1, **layers).mtp_pattern == pattern
    assert config(num_nextn_predict_layers=0, **layers).mtp_pattern == ""


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file; expected the config"):
        HybridConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b'{"vocab_size": 97,}', "not valid JSON"),
        (b"[1, 2]", "expected a JSON object, found list"),
        (b"null", "expected a JSON object, found NoneType"),
        (b"{}", "neither layers_block_type nor hybrid_override_pattern"),
    ],
)
def test_files_that_are_no_config(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        HybridConfig.from_pretrained(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(BASE).encode())
    assert HybridConfig.from_pretrained(tmp_path).pattern == "ME*-"

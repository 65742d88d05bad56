"""The shape of a `nemotron_h` model, read from a checkpoint's `config.json` in every spelling in use.

Dimensions, used in shape comments everywhere in this project:
**T** tokens in the packed row, **S** documents in it, **D** model width, **V** vocabulary, **L** layers,
**H** heads, **G** key/value heads or SSM groups, **P** head width, **N** SSM state, **Q** chunk length,
**C** chunks (in conv1d: channels), **W** convolution width, **E** experts, **K** experts a token,
**F** expert width, **R** routed rows = T*K.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LAYER_KINDS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "moe": "E",
    "mlp": "-",
}
# Our attribute -> the spellings it has in published configs. Where a file has several, they must agree.
SPELLINGS = {
    "norm_eps": ("layer_norm_epsilon", "norm_eps", "rms_norm_eps"),
    "head_dim": ("head_dim", "attention_head_dim"),
    "dtype": ("dtype", "torch_dtype"),
    "n_groups": ("n_groups", "mamba_n_groups"),
    "conv_kernel": ("conv_kernel", "mamba_d_conv"),
    "chunk_size": ("chunk_size", "mamba_chunk_size"),
    "use_conv_bias": ("use_conv_bias", "mamba_conv_bias"),
    "time_step_limit": ("time_step_limit", "mamba_dt_limit"),
    "n_routed_experts": ("n_routed_experts", "num_local_experts"),
}
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """What the network needs to know of `config.json`; `raw` keeps the file as it was, every key.

    Raises:
        ValueError: an unknown layer kind, heads that do not divide, a quantised checkpoint, an option
            that no implementation of the family computes; the message names the key and its value.
    """

    vocab_size: int
    hidden_size: int
    pattern: str  # one letter a layer: M Mamba-2, E mixture of experts, * attention, - MLP
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    residual_in_fp32: bool = False
    initializer_range: float = 0.02
    dtype: str = "float32"  # what the checkpoint calls its dtype; each tensor's own is in its shard

    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    attention_bias: bool = False

    intermediate_size: int = 0
    mlp_bias: bool = False  # also the shared expert's and the latent projections'

    mamba_num_heads: int = 0
    mamba_head_dim: int = 0
    n_groups: int = 8
    ssm_state_size: int = 128
    conv_kernel: int = 4
    chunk_size: int = 128
    use_conv_bias: bool = True
    use_bias: bool = False  # of the Mamba projections
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    time_step_min: float = 0.001  # this and the two below only initialise dt_bias
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4

    n_routed_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_latent_size: int | None = None
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    num_nextn_predict_layers: int = 0
    mtp_pattern: str = (
        ""  # layer kinds of the multi-token-prediction block, which is not trained here
    )

    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Checks each group of fields that the layers of `pattern` use."""
        _check_positive(self, "vocab_size", "hidden_size")
        if "*" in self.pattern:
            _check_positive(self, "num_attention_heads", "num_key_value_heads", "head_dim")
            _check_divides(self, "num_attention_heads", "num_key_value_heads")
        if "M" in self.pattern:
            _check_positive(self, "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")
            _check_positive(self, "conv_kernel", "chunk_size")
            _check_divides(self, "mamba_num_heads", "n_groups")
        if "-" in self.pattern:
            _check_positive(self, "intermediate_size")
        if "E" in self.pattern:
            self._check_experts()
        if self.moe_latent_size is not None:
            _check_positive(self, "moe_latent_size")

    def _check_experts(self) -> None:
        _check_positive(self, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
        _check_positive(self, "moe_shared_expert_intermediate_size", "n_group", "topk_group")
        _check_divides(self, "n_routed_experts", "n_group")
        if self.topk_group > self.n_group:
            raise ValueError(
                f"topk_group = {self.topk_group} is more than n_group = {self.n_group}"
            )
        group = self.n_routed_experts // self.n_group
        if self.n_group > 1 and group < 2:
            raise ValueError(
                f"n_group = {self.n_group} leaves {group} expert a group; a group's score is the sum of its best two"
            )
        if self.num_experts_per_tok > group * self.topk_group:
            raise ValueError(
                f"num_experts_per_tok = {self.num_experts_per_tok} is more than the {group * self.topk_group} "
                f"experts of topk_group = {self.topk_group} groups"
            )

    @property
    def mamba_inner(self) -> int:
        """Width of the Mamba mixer, H*P."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: x, b and c, H*P + 2*G*N."""
        return self.mamba_inner + 2 * self.n_groups * self.ssm_state_size

    @property
    def expert_input(self) -> int:
        """Width of what the routed experts read and write: the latent size where there is one, else D."""
        return self.hidden_size if self.moe_latent_size is None else self.moe_latent_size

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "HybridConfig":
        """Reads `path/config.json`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no JSON object, or describes a model that this one is not.
        """
        file = Path(path) / "config.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"{file}: no such file; expected the config of a nemotron_h checkpoint"
            )
        try:
            raw = json.loads(file.read_text(encoding="utf-8-sig"))
        except ValueError as error:
            raise ValueError(f"{file}: not valid JSON ({error})") from None
        try:
            return cls.from_dict(raw)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "HybridConfig":
        """Builds the config from the object in `config.json`; see the class for what is refused."""
        if not isinstance(raw, Mapping):
            raise ValueError(f"expected a JSON object, found {type(raw).__name__}")
        _refuse(raw)
        values: dict[str, Any] = {"pattern": _layer_pattern(raw), "raw": copy.deepcopy(dict(raw))}
        for name in cls.__dataclass_fields__:
            if name in ("pattern", "raw", "mtp_pattern"):
                continue
            found = _spelled(raw, name)
            if found is not None:
                values[name] = found
        for name in ("vocab_size", "hidden_size"):
            if name not in values:
                raise ValueError(f"{name} is missing")
        values["dtype"] = _dtype(values.get("dtype", "float32"))
        values["time_step_limit"] = _time_step_limit(values.get("time_step_limit"))
        if values.get("num_nextn_predict_layers"):
            values["mtp_pattern"] = _mtp_pattern(raw)
        return cls(**_typed(cls, values))

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that the config came from, every key as it was."""
        return copy.deepcopy(dict(self.raw))


def _spelled(raw: Mapping[str, Any], name: str) -> Any:
    """The value of a field under any of its spellings; None where absent or null."""
    found = {key: raw[key] for key in SPELLINGS.get(name, (name,)) if raw.get(key) is not None}
    if len({repr(value) for value in found.values()}) > 1:
        raise ValueError(
            "keys that mean the same disagree: " + ", ".join(f"{k} = {v}" for k, v in found.items())
        )
    return next(iter(found.values()), None)


def _refuse(raw: Mapping[str, Any]) -> None:
    """Refuses what would be computed wrongly in silence."""
    kind = raw.get("model_type", "nemotron_h")
    if kind != "nemotron_h":
        raise ValueError(f"model_type = {kind!r}; expected 'nemotron_h'")
    if raw.get("quantization_config") is not None:
        method = raw["quantization_config"]
        method = method.get("quant_method", "unnamed") if isinstance(method, Mapping) else method
        raise ValueError(
            f"quantization_config ({method}): a quantised checkpoint cannot be trained; use the BF16 one"
        )
    only = {
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu", "swish"),
        "sliding_window": (None,),
        "attention_dropout": (0, 0.0),
        "hidden_dropout": (0, 0.0),
    }
    for key, allowed in only.items():
        if key in raw and raw[key] not in allowed:
            raise ValueError(f"{key} = {raw[key]!r} is not supported; expected {allowed[0]!r}")
    # No implementation of the family reads this key: its Mamba projections follow use_bias.
    if raw.get("mamba_proj_bias") and not raw.get("use_bias"):
        raise ValueError(
            "mamba_proj_bias = true with use_bias = false: no implementation of the family has these biases"
        )
    has_experts = "E" in _layer_pattern(raw)
    if has_experts and raw.get("n_shared_experts", 1) != 1:
        raise ValueError(
            f"n_shared_experts = {raw['n_shared_experts']!r} is not supported; expected 1"
        )


def _layer_pattern(raw: Mapping[str, Any]) -> str:
    """One letter a layer from `layers_block_type`, `layer_types` or `hybrid_override_pattern`."""
    found = {}
    for key in ("layers_block_type", "layer_types"):
        if raw.get(key) is not None:
            found[key] = _letters(raw[key], key)
    if raw.get("hybrid_override_pattern") is not None:
        found["hybrid_override_pattern"] = _letters(
            raw["hybrid_override_pattern"], "hybrid_override_pattern"
        )
    if not found:
        raise ValueError(
            "neither layers_block_type nor hybrid_override_pattern is there to say what the layers are"
        )
    if len(set(found.values())) > 1:
        raise ValueError(
            "layer lists disagree: " + ", ".join(f"{key} = {value}" for key, value in found.items())
        )
    pattern = next(iter(found.values()))
    if not pattern:
        raise ValueError(f"{next(iter(found))} is empty")
    layers = raw.get("num_hidden_layers")
    if layers is not None and layers != len(pattern):
        raise ValueError(
            f"num_hidden_layers = {layers}, but {next(iter(found))} lists {len(pattern)} layers"
        )
    return pattern


def _letters(layers: Any, key: str) -> str:
    """Letters of a list of kind names, or of a pattern string."""
    if isinstance(layers, str):
        bad = sorted(set(layers) - set("ME*-"))
        if bad:
            raise ValueError(
                f"{key} has unknown layer kind {bad[0]!r}; expected letters of 'M', 'E', '*', '-'"
            )
        return layers
    if not isinstance(layers, list):
        raise ValueError(f"{key}: expected a list or a string, found {type(layers).__name__}")
    for index, kind in enumerate(layers):
        if not isinstance(kind, str) or kind not in LAYER_KINDS:
            raise ValueError(
                f"{key}[{index}] = {kind!r} is an unknown layer kind; expected one of {list(LAYER_KINDS)}"
            )
    return "".join(LAYER_KINDS[kind] for kind in layers)


def _mtp_pattern(raw: Mapping[str, Any]) -> str:
    """Kinds of the multi-token-prediction layers; the family's default is attention, then experts."""
    for key in ("mtp_layers_block_type", "mtp_hybrid_override_pattern"):
        if raw.get(key) is not None:
            return _letters(raw[key], key)
    return "*E"


def _dtype(value: str) -> str:
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype = {value!r}; expected one of {', '.join(DTYPES)}")
    return name


def _time_step_limit(value: Any) -> tuple[float, float]:
    """[low, high]; absent or null is [0, inf].

    JSON writers spell infinity `Infinity`, "inf", null, or (transformers) {"__float__": "Infinity"}.
    """
    if value is None:
        return (0.0, float("inf"))
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"time_step_limit = {value!r}; expected two numbers")
    defaults = (0.0, float("inf"))
    value = [v["__float__"] if isinstance(v, dict) and "__float__" in v else v for v in value]
    try:
        low, high = (d if v is None else float(v) for v, d in zip(value, defaults, strict=True))
    except (TypeError, ValueError):
        raise ValueError(f"time_step_limit = {value!r}; expected two numbers") from None
    if not 0 <= low < high:
        raise ValueError(f"time_step_limit = {value!r}; expected 0 <= low < high")
    return (low, high)


def _typed(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """Refuses a value of another type than its field's: a string where a number belongs, 1.5 heads."""
    for name, value in values.items():
        kind = cls.__annotations__[name]
        if kind is bool:
            right = isinstance(value, bool)
        elif kind in (int, int | None):
            right = value is None or (isinstance(value, int) and not isinstance(value, bool))
        elif kind is float:
            right = isinstance(value, int | float) and not isinstance(value, bool)
        else:
            right = True
        if not right:
            raise ValueError(f"{name} = {value!r}; expected {getattr(kind, '__name__', kind)}")
    return values


def _check_positive(config: HybridConfig, *names: str) -> None:
    for name in names:
        if getattr(config, name) <= 0:
            raise ValueError(f"{name} = {getattr(config, name)}; expected a positive number")


def _check_divides(config: HybridConfig, whole: str, part: str) -> None:
    if getattr(config, whole) % getattr(config, part):
        raise ValueError(
            f"{whole} = {getattr(config, whole)} does not divide by {part} = {getattr(config, part)}"
        )

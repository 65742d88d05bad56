"""Our parameter names and the checkpoint's: one table of templates, read in both directions.

A checkpoint of the family has one tensor for each expert, the model one stack of them; its layers live
under `backbone.` (some files: `model.`), its head is `lm_head.weight`. Nothing else differs. The
`mtp.*` tensors (multi-token prediction) use the same mixers; they are known here so that they can be
counted and passed through, and never enter the model.

`{e}` in a file template marks one tensor an expert; the shape given is then that of one expert.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hymoe.model.config import HybridConfig


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        ours: name below the layer, or below the model.
        file: name in the checkpoint at the same level; empty where it is the same.
        shape: names of dimensions, looked up in `_facts`.
        when: conditions that it exists under, likewise, with spaces between; empty for always.
        small: float32 in training, replicated, outside FSDP.
        decays: weight decay applies.
    """

    ours: str
    shape: tuple[str, ...]
    file: str = ""
    when: str = ""
    small: bool = False
    decays: bool = False


@dataclass(frozen=True, slots=True)
class Spec:
    """What one tensor of the checkpoint must be and where it goes.

    Attributes:
        shape: its shape in the file.
        param: our parameter or buffer; for `mtp.*`, which we have none of, the name in the file.
        expert: its row in our stack, or None where the whole parameter is this tensor.
    """

    shape: tuple[int, ...]
    param: str
    expert: int | None = None


def _linear(name: str, out: str, into: str, bias: str, when: str = "") -> tuple[Row, Row]:
    return (
        Row(f"{name}.weight", (out, into), when=when, decays=True),
        Row(f"{name}.bias", (out,), when=f"{when} {bias}"),
    )


TOP = (
    Row("embeddings.weight", ("V", "D")),
    Row("norm_f.weight", ("D",), small=True),
    Row("head.weight", ("V", "D"), file="lm_head.weight", when="untied", decays=True),
)
BLOCK = (Row("norm.weight", ("D",), small=True),)
MIXER = {
    "M": (
        *_linear("in_proj", "mamba_in", "D", bias="use_bias"),
        Row("conv1d.weight", ("C", "1", "W"), decays=True),
        Row("conv1d.bias", ("C",), when="use_conv_bias", small=True),
        Row("A_log", ("H",), small=True),
        Row("D", ("H",), small=True),
        Row("dt_bias", ("H",), small=True),
        Row("norm.weight", ("HP",), small=True),
        *_linear("out_proj", "D", "HP", bias="use_bias"),
    ),
    "E": (
        Row("gate.weight", ("E", "D"), small=True, decays=True),
        Row("gate.e_score_correction_bias", ("E",), small=True),
        *_linear("fc1_latent_proj", "latent", "D", bias="mlp_bias", when="latent"),
        Row("experts.up_proj", ("F", "Din"), file="experts.{e}.up_proj.weight", decays=True),
        Row("experts.down_proj", ("Din", "F"), file="experts.{e}.down_proj.weight", decays=True),
        *_linear("fc2_latent_proj", "D", "latent", bias="mlp_bias", when="latent"),
        *_linear("shared_experts.up_proj", "Fshared", "D", bias="mlp_bias"),
        *_linear("shared_experts.down_proj", "D", "Fshared", bias="mlp_bias"),
    ),
    "*": (
        *_linear("q_proj", "Q", "D", bias="attention_bias"),
        *_linear("k_proj", "KV", "D", bias="attention_bias"),
        *_linear("v_proj", "KV", "D", bias="attention_bias"),
        *_linear("o_proj", "D", "Q", bias="attention_bias"),
    ),
    "-": (
        *_linear("up_proj", "Fmlp", "D", bias="mlp_bias"),
        *_linear("down_proj", "D", "Fmlp", bias="mlp_bias"),
    ),
}
# Around the block of a multi-token-prediction module: before its first layer, after its last.
MTP_FIRST = (
    Row("enorm.weight", ("D",)),
    Row("hnorm.weight", ("D",)),
    Row("eh_proj.weight", ("D", "2D")),
)
MTP_LAST = (Row("final_layernorm.weight", ("D",)),)

_LAYER = re.compile(r"layers\.\d+\.(.+)")
_BY_TAIL = {row.ours: row for row in (*TOP, *BLOCK)} | {
    "mixer." + row.ours: row for rows in MIXER.values() for row in rows
}


def tensor_specs(config: HybridConfig, prefix: str = "backbone.") -> dict[str, Spec]:
    """Every tensor that a checkpoint of this config must have, without `mtp.*`.

    Args:
        config: the model's shape.
        prefix: what embeddings, layers and the last norm live under in the file: `backbone.` or
            `model.`; the head has no prefix.

    Returns:
        File name -> Spec, in the order of the model: embeddings, layers, last norm, head; the experts
        of one stack follow each other.
    """
    facts = _facts(config)
    embeddings, norm_f, head = TOP
    specs = dict(_expand((embeddings,), prefix, "", facts))
    for index, kind in enumerate(config.pattern):
        specs |= _layer(kind, f"{prefix}layers.{index}.", f"layers.{index}.", facts)
    specs |= _expand((norm_f,), prefix, "", facts)
    specs |= _expand((head,), "", "", facts)
    return specs


def mtp_specs(config: HybridConfig) -> dict[str, Spec]:
    """The `mtp.*` tensors of a checkpoint of this config; empty where it predicts no further token.

    Each of the `num_nextn_predict_layers` modules has the layers of `mtp_pattern`, numbered on; its
    first layer also joins the embedding to the hidden state, its last has a final norm.
    """
    facts = _facts(config)
    specs: dict[str, Spec] = {}
    last = len(config.mtp_pattern) - 1
    for module in range(config.num_nextn_predict_layers):
        for position, kind in enumerate(config.mtp_pattern):
            under = f"mtp.layers.{module * (last + 1) + position}."
            if position == 0:
                specs |= _expand(MTP_FIRST, under, under, facts)
            for name, spec in _layer(kind, under, under, facts).items():
                specs[name] = Spec(spec.shape, name)  # no stacks: each is passed through by itself
            if position == last:
                specs |= _expand(MTP_LAST, under, under, facts)
    return specs


def by_parameter(specs: Mapping[str, Spec]) -> dict[str, list[str]]:
    """The table read the other way: our name -> its file names, a stack's in the order of its rows."""
    files: dict[str, list[str]] = {}
    for name, spec in specs.items():
        files.setdefault(spec.param, []).append(name)
        if spec.expert is not None and spec.expert != len(files[spec.param]) - 1:
            raise ValueError(f"{name}: expert {spec.expert} is not the next row of {spec.param}")
    return files


def parameter_shape(specs: Mapping[str, Spec], files: list[str]) -> tuple[int, ...]:
    """Shape of the parameter that these file tensors make up: theirs, or (E, ...) for a stack."""
    spec = specs[files[0]]
    return spec.shape if spec.expert is None else (len(files), *spec.shape)


def is_small(name: str) -> bool:
    """Whether a tensor (our name) is float32 in training, replicated, and outside FSDP's units.

    Raises:
        ValueError: the model has no tensor of that name.
    """
    return _row(name).small


def decays(name: str) -> bool:
    """Whether weight decay applies to a tensor (our name): matrices, but neither embeddings nor biases.

    A tied head is the embedding, under its name, and does not decay.

    Raises:
        ValueError: the model has no tensor of that name.
    """
    return _row(name).decays


def _row(name: str) -> Row:
    layer = _LAYER.fullmatch(name)
    row = _BY_TAIL.get(layer.group(1) if layer else name)
    if row is None or (layer is None) != (row in TOP):
        raise ValueError(f"{name}: no tensor of the model has this name")
    return row


def _layer(kind: str, file: str, ours: str, facts: Mapping[str, int]) -> dict[str, Spec]:
    """One layer: its norm, then its mixer."""
    specs = dict(_expand(BLOCK, file, ours, facts))
    return specs | dict(_expand(MIXER[kind], f"{file}mixer.", f"{ours}mixer.", facts))


def _expand(
    rows: tuple[Row, ...], file: str, ours: str, facts: Mapping[str, int]
) -> Iterator[tuple[str, Spec]]:
    """Rows below two prefixes -> (file name, Spec), one for each expert of a stack."""
    for row in rows:
        if not all(facts[condition] for condition in row.when.split()):
            continue
        shape = tuple(facts[dim] for dim in row.shape)
        template = file + (row.file or row.ours)
        if "{e}" not in template:
            yield template, Spec(shape, ours + row.ours)
            continue
        for expert in range(facts["E"]):
            yield template.format(e=expert), Spec(shape, ours + row.ours, expert)


def _facts(config: HybridConfig) -> dict[str, int]:
    """The table's dimensions as numbers (0 where this config has no such thing), its conditions as 0 or 1."""
    inner = config.mamba_inner
    return {
        "1": 1,
        "V": config.vocab_size,
        "D": config.hidden_size,
        "2D": 2 * config.hidden_size,
        "H": config.mamba_num_heads,
        "HP": inner,
        "C": config.conv_dim,
        "W": config.conv_kernel,
        "mamba_in": inner + config.conv_dim + config.mamba_num_heads,  # z, (x, b, c), dt
        "Q": config.num_attention_heads * config.head_dim,
        "KV": config.num_key_value_heads * config.head_dim,
        "Fmlp": config.intermediate_size,
        "E": config.n_routed_experts,
        "F": config.moe_intermediate_size,
        "Din": config.expert_input,
        "Fshared": config.moe_shared_expert_intermediate_size,
        "latent": config.moe_latent_size or 0,
        "untied": not config.tie_word_embeddings,
        "use_bias": config.use_bias,
        "use_conv_bias": config.use_conv_bias,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }

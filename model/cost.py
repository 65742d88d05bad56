"""What a model costs, before one exists: parameters, FLOPs a token, bytes. Pure arithmetic.

**Parameters** are counted from the table of names; the totals equal those of the published checkpoints.
*Active* is what one token uses: K of E routed experts, all else whole.

**FLOPs** of one token, forward, a multiply-add counted as two:
    matmul     2 * every active weight of two or more dimensions; the head counts (tied or not), the
               embedding table is looked up, not multiplied
    attention  2*2*H*P * context in each attention layer (scores and values); `context` is the mean
               number of keys that a query sees: (len + 1) / 2 in a document of len tokens
    ssd        in each Mamba layer, chunks of Q:  2*Q*G*N (scores)  +  2*Q*H*P (within the chunk)
               +  2*2*H*P*N (states in, states out)
Training costs three times the forward pass: the gradient of a product is two products. What is
recomputed in the backward pass comes on top (`Flops.recomputed`) and never counts as useful work.

**Bytes**: weights by family (`weight_bytes`), and activations of one token in one block
(`activation_bytes`): what the backward pass of that block needs and what it makes on the way.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from math import prod

from hymoe.model.config import HybridConfig
from hymoe.model.names import by_parameter, is_small, parameter_shape, tensor_specs

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LAYER = "layers.0."  # any layer will do: shapes follow from the kind
ROUTED = ("mixer.experts.up_proj", "mixer.experts.down_proj")


def layer_shapes(config: HybridConfig, kind: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of one layer, by our names below `layers.{i}.`.

    Args:
        config: the model.
        kind: one letter of `config.pattern`.
    """
    specs = tensor_specs(replace(config, pattern=kind))
    return {
        name.removeprefix(LAYER): parameter_shape(specs, files)
        for name, files in by_parameter(specs).items()
        if name.startswith(LAYER)
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Numbers of values by family; buffers of the checkpoint (the router's bias) included."""

    embedding: int = 0
    head: int = 0  # 0 where tied
    mamba: int = 0
    attention: int = 0
    mlp: int = 0
    routed: int = 0  # all E experts of every MoE layer
    shared: int = 0
    latent: int = 0
    router: int = 0  # weights and correction bias
    norm: int = 0  # the block norms and the last one; a mixer's own norm is in its family
    routed_active: int = 0  # the K experts that one token uses; part of `routed`
    frozen: int = 0  # correction biases: buffers, never trained; part of `router`
    small: int = 0  # float32, replicated, outside FSDP2's units; part of the families

    @property
    def families(self) -> dict[str, int]:
        """The families that add up to the total."""
        inside = ("routed_active", "frozen", "small")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in inside}

    @property
    def total(self) -> int:
        """Every value in the checkpoint, without multi-token-prediction layers."""
        return sum(self.families.values())

    @property
    def active(self) -> int:
        """What one token uses, the whole embedding table counted in."""
        return self.total - self.routed + self.routed_active


def count_parameters(config: HybridConfig) -> Parameters:
    """Counts the model that `config` describes."""
    vocabulary = config.vocab_size * config.hidden_size
    counts = dict.fromkeys((f.name for f in fields(Parameters)), 0)
    counts["embedding"] = vocabulary
    counts["head"] = 0 if config.tie_word_embeddings else vocabulary
    counts["norm"] = counts["small"] = config.hidden_size  # norm_f
    for kind in set(config.pattern):
        layers = config.pattern.count(kind)
        for name, shape in layer_shapes(config, kind).items():
            size = layers * prod(shape)
            counts[_family(kind, name)] += size
            counts["small"] += size if is_small(LAYER + name) else 0
            if name.endswith("e_score_correction_bias"):
                counts["frozen"] += size
            if name in ROUTED:
                counts["routed_active"] += _used(config, size)
    return Parameters(**counts)


def _used(config: HybridConfig, routed: int) -> int:
    """The part of this many values of routed experts that one token uses."""
    return routed // config.n_routed_experts * config.num_experts_per_tok


def _family(kind: str, name: str) -> str:
    if name == "norm.weight":
        return "norm"
    if kind != "E":
        return {"M": "mamba", "*": "attention", "-": "mlp"}[kind]
    part = name.removeprefix("mixer.").split(".")[0]
    return {"gate": "router", "experts": "routed", "shared_experts": "shared"}.get(part, "latent")


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """Floating-point operations of one token, forward; see the formulas above."""

    matmul: int
    attention: float
    ssd: int
    head: int  # the part of `matmul` that no block recomputes

    @property
    def forward(self) -> float:
        """One forward pass."""
        return self.matmul + self.attention + self.ssd

    @property
    def training(self) -> float:
        """Forward and backward: what counts as useful work in an MFU."""
        return 3 * self.forward

    @property
    def recomputed(self) -> float:
        """Training as executed when every block runs its forward pass again in the backward pass."""
        return self.training + self.forward - self.head


def flops_per_token(config: HybridConfig, context: float) -> Flops:
    """FLOPs of one token.

    Args:
        config: the model.
        context: mean number of keys that a query sees in the attention layers, see `mean_context`.
    """
    head = 2 * config.vocab_size * config.hidden_size
    matmul = head
    for kind in set(config.pattern):
        for name, shape in layer_shapes(config, kind).items():
            size = prod(shape) if len(shape) >= 2 else 0
            used = _used(config, size) if name in ROUTED else size
            matmul += 2 * config.pattern.count(kind) * used
    attention = 4 * config.num_attention_heads * config.head_dim * context
    scores = config.chunk_size * (config.n_groups * config.ssm_state_size + config.mamba_inner)
    states = 2 * config.mamba_inner * config.ssm_state_size
    return Flops(
        matmul=matmul,
        attention=config.pattern.count("*") * attention,
        ssd=config.pattern.count("M") * 2 * (scores + states),
        head=head,
    )


def mean_context(lengths: Iterable[int]) -> float:
    """Mean number of keys that a query of these packed documents sees.

    Args:
        lengths: tokens of each document.
    """
    lengths = list(lengths)
    tokens = sum(lengths)
    return sum(n * (n + 1) for n in lengths) / (2 * tokens) if tokens else 0.0


def weight_bytes(config: HybridConfig, dtype: str) -> dict[str, int]:
    """Bytes of the weights by family as they lie in memory; `small` apart, in float32.

    Args:
        config: the model.
        dtype: of all weights that are not small.
    """
    size = DTYPE_BYTES[dtype]
    counts = dict.fromkeys(Parameters().families, 0)
    counts["embedding"] = config.vocab_size * config.hidden_size
    counts["head"] = 0 if config.tie_word_embeddings else counts["embedding"]
    for kind in set(config.pattern):
        for name, shape in layer_shapes(config, kind).items():
            if not is_small(LAYER + name):
                counts[_family(kind, name)] += config.pattern.count(kind) * prod(shape)
    result = {family: size * count for family, count in counts.items() if count}
    return result | {"small": 4 * count_parameters(config).small}


def unit_parameters(config: HybridConfig, kind: str) -> int:
    """Values of one block that FSDP2 gathers and frees together: all but the small ones."""
    shapes = layer_shapes(config, kind).items()
    return sum(prod(shape) for name, shape in shapes if not is_small(LAYER + name))


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes of one token in one block, with fused operations that keep no copies of rows."""

    saved: int  # forward values that the backward pass reads
    gradient: int  # what the backward pass makes on the way, at its worst moment

    @property
    def working(self) -> int:
        """What is alive while the backward pass of this block runs."""
        return self.saved + self.gradient


def activation_bytes(config: HybridConfig, kind: str, dtype: str) -> Activations:
    """Activations of one token in one block of this kind.

    Args:
        config: the model.
        kind: one letter of `config.pattern`.
        dtype: of the activations; states, log-sums and attention's dq sum are float32.
    """
    size, width = DTYPE_BYTES[dtype], config.hidden_size
    if kind == "M":
        inner = config.mamba_inner
        states = 4 * inner * config.ssm_state_size // config.chunk_size
        # in_proj's output, conv output, scan output, gated norm: each has a gradient of its size.
        values = size * (3 * inner + 2 * config.conv_dim + config.mamba_num_heads)
        scores = 2 * 4 * config.n_groups * config.chunk_size
        saved = size * width + values + states
        return Activations(saved=saved, gradient=values + states + scores + 2 * size * width)
    if kind == "*":
        q = config.num_attention_heads * config.head_dim
        qkv = q + 2 * config.num_key_value_heads * config.head_dim
        saved = size * (width + qkv + q) + 4 * config.num_attention_heads
        return Activations(saved=saved, gradient=size * (qkv + q + width) + 4 * q)
    if kind == "E":
        rows, shared = config.num_experts_per_tok, config.moe_shared_expert_intermediate_size
        inner = rows * config.moe_intermediate_size
        saved = size * (width + inner + 2 * shared) + 12 * rows  # ids int64, weights float32
        latent = size * (config.moe_latent_size or 0)
        gradient = size * (inner + rows * config.expert_input + shared + width)
        return Activations(saved=saved + 2 * latent, gradient=gradient + 2 * latent)
    inner = config.intermediate_size
    return Activations(saved=size * (width + 2 * inner), gradient=size * (inner + 2 * width))

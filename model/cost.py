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
Training costs three times the forward pass: the gradient of a product is two products. What runs again in the
backward pass comes on top (`Flops.executed`) and never counts as useful work: blocks without their last product, whose
result nothing reads.

**Bytes** of the weights by family (`weight_bytes`); those of activations are in `activations.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from math import prod

from hymoe.model.config import HybridConfig
from hymoe.model.names import by_parameter, is_small, parameter_shape, tensor_specs

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LAYER = "layers.0."  # any layer will do: shapes follow from the kind
ROUTED = ("mixer.experts.up_proj", "mixer.experts.down_proj")
# Products whose result nothing reads where a block runs again for its backward pass.
LAST = (
    "mixer.out_proj.weight",
    "mixer.o_proj.weight",
    "mixer.down_proj.weight",
    "mixer.shared_experts.down_proj.weight",
)


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
    again_acts: float  # what the blocks without experts run again
    again_experts: float  # what those with experts run again

    @property
    def forward(self) -> float:
        """One forward pass."""
        return self.matmul + self.attention + self.ssd

    @property
    def training(self) -> float:
        """Forward and backward: what counts as useful work in an MFU."""
        return 3 * self.forward

    def executed(self, keep: str) -> float:
        """Forward, backward, and what runs again where the backward pass finds `keep`: all, acts or inputs."""
        again = {
            "all": 0.0,
            "acts": self.again_acts,
            "inputs": self.again_acts + self.again_experts,
        }
        return self.training + again[keep]


def flops_per_token(config: HybridConfig, context: float) -> Flops:
    """FLOPs of one token.

    Args:
        config: the model.
        context: mean number of keys that a query sees in the attention layers, see `mean_context`.
    """
    matmul = 2 * config.vocab_size * config.hidden_size
    again = {"E": 0.0, "other": 0.0}
    # A latent projection reads the experts' sums.
    last = LAST if config.moe_latent_size is not None else (*LAST, "mixer.experts.down_proj")
    for kind in set(config.pattern):
        layers = config.pattern.count(kind)
        for name, shape in layer_shapes(config, kind).items():
            size = prod(shape) if len(shape) >= 2 else 0
            product = 2 * layers * (_used(config, size) if name in ROUTED else size)
            matmul += product
            again["E" if kind == "E" else "other"] += 0 if name in last else product
    attention = 4 * config.num_attention_heads * config.head_dim * context
    attention *= config.pattern.count("*")
    scores = config.chunk_size * (config.n_groups * config.ssm_state_size + config.mamba_inner)
    states = 2 * config.mamba_inner * config.ssm_state_size
    ssd = config.pattern.count("M") * 2 * (scores + states)
    return Flops(
        matmul=matmul,
        attention=attention,
        ssd=ssd,
        again_acts=again["other"] + attention + ssd,
        again_experts=again["E"],
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

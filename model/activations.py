"""Bytes of activations of one block: what it keeps for its backward pass, and the most that is alive in either pass.

Pure arithmetic over the operations of `kernels/`, in the order in which the block calls them. *Kept* is what autograd
holds beside the block's input; weights and their gradients are not activations.

Two implementations. `fused` is the GPU's: whole rows at a time, and room for every choice that could be at hand.
`torch` is the CPU's: tiles and one expert at a time, exact numbers of rows, so that little but what is kept is alive.
"""

from dataclasses import dataclass

from hymoe.kernels.ssd.op import CPU_BLOCK, CPU_CHUNK
from hymoe.model.config import HybridConfig
from hymoe.model.cost import DTYPE_BYTES

FLOAT, INDEX = 4, 8  # bytes of float32 and int64
EXPERT_SKEW = 1.5  # rows of a rank's busiest expert over the mean, which a CPU works on at once
SUM_COLUMNS = 32  # of the fused expert backward: a float32 part of a weight's gradient each


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A moment of a block's backward pass.

    Attributes:
        size: bytes of activations and their gradients, what is kept included.
        done: share of the gradients of the block's weights that is made by then.
    """

    size: float
    done: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes of one block.

    Attributes:
        kept: what the forward pass leaves.
        forward: the most alive in the forward pass, what is kept included.
        moments: of the backward pass.
    """

    kept: float
    forward: float
    moments: tuple[Moment, ...]

    @property
    def working(self) -> float:
        """The most alive while the block runs, forward or backward."""
        return max(self.forward, *(moment.size for moment in self.moments))


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """What a rank gets where tokens travel to their experts.

    Attributes:
        rows: tokens of all ranks that came, and the row of zeros.
        choices: choices of these rows that there is room for in the experts' tensors.
        sent: rows that went out, where they are indexed one by one; 0 for an exchange of whole tensors.
        ranks: of the group.
    """

    rows: float
    choices: float
    sent: float
    ranks: int = 1


def block_activations(
    config: HybridConfig,
    kind: str,
    tokens: int,
    dtype: str,
    *,
    implementation: str = "fused",
    received: Received | None = None,
) -> Activations:
    """Activations of one block.

    Args:
        config: the model.
        kind: one letter of `config.pattern`.
        tokens: T, in one document: shorter ones need less.
        dtype: of the activations.
        implementation: fused or torch.
        received: where tokens travel; None: every expert is at hand.
    """
    size, is_fused = DTYPE_BYTES[dtype], implementation == "fused"
    if kind == "M":
        return _mamba(config, tokens, size, is_fused)
    if kind == "*":
        return _attention(config, tokens, size, is_fused)
    if kind == "E":
        return _moe(config, tokens, size, is_fused, received)
    width, inner = config.hidden_size, config.intermediate_size
    kept = tokens * (size * (width + inner) + FLOAT)
    last = Moment(size=kept + tokens * size * (width + 2 * inner), done=0.5)
    return Activations(kept=kept, forward=kept + tokens * size * max(inner, width), moments=(last,))


def routing_bytes(config: HybridConfig, tokens: int, received: Received | None = None) -> float:
    """What is kept of a MoE layer's routing even where the block runs again: choices, their order, who goes where."""
    choices = tokens * config.num_experts_per_tok
    tables = 3 * INDEX * choices
    if received is None:
        return tables
    places = (received.ranks * tokens + received.sent) * INDEX if received.sent else 0
    return (
        tables + received.rows * config.num_experts_per_tok * FLOAT + places
    )  # ids travel as int32


def _mamba(cfg: HybridConfig, tokens: int, size: int, is_fused: bool) -> Activations:
    width, inner, channels, heads = (
        cfg.hidden_size, cfg.mamba_inner, cfg.conv_dim, cfg.mamba_num_heads,
    )  # fmt: skip
    projected = inner + channels + heads
    scales = FLOAT * (1 + cfg.n_groups)  # of the two norms
    kept = size * (width + projected + channels + 2 * inner) + scales
    chunk = cfg.chunk_size if is_fused else min(cfg.chunk_size, CPU_CHUNK)
    states = (size if is_fused else FLOAT) * inner * cfg.ssm_state_size / chunk
    if is_fused:
        # The states are made again. Sums by head: time step and decay, and of the backward pass four float32 and
        # for each of a chunk's tiles of 64 a float64.
        forward = states + 3 * FLOAT * heads
        scan = 2 * states + heads * (7 * FLOAT + (2 + chunk / 64) * 8)
    else:
        kept += (
            states + 4 * FLOAT * heads
        )  # the time step on its way: summed, softplus, clamped, times A
        forward, scan = 0.0, 2 * FLOAT * heads
    grad = size * width  # of the block's output, alive all the time
    between = channels - inner  # b and c
    moments = (
        # out_proj has given dgated, whose forward value is gone; the gated norm gives dy and dz.
        Moment(size=kept + grad + 2 * size * inner, done=_share(cfg, inner * width)),
        # y is gone too; the scan turns dy into dx, db, dc, beside dz.
        Moment(size=kept + grad + size * (inner + between) + scan, done=_share(cfg, inner * width)),
        # dx, db, dc side by side; dy is gone.
        Moment(size=kept + grad + size * (2 * channels - inner), done=_share(cfg, inner * width)),
        # in_proj: its output's gradient, whole and in its parts, then its input's.
        Moment(size=grad + size * (width + 2 * projected), done=1.0),
    )
    tile = 0.0 if is_fused else _scan_tile(cfg, tokens, size, chunk)
    sizes = [tokens * moment.size for moment in moments]
    sizes[1] += tile
    return Activations(
        kept=tokens * kept,
        forward=tokens * (kept + max(forward, size * width)) + tile / 2,
        moments=tuple(Moment(size=n, done=m.done) for n, m in zip(sizes, moments, strict=True)),
    )


def _scan_tile(cfg: HybridConfig, tokens: int, size: int, chunk: int) -> float:
    """Bytes of the temporaries of a CPU's scan, of the chunks that it works on together, in the backward pass."""
    heads, squares, rows, states = (
        cfg.mamba_num_heads, chunk * chunk, chunk * cfg.mamba_head_dim, cfg.ssm_state_size * cfg.mamba_head_dim,
    )  # fmt: skip
    chunks = min(-(-tokens // chunk), max(1, CPU_BLOCK // (heads * (squares + rows + states))))
    # Decay, its gradient and that in float64; dy and d(dt x) by head; in BF16 x and dy as float32 before.
    by_head = 4 * squares + (2 if size == FLOAT else 4) * rows
    by_group = 2 * squares + 4 * chunk * cfg.ssm_state_size  # scores, b, c, each with its gradient
    return FLOAT * chunks * (heads * by_head + cfg.n_groups * by_group)


def _share(cfg: HybridConfig, made: int) -> float:
    """Of a Mamba block's weights."""
    projected = cfg.mamba_inner + cfg.conv_dim + cfg.mamba_num_heads
    return made / (cfg.hidden_size * (cfg.mamba_inner + projected))


def _attention(cfg: HybridConfig, tokens: int, size: int, is_fused: bool) -> Activations:
    width, query = cfg.hidden_size, cfg.num_attention_heads * cfg.head_dim
    keys = 2 * cfg.num_key_value_heads * cfg.head_dim
    kept = size * (width + 2 * query + keys) + FLOAT * (1 + cfg.num_attention_heads)
    # From do to dq, dk, dv; flash attention adds dq up in float32.
    scan = size * (2 * query + keys) + (FLOAT * query if is_fused else 0)
    grad = size * width
    done = query * width / (width * (2 * query + keys))
    moments = (
        Moment(size=tokens * (kept + grad + scan), done=done),
        Moment(size=tokens * (grad + size * (query + keys + 3 * width)), done=1.0),
    )
    return Activations(kept=tokens * kept, forward=tokens * (kept + size * width), moments=moments)


def _moe(
    cfg: HybridConfig, tokens: int, size: int, is_fused: bool, received: Received | None
) -> Activations:
    width, outer, inner = cfg.hidden_size, cfg.expert_input, cfg.moe_intermediate_size
    shared, top_k = cfg.moe_shared_expert_intermediate_size, cfg.num_experts_per_tok
    rows = tokens if received is None else received.rows
    choices = tokens * top_k if received is None else received.choices
    latent = cfg.moe_latent_size or 0

    first = tokens * (size * (width + shared + latent) + FLOAT)  # normed input, shared activation
    first += routing_bytes(cfg, tokens, received)
    if is_fused:
        first += tokens * 2 * FLOAT * top_k  # weights and scores of the chosen
    else:
        first += tokens * FLOAT * (cfg.n_routed_experts + 3 * top_k + 1)  # and all scores
        first += tokens * FLOAT * width if size < FLOAT else 0  # the router's own copy of its input
    experts = choices * inner * size  # a
    if received is not None:
        experts += rows * (outer * size + top_k * (FLOAT + 3 * INDEX))  # rows, weights, tables
    elif latent:
        experts += rows * outer * size
    if not is_fused:
        experts += choices * (INDEX + FLOAT)  # token and weight of each
    kept = first + experts

    # Gradients of the block's output, and of the shared expert's activation, whose product comes last.
    grad = tokens * size * (width + shared)
    travelling = 0 if received is None else rows * outer * size  # a row's gradient, sent or to send
    wide = rows * outer * FLOAT  # a CPU's sums
    sums = 0 if received is None else tokens * outer * FLOAT
    if is_fused:
        hidden = choices * inner * size
        columns = choices * FLOAT * inner / SUM_COLUMNS
        products = choices * outer * size  # of every choice, until a token's are summed
        forward = products + rows * outer * size
        back = columns + max(2 * hidden, hidden + products + rows * outer * size)
    else:
        narrow = rows * outer * size if size < FLOAT else 0
        busiest = EXPERT_SKEW * choices * received_ranks(received) / cfg.n_routed_experts
        # One expert at a time: its rows in and out, and of its activations three float32 values, in BF16 one more.
        one = busiest * (2 * outer + (3 if size == FLOAT else 4) * inner) * FLOAT
        forward = wide + narrow + busiest * (2 * outer + 2 * inner) * FLOAT
        back = wide + narrow + choices * FLOAT + one
    moments = [
        Moment(size=kept + grad + travelling + back, done=_routed_share(cfg)),
        # Inputs' gradients go back and are added up; what the experts kept is gone.
        Moment(
            size=first + grad + rows * outer * size + travelling + sums, done=_routed_share(cfg)
        ),
        # The shared expert: gradients of both sides of its square, and of the normed input, a part from each reader.
        Moment(size=first + grad + tokens * size * (shared + 2 * width), done=1.0),
    ]
    return Activations(
        kept=kept, forward=kept + forward + tokens * size * width, moments=tuple(moments)
    )


def received_ranks(received: Received | None) -> int:
    """Ranks that share the experts."""
    return 1 if received is None else received.ranks


def _routed_share(cfg: HybridConfig) -> float:
    """Of a MoE block's weights, where all experts are among them."""
    routed = 2 * cfg.n_routed_experts * cfg.expert_input * cfg.moe_intermediate_size
    return routed / (routed + 2 * cfg.hidden_size * cfg.moe_shared_expert_intermediate_size)

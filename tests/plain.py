"""The network once more, as plainly as it can be said: float64, one document at a time, no kernel of ours.

Options that transformers ignores have no other truth to be compared with.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from hymoe.model.config import HybridConfig
from hymoe.model.net import HybridLM

Weights = Mapping[str, Tensor]


def plain_weights(lm: HybridLM) -> dict[str, Tensor]:
    """Float64 copies of all tensors of `lm` by name, parameters with gradients; tied ones are one tensor."""
    weights = {
        name: x.detach().double().requires_grad_(x.requires_grad)
        for name, x in [*lm.named_parameters(), *lm.named_buffers()]
    }
    weights.setdefault("head.weight", weights["embeddings.weight"])
    return weights


def plain_hidden(
    config: HybridConfig, weights: Weights, input_ids: Tensor, lengths: Sequence[int]
) -> Tensor:
    """(T,) ids of documents of these lengths -> (T, D) after the final norm."""
    documents = input_ids.split(list(lengths))
    return torch.cat([_document(config, weights, document) for document in documents])


def plain_loss(
    config: HybridConfig,
    weights: Weights,
    input_ids: Tensor,
    labels: Tensor,
    lengths: Sequence[int],
) -> Tensor:
    """Summed cross-entropy of the supervised tokens."""
    logits = plain_hidden(config, weights, input_ids, lengths) @ weights["head.weight"].T
    return functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


def _document(config: HybridConfig, weights: Weights, input_ids: Tensor) -> Tensor:
    mixers = {"M": _mamba, "*": _attention, "E": _moe, "-": _mlp}
    x = weights["embeddings.weight"][input_ids]
    for i, kind in enumerate(config.pattern):
        w = {
            name.removeprefix(f"layers.{i}.mixer."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"layers.{i}.mixer.")
        }
        normed = _norm(x, weights[f"layers.{i}.norm.weight"], config.norm_eps)
        x = x + mixers[kind](config, w, normed)
    return _norm(x, weights["norm_f.weight"], config.norm_eps)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def _linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return functional.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def _mlp(config: HybridConfig, w: Weights, x: Tensor, prefix: str = "") -> Tensor:
    up = _linear(w, f"{prefix}up_proj", x)
    return _linear(w, f"{prefix}down_proj", functional.relu(up) ** 2)


def _attention(config: HybridConfig, w: Weights, x: Tensor) -> Tensor:
    q, k, v = (_linear(w, f"{n}_proj", x).unflatten(-1, (-1, config.head_dim)) for n in "qkv")
    share = config.num_attention_heads // config.num_key_value_heads
    heads = []
    for h in range(config.num_attention_heads):
        scores = q[:, h] @ k[:, h // share].T / config.head_dim**0.5
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[:, h // share])
    return _linear(w, "o_proj", torch.cat(heads, dim=-1))


def _mamba(config: HybridConfig, w: Weights, x: Tensor) -> Tensor:
    tokens, heads, width = x.shape[0], config.mamba_num_heads, config.mamba_head_dim
    groups, states, inner = config.n_groups, config.ssm_state_size, config.mamba_inner
    z, xbc, dt = _linear(w, "in_proj", x).split([inner, config.conv_dim, heads], dim=-1)
    kernel = w["conv1d.weight"][:, 0]
    padded = functional.pad(xbc, (0, 0, kernel.shape[1] - 1, 0))
    conv = sum(padded[s : s + tokens] * kernel[:, s] for s in range(kernel.shape[1]))
    conv = functional.silu(conv + w["conv1d.bias"] if "conv1d.bias" in w else conv)
    values, b, c = conv.split([inner, groups * states, groups * states], dim=-1)
    values = values.unflatten(-1, (heads, width))
    share = heads // groups
    b, c = (t.unflatten(-1, (groups, states)).repeat_interleave(share, dim=1) for t in (b, c))
    step = functional.softplus(dt + w["dt_bias"]).clamp(*config.time_step_limit)
    state = x.new_zeros(heads, width, states)
    rows = []
    for t in range(tokens):
        decay = torch.exp(-step[t] * torch.exp(w["A_log"]))[:, None, None]
        enters = (step[t, :, None] * values[t])[:, :, None] * b[t, :, None, :]
        state = decay * state + enters
        rows.append((state * c[t, :, None, :]).sum(-1) + w["D"][:, None] * values[t])
    gated = (torch.stack(rows).flatten(1) * functional.silu(z)).unflatten(-1, (groups, -1))
    normed = _norm(gated, w["norm.weight"].unflatten(0, (groups, -1)), config.norm_eps)
    return _linear(w, "out_proj", normed.flatten(1))


def _moe(config: HybridConfig, w: Weights, x: Tensor) -> Tensor:
    """Every expert on every token."""
    scores = torch.sigmoid(x @ w["gate.weight"].T)
    biased = (scores + w["gate.e_score_correction_bias"]).detach()
    if config.n_group > 1:
        grouped = biased.unflatten(1, (config.n_group, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(config.topk_group).indices
        stays = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter_(1, best, True)
        biased = grouped.masked_fill(~stays[..., None], -torch.inf).flatten(1)
    chosen = biased.topk(config.num_experts_per_tok).indices
    share = scores * torch.zeros_like(scores).scatter_(1, chosen, 1.0)
    if config.norm_topk_prob:
        share = share / share.sum(-1, keepdim=True)
    share = share * config.routed_scaling_factor
    rows = _linear(w, "fc1_latent_proj", x) if config.moe_latent_size else x
    out = 0
    for e in range(config.n_routed_experts):
        up, down = w["experts.up_proj"][e], w["experts.down_proj"][e]
        out = out + share[:, e : e + 1] * (functional.relu(rows @ up.T) ** 2 @ down.T)
    out = _linear(w, "fc2_latent_proj", out) if config.moe_latent_size else out
    return out + _mlp(config, w, x, "shared_experts.")

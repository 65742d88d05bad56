"""Tiny models of every kind, and the reference implementation's twin of each."""

from typing import Any

import torch

from hymoe.model.config import HybridConfig
from hymoe.model.net import HybridLM

BASE: dict[str, Any] = {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 40,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "chunk_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
    "routed_scaling_factor": 2.5,
    "time_step_limit": [0.001, float("inf")],  # what the reference does, whatever its config says
    "initializer_range": 0.1,
    "dtype": "float32",
}


def tiny_config(**changes: Any) -> HybridConfig:
    """The smallest config with every layer kind, changed by keyword."""
    return HybridConfig.from_dict({**BASE, **changes})


def tiny_lm(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> HybridLM:
    """A small random model; biases and norms are random too, so that a forgotten one shows."""
    lm = HybridLM(tiny_config(**changes), dtype=dtype)
    lm.init_weights(seed)
    rng = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in [*lm.named_parameters(), *lm.named_buffers()]:
            if name.endswith(("bias", "norm.weight", "norm_f.weight", ".D")):
                tensor.add_(torch.randn(tensor.shape, generator=rng) * 0.1)
    return lm


def reference_twin(lm: HybridLM, **changes: Any) -> Any:
    """transformers' own model with the weights of `lm`, by our names; float32, evaluation mode."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    raw = {**lm.config.to_dict(), **changes}
    twin = NemotronHForCausalLM(NemotronHConfig(**raw)).eval()
    ours = {**dict(lm.named_parameters()), **dict(lm.named_buffers())}
    theirs = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
    with torch.no_grad():
        for name, tensor in theirs.items():
            tensor.copy_(ours[our_name(name)])
    return twin


def our_name(name: str) -> str:
    """transformers' attribute path -> ours."""
    return {"lm_head.weight": "head.weight"}.get(name, name.removeprefix("model."))

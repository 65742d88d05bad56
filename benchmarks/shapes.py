"""Shapes of the real model and of one rank's micro-step, in the letters of `model/config.py`."""

from typing import Any

# Nemotron-3.5-Lightning-30B-A3B
T = 16_384  # tokens of a micro-step
D = 2_688  # hidden size
V = 131_072  # vocabulary
E = 128  # experts
K = 6  # of them a token
F = 1_856  # intermediate size of an expert
F_SHARED = 3_712  # of the shared expert
H = 64  # Mamba heads
P = 64  # width of a Mamba head
G = 8  # groups that share b and c
N = 128  # states
W = 4  # taps of the convolution
CONV = H * P + 2 * G * N  # channels of the convolution
PROJECTED = H * P + CONV + H  # z | x, b, c | dt
DOCUMENTS = (5_000, 3, 1, 2, 4_097, 128, 1, 3_000, 127, 4_025)  # of a packed row

# The same model for a CPU: an eighth of the width, the first eight layers, a quarter of the experts.
CUT: dict[str, Any] = {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 336,
    "hybrid_override_pattern": "MEMEM*EM",
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "n_groups": 1,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "chunk_size": 128,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 232,
    "moe_shared_expert_intermediate_size": 464,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
}

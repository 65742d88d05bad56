"""The Mamba-2 mixer: projection, causal convolution, selective scan, gated norm, projection."""

import torch
from torch import Tensor, nn

from hymoe.kernels.conv1d import causal_conv1d
from hymoe.kernels.norm import gated_rms_norm
from hymoe.kernels.packed import Packed
from hymoe.kernels.ssd.op import ssd_scan
from hymoe.model.config import HybridConfig
from hymoe.model.mlp import Linear


class ConvWeights(nn.Module):
    """Weight (C, 1, W) in the training dtype and bias (C,) in float32, as checkpoints name them."""

    def __init__(self, config: HybridConfig, dtype: torch.dtype) -> None:
        """Allocates only."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.conv_dim, 1, config.conv_kernel, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(config.conv_dim)) if config.use_conv_bias else None


class GroupNormWeight(nn.Module):
    """Weight (H*P,) of the gated norm, float32."""

    def __init__(self, config: HybridConfig) -> None:
        """Allocates only."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.mamba_inner))


class Mamba(nn.Module):
    """Selective state-space mixer with H heads of width P in G groups that share b and c."""

    def __init__(self, config: HybridConfig, dtype: torch.dtype, kernels: str = "auto") -> None:
        """Allocates only; A_log, D, dt_bias, the norm and the convolution's bias are float32."""
        super().__init__()
        self.config, self.kernels = config, kernels
        heads = config.mamba_num_heads
        projected = config.mamba_inner + config.conv_dim + heads  # z | x, b, c | dt
        self.in_proj = Linear(config.hidden_size, projected, config.use_bias, dtype)
        self.conv1d = ConvWeights(config, dtype)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm = GroupNormWeight(config)
        self.out_proj = Linear(config.mamba_inner, config.hidden_size, config.use_bias, dtype)

    def forward(self, x: Tensor, packed: Packed) -> Tensor:
        """(T, D) -> (T, D)."""
        cfg = self.config
        z, xbc, dt = self.in_proj(x).split(
            [cfg.mamba_inner, cfg.conv_dim, cfg.mamba_num_heads], dim=-1
        )
        xbc = causal_conv1d(
            xbc, self.conv1d.weight.squeeze(1), self.conv1d.bias, packed, self.kernels
        )
        shared = cfg.n_groups * cfg.ssm_state_size
        values, b, c = xbc.split([cfg.mamba_inner, shared, shared], dim=-1)
        y = ssd_scan(
            values.unflatten(-1, (cfg.mamba_num_heads, cfg.mamba_head_dim)),  # (T, H, P)
            dt,
            self.A_log,
            b.unflatten(-1, (cfg.n_groups, cfg.ssm_state_size)),  # (T, G, N)
            c.unflatten(-1, (cfg.n_groups, cfg.ssm_state_size)),
            self.D,
            self.dt_bias,
            cfg.time_step_limit,
            packed,
            cfg.chunk_size,
            self.kernels,
        )
        y = gated_rms_norm(
            y.flatten(1), z, self.norm.weight, cfg.n_groups, cfg.norm_eps, self.kernels
        )  # (T, H*P)
        return self.out_proj(y)

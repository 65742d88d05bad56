"""The Mamba-2 mixer: projection, causal convolution, selective scan, gated norm, projection."""

import torch
from torch import Tensor, nn

from hymoe.kernels.conv1d import causal_conv1d
from hymoe.kernels.conv1d_step import conv1d_step, conv1d_tails
from hymoe.kernels.few_rows import gated_rms_norm_few
from hymoe.kernels.norm import gated_rms_norm
from hymoe.kernels.packed import Packed
from hymoe.kernels.ssd.op import ssd_scan
from hymoe.kernels.ssd.step import ssd_final_states, ssd_step
from hymoe.model.cache import MambaState
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

    def forward(self, x: Tensor, packed: Packed | None, state: MambaState | None = None) -> Tensor:
        """(T, D) -> (T, D).

        Args:
            x: (T, D) normed residual stream.
            packed: boundaries of the documents in the T tokens; None: one more token of each sequence of `state`.
            state: gets what decoding needs, where that comes next.
        """
        cfg = self.config
        z, xbc, dt = self.in_proj(x).split(
            [cfg.mamba_inner, cfg.conv_dim, cfg.mamba_num_heads], dim=-1
        )
        y = self._step(xbc, dt, state) if packed is None else self._scan(xbc, dt, packed, state)
        norm = gated_rms_norm_few if packed is None else gated_rms_norm
        y = norm(
            y.flatten(1), z, self.norm.weight, cfg.n_groups, cfg.norm_eps, self.kernels
        )  # (T, H*P)
        return self.out_proj(y)

    def _scan(self, xbc: Tensor, dt: Tensor, packed: Packed, state: MambaState | None) -> Tensor:
        cfg, weight = self.config, self.conv1d.weight.squeeze(1)
        raw = xbc
        xbc = causal_conv1d(raw, weight, self.conv1d.bias, packed, self.kernels)
        values, b, c = self._heads(xbc)
        scales = (self.D, self.dt_bias, cfg.time_step_limit)
        if state is not None:
            states = ssd_final_states(values, dt, self.A_log, b, *scales[1:], packed)
            state.fill(conv1d_tails(raw, packed, cfg.conv_kernel), states)
        chunk = cfg.chunk_size
        return ssd_scan(values, dt, self.A_log, b, c, *scales, packed, chunk, self.kernels)

    def _step(self, xbc: Tensor, dt: Tensor, state: MambaState) -> Tensor:
        rows, weight = len(xbc), self.conv1d.weight.squeeze(1)
        xbc = conv1d_step(xbc, weight, self.conv1d.bias, state.tails[:rows])
        values, b, c = self._heads(xbc)
        scales = (self.D, self.dt_bias, self.config.time_step_limit)
        return ssd_step(values, dt, self.A_log, b, c, *scales, state.states[:rows])

    def _heads(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the convolution gives, as values (T, H, P), b and c (T, G, N)."""
        cfg = self.config
        shared = cfg.n_groups * cfg.ssm_state_size
        values, b, c = xbc.split([cfg.mamba_inner, shared, shared], dim=-1)
        by_group = (cfg.n_groups, cfg.ssm_state_size)
        heads = values.unflatten(-1, (cfg.mamba_num_heads, cfg.mamba_head_dim))
        return heads, b.unflatten(-1, by_group), c.unflatten(-1, by_group)

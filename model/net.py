"""The network: embed -> blocks -> norm -> head.

It takes one row of packed documents, or several that pass each block together; see `rows.py`.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hymoe.kernels.embedding import embedding
from hymoe.kernels.few_rows import rms_norm_few
from hymoe.kernels.launch import CHOICES
from hymoe.kernels.loss import linear_cross_entropy
from hymoe.kernels.norm import rms_norm
from hymoe.kernels.packed import Packed
from hymoe.kernels.route import Routing
from hymoe.model.attention import Attention
from hymoe.model.cache import AttentionState, Cache, MambaState
from hymoe.model.config import HybridConfig
from hymoe.model.mamba import Mamba
from hymoe.model.mlp import MLP
from hymoe.model.moe import MoE
from hymoe.model.rows import WeightTaps

KEEPS = ("inputs", "acts", "all")  # what blocks keep for the backward pass


class NormWeight(nn.Module):
    """Weight (D,) of an RMS norm, float32."""

    def __init__(self, width: int) -> None:
        """Allocates only."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))


class Embedding(nn.Module):
    """Weight (V, D) in the training dtype."""

    def __init__(self, config: HybridConfig, dtype: torch.dtype) -> None:
        """Allocates only."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype))

    def forward(self, input_ids: Tensor) -> Tensor:
        """(T,) int64 -> (T, D)."""
        return embedding(input_ids, self.weight)


class Head(nn.Module):
    """Output projection (V, D). Its loss never builds all logits."""

    def __init__(self, weight: nn.Parameter, kernels: str = "auto") -> None:
        """`weight` is the head's own or, where embeddings are tied, theirs."""
        super().__init__()
        self.weight, self.kernels = weight, kernels

    def logits(self, hidden: Tensor) -> Tensor:
        """(T, D) -> (T, V)."""
        return functional.linear(hidden, self.weight)

    def loss(self, hidden: Tensor, labels: Tensor, count: int | None) -> Tensor:
        """(T, D), labels (T,) -> () float32, the sum over supervised tokens in nats."""
        return linear_cross_entropy(hidden, self.weight, labels, count, kernels=self.kernels)


class Block(nn.Module):
    """x + mixer(norm(x)), one mixer of the pattern's kind."""

    def __init__(
        self, config: HybridConfig, kind: str, dtype: torch.dtype, kernels: str = "auto"
    ) -> None:
        """`kind` is a letter of the pattern."""
        super().__init__()
        self.kind, self.eps, self.kernels = kind, config.norm_eps, kernels
        self.recompute = False  # whether the backward pass runs this block again instead of keeping its activations
        self.norm = NormWeight(config.hidden_size)
        if kind == "M":
            self.mixer = Mamba(config, dtype, kernels)
        elif kind == "*":
            self.mixer = Attention(config, dtype, kernels)
        elif kind == "E":
            self.mixer = MoE(config, dtype, kernels)
        else:
            self.mixer = MLP(config, config.intermediate_size, dtype, kernels)

    def forward(
        self,
        rows: tuple[Tensor, ...],
        packed: tuple[Packed | None, ...],
        dtype: torch.dtype,
        state: AttentionState | MambaState | None = None,
    ) -> tuple[Tensor, ...]:
        """Rows (T, D) -> rows (T, D), each with its own T and boundaries.

        `dtype` is the mixer's, which differs from the rows' where the residual is float32. `packed` None is a step of
        decoding, with the layer's `state` where it has one; see `HybridLM.forward`.
        """
        taps = WeightTaps(self.mixer, len(rows))
        return tuple(
            self._row(x, documents, dtype, taps.for_row(), state)
            for x, documents in zip(rows, packed, strict=True)
        )

    def _row(
        self,
        x: Tensor,
        packed: Packed | None,
        dtype: torch.dtype,
        weights: dict[str, Tensor],
        state: AttentionState | MambaState | None,
    ) -> Tensor:
        kept: list[Routing] = []
        if self.recompute and torch.is_grad_enabled():
            # `kept` outlives the first pass, so the second one routes as the first did.
            again = {"use_reentrant": False, "preserve_rng_state": False}
            return checkpoint(self._run, x, packed, dtype, weights, kept, **again)
        return self._run(x, packed, dtype, weights, kept, state)

    def _run(
        self,
        x: Tensor,
        packed: Packed | None,
        dtype: torch.dtype,
        weights: dict[str, Tensor],
        kept: list[Routing],
        state: AttentionState | MambaState | None = None,
    ) -> Tensor:
        norm = rms_norm_few if packed is None else rms_norm
        args = [norm(x, self.norm.weight, self.eps, self.kernels).to(dtype)]
        if self.kind == "E":
            args.append(kept)
        elif self.kind != "-":
            args += [packed, state]
        if not weights:
            return x + self.mixer(*args)
        return x + functional_call(self.mixer, weights, tuple(args), tie_weights=False)


class HybridLM(nn.Module):
    """A `nemotron_h` language model over rows of packed documents; there is no batch dimension and no padding."""

    def __init__(
        self,
        config: HybridConfig,
        kernels: str = "auto",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        """Allocates parameters; nothing is read and nothing initialised.

        Args:
            config: the shape.
            kernels: auto | torch | triton | packages; see `hymoe.kernels.launch.choose`.
            dtype: of all but the small tensors (norms, router, A_log, D, dt_bias, convolution biases): float32.
            device: where to allocate; "meta" allocates nothing.
        """
        super().__init__()
        self.config = config
        if kernels not in CHOICES:
            raise ValueError(f"kernels = {kernels!r}; expected one of {', '.join(CHOICES)}")
        self.kernels = kernels
        self.source: Path | None = (
            None  # the HF folder that the weights came from; set by whoever loads them
        )
        with torch.device(device if device is not None else torch.get_default_device()):
            self.embeddings = Embedding(config, dtype)
            self.layers = nn.ModuleList(
                Block(config, kind, dtype, kernels) for kind in config.pattern
            )
            self.norm_f = NormWeight(config.hidden_size)
            own = self.embeddings.weight if config.tie_word_embeddings else None
            if own is None:
                own = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype))
            self.head = Head(own, kernels)

    def forward(
        self,
        input_ids: Tensor | Sequence[Tensor],
        cu_seqlens: Tensor | Packed | Sequence[Tensor | Packed] | None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Hidden states after the final norm.

        Args:
            input_ids: (T,) int64 tokens of S documents, packed end to end; or several such rows.
            cu_seqlens: (S+1,) int32 document starts, the last entry T; or the row's `Packed`, which spares
                asking the device; or one of these for each row. None: one more token of each sequence in the cache,
                in the order of its rows.
            cache: None in training. Documents given with a cache become rows of it, to be continued; no gradients.

        Returns:
            hidden: (T, D); of several rows one behind the other.

        Raises:
            ValueError: the boundaries do not add up to T, or a step has another number of tokens than the cache rows.
        """
        if isinstance(input_ids, Tensor):
            input_ids, cu_seqlens = (input_ids,), (cu_seqlens,)
        packed = tuple(
            Packed.from_cu_seqlens(starts) if isinstance(starts, Tensor) else starts
            for starts in cu_seqlens
        )
        for ids, row in zip(input_ids, packed, strict=True):
            if row is not None and ids.shape != (row.num_tokens,):
                raise ValueError(
                    f"input_ids {tuple(ids.shape)}: the documents have {row.num_tokens} tokens"
                )
        if cache is None:
            return self._hidden(input_ids, packed, [None] * len(self.layers))
        if packed[0] is None:
            cache.begin_step(len(input_ids[0]))
        else:
            cache.begin_prefill(packed[0])
        with torch.no_grad():  # what is cached is no part of a gradient
            hidden = self._hidden(input_ids, packed, cache.layers)
        cache.end()
        return hidden

    def _hidden(
        self,
        input_ids: Sequence[Tensor],
        packed: tuple[Packed | None, ...],
        states: Sequence[AttentionState | MambaState | None],
    ) -> Tensor:
        x = self.embeddings(_joined(input_ids))
        dtype = x.dtype
        if self.config.residual_in_fp32:
            x = x.float()
        rows = (x,) if len(packed) == 1 else x.split([len(ids) for ids in input_ids])
        for layer, state in zip(self.layers, states, strict=True):
            rows = layer(rows, packed, dtype, state)
        norm = rms_norm_few if packed[0] is None else rms_norm
        weight, eps = self.norm_f.weight, self.config.norm_eps
        return _joined([norm(x, weight, eps, self.kernels).to(dtype) for x in rows])

    def new_cache(self, most_tokens: int) -> Cache:
        """An empty cache for sequences of at most `most_tokens` tokens each, on the model's device."""
        weight = self.embeddings.weight
        return Cache(self.config, self.norm_f.weight.device, weight.dtype, most_tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """(T, D) -> (T, V)."""
        return self.head.logits(hidden)

    def loss(
        self,
        input_ids: Tensor | Sequence[Tensor],
        labels: Tensor | Sequence[Tensor],
        cu_seqlens: Tensor | Packed | Sequence[Tensor | Packed],
    ) -> tuple[Tensor, Tensor | int]:
        """Cross-entropy summed over the supervised tokens.

        Args:
            input_ids: (T,) int64, or several rows as in `forward`.
            labels: (T,) int64, already shifted; -100 where a token is not supervised.
            cu_seqlens: as in `forward`.

        Returns:
            loss_sum: () float32 in nats; 0 where nothing is supervised.
            count: supervised tokens, an int where the `Packed` of every row knows it, else a () int64 tensor.
        """
        hidden = self(input_ids, cu_seqlens)
        # One call for all rows: it works in chunks of its own and sums the gradient of its weight in float32.
        labels = labels if isinstance(labels, Tensor) else _joined(labels)
        rows = [cu_seqlens] if isinstance(cu_seqlens, Tensor | Packed) else cu_seqlens
        known = [row.supervised if isinstance(row, Packed) else None for row in rows]
        count = None if None in known else sum(known)
        loss_sum = self.head.loss(hidden, labels, count)
        return loss_sum, (labels != -100).sum() if count is None else count

    def set_keep(self, keep: str) -> None:
        """What blocks keep for the backward pass.

        Args:
            keep: all: what the backward pass reads, so that nothing runs again. acts: MoE blocks do, so that no tokens
                travel again and no expert computes again; the others keep their inputs and run again. inputs: all
                blocks keep their inputs. Routing is kept in any case, and no product whose result is not read is made
                again.

        Raises:
            ValueError: another word.
        """
        if keep not in KEEPS:
            raise ValueError(f"keep = {keep!r}; expected one of {', '.join(KEEPS)}")
        for layer in self.layers:
            layer.recompute = keep == "inputs" or (keep == "acts" and layer.kind != "E")

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Random weights for a model that is trained from nothing; never called on a loaded one.

        Normal with std `initializer_range`, residual outputs divided by sqrt(2L) (GPT-2), norms 1, biases 0; A_log =
        log of 1..H; dt_bias so that the time step is log-uniform from time_step_min to time_step_max (Mamba, 3.6).
        """
        cfg = self.config
        rng = torch.Generator().manual_seed(seed)
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            leaf = name.rsplit(".", 1)[-1]
            if leaf == "A_log":
                value = torch.log(torch.arange(1, tensor.numel() + 1, dtype=torch.float32))
            elif leaf == "dt_bias":
                low, high = math.log(cfg.time_step_min), math.log(cfg.time_step_max)
                step = torch.exp(
                    torch.rand(tensor.shape, generator=rng) * (high - low) + low
                ).clamp(min=cfg.time_step_floor)
                value = step + torch.log(-torch.expm1(-step))  # the inverse of softplus
            elif leaf == "D" or name.endswith(("norm.weight", "norm_f.weight")):
                value = torch.ones(tensor.shape)
            elif leaf in ("bias", "e_score_correction_bias"):
                value = torch.zeros(tensor.shape)
            else:
                value = torch.randn(tensor.shape, generator=rng) * cfg.initializer_range
                if name.endswith(
                    ("out_proj.weight", "o_proj.weight", "down_proj.weight", "experts.down_proj")
                ):
                    value /= math.sqrt(2 * len(cfg.pattern))
                if leaf == "weight" and "conv1d" in name:
                    value = (torch.rand(tensor.shape, generator=rng) * 2 - 1) / math.sqrt(
                        cfg.conv_kernel
                    )
            tensor.copy_(value)


def _joined(rows: Sequence[Tensor]) -> Tensor:
    """One behind the other; a single one as it is."""
    return rows[0] if len(rows) == 1 else torch.cat(tuple(rows))

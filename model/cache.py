"""What decoding remembers: keys and values, the convolutions' last inputs, the SSM states (float32).

A row is one sequence that is being continued; rows 0 to S-1 are in use. Prefill gives each document of a packed row a
row of its own, a step adds one token to every row. When sequences end, the last rows move into the gaps, so what is in
use stays in front and a step works on slices. Memory follows what is in use: tensors are allocated again, by a quarter
longer, when a sequence outgrows them, and for as many rows as are then in use.

The order of calls is `HybridLM.forward`'s: `begin_prefill` or `begin_step`, every layer, `end`.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from hymoe.kernels.packed import Packed
from hymoe.model.config import HybridConfig

ROOM = 64  # tokens: the least that a sequence is given, and what its room is a multiple of


class AttentionState:
    """Keys and values of one layer, (rows, G, room, P) each, and where the current step stands."""

    def __init__(self, config: HybridConfig, device: torch.device, dtype: torch.dtype) -> None:
        """Allocates no row."""
        shape = (0, config.num_key_value_heads, 0, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.first = 0  # row of the next document, in prefill
        self.step: Step | None = None

    def resize(self, rows: int, room: int, kept: int, longest: int) -> None:
        """Allocates again; rows 0 to kept-1 keep their first `longest` tokens."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            # Zeros: a masked place still takes part in products, and a NaN would outlive its weight of 0.
            new = old.new_zeros(rows, old.shape[1], room, old.shape[3])
            new[:kept, :, :longest] = old[:kept, :, :longest]
            setattr(self, name, new)

    def fill(self, k: Tensor, v: Tensor, packed: Packed) -> None:
        """Takes the keys and values, (T, G, P), of documents that begin."""
        for cached, tokens in ((self.keys, k), (self.values, v)):
            for row, document in enumerate(tokens.split(packed.lengths), self.first):
                cached[row, :, : len(document)] = document.transpose(0, 1)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Takes a token's keys and values, (S, G, P), for each row.

        Returns:
            keys: (S, G, L, P), L being the longest row with its new token.
            values: the same.
            mask: what is added to scores, (S, 1, 1, L), -inf behind a row's end; None where all rows are of one length.
        """
        step = self.step
        assert step is not None, "append is part of a step"
        for cached, token in ((self.keys, k), (self.values, v)):
            if step.mask is None:
                cached[: len(token), :, step.longest - 1] = token
            else:
                cached[step.rows, :, step.at] = token
        keys, values = (t[: len(k), :, : step.longest] for t in (self.keys, self.values))
        return keys, values, step.mask

    def move(self, source: int, target: int, length: int) -> None:
        """A row takes another one's place."""
        for cached in (self.keys, self.values):
            cached[target, :, :length] = cached[source, :, :length]


class MambaState:
    """The last inputs of a layer's convolution, (rows, W-1, C), and its states, (rows, H, P, N) float32."""

    def __init__(self, config: HybridConfig, device: torch.device, dtype: torch.dtype) -> None:
        """Allocates no row."""
        heads, width = config.mamba_num_heads, config.mamba_head_dim
        wide = torch.promote_types(dtype, torch.float32)
        self.tails = torch.empty(
            0, config.conv_kernel - 1, config.conv_dim, dtype=dtype, device=device
        )
        self.states = torch.empty(0, heads, width, config.ssm_state_size, dtype=wide, device=device)
        self.first = 0  # row of the next document, in prefill

    def resize(self, rows: int, room: int, kept: int, longest: int) -> None:
        """Allocates again; rows 0 to kept-1 are kept."""
        for name in ("tails", "states"):
            old = getattr(self, name)
            new = old.new_empty(rows, *old.shape[1:])
            new[:kept] = old[:kept]
            setattr(self, name, new)

    def fill(self, tails: Tensor, states: Tensor) -> None:
        """Takes what documents that begin leave behind: (S, W-1, C) and (S, H, P, N)."""
        self.tails[self.first : self.first + len(tails)] = tails
        self.states[self.first : self.first + len(states)] = states

    def move(self, source: int, target: int, length: int) -> None:
        """A row takes another one's place."""
        for cached in (self.tails, self.states):
            cached[target] = cached[source]


class Step:
    """Where the tokens of a step go.

    Attributes:
        longest: L, tokens of the longest row, the new one included.
        rows: (S,) int64, 0 to S-1.
        at: (S,) int64, the place of each row's new token.
        mask: see `AttentionState.append`.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
        """`lengths` are those of the rows before the new token."""
        self.longest = max(lengths) + 1
        self.mask = self.rows = self.at = None
        if min(lengths) + 1 == self.longest:
            return
        self.rows = torch.arange(len(lengths), device=device)
        self.at = torch.tensor(lengths, device=device)
        behind = torch.arange(self.longest, device=device) > self.at[:, None]
        zeros = torch.zeros(behind.shape, dtype=dtype, device=device)
        self.mask = zeros.masked_fill_(behind, float("-inf"))[:, None, None]


class Cache:
    """The decoding state of several sequences in all layers.

    Attributes:
        lengths: tokens that each row has seen, on the host.
        layers: the state of each layer, None where it has none.
    """

    def __init__(
        self, config: HybridConfig, device: torch.device, dtype: torch.dtype, most: int
    ) -> None:
        """Allocates no row.

        Args:
            config: the model's.
            device: the model's.
            dtype: of keys, values and convolution inputs, the model's training dtype.
            most: tokens that no row will exceed.
        """
        kinds = {"*": AttentionState, "M": MambaState}
        self.layers = [
            kinds[kind](config, device, dtype) if kind in kinds else None for kind in config.pattern
        ]
        self.lengths: list[int] = []
        self._device, self._dtype, self._most = device, dtype, most
        self._rows = self._room = 0  # what is allocated
        self._coming: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """S, rows in use."""
        return len(self.lengths)

    @property
    def num_bytes(self) -> int:
        """What is allocated."""
        tensors = [t for layer in self._states() for t in vars(layer).values()]
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))

    def begin_prefill(self, packed: Packed) -> None:
        """Makes a row for each document of a packed row, behind those in use."""
        self._reserve(self.rows + len(packed.lengths), max(packed.lengths))
        self._coming = packed.lengths
        for layer in self._states():
            layer.first = self.rows

    def begin_step(self, tokens: int) -> None:
        """Makes room for one token in each row.

        Raises:
            ValueError: another number of tokens than of rows.
        """
        if tokens != self.rows or not tokens:
            raise ValueError(
                f"{tokens} tokens for a cache of {self.rows} rows; expected one for each"
            )
        self._reserve(self.rows, max(self.lengths) + 1)
        step = Step(self.lengths, self._device, self._dtype)
        for layer in self._states():
            if isinstance(layer, AttentionState):
                layer.step = step

    def end(self) -> None:
        """Counts the tokens of the prefill or step that has passed all layers."""
        if self._coming:
            self.lengths += self._coming
            self._coming = ()
        else:
            self.lengths = [n + 1 for n in self.lengths]

    def drop(self, gone: Collection[int]) -> list[tuple[int, int]]:
        """Frees rows; the last ones move into the gaps.

        Returns:
            (from, to) of each row that moved: what a caller keeps in the order of the rows moves likewise, and is
            then cut to the rows that are left.
        """
        left = self.rows - len(set(gone))
        gaps = sorted(row for row in set(gone) if row < left)
        movers = [row for row in range(left, self.rows) if row not in gone]
        moves = list(zip(movers, gaps, strict=True))
        for source, target in moves:
            for layer in self._states():
                layer.move(source, target, self.lengths[source])
            self.lengths[target] = self.lengths[source]
        del self.lengths[left:]
        return moves

    def _states(self) -> list[AttentionState | MambaState]:
        return [layer for layer in self.layers if layer is not None]

    def _reserve(self, rows: int, tokens: int) -> None:
        if rows <= self._rows and tokens <= self._room:
            return
        longest = max(self.lengths, default=0)
        tokens = max(tokens, longest)
        # A row's end is not known: a quarter more than it has now is copied rarely and wastes little.
        room = -(-(tokens + tokens // 4) // ROOM) * ROOM
        room = max(tokens, min(room, self._most))
        for layer in self._states():
            layer.resize(rows, room, self.rows, longest)
        self._rows, self._room = rows, room

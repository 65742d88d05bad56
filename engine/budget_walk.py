"""The memory of one training step from moment to moment, as the plan of `parallel.py` and FSDP2 allocate it.

A step is walked block by block. What lives through it, the state, is the caller's; here is what comes and goes:

    forward   block i: inputs of blocks 0..i, what blocks before it keep, what it makes; its weights, gathered, and the
              buffer that they came in, which FSDP2 frees with the next block's; with experts at hand the next one's too
    head      all inputs, all that is kept; head, chunk of logits, float32 gradient of the head
    top       backward through the upper half of the blocks, at the worst of them: inputs and kept activations up to
              this block, its own recomputed forward or backward pass, gradients of the blocks above; its gathered
              weights, its gradients before they are summed, the next block's buffer of weights, the block's buffer of
              gradients before it, which FSDP2 frees late
    bottom    the same of the lower half, and the embedding: gradients nearly complete, most inputs gone
    update    gradients and the optimiser; no activations

Reducing a unit's gradients takes its copy in rank order, what is received, and the sum in float32 of this rank's rows.
Micro-steps that pass each block together have their inputs and what they keep alive together, but run one after the
other; meanwhile a block's gradients are summed in float32.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hymoe.kernels.loss import CHUNK_BYTES, CPU_CHUNK_BYTES, CPU_TILE_BYTES
from hymoe.kernels.rounding import SLICE_CPU
from hymoe.model.activations import Activations, Received, block_activations, routing_bytes
from hymoe.model.config import HybridConfig
from hymoe.model.cost import DTYPE_BYTES, LAYER, ROUTED, count_parameters, layer_shapes
from hymoe.model.names import is_small

WIDE = 4  # bytes of float32
PHASES = ("forward", "head", "top", "bottom", "update")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Values of a block, the embedding or the head, small tensors left out.

    Attributes:
        whole: what FSDP2 gathers, padded to equal rows; of one process everything.
        own: this rank's rows of it.
        stay: the routed experts of this rank where tokens travel; never gathered.
    """

    whole: int
    own: int
    stay: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What the walk depends on; see `budget.estimate`."""

    config: HybridConfig
    world_size: int
    expert_parallel: int
    tokens: int
    together: int
    passes: int
    dtype: str
    keep: str
    implementation: str
    received: Received | None


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a phase needs beside the state, and what it is made of: part -> bytes."""

    parts: dict[str, float]

    @property
    def size(self) -> float:
        """In bytes."""
        return sum(self.parts.values())


def units(config: HybridConfig, world_size: int, expert_parallel: int) -> dict[str, Unit]:
    """A unit for each kind of block in the pattern, `embedding`, and `head` where it is not tied."""
    found = {}
    for kind in sorted(set(config.pattern)):
        shapes = layer_shapes(config, kind)
        large = {name: shape for name, shape in shapes.items() if not is_small(LAYER + name)}
        found[kind] = _unit(large, world_size, expert_parallel)
    vocabulary = _unit({"": (config.vocab_size, config.hidden_size)}, world_size, 1)
    found |= dict.fromkeys(("embedding", "head"), vocabulary)
    if config.tie_word_embeddings:
        del found["head"]
    return found


def _unit(shapes: dict[str, tuple[int, ...]], ranks: int, expert_parallel: int) -> Unit:
    own = stay = 0
    for name, shape in shapes.items():
        if expert_parallel > 1 and name in ROUTED:
            stay += math.prod(shape) // expert_parallel
        else:
            own += -(-shape[0] // ranks) * math.prod(shape[1:])
    return Unit(whole=ranks * own, own=own, stay=stay)


def walk(shape: Shape) -> dict[str, Peak]:
    """The peak of each phase of a step, the state left out."""
    step = _Step(shape)
    middle = len(shape.config.pattern) // 2
    found: dict[str, list[Peak]] = {name: [] for name in PHASES}
    found["forward"] = list(step.forward())
    found["head"] = list(step.head())
    for block in range(len(shape.config.pattern)):
        found["top" if block >= middle else "bottom"] += step.backward(block)
    found["bottom"] += step.embedding()
    found["update"] = [step.update()]
    return {name: max(peaks, key=lambda p: p.size) for name, peaks in found.items() if peaks}


class _Step:
    def __init__(self, shape: Shape) -> None:
        self.shape, config = shape, shape.config
        self.size, self.tokens, self.rows = DTYPE_BYTES[shape.dtype], shape.tokens, shape.together
        self.is_fused, self.is_spread = shape.implementation == "fused", shape.world_size > 1
        self.units = units(config, shape.world_size, shape.expert_parallel)
        self.blocks = {kind: self._block(kind) for kind in set(config.pattern)}
        self.row = (WIDE if config.residual_in_fp32 else self.size) * config.hidden_size
        self.kept = [self._kept(kind) for kind in config.pattern]
        counts = count_parameters(config)
        self.small = counts.small - counts.frozen

    def _block(self, kind: str) -> Activations:
        shape = self.shape
        return block_activations(
            shape.config, kind, shape.tokens, shape.dtype,
            implementation=shape.implementation, received=shape.received,
        )  # fmt: skip

    def reruns(self, kind: str) -> bool:
        return self.shape.keep == "inputs" or (self.shape.keep == "acts" and kind != "E")

    def _kept(self, kind: str) -> float:
        if not self.reruns(kind):
            return self.blocks[kind].kept
        return (
            routing_bytes(self.shape.config, self.tokens, self.shape.received) if kind == "E" else 0
        )

    def alive(self, block: int, **parts: float) -> Peak:
        """Of a moment in which the inputs of blocks 0..block are alive, and what the blocks before it keep."""
        inputs = self.rows * self.tokens * self.row * (block + 1)
        kept = self.rows * sum(self.kept[:block])
        kept += (self.rows - 1) * self.kept[block] if block < len(self.kept) else 0
        return Peak({"block inputs": inputs, "kept activations": kept, **_named(parts)})

    def gathered(self, key: str) -> float:
        """Bytes of a unit's weights where they are not this rank's own; of its gradients likewise."""
        return self.size * self.units[key].whole if self.is_spread and key in self.units else 0

    def gradients(self, block: int) -> float:
        """Of this rank, of the head and all blocks above."""
        above = [*self.shape.config.pattern[block + 1 :], "head"]
        return self.size * sum(
            self.units[k].own + self.units[k].stay for k in above if k in self.units
        )

    def forward(self) -> Iterator[Peak]:
        pattern = self.shape.config.pattern
        for i, kind in enumerate(pattern):
            ahead = pattern[i + 1 : i + 2] if self.shape.expert_parallel > 1 else ""
            yield self.alive(
                i,
                block_working_set=self.blocks[kind].forward,
                gathered_unit=2 * self.gathered(kind) + sum(map(self.gathered, ahead)),
            )

    def head(self) -> Iterator[Peak]:
        config, tokens = self.shape.config, self.rows * self.tokens
        joined = 1 if self.rows == 1 else 2  # hidden states of the rows, and one behind the other
        values, width = config.vocab_size * config.hidden_size, config.hidden_size * self.size
        most = CHUNK_BYTES if self.is_fused else CPU_CHUNK_BYTES
        chunks = -(-tokens // max(1, most // (self.size * config.vocab_size)))
        rows = -(-tokens // chunks)
        is_narrow = not self.is_fused and chunks == 1
        # A CPU's float32 copies of BF16 logits: a tile and the one before it.
        wide = (
            0
            if self.is_fused or self.size == WIDE
            else min(CPU_TILE_BYTES, rows * config.vocab_size * WIDE)
        )
        summed = values * (self.size if is_narrow else WIDE)
        key = "embedding" if config.tie_word_embeddings else "head"
        last = len(self.kept)
        yield self.alive(
            last,
            gathered_unit=0,
            head_in_use=2 * self.gathered(key) + summed,
            logits_chunk=rows * (config.vocab_size * self.size + width) + 12 * tokens + 2 * wide,
            block_working_set=(joined + 1) * tokens * width,  # hidden states and their gradient
        )
        # Both gradients are scaled into fresh memory.
        yield self.alive(
            last,
            head_in_use=self.gathered(key) + summed + values * self.size,
            block_working_set=3 * tokens * width,
        )
        yield self.alive(
            last, head_in_use=self._reducing(key), block_working_set=2 * tokens * width
        )

    def backward(self, block: int) -> Iterator[Peak]:
        pattern = self.shape.config.pattern
        kind, unit = pattern[block], self.units[pattern[block]]
        above = pattern[block + 1] if block + 1 < len(pattern) else "head"
        ahead = (
            self.gathered(pattern[block - 1]) if block else 0
        )  # the next block's weights, on their way
        grads, late = self.gradients(block), self.gathered(above)
        others = (
            (self.rows - 1) * self.tokens * self.row
        )  # gradients of the other rows' outputs or inputs
        each = self.size  # bytes of a gradient while the block runs
        if self.rows > 1:
            each += max(self.size, WIDE)
        own, stay = each * unit.whole, each * unit.stay
        moments = [(m.size, m.done) for m in self.blocks[kind].moments]
        if self.reruns(kind):
            moments.append((self.blocks[kind].forward + self.tokens * self.row, 0.0))
        for working, done in moments:
            share = self._dense_share(kind, done)
            yield self.alive(
                block,
                block_working_set=working + others,
                gathered_unit=self.gathered(kind) + ahead,
                unit_gradients_and_reduction=late + share * own if self.is_spread else 0,
                gradients=grads + (stay if done else 0) + (0 if self.is_spread else share * own),
            )
        if self.is_spread:
            yield self.alive(
                block,
                block_working_set=(self.rows + 1) * self.tokens * self.row,
                gathered_unit=ahead,
                unit_gradients_and_reduction=self._reducing(kind),
                gradients=grads + self.size * unit.stay,
            )

    def _dense_share(self, kind: str, done: float) -> float:
        """Share of the gradients made of what FSDP2 gathers: without the experts, where they stay."""
        if kind != "E" or not self.units[kind].stay:
            return done
        return float(done == 1)

    def _reducing(self, key: str) -> float:
        """Bytes while a unit's gradients are summed over the ranks: before they are sent, then after."""
        if not self.is_spread or key not in self.units:
            return 0
        own = self.units[key].own
        return 2 * self.gathered(key) + own * (self.size + WIDE)

    def embedding(self) -> Iterator[Peak]:
        first, grads = self.shape.config.pattern[0], self.gradients(-1)
        # Summed in float32 and rounded once; so is the gradient of the tokens that it is summed from.
        wide = self.size if self.size == WIDE else self.size + WIDE
        made = wide * self.units["embedding"].whole
        yield self.alive(
            0,
            block_working_set=self.rows * self.tokens * self.shape.config.hidden_size * wide,
            unit_gradients_and_reduction=(self.gathered(first) + made) if self.is_spread else 0,
            gradients=grads if self.is_spread else grads + made,
        )
        yield self.alive(
            0, unit_gradients_and_reduction=self._reducing("embedding"), gradients=grads
        )

    def update(self) -> Peak:
        grads = 0.0
        if self.shape.passes == 1:  # else their float32 sum has taken their place
            grads = self.gradients(-1) + self.size * self.units["embedding"].own
        flat = (
            3 * WIDE * self.small if self.is_spread else 0
        )  # the small ones, flat, sent and received
        scratch = 0 if self.is_fused else SLICE_CPU * 4 * WIDE
        return Peak(_named({"gradients": grads, "block_working_set": flat + scratch}))


def _named(parts: dict[str, float]) -> dict[str, float]:
    return {name.replace("_", " "): size for name, size in parts.items()}

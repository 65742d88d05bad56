"""Decoding: token ids in, token ids out, many prompts at once.

Prompts of any lengths are read as one packed row of documents, without padding, which fills a cache (`model/cache.py`);
then every step continues all open sequences by one token. A sequence that ends leaves at once, and waiting prompts take
its place when a quarter of the batch is free. Long prompts go first, so that sequences of similar length are together
and memory is at its highest early. How tokens are chosen is in `sampling.py`.

Memory is bounded by `batch` (SSM states and logits) and `cache_tokens` (keys and values): prompts wait while the open
sequences times the longest that any of them may become would exceed it; a single one always runs.
Results do not depend on who shares a batch but by float rounding.
"""

import json
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hymoe.engine.data.tokenizer import Tokenizer
from hymoe.engine.errors import UserError
from hymoe.engine.sampling import Sampling, SeenIds, drawn, greedy, penalized, uniform
from hymoe.kernels.packed import Packed
from hymoe.model.net import HybridLM

__all__ = ["Generation", "Sampling", "generate", "greedy", "stop_ids"]

BATCH = 64  # sequences continued at once
ROW_TOKENS = 8192  # tokens of prompts read at once: bounds memory, and is enough to keep a GPU busy
CACHE_TOKENS = 1 << 18  # 1.6 GB of keys and values at 6 layers of 2 heads of 128 in 16 bits


@dataclass(slots=True)
class Generation:
    """The answer to one prompt."""

    ids: list[int] = field(default_factory=list)  # new tokens, without the stop id
    finish_reason: str = "length"  # "stop": a stop id came; "length": the limit came first


Progress = Callable[[int, int, int], None]  # prompts finished, prompts, new tokens so far


@torch.no_grad()
def generate(
    lm: HybridLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    sampling: Sampling | None = None,
    keys: Sequence[str] | None = None,
    batch: int = BATCH,
    cache_tokens: int = CACHE_TOKENS,
    row_tokens: int = ROW_TOKENS,
    progress: Progress | None = None,
    on_answer: Callable[[int, Generation], None] | None = None,
) -> list[Generation]:
    """Continues each prompt until a stop id or the limit.

    Args:
        lm: the model; one that is sharded over ranks is asked on all of them with the same arguments.
        prompts: token ids of each, none empty.
        max_new_tokens: most tokens of an answer.
        stop_ids: ids that end an answer.
        sampling: how tokens are chosen; None: the likeliest, without a penalty.
        keys: what the draws of each prompt depend on besides the seed; None: its number.
        batch: most sequences at once.
        cache_tokens: most tokens that open sequences may come to, each counted as the longest of them; a single
            sequence may have more.
        row_tokens: most tokens of a packed row of prompts; a longer prompt has a row of its own.
        progress: called after each round.
        on_answer: called with a prompt's number and its answer as soon as it is finished.

    Returns:
        One `Generation` a prompt, in their order.

    Raises:
        UserError: an empty prompt, an id outside the vocabulary, no token to generate, or a logit that is not finite.
    """
    _check(lm, prompts, stop_ids, max_new_tokens)
    if min(batch, cache_tokens, row_tokens) < 1:
        raise UserError(
            f"batch = {batch}, cache_tokens = {cache_tokens}, row_tokens = {row_tokens}; expected 1 or more"
        )
    if not prompts:
        return []
    loads = [(layer.mixer, layer.mixer.load) for layer in lm.layers if layer.kind == "E"]
    run = _Run(
        lm,
        prompts,
        keys or [str(i) for i in range(len(prompts))],
        sampling or Sampling(),
        max_new_tokens,
        frozenset(stop_ids),
    )
    waiting = deque(sorted(range(len(prompts)), key=lambda i: -len(prompts[i])))
    finished = 0
    while waiting or run.open:
        row: list[int] = []
        if 4 * (batch - len(run.open)) >= batch:
            row = _admit(waiting, run, batch, cache_tokens, row_tokens)
        for i in run.read(row) if row else run.step():
            finished += 1
            if on_answer is not None:
                on_answer(i, run.answers[i])
        if progress is not None:
            progress(finished, len(prompts), run.new_tokens)
    for mixer, load in loads:
        mixer.load = load  # generating is no part of what training counts
    return run.answers


class _Run:
    """The open sequences: what the model remembers of them, and what they said."""

    def __init__(
        self,
        lm: HybridLM,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[str],
        sampling: Sampling,
        max_new_tokens: int,
        stop_ids: frozenset[int],
    ) -> None:
        self.answers = [Generation() for _ in prompts]
        self.open: list[int] = []  # numbers of prompts, by the cache's rows
        self.new_tokens = 0
        self._last: list[int] = []  # by the same rows: the token that the model has not seen yet
        self._lm, self._prompts, self._keys = lm, prompts, keys
        self._sampling, self._limit, self._stops = sampling, max_new_tokens, stop_ids
        self._device = lm.norm_f.weight.device
        self._seen = SeenIds()
        self._cache = lm.new_cache(max(map(len, prompts)) + max_new_tokens)

    def room(self, prompt: int) -> int:
        """Tokens that a sequence may come to."""
        return len(self._prompts[prompt]) + self._limit

    def length(self, prompt: int) -> int:
        """Tokens of a prompt."""
        return len(self._prompts[prompt])

    def read(self, row: list[int]) -> list[int]:
        """Opens prompts, reads them in one packed row and gives each its first token; returns those that ended."""
        texts = [self._prompts[i] for i in row]
        packed = Packed.from_lengths([len(text) for text in texts], self._device)
        input_ids = torch.tensor([id for text in texts for id in text], device=self._device)
        first = len(self.open)
        hidden = self._lm(input_ids, packed, self._cache)
        self.open += row
        self._last += [0] * len(row)
        if self._sampling.repetition_penalty != 1:
            for text in texts:
                self._seen.add_row(text if self._sampling.penalize_prompt else ())
        last = packed.cu_seqlens[1:].long() - 1
        return self._choose(hidden[last], first)

    def step(self) -> list[int]:
        """One more token for every open sequence; returns those that ended."""
        input_ids = torch.tensor(self._last, device=self._device)
        return self._choose(self._lm(input_ids, None, self._cache), 0)

    def _choose(self, hidden: Tensor, first: int) -> list[int]:
        """Tokens for the rows from `first` on, whose last hidden states these are."""
        logits, how = self._lm.logits(hidden), self._sampling
        if how.repetition_penalty != 1:
            logits = penalized(logits, self._seen, how.repetition_penalty, first)
        if how.temperature == 0:
            tokens = greedy(logits)
        else:
            places = ((self._keys[i], len(self.answers[i].ids)) for i in self.open[first:])
            numbers = [uniform(how.seed, key, position) for key, position in places]
            tokens = drawn(logits, how.temperature, how.top_p, numbers)
        return self._take(tokens.tolist(), first)

    def _take(self, tokens: list[int], first: int) -> list[int]:
        """Notes the chosen tokens, and closes the sequences that end with them."""
        gone = []
        for row, token in enumerate(tokens, first):
            answer = self.answers[self.open[row]]
            if token in self._stops:
                answer.finish_reason = "stop"
                gone.append(row)
                continue
            answer.ids.append(token)
            self.new_tokens += 1
            self._last[row] = token
            if len(answer.ids) == self._limit:
                gone.append(row)
            elif self._sampling.repetition_penalty != 1:
                self._seen.note(row, token)
        ended = [self.open[row] for row in gone]
        if gone:
            moves = self._cache.drop(gone)
            for source, target in moves:
                self.open[target], self._last[target] = self.open[source], self._last[source]
            left = self._cache.rows
            del self.open[left:], self._last[left:]
            if self._sampling.repetition_penalty != 1:
                self._seen.drop(moves, left)
        return ended


def _admit(
    waiting: deque[int], run: _Run, batch: int, cache_tokens: int, row_tokens: int
) -> list[int]:
    """Takes the next prompts that fit into the batch, the cache and one packed row."""
    longest = max((run.room(i) for i in run.open), default=0)
    row: list[int] = []
    filled = 0
    while waiting:
        i = waiting[0]
        rows, longest = len(run.open) + len(row) + 1, max(longest, run.room(i))
        if rows > 1 and (rows > batch or rows * longest > cache_tokens):
            break
        if row and filled + run.length(i) > row_tokens:
            break
        row.append(waiting.popleft())
        filled += run.length(i)
    return row


def stop_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end an answer: the union of generation_config.json's, config.json's and `<|im_end|>`.

    Raises:
        UserError: a file that is no JSON object, or an `eos_token_id` that is no id or list of ids.
    """
    found = {tokenizer.im_end}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            found |= _ends_in(path)
    return frozenset(found)


def _check(
    lm: HybridLM, prompts: Sequence[Sequence[int]], stop_ids: Collection[int], max_new_tokens: int
) -> None:
    size = lm.config.vocab_size
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens = {max_new_tokens}, expected 1 or more")
    outside = [i for i in stop_ids if not 0 <= i < size]
    if outside:
        raise UserError(f"stop id {outside[0]}, expected an id of the vocabulary, 0 to {size - 1}")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {number} is empty, expected at least one token")
        if not 0 <= min(prompt) <= max(prompt) < size:
            raise UserError(
                f"prompt {number} has ids from {min(prompt)} to {max(prompt)}, expected ids of the "
                f"vocabulary, 0 to {size - 1}; do tokenizer and model belong together?"
            )


def _ends_in(path: Path) -> set[int]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: found no valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: found {type(content).__name__}, expected a JSON object")
    ends = content.get("eos_token_id")
    ids = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(type(i) is int for i in ids):
        raise UserError(f"{path}: eos_token_id = {ends!r}, expected an id or a list of ids")
    return set(ids)

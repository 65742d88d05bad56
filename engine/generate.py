"""Greedy decoding: token ids in, token ids out, many prompts at once.

All unfinished prompts lie end to end in packed rows, so prompts of different lengths need no padding. Each new token
recomputes its row; only the last position of each prompt goes through the head. The argmax is taken in float32, and
among equal logits the lowest id wins, so the result does not depend on the device's order of search.
"""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hymoe.engine.data.tokenizer import Tokenizer
from hymoe.engine.errors import UserError
from hymoe.kernels.packed import Packed
from hymoe.model.net import HybridLM

ROW_TOKENS = 8192  # tokens computed at once: bounds memory, and is enough to keep a GPU busy


@dataclass(slots=True)
class Generation:
    """The answer to one prompt."""

    ids: list[int] = field(default_factory=list)  # new tokens, without the stop id
    finish_reason: str = "length"  # "stop": a stop id came; "length": the limit came first


@torch.no_grad()
def generate(
    lm: HybridLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    row_tokens: int = ROW_TOKENS,
    progress: Callable[[int, int], None] | None = None,
) -> list[Generation]:
    """Continues each prompt with the likeliest token until a stop id or the limit.

    Args:
        lm: the model, on one device.
        prompts: token ids of each, none empty.
        max_new_tokens: most tokens of an answer.
        stop_ids: ids that end an answer.
        row_tokens: most tokens of a packed row; a longer prompt has a row of its own.
        progress: called with (prompts finished, prompts) after each round.

    Returns:
        One `Generation` a prompt, in their order; independent of how prompts were packed together.

    Raises:
        UserError: an empty prompt, an id outside the vocabulary, no token to generate, or a logit that is not finite.
    """
    _check(lm, prompts, stop_ids, max_new_tokens)
    answers = [Generation() for _ in prompts]
    open_ = list(range(len(prompts)))
    for _ in range(max_new_tokens):
        for row in _rows(open_, prompts, answers, row_tokens):
            following = _next_ids(lm, [[*prompts[i], *answers[i].ids] for i in row])
            for i, token in zip(row, following, strict=True):
                if token in stop_ids:
                    answers[i].finish_reason = "stop"
                else:
                    answers[i].ids.append(token)
        open_ = [i for i in open_ if answers[i].finish_reason != "stop"]
        if progress is not None:
            progress(len(prompts) - len(open_), len(prompts))
        if not open_:
            break
    return answers


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


def greedy(logits: Tensor) -> Tensor:
    """The id of the largest logit, the lowest of several equal ones.

    Args:
        logits: (S, V), any float dtype.

    Returns:
        ids: (S,) int64.

    Raises:
        UserError: a row's largest logit is not finite.
    """
    logits = logits.float()
    best = logits.amax(dim=-1, keepdim=True)
    if not bool(torch.isfinite(best).all()):
        raise UserError("the model gave a logit that is not finite: its weights are broken")
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == best, ids, logits.shape[-1]).amin(dim=-1)


def _next_ids(lm: HybridLM, sequences: list[list[int]]) -> list[int]:
    """The next token of each sequence, computed in one packed row."""
    device = lm.norm_f.weight.device
    packed = Packed.from_lengths([len(sequence) for sequence in sequences], device)
    input_ids = torch.tensor([i for sequence in sequences for i in sequence], device=device)
    last = packed.cu_seqlens[1:].long() - 1
    return greedy(lm.logits(lm(input_ids, packed)[last])).tolist()


def _rows(
    open_: list[int],
    prompts: Sequence[Sequence[int]],
    answers: list[Generation],
    row_tokens: int,
) -> Iterator[list[int]]:
    """The unfinished prompts in rows of at most `row_tokens`, one at least in each."""
    row: list[int] = []
    filled = 0
    for i in open_:
        length = len(prompts[i]) + len(answers[i].ids)
        if row and filled + length > row_tokens:
            yield row
            row, filled = [], 0
        row.append(i)
        filled += length
    if row:
        yield row


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

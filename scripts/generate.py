"""Answers prompts with a checkpoint.

    python scripts/generate.py --model DIR --prompts PROMPTS.jsonl --out ANSWERS.jsonl

A prompt is a JSON object on a line of its own: id (or key), and messages or prompt (the user's text).
An answer has id, response, finish_reason ("stop" or "length") and num_tokens.
An interrupted run is continued by the same command.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from hymoe.engine.answers import Task, answer_prompts
from hymoe.engine.errors import UserError
from hymoe.engine.sampling import Sampling

LINE_SECONDS = 30.0  # between lines of progress in a log


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to answer, with what, and how."""

    model: Path
    """HF folder: shards, config.json, tokenizer.json."""
    prompts: Path
    """JSONL file of prompts."""
    out: Path
    """JSONL file of answers: continued where it has some of them, replaced where it has all."""
    overwrite: bool = False
    """Begin again whatever --out holds."""
    max_new_tokens: int = 2048
    """Most tokens of an answer."""
    max_prompt_tokens: int | None = None
    """Most tokens of a prompt with its chat template; None: any number."""
    too_long: Literal["refuse", "cut"] = "refuse"
    """What becomes of a longer prompt; cut: its end stays."""
    temperature: float = 0.0
    """0: the likeliest token (greedy); above: draw, after dividing logits by it."""
    top_p: float = 1.0
    """Draw from the most probable tokens that reach this probability."""
    seed: int = 0
    """Of drawing: the same seed gives the same answers, in any batch."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens that were seen less likely: positive logits are divided by it, negative ones multiplied."""
    penalize_prompt: bool = True
    """Whether the prompt's tokens count as seen."""
    chat_template: str = "chatml"
    """chatml, base (the checkpoint's own template), or a Jinja file."""
    system_prompt: Path | None = None
    """File with a system prompt for all prompts."""
    system: Literal["replace", "fill"] = "replace"
    """Where a prompt has a system message: replace it by --system-prompt, or leave it and fill only the others."""
    batch: int = 64
    """Most prompts answered at once."""
    cache_tokens: int = 1 << 18
    """Most tokens whose keys and values are kept at once, which bounds memory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: on a GPU where there is one."""


def main() -> int:
    """Returns the exit status: 0 done, 2 bad input."""
    arguments = vars(tyro.cli(Arguments, description=__doc__)).copy()
    try:
        arguments["device"] = choose_device(arguments["device"])
        sampling = Sampling(**{key: arguments.pop(key) for key in Sampling.__dataclass_fields__})
        task = Task(**arguments, sampling=sampling)
        started = time.monotonic()
        done = answer_prompts(task, print, ShowProgress())
    except UserError as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 2
    seconds = time.monotonic() - started
    counts = f"{done.answers} answers, {done.stopped} of {done.answers - done.kept} new ones ended by themselves"
    print(f"{task.out}: {counts}, {done.new_tokens:,} tokens in {seconds:.1f} s")
    return 0


def choose_device(device: str) -> str:
    """What --device means here: cpu or cuda."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: found no CUDA device")
    return device


class ShowProgress:
    """One line that is overwritten on a terminal; in a log, a line now and then."""

    def __init__(self) -> None:
        """Starts the clock."""
        self._started = self._shown = time.monotonic()

    def __call__(self, done: int, total: int, tokens: int) -> None:
        """Shows how many answers are finished."""
        now, is_terminal = time.monotonic(), sys.stderr.isatty()
        if now - self._shown < (0.2 if is_terminal else LINE_SECONDS) and done < total:
            return
        rate = tokens / max(now - self._started, 1e-3)
        text = f"{done}/{total} answers finished, {tokens:,} tokens, {rate:,.0f} a second"
        if is_terminal:
            print(f"\r{text}", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif done < total:  # the last line of the command says the rest
            print(text, file=sys.stderr, flush=True)
        self._shown = now


if __name__ == "__main__":
    sys.exit(main())

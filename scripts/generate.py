"""Answers prompts with a checkpoint, greedily.

    python scripts/generate.py --model DIR --prompts PROMPTS.jsonl --out ANSWERS.jsonl

A prompt is a JSON object on a line of its own: id (or key), and messages or prompt (the user's text).
An answer has id, response, finish_reason ("stop" or "length") and num_tokens.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from hymoe.engine.data.chat import render_prompt
from hymoe.engine.data.formats import read_questions
from hymoe.engine.data.tokenizer import Tokenizer
from hymoe.engine.errors import UserError
from hymoe.engine.generate import generate, stop_ids
from hymoe.engine.hf_checkpoint import load_pretrained


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to answer, and with what."""

    model: Path
    """HF folder: shards, config.json, tokenizer.json."""
    prompts: Path
    """JSONL file of prompts."""
    out: Path
    """JSONL file of answers to write, replaced where it is there."""
    max_new_tokens: int = 2048
    """Most tokens of an answer."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: on a GPU where there is one."""


def main() -> int:
    """Returns the exit status: 0 done, 2 bad input."""
    arguments = tyro.cli(Arguments, description=__doc__)
    try:
        answer(arguments)
    except UserError as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 2
    return 0


def answer(arguments: Arguments) -> None:
    """Reads, generates, writes."""
    if not arguments.out.parent.is_dir():
        raise UserError(f"--out {arguments.out}: no folder {arguments.out.parent}")
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: found no CUDA device")
    questions = list(read_questions(arguments.prompts))
    tokenizer = Tokenizer(arguments.model)
    lm = load_pretrained(arguments.model, device=device)
    started = time.monotonic()
    answers = generate(
        lm,
        [render_prompt(question.messages, tokenizer) for question in questions],
        max_new_tokens=arguments.max_new_tokens,
        stop_ids=stop_ids(arguments.model, tokenizer),
        progress=show_progress,
    )
    partial = arguments.out.with_name(f".{arguments.out.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        for question, found in zip(questions, answers, strict=True):
            row = {
                "id": question.id,
                "response": tokenizer.decode(found.ids, keep_special=False),
                "finish_reason": found.finish_reason,
                "num_tokens": len(found.ids),
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    os.replace(partial, arguments.out)
    stopped = sum(found.finish_reason == "stop" for found in answers)
    tokens = sum(len(found.ids) for found in answers)
    counts = f"{len(answers)} answers, {stopped} ended by themselves, {tokens:,} tokens"
    print(f"{arguments.out}: {counts} in {time.monotonic() - started:.1f} s")


def show_progress(done: int, total: int) -> None:
    """One line that is overwritten, on a terminal only: in a log the last line says it all."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{done}/{total} answers finished", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Answers prompts with a checkpoint, greedily.

    python scripts/generate.py --model DIR --prompts PROMPTS.jsonl --out ANSWERS.jsonl

A prompt is a JSON object on a line of its own: `id` (or `key`), and either `messages` or `prompt` (the user's text). An
answer has `id`, `response`, `finish_reason` ("stop" or "length") and `num_tokens`.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

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
    """JSONL file of prompts: id (or key), and messages or prompt."""
    out: Path
    """JSONL file to write: id, response, finish_reason, num_tokens. Replaced where it is there."""
    max_new_tokens: int = 2048
    """Most tokens of an answer."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where to compute."""


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
    questions = list(read_questions(arguments.prompts))
    tokenizer = Tokenizer(arguments.model)
    ends = stop_ids(arguments.model, tokenizer)
    lm = load_pretrained(arguments.model, device=arguments.device)
    started = time.monotonic()
    answers = generate(
        lm,
        [render_prompt(question.messages, tokenizer) for question in questions],
        max_new_tokens=arguments.max_new_tokens,
        stop_ids=ends,
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
    tokens, seconds = sum(len(found.ids) for found in answers), time.monotonic() - started
    print(
        f"{arguments.out}: {len(answers)} answers, {stopped} ended by themselves, "
        f"{tokens:,} tokens in {seconds:.1f} s"
    )


def show_progress(done: int, total: int) -> None:
    """One line that is overwritten, on a terminal only: in a log the last line says it all."""
    if sys.stderr.isatty():
        print(
            f"\r{done}/{total} answers finished", end="\n" if done == total else "", file=sys.stderr
        )


if __name__ == "__main__":
    sys.exit(main())

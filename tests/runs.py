"""Whole runs in processes of their own: a checkpoint saved by transformers, chat data, torchrun."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from hymoe.engine.data.tokenizer import Tokenizer, train_tokenizer
from tests.tiny import BASE

REPO = Path(__file__).resolve().parent.parent
WORDS = ["apple", "river", "stone", "lamp", "tower", "cloud", "honey", "tiger", "paper", "moon"]


def chat_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Conversations of one or two turns and of different lengths."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        messages = []
        for _ in range(rng.choice((1, 1, 2))):
            words = rng.choices(WORDS, k=rng.randint(1, 6))
            messages.append({"role": "user", "content": "say " + " ".join(words)})
            messages.append({"role": "assistant", "content": " ".join(reversed(words))})
        rows.append({"messages": messages})
    return rows


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def save_by_transformers(folder: Path, dtype: torch.dtype, tokenizer: Path, **changes: Any) -> Path:
    """A random base checkpoint in several shards, written by transformers itself, with a tokenizer beside it."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    torch.manual_seed(0)
    raw = {
        **BASE,
        "vocab_size": Tokenizer(tokenizer).vocab_size,
        "initializer_range": 0.02,
        **changes,
    }
    del raw["dtype"]
    # transformers keeps the router in float32, as the real checkpoints do.
    NemotronHForCausalLM(NemotronHConfig(**raw)).to(dtype).save_pretrained(
        folder, max_shard_size="40KB"
    )
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    return folder


def make_data(folder: Path) -> dict[str, Path]:
    """Tokenizer, training and held-out conversations."""
    rows = chat_rows(120, seed=1)
    tokenizer = folder / "tokenizer.json"
    train_tokenizer([m["content"] for row in rows for m in row["messages"]], tokenizer)
    return {
        "tokenizer": tokenizer,
        "train": write_jsonl(folder / "train.jsonl", rows),
        "eval": write_jsonl(folder / "eval.jsonl", chat_rows(20, seed=2)),
    }


def write_recipe(path: Path, **sections: dict[str, Any]) -> Path:
    """A recipe file from keyword sections."""
    lines = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        lines += [
            f"{key} = {json.dumps(str(v) if isinstance(v, Path) else v)}"
            for key, v in values.items()
        ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def train(ranks: int, *arguments: Any, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """scripts/train.py under torchrun, or alone for one rank."""
    script = [str(REPO / "scripts" / "train.py"), *map(str, arguments)]
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        script = [*launcher, *script]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *script],
        capture_output=True,
        text=True,
        env=env,
        cwd=cwd,
        timeout=600,
        check=False,
    )


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

"""Real threads, a real tokenizer, a checkpoint saved by transformers, 4 ranks: the loss falls, the export has it."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from hymoe.engine.data.chat import drop_reason, render, shifted_labels
from hymoe.engine.data.formats import read_rows
from hymoe.engine.data.tokenizer import Tokenizer
from tests.runs import metrics, save_by_transformers, train, write_recipe

SEQ_LEN = 1024


@pytest.mark.slow
def test_real_threads_from_base_to_export(shared_dir: Path, tmp_path: Path) -> None:
    from transformers import NemotronHForCausalLM

    threads = shared_dir / "data" / "chat" / "oasst_en100_messages.jsonl"
    tokenizer = shared_dir / "data" / "tokenizers" / "smollm2_135m_instruct.tokenizer.json"
    if not threads.is_file() or not tokenizer.is_file():
        pytest.skip(f"{threads} or {tokenizer} is absent")
    lines = threads.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(lines) == 564
    # Threads of one tree share their beginning: whole trees are held out.
    trees = sorted({json.loads(line)["tree_id"] for line in lines})
    held = set(trees[::8])
    split = {
        "train": [line for line in lines if json.loads(line)["tree_id"] not in held],
        "held": [line for line in lines if json.loads(line)["tree_id"] in held],
    }
    for name, part in split.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(part), encoding="utf-8")
    base = save_by_transformers(tmp_path / "base", torch.float32, tokenizer, hidden_size=48)
    recipe = write_recipe(
        tmp_path / "recipe.toml",
        model={"path": base},
        data={
            "path": tmp_path / "train.jsonl",
            "eval": tmp_path / "held.jsonl",
            "seq_len": SEQ_LEN,
            "micro_tokens": SEQ_LEN,
        },
        optim={"lr": 5e-3, "warmup_steps": 2},
        train={"steps": 8, "step_tokens": 4 * SEQ_LEN, "eval_every": 4},
        run={"dir": tmp_path / "run"},
    )
    result = train(4, recipe)
    assert result.returncode == 0, result.stderr

    evidence = json.loads((tmp_path / "run" / "evidence.json").read_text())
    measured = [m["eval_loss"] for m in metrics(tmp_path / "run") if "eval_loss" in m]
    assert len(measured) == 2
    assert evidence["eval_loss_before"] > measured[0] > measured[1]
    assert evidence["eval_loss_before"] - measured[1] > 0.5

    twin = NemotronHForCausalLM.from_pretrained(
        tmp_path / "run" / "final", dtype=torch.float32
    ).eval()
    loss, count = held_out_loss(twin, tmp_path / "held.jsonl", Tokenizer(tokenizer))
    kept = int(
        re.search(r"^eval .* ([\d,]+) supervised", result.stdout, re.MULTILINE)[1].replace(",", "")
    )
    assert count == kept
    assert loss == pytest.approx(measured[-1], rel=1e-5)


def held_out_loss(twin: torch.nn.Module, path: Path, tokenizer: Tokenizer) -> tuple[float, int]:
    """Mean loss over the supervised tokens, one conversation at a time, by transformers alone."""
    total, count = 0.0, 0
    for row in read_rows(path):
        if drop_reason(row.messages) is not None:
            continue
        ids, mask, _ = render(row.messages, tokenizer)
        if len(ids) > SEQ_LEN:
            continue
        labels = torch.tensor(shifted_labels(ids, mask))
        with torch.no_grad():
            logits = twin(torch.tensor(ids)[None], use_cache=False).logits[0]
        total += functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()
        count += int((labels != -100).sum())
    return total / count, count

"""scripts/train.py as a person uses it: bad input, dry run, flags, a run folder in use, Ctrl-C."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runs import (
    REPO,
    make_data,
    metrics,
    save_by_transformers,
    train,
    write_jsonl,
    write_recipe,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with base, data and a recipe that trains two steps."""
    root = tmp_path_factory.mktemp("cli")
    data = make_data(root)
    save_by_transformers(root / "base", torch.bfloat16, data["tokenizer"])
    write_recipe(
        root / "recipe.toml",
        model={"path": root / "base"},
        data={"path": data["train"], "seq_len": 64, "micro_tokens": 128},
        optim={"lr": 1e-3, "warmup_steps": 1},
        train={"steps": 2, "step_tokens": 256},
        run={"dir": root / "run"},
    )
    return root


def first_shard(base: Path) -> Path:
    return sorted(base.glob("*.safetensors"))[0]


def drop_shard(base: Path) -> None:
    first_shard(base).unlink()


def truncate_shard(base: Path) -> None:
    shard = first_shard(base)
    shard.write_bytes(shard.read_bytes()[:-10])


def change_shape(base: Path) -> None:
    shard = first_shard(base)
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name].flatten()[:-1].clone()
    save_file(tensors, shard, metadata={"format": "pt"})


def leave_folder(base: Path) -> None:
    index = base / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["backbone.norm_f.weight"] = "../x.safetensors"
    index.write_text(json.dumps(content))


def break_config(base: Path) -> None:
    (base / "config.json").write_text("{not json")


# Fault -> parts of the one line that names it.
BASE_FAULTS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "missing-shard": (drop_shard, ("model-00001", "safetensors")),
    "truncated-shard": (truncate_shard, ("model-00001", "bytes")),
    "other-shape": (change_shape, ("expected", "[")),
    "outside-path": (leave_folder, ("../x.safetensors", "norm_f")),
    "config-no-json": (break_config, ("config.json", "JSON")),
    "no-config": (lambda base: (base / "config.json").unlink(), ("config.json", "no such file")),
    "no-folder": (shutil.rmtree, ("base", "no such file")),
}


@pytest.mark.parametrize("fault", BASE_FAULTS)
def test_a_broken_base_is_one_clear_line_before_training(
    made: Path, fault: str, tmp_path: Path
) -> None:
    spoil, parts = BASE_FAULTS[fault]
    base = shutil.copytree(made / "base", tmp_path / "base")
    spoil(base)
    result = train(1, made / "recipe.toml", "--model.path", base, "--run.dir", tmp_path / "run")
    assert_one_line(result, 2, *parts)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_for_another_machine_needs_a_config(made: Path, tmp_path: Path) -> None:
    machine = ("--dry-run", "--device", "h100", "--ranks", 2)
    result = train(1, made / "recipe.toml", "--model.path", tmp_path / "none", *machine)
    assert_one_line(result, 2, "none/config.json", "no such file")


def test_a_tokenizer_of_another_model_is_refused(made: Path, tmp_path: Path) -> None:
    base = shutil.copytree(made / "base", tmp_path / "base")
    content = json.loads((base / "tokenizer.json").read_text())
    extra = {**content["added_tokens"][0], "id": 99_999, "content": "<|of another model|>"}
    content["added_tokens"].append(extra)
    (base / "tokenizer.json").write_text(json.dumps(content))
    arguments = (made / "recipe.toml", "--model.path", base, "--run.dir", tmp_path / "run")
    assert_one_line(
        train(1, *arguments), 2, "tokenizer.json", "has ids up to", "vocabulary ends at"
    )


DATA_FAULTS = {
    "empty-file": ([], ("data.jsonl",)),
    "no-messages": ([{"text": "hello"}], ("data.jsonl", "messages")),
    "no-answer": ([{"messages": [{"role": "user", "content": "hi"}]}], ("data.jsonl",)),
}


@pytest.mark.parametrize("fault", DATA_FAULTS)
def test_bad_data_is_one_clear_line_before_training(made: Path, fault: str, tmp_path: Path) -> None:
    rows, parts = DATA_FAULTS[fault]
    data = write_jsonl(tmp_path / "data.jsonl", rows)
    result = train(1, made / "recipe.toml", "--data.path", data, "--run.dir", tmp_path / "run")
    assert_one_line(result, 2, *parts)
    assert not (tmp_path / "run").exists()


RECIPE_FAULTS = {
    "unknown-key": ("[optim]\nlearning_rate = 1.0\n", ("[optim] learning_rate", "expected one of")),
    "near-key": ("[train]\nstep_token = 5\n", ("did you mean step_tokens?",)),
    "wrong-type": ('[optim]\nlr = "fast"\n', ("[optim] lr", "'fast'", "float")),
    "wrong-choice": ('[optim]\nrounding = "up"\n', ("[optim] rounding", "stochastic")),
    "no-toml": ("[optim\n", ("not valid TOML",)),
    "does-not-divide": (
        '[model]\npath = "x"\n[data]\npath = "y"\nseq_len = 64\nmicro_tokens = 128\n'
        '[train]\nstep_tokens = 200\n[run]\ndir = "z"\n',
        ("train.step_tokens = 200", "128"),
    ),
    "no-model": ('[data]\npath = "y"\n', ("model.path is missing",)),
}


@pytest.mark.parametrize("fault", RECIPE_FAULTS)
def test_a_bad_recipe_is_one_clear_line(fault: str, tmp_path: Path) -> None:
    text, parts = RECIPE_FAULTS[fault]
    recipe = tmp_path / "bad.toml"
    recipe.write_text(text)
    assert_one_line(train(1, recipe), 2, *parts)


def assert_one_line(result: subprocess.CompletedProcess, status: int, *parts: str) -> None:
    assert result.returncode == status, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    for part in parts:
        assert part in lines[0]
    assert "Traceback" not in result.stdout


def test_under_torchrun_rank_0_alone_says_what_is_wrong(made: Path, tmp_path: Path) -> None:
    result = train(
        2,
        made / "recipe.toml",
        "--data.path",
        tmp_path / "none.jsonl",
        "--run.dir",
        tmp_path / "run",
    )
    assert result.returncode == 1  # torchrun's own
    assert result.stderr.count("train.py: ") == 1
    assert "none.jsonl" in result.stderr
    assert "[rank" not in result.stderr.replace("[rank0]", "")


def test_dry_run_resolves_everything_and_writes_nothing(made: Path) -> None:
    result = train(1, made / "recipe.toml", "--dry-run", "--optim.lr", "0.5")
    assert result.returncode == 0, result.stderr
    for part in (
        "lr = 0.5",
        "parameters",
        "active",
        "learning rate by step",
        'rounding = "exact"',
        "memory",
    ):
        assert part in result.stdout
    assert not (made / "run").exists()


def test_help_names_every_section_and_trains_nothing(tmp_path: Path, made: Path) -> None:
    result = train(1, made / "recipe.toml", "--help")
    assert result.returncode == 0
    for flag in ("--optim.lr", "--data.micro-tokens", "--train.step-tokens", "--run.dir"):
        assert flag in result.stdout
    assert not (made / "run").exists()


def test_a_run_folder_in_use_is_refused_unless_asked(made: Path, tmp_path: Path) -> None:
    used = tmp_path / "used"
    arguments = (made / "recipe.toml", "--run.dir", used, "--run.export", "", "--run.save-every", 0)
    assert train(1, *arguments).returncode == 0
    before = (used / "metrics.jsonl").read_bytes()
    assert_one_line(train(1, *arguments), 2, "holds an earlier run without a saved state")
    assert (used / "metrics.jsonl").read_bytes() == before
    assert train(1, *arguments, "--run.replace", "true").returncode == 0
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    arguments = (made / "recipe.toml", "--run.dir", foreign, "--run.replace", "true")
    assert_one_line(train(1, *arguments), 2, "no run of ours")
    assert (foreign / "thesis.txt").read_text() == "mine"


def test_near_zero_embedding_rows_are_counted_and_named(made: Path, tmp_path: Path) -> None:
    base = shutil.copytree(made / "base", tmp_path / "base")
    for shard in base.glob("*.safetensors"):
        tensors = load_file(shard)
        if "backbone.embeddings.weight" in tensors:
            tensors["backbone.embeddings.weight"][:3] *= 1e-17
            save_file(tensors, shard, metadata={"format": "pt"})
    result = train(1, made / "recipe.toml", "--model.path", base, "--run.dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert "3 embedding rows are near zero" in result.stdout
    assert "<|im_start|>" in result.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_run_that_saves_nothing_with_the_export_of_what_it_has(
    made: Path, tmp_path: Path, number: int
) -> None:
    run = tmp_path / "run"
    script = [sys.executable, str(REPO / "scripts" / "train.py"), str(made / "recipe.toml")]
    arguments = [*script, "--run.dir", str(run), "--train.steps", "100000", "--run.save-every", "0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        while process.poll() is None and not (
            (run / "metrics.jsonl").exists() and len(metrics_text(run)) > 2
        ):
            time.sleep(0.1)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    steps = metrics(run)
    assert 3 <= len(steps) < 100000
    assert f"stopped after step {steps[-1]['step']}" in out
    stopped = run / f"stopped_step_{steps[-1]['step']:08d}"
    assert (stopped / "config.json").is_file()
    assert not (run / "final").exists()


def metrics_text(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text().splitlines()

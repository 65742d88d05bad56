"""`scripts/prepare_data.py` as a person runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.test_pipeline import REPO, chats, mixture


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, REPO / "scripts" / "prepare_data.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    chats(folder / "a.jsonl", 30, 1)
    path = mixture(folder, tokenizer_file, '[[source]]\nname = "a"\npath = "a.jsonl"\nrepeat = 2\n')
    done = run(path, "--out", folder / "packed", "--workers", 2)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((folder / "packed" / "manifest.json").read_text())
    assert f"dataset_sha256 {manifest['dataset_sha256']}" in done.stdout
    row = next(line for line in done.stdout.splitlines() if " a " in line)
    assert "all x 2" in row
    assert f"{manifest['supervised_tokens']:,}" in row
    return folder


def test_show_marks_what_is_trained_on(prepared: Path) -> None:
    done = run(prepared / "packed", "--show", 3, "--base", prepared)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens trained on") == 3
    answers = [line for line in done.stdout.splitlines() if line.startswith("[[")]
    assert answers
    assert all(line.endswith("<|im_end|>]]") for line in answers)
    rest = "\n".join(line for line in done.stdout.splitlines() if not line.startswith("[["))
    assert "[[" not in rest
    assert "<|im_start|>user" in rest


def test_check_says_what_is_wrong(prepared: Path) -> None:
    assert run(prepared / "packed", "--check").returncode == 0
    file = prepared / "packed" / "labels_00000.bin"
    good = file.read_bytes()
    try:
        file.write_bytes(bytes([1 - good[0]]) + good[1:])
        done = run(prepared / "packed", "--check")
    finally:
        file.write_bytes(good)
    assert done.returncode == 1
    assert "row 0:" in done.stderr
    assert "dataset_sha256 is" in done.stderr


def test_bad_input_is_one_line_and_status_2(prepared: Path) -> None:
    for arguments in (
        [prepared / "none.toml", "--out", prepared / "x"],
        [prepared / "mixture.toml"],
        [prepared / "mixture.toml", "--out", prepared / "packed"],
        [prepared, "--check"],
    ):
        done = run(*arguments)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("prepare_data.py: ")

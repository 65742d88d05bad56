"""BUNDLE.toml: the example in the repository can be read, and a wrong key is named."""

from pathlib import Path

import pytest

from hymoe.engine.bundle.spec import read_spec
from tests.hf_folder import refused
from tests.runs import REPO


def test_the_example_can_be_read(tmp_path: Path) -> None:
    example = (REPO / "scripts" / "recipes" / "bundle.toml").read_text()
    (tmp_path / "bundle.toml").write_text(example)
    for name in ("system_prompt.txt", "intended_use.txt", "instructions.json", "win_rate.json"):
        (tmp_path / name).write_text("text\n")
    spec = read_spec(tmp_path / "bundle.toml")
    assert (spec.shards, spec.generation.repetition_penalty) == (16, 1.05)
    assert spec.prompt_text == "text"


WRONG_KEYS = {
    "temperature = -1": ("[generation]", "temperature = -1"),
    "max_new_tokens = 0": ("max_new_tokens = 0", "1 or more"),
    'stop_ids = ["</s>"]': ("stop_ids", "'</s>'", "int"),
    "penalty = 1.1": ("penalty", "unknown"),
}


@pytest.mark.parametrize("line", WRONG_KEYS)
def test_a_wrong_key_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "p.txt").write_text("x")
    path = tmp_path / "bundle.toml"
    path.write_text(f'name = "x"\nsystem_prompt = "p.txt"\n[generation]\n{line}\n')
    refused(lambda: read_spec(path), str(path), *WRONG_KEYS[line])

"""A small trained tokenizer with the two control tokens and an added token that is not marked special."""

import json
from pathlib import Path

import pytest

from hymoe.engine.data.tokenizer import Tokenizer, train_tokenizer

TEXTS = ("system\n", "user\n", "assistant\n", "one two three four", "hi there", '["one", "two"]')


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(TEXTS * 2, path)
    content = json.loads(path.read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    size = len(content["model"]["vocab"])
    for i, token in enumerate(("<think>", "</think>")):
        content["added_tokens"].append(
            {"id": size + i, "content": token, "special": False, **plain}
        )
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer(tokenizer_file)


@pytest.fixture(scope="session")
def real_tokenizer(shared_dir: Path) -> Tokenizer:
    path = shared_dir / "data" / "tokenizers" / "smollm2_135m_instruct.tokenizer.json"
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    return Tokenizer(path)

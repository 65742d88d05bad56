"""The real tokenizer's ids: goldens, control tokens, and a whole conversation spelled out."""

import json
from pathlib import Path

import pytest

from hymoe.engine.data.chat import render
from hymoe.engine.data.schema import Message
from hymoe.engine.data.tokenizer import Tokenizer
from tests.data.nemotron_tokenizer import write_tokenizer

pytestmark = pytest.mark.slow  # the merges of 130,000 tokens


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("nemotron") / "tokenizer.json"
    write_tokenizer(path)
    return Tokenizer(path)


def test_control_tokens_have_their_ids(nemotron: Tokenizer) -> None:
    assert (nemotron.im_start, nemotron.im_end) == (10, 11)
    assert (nemotron.id_of("<think>"), nemotron.id_of("</think>")) == (12, 13)
    assert nemotron.vocab_size == 131072


def test_goldens(nemotron: Tokenizer, shared_dir: Path) -> None:
    goldens = json.loads((shared_dir / "facts" / "tokenizer_goldens_tekken.json").read_text())[
        "rows"
    ]
    assert len(goldens) > 10
    for row in goldens:
        assert nemotron.encode(row["text"]) == row["ids"], row["text"]
        assert nemotron.decode(row["ids"]) == row["text"]


def test_a_conversation_token_by_token(nemotron: Tokenizer) -> None:
    messages = [Message("user", "The capital of France is"), Message("assistant", "\n\n")]
    ids, trained, _ = render(messages, nemotron)
    user = [10, 3263, 1010, 1784, 8961, 1307, 5498, 1395, 11, 1010]
    assert ids == [*user, 10, 1503, 19464, 1010, 1267, 11, 1010]
    assert trained == [False] * (len(user) + 4) + [True, True, False]

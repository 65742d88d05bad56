"""Greedy decoding: a scripted model for the rules, the real one for the arithmetic."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hymoe.engine.data.tokenizer import Tokenizer, train_tokenizer
from hymoe.engine.errors import UserError
from hymoe.engine.generate import generate, greedy, stop_ids
from hymoe.engine.hf_checkpoint import save_pretrained
from hymoe.kernels.packed import Packed
from tests.tiny import reference_twin, tiny_lm

REPO = Path(__file__).resolve().parent.parent


class Scripted:
    """Says its lines: the next token is the one behind the number of tokens already said."""

    def __init__(self, script: dict[int, list[int]], vocab_size: int = 50) -> None:
        self.script = script  # by the first token of the prompt; prompts have two tokens
        self.config = SimpleNamespace(vocab_size=vocab_size)
        self.norm_f = SimpleNamespace(weight=torch.zeros(1))
        self.rows: list[tuple[int, ...]] = []  # lengths of each packed row that was computed
        self.heads = 0  # positions that went through the head

    def __call__(self, ids: torch.Tensor, packed: Packed) -> torch.Tensor:
        self.rows.append(packed.lengths)
        hidden = torch.full((packed.num_tokens, self.config.vocab_size), -1.0)
        for start, length in zip(packed.cu_seqlens.tolist()[:-1], packed.lengths, strict=True):
            line = self.script[int(ids[start])]
            hidden[start + length - 1, line[min(length - 2, len(line) - 1)]] = 1.0
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.heads += len(hidden)
        return hidden


def test_stops_at_any_stop_id_or_at_the_limit() -> None:
    lm = Scripted({20: [5, 11, 7, 7], 21: [6], 22: [2], 23: [5, 6, 7, 2]})
    answers = generate(lm, [[i, 0] for i in (20, 21, 22, 23)], max_new_tokens=4, stop_ids={2, 11})
    assert [(a.ids, a.finish_reason) for a in answers] == [
        ([5], "stop"),
        ([6, 6, 6, 6], "length"),
        ([], "stop"),
        ([5, 6, 7], "stop"),
    ]


def test_only_unfinished_prompts_and_last_positions_are_computed() -> None:
    lm = Scripted({20: [11], 21: [5, 11], 22: [5]})
    seen: list[tuple[int, int]] = []
    generate(
        lm,
        [[20, 0], [21, 0], [22, 0]],
        max_new_tokens=3,
        stop_ids={11},
        progress=lambda done, total: seen.append((done, total)),
    )
    assert lm.rows == [(2, 2, 2), (3, 3), (4,)]
    assert lm.heads == 6
    assert seen == [(1, 3), (2, 3), (2, 3)]


def test_rows_stay_below_the_limit() -> None:
    lm = Scripted({20: [5, 11], 21: [6, 11], 22: [7, 11]})
    answers = generate(
        lm, [[20, 0], [21, 0], [22, 0]], max_new_tokens=9, stop_ids={11}, row_tokens=5
    )
    assert lm.rows == [(2, 2), (2,), (3,), (3,), (3,)]
    assert [a.ids for a in answers] == [[5], [6], [7]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lowest_id_wins_a_tie(dtype: torch.dtype) -> None:
    logits = torch.full((3, 1000), -2.0, dtype=dtype)
    logits[0, 700:] = 1.0
    logits[1, [3, 999]] = 0.5
    assert greedy(logits).tolist() == [700, 3, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_are_no_token(bad: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1, 2] = bad
    with pytest.raises(UserError, match="not finite"):
        greedy(logits)


@pytest.mark.parametrize(
    ("prompts", "stops", "limit", "said"),
    [
        ([[1], []], {2}, 4, "prompt 1 is empty"),
        (
            [[1, 50]],
            {2},
            4,
            "prompt 0 has ids from 1 to 50, expected ids of the vocabulary, 0 to 49",
        ),
        ([[-1]], {2}, 4, "ids from -1"),
        ([[1]], {2, 50}, 4, "stop id 50, expected an id of the vocabulary, 0 to 49"),
        ([[1]], {2}, 0, "max_new_tokens = 0"),
    ],
)
def test_bad_input(prompts: list[list[int]], stops: set[int], limit: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        generate(Scripted({1: [3]}), prompts, max_new_tokens=limit, stop_ids=stops)


def test_tokens_equal_the_reference_whatever_is_packed_together() -> None:
    lm = tiny_lm(seed=3)
    twin = reference_twin(lm)
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 97, (n,), generator=rng).tolist() for n in (1, 2, 3, 17, 30)]
    together = generate(lm, prompts, max_new_tokens=8, stop_ids={7, 11})
    assert [generate(lm, [p], max_new_tokens=8, stop_ids={7, 11})[0] for p in prompts] == together
    for prompt, answer in zip(prompts, together, strict=True):
        expected: list[int] = []
        with torch.no_grad():
            while len(expected) < 8:
                token = int(twin(torch.tensor([[*prompt, *expected]])).logits[0, -1].argmax())
                if token in (7, 11):
                    break
                expected.append(token)
        assert answer.ids == expected
        assert answer.finish_reason == ("length" if len(expected) == 8 else "stop")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "hf"
    trained = folder.with_name("tokenizer.json")
    train_tokenizer(["user\n", "assistant\n", "one two three"] * 2, trained)
    size = Tokenizer(trained).vocab_size
    save_pretrained(tiny_lm(vocab_size=size, eos_token_id=2), folder)
    trained.rename(folder / "tokenizer.json")
    return folder


def test_stop_ids_are_a_union(model_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(model_folder)
    assert tokenizer.im_end == 1
    assert stop_ids(model_folder, tokenizer) == {1, 2}
    (tmp_path / "config.json").write_text('{"eos_token_id": [2, 5]}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 11]}')
    assert stop_ids(tmp_path, tokenizer) == {1, 2, 5, 11}
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    assert stop_ids(tmp_path, tokenizer) == {1, 2, 11}


@pytest.mark.parametrize(
    "content", ["{", "[2]", '{"eos_token_id": "2"}', '{"eos_token_id": [true]}']
)
def test_bad_stop_ids(model_folder: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match=r"generation_config\.json"):
        stop_ids(tmp_path, Tokenizer(model_folder))


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(REPO / "scripts" / "generate.py"), *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_command(model_folder: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": 7, "prompt": "one two"},
        {"id": "b", "messages": [{"role": "user", "content": "one two"}]},
    ]
    prompts, out = tmp_path / "p.jsonl", tmp_path / "a.jsonl"
    prompts.write_text("\n".join(map(json.dumps, rows)))
    arguments = ("--model", model_folder, "--prompts", prompts, "--out", out, "--max-new-tokens", 5)
    done = command(*arguments)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["id"] for answer in answers] == [7, "b"]
    assert answers[0]["response"] == answers[1]["response"]
    for answer in answers:
        assert set(answer) == {"id", "response", "finish_reason", "num_tokens"}
        assert (answer["num_tokens"] == 5) == (answer["finish_reason"] == "length")

    before = out.read_text()
    prompts.write_text('{"id": 1}\n')
    done = command(*arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "p.jsonl:1" in done.stderr
    assert out.read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "p.jsonl"]

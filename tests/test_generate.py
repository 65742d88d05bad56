"""Generation: a scripted model for the rules, the `generate` of `transformers` for the arithmetic, the command."""

import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hymoe.engine.data.tokenizer import Tokenizer, train_tokenizer
from hymoe.engine.errors import UserError
from hymoe.engine.generate import generate, stop_ids
from hymoe.engine.hf_checkpoint import load_pretrained, save_pretrained
from hymoe.engine.sampling import Sampling, SeenIds, drawn, greedy, penalized, uniform
from hymoe.kernels.packed import Packed
from hymoe.model.cache import Cache
from tests.close import assert_close_rel
from tests.tiny import tiny_lm

REPO = Path(__file__).resolve().parent.parent


class ScriptedCache(Cache):
    """Remembers the first token of each row's prompt, and how much it has said."""

    def __init__(self, config: Any, most: int) -> None:
        super().__init__(config, torch.device("cpu"), torch.float32, most)
        self.said: list[list[int]] = []

    def drop(self, gone: Collection[int]) -> list[tuple[int, int]]:
        moves = super().drop(gone)
        for source, target in moves:
            self.said[target] = self.said[source]
        del self.said[self.rows :]
        return moves


class Scripted:
    """Says its lines, by the first token of the prompt; the last token of a line is repeated for ever."""

    def __init__(self, script: dict[int, list[int]], vocab_size: int = 50) -> None:
        self.script = script
        self.config = SimpleNamespace(vocab_size=vocab_size, pattern="")
        self.layers: list[Any] = []
        self.norm_f = SimpleNamespace(weight=torch.zeros(1))
        self.calls: list[
            tuple[int, ...] | int
        ] = []  # prompts' lengths of a reading, rows of a step
        self.heads = 0  # positions that went through the head

    def new_cache(self, most: int) -> ScriptedCache:
        return ScriptedCache(self.config, most)

    def __call__(
        self, ids: torch.Tensor, packed: Packed | None, cache: ScriptedCache
    ) -> torch.Tensor:
        if packed is None:
            self.calls.append(len(ids))
            cache.begin_step(len(ids))
            for row, token in enumerate(ids.tolist()):
                said = cache.said[row]
                assert token == self.script[said[0]][min(said[1], len(self.script[said[0]]) - 1)]
                said[1] += 1
            last, rows = list(range(len(ids))), cache.said
        else:
            self.calls.append(packed.lengths)
            cache.begin_prefill(packed)
            starts = packed.cu_seqlens.tolist()
            rows = [[int(ids[start]), 0] for start in starts[:-1]]
            cache.said += rows
            last = [end - 1 for end in starts[1:]]
        cache.end()
        hidden = torch.full((len(ids), self.config.vocab_size), -1.0)
        for place, (first, said) in zip(last, rows, strict=True):
            line = self.script[first]
            hidden[place, line[min(said, len(line) - 1)]] = 1.0
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.heads += len(hidden)
        return hidden


def test_stops_at_any_stop_id_or_at_the_limit() -> None:
    """NVIDIA/TensorRT-Model-Connect#640, and its kind: whichever of several ids comes, and wherever."""
    lm = Scripted({20: [5, 11, 7, 7], 21: [6], 22: [2], 23: [5, 6, 7, 2], 24: [8, 5, 2]})
    prompts = [[i, 0] for i in (20, 21, 22, 23, 24)]
    answers = generate(lm, prompts, max_new_tokens=4, stop_ids={2, 11})
    assert [(a.ids, a.finish_reason) for a in answers] == [
        ([5], "stop"),
        ([6, 6, 6, 6], "length"),
        ([], "stop"),
        ([5, 6, 7], "stop"),
        ([8, 5], "stop"),
    ]


def test_only_open_prompts_and_last_positions_are_computed() -> None:
    lm = Scripted({20: [11], 21: [5, 11], 22: [5]})
    seen: list[tuple[int, int, int]] = []
    ended: list[tuple[int, list[int]]] = []
    generate(
        lm,
        [[20, 0], [21, 0], [22, 0]],
        max_new_tokens=3,
        stop_ids={11},
        progress=lambda *counts: seen.append(counts),
        on_answer=lambda i, answer: ended.append((i, list(answer.ids))),
    )
    assert lm.calls == [(2, 2, 2), 2, 1]
    assert lm.heads == 6
    assert seen == [(1, 3, 2), (2, 3, 3), (3, 3, 4)]
    assert ended == [(0, []), (1, [5]), (2, [5, 5, 5])]


def test_waiting_prompts_take_the_place_of_those_that_ended() -> None:
    script = {20 + i: [5] * i + [11] for i in range(8)}
    lm = Scripted(script)
    prompts = [[20 + i] + [0] * (8 - i) for i in range(8)]
    answers = generate(lm, prompts, max_new_tokens=9, stop_ids={11}, batch=4)
    assert [a.ids for a in answers] == [[5] * i for i in range(8)]
    assert lm.calls[:2] == [(9, 8, 7, 6), (5,)]  # the longest first; one ended at once
    assert max(call for call in lm.calls if isinstance(call, int)) == 4


@pytest.mark.parametrize(
    ("limits", "calls"),
    [
        ({"row_tokens": 5}, [(2, 2), (2,), 3]),  # two prompts a row
        ({"row_tokens": 1}, [(2,), (2,), (2,), 3]),  # one has a row of its own, however long
        ({"cache_tokens": 22}, [(2, 2), 2, (2,), 1]),  # two sequences of up to 11 tokens
        ({"cache_tokens": 1}, [(2,), 1, (2,), 1, (2,), 1]),  # one always runs
        ({"batch": 1}, [(2,), 1, (2,), 1, (2,), 1]),
    ],
)
def test_memory_is_bounded(limits: dict[str, int], calls: list[Any]) -> None:
    lm = Scripted({20: [5, 11], 21: [6, 11], 22: [7, 11]})
    prompts = [[20, 0], [21, 0], [22, 0]]
    answers = generate(lm, prompts, max_new_tokens=9, stop_ids={11}, **limits)
    assert lm.calls == calls
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
    with pytest.raises(UserError, match="not finite"):
        drawn(logits, 1.0, 0.9, [0.5, 0.5])


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


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": -0.1}, "temperature = -0.1, expected 0 or more"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_p": 0.0}, "top_p = 0.0, expected above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p = 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0, expected above 0"),
    ],
)
def test_bad_sampling(values: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Sampling(**values)


def seen_ids(*rows: list[int]) -> SeenIds:
    seen = SeenIds()
    for row in rows:
        seen.add_row(row)
    return seen


def test_penalty_makes_seen_ids_less_likely_once() -> None:
    """huggingface/transformers#2302: the case itself, then every sign, repeats, and what was not seen."""
    logits = torch.tensor([[2.0, -1.0, 0.5]])
    found = penalized(logits, seen_ids([0, 0, 1, 0]), 1.05)
    assert_close_rel(found, torch.tensor([[1.904762, -1.05, 0.5]]), 1e-6)
    assert found[0, 2] == 0.5
    assert torch.equal(penalized(logits, seen_ids([0, 0, 1]), 1.0), logits)
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 40, generator=rng).to(torch.bfloat16)
    rows = [[], [7] * 5, torch.randint(0, 40, (90,), generator=rng).tolist()]
    seen = seen_ids(*rows)
    for penalty in (0.8, 1.05, 1.2, 3.0):
        found = penalized(logits, seen, penalty)
        assert found.dtype == torch.float32
        for row, ids in enumerate(rows):
            for id in range(40):
                one = logits[row, id].float()
                if id in ids:
                    one = one / penalty if one > 0 else one * penalty
                    assert penalty < 1 or found[row, id] <= logits[row, id].float()
                assert found[row, id] == pytest.approx(float(one), rel=2**-23)
                assert id in ids or found[row, id] == one
    assert torch.equal(penalized(logits, seen, 1.0), logits.float())
    assert torch.equal(penalized(logits[1:], seen, 1.2, first=1), penalized(logits, seen, 1.2)[1:])


def test_seen_ids_move_with_their_rows() -> None:
    seen = seen_ids([1], [2, 3], [], [4])
    seen.drop([(3, 0)], 3)
    seen.note(2, 9)
    seen.note(0, 4)
    seen.note(0, 5)
    logits = torch.ones(3, 10)
    changed = (penalized(logits, seen, 2.0) != 1).nonzero().tolist()
    assert changed == [[0, 4], [0, 5], [1, 2], [1, 3], [2, 9]]


@pytest.mark.parametrize(("prompt_counts", "expected"), [(True, [7, 6, 8]), (False, [7, 6, 5])])
def test_prompt_ids_count_where_asked(prompt_counts: bool, expected: list[int]) -> None:
    """A model that always has the logits 4, 4.5, 5, 3.9 for the ids 5, 6, 7, 8; id 5 is in the prompt."""
    lm = Scripted({5: [0]})
    row = torch.full((50,), -1.0)
    row[[5, 6, 7, 8]] = torch.tensor([4.0, 4.5, 5.0, 3.9])
    lm.script = {5: [*expected, 0]}
    lm.logits = lambda hidden: row.expand(len(hidden), -1)
    how = Sampling(repetition_penalty=1.3, penalize_prompt=prompt_counts)
    answer = generate(lm, [[5, 5]], max_new_tokens=3, stop_ids=(), sampling=how)[0]
    assert answer.ids == expected


def test_draws_follow_the_distribution_within_the_nucleus() -> None:
    """10,000 draws; of shares 0.5, 0.25, 0.15, 0.1 a nucleus of 0.7 needs two, of 0.75 two, of 0.76 three."""
    shares = torch.tensor([0.15, 0.5, 0.1, 0.25])
    numbers = [uniform(0, "a", i) for i in range(10_000)]
    logits = shares.log().expand(10_000, -1)
    for top_p, kept in ((0.2, [1]), (0.7, [1, 3]), (0.76, [0, 1, 3]), (1.0, [0, 1, 2, 3])):
        counts = torch.bincount(drawn(logits, 1.0, top_p, numbers), minlength=4) / 10_000
        expected = torch.zeros(4)
        expected[kept] = shares[kept] / shares[kept].sum()
        assert (counts - expected).abs().max() < 0.02
        assert not counts[expected == 0].any()
    cold = drawn(logits, 0.5, 1.0, numbers)
    expected = shares.square() / shares.square().sum()
    assert (torch.bincount(cold, minlength=4) / 10_000 - expected).abs().max() < 0.02
    assert drawn(1e4 * logits[:3], 1e-3, 1.0, [0.0, 0.5, 1 - 2**-53]).tolist() == [1, 1, 1]


def test_numbers_of_draws_are_uniform_and_differ_by_seed_key_and_position() -> None:
    numbers = torch.tensor([uniform(s, k, i) for s in (0, 1) for k in "ab" for i in range(500)])
    assert len(set(numbers.tolist())) == 2000
    assert (torch.histc(numbers, 10, 0, 1) / 200 - 1).abs().max() < 0.3


# The reference bounds the time step in a full pass and not in a decoding step: so low, the bound does nothing.
SAME_STEPS = {"time_step_limit": [0.0, float("inf")], "time_step_min": 1e-6}
STOPS = [7, 11, 13]
LIMITS = ({}, {"batch": 3}, {"batch": 1}, {"cache_tokens": 150, "row_tokens": 8})
PATTERNS = {
    "every-kind": "M*E-",
    "deep": "MEM*E-MEME",
    "mamba": "MMM*",  # without any attention the reference's cache cannot count
    "attention": "***",
    "experts": "*EE",
}


def exported(folder: Path, pattern: str) -> Path:
    """Weights large enough that answers are no single token for ever."""
    options = {"layers_block_type": None, "hybrid_override_pattern": pattern}
    save_pretrained(tiny_lm(3, initializer_range=0.4, **options, **SAME_STEPS), folder)
    return folder


def prompts_with(id: int, seed: int = 0) -> list[list[int]]:
    """Ragged, and all with the id that pads in the reference, which counts it as seen otherwise."""
    rng = torch.Generator().manual_seed(seed)
    lengths = (1, 2, 3, 5, 17, 30, 8)
    return [[*torch.randint(14, 97, (n,), generator=rng).tolist(), id] for n in lengths]


def reference_answers(
    twin: Any, prompts: list[list[int]], limit: int, penalty: float
) -> list[list[int]]:
    """transformers' answers to a batch that is padded on the left."""
    longest = max(map(len, prompts))
    pad = 3
    rows = [[pad] * (longest - len(p)) + p for p in prompts]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    found = twin.generate(
        input_ids=torch.tensor(rows),
        attention_mask=torch.tensor(mask),
        max_new_tokens=limit,
        do_sample=False,
        repetition_penalty=penalty,
        eos_token_id=STOPS,
        pad_token_id=pad,
    )
    answers = []
    for row in found[:, longest:].tolist():
        end = next((i for i, token in enumerate(row) if token in STOPS), limit)
        answers.append(row[:end])
    return answers


@pytest.mark.parametrize("name", PATTERNS)
def test_tokens_equal_the_reference_from_the_same_folder(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = exported(tmp_path / "model", PATTERNS[name])
    twin, lm = AutoModelForCausalLM.from_pretrained(folder).eval(), load_pretrained(folder)
    prompts = prompts_with(3)
    varied = stopped = 0
    for penalty in (1.0, 1.05, 1.2):
        expected = reference_answers(twin, prompts, 40, penalty)
        how = Sampling(repetition_penalty=penalty)
        for limits in LIMITS if name == "every-kind" else LIMITS[:1]:
            found = generate(lm, prompts, max_new_tokens=40, stop_ids=STOPS, sampling=how, **limits)
            assert [answer.ids for answer in found] == expected, (penalty, limits)
            for answer in found:
                assert answer.finish_reason == ("length" if len(answer.ids) == 40 else "stop")
        varied += sum(len(set(ids)) > 5 for ids in expected)
        stopped += sum(len(ids) < 40 for ids in expected)
    assert varied > 5, "answers of one token for ever prove little"
    assert stopped, "no answer stopped"


def test_the_batch_changes_no_draw() -> None:
    lm = tiny_lm(3, initializer_range=0.3)
    prompts = prompts_with(3) + prompts_with(4, seed=1)
    keys = [f"p{i}" for i in range(len(prompts))]
    how = Sampling(temperature=0.9, top_p=0.95, seed=5, repetition_penalty=1.1)

    def answers(order: list[int], sampling: Sampling = how, **limits: int) -> dict[str, list[int]]:
        found = generate(
            lm,
            [prompts[i] for i in order],
            max_new_tokens=12,
            stop_ids=STOPS,
            sampling=sampling,
            keys=[keys[i] for i in order],
            **limits,
        )
        return {keys[i]: answer.ids for i, answer in zip(order, found, strict=True)}

    together = answers(list(range(14)))
    assert answers(list(range(13, -1, -1)), batch=3) == together
    assert {k: v for i in range(14) for k, v in answers([i]).items()} == together
    other = answers(list(range(14)), Sampling(temperature=0.9, top_p=0.95, seed=6))
    assert sum(other[key] != together[key] for key in keys) > 7
    # The load that training watches is not generation's.
    assert all(layer.mixer.load is None for layer in lm.layers if layer.kind == "E")


def test_sharded_models_say_the_same(tmp_path: Path) -> None:
    """Two ranks, parameters by FSDP2 and experts by rank: every rank asks with the same prompts."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    worker = [str(REPO / "tests" / "generate_worker.py"), str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    line = [sys.executable, *launcher, *worker]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found) == 3
        for name, tokens in found.items():
            assert tokens == found["whole"], (rank, name)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "hf"
    trained = folder.with_name("tokenizer.json")
    train_tokenizer(["user\n", "assistant\n", "system\n", "one two three"] * 2, trained)
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


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    line = [
        sys.executable,
        "benchmarks/generation.py",
        "--tiny",
        "--rounds",
        "1",
        "--json",
        str(out),
    ]
    done = subprocess.run(line, cwd=REPO, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    cells = json.loads(out.read_text())["cells"]
    assert [cell["cell"].split(", ")[1] for cell in cells] == ["batch 1", "batch 16"] * 2
    assert json.loads(done.stdout.splitlines()[-1])["cells"] == cells

"""Win rates on real battles, against the same figures computed with SciPy; ties, lists without spread, resuming."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from hymoe.engine.errors import UserError
from hymoe.engine.eval.battles import Battle, read_battles
from hymoe.engine.eval.judge import Rules, judge
from hymoe.engine.eval.paired import holm, mcnemar, paired_t
from hymoe.engine.eval.reward import RewardModel
from hymoe.engine.eval.scores import LengthScorer, ScoreCache, score_all
from hymoe.engine.eval.winrate import length_controlled, win_rate

REPO = Path(__file__).resolve().parents[2]
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|>{% endfor %}"
SEED = 7


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random reward model over words, as transformers saves one."""
    folder = tmp_path_factory.mktemp("reward")
    words = [
        "<pad>",
        "<unk>",
        "<|user|>",
        "<|assistant|>",
        "<|end|>",
        *["the", "a", "of", "to", "is", "in", "you"],
    ]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", pad_token="<pad>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=0,
        max_position_embeddings=4096,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture
def battles_file(shared_dir: Path) -> Path:
    return shared_dir / "data" / "pairwise" / "pandalm_battles.jsonl"


def own_scores(folder: Path, conversations: list[list[dict[str, str]]]) -> list[float]:
    """The reward model's scores by transformers alone, a batch of its own padding at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    found: list[float] = []
    for start in range(0, len(conversations), 32):
        texts = [
            "".join(f"<|{turn['role']}|> {turn['content']} <|end|>" for turn in turns)
            for turns in conversations[start : start + 32]
        ]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.no_grad():
            found += (
                model(batch.input_ids, attention_mask=batch.attention_mask).logits[:, 0].tolist()
            )
    return found


def check_against_scipy(made: dict[str, Any], scores: np.ndarray, lengths: np.ndarray) -> None:
    """Compares the JSON of a candidate with SciPy's figures; scores and lengths are (2, N), candidate first."""
    margin = scores[0] - scores[1]
    sign = np.sign(margin)
    outcome = np.where(sign > 0, 1.0, np.where(sign == 0, 0.5, 0.0))
    assert (made["wins"], made["ties"], made["losses"]) == tuple(
        int((sign == s).sum()) for s in (1, 0, -1)
    )
    assert made["battles"] == len(margin)
    assert made["rate"] == pytest.approx(outcome.mean(), abs=1e-12)
    assert made["mean_margin"] == pytest.approx(margin.mean(), rel=1e-6)
    for name, values in (("rate_interval", outcome), ("margin_interval", margin)):
        interval = stats.bootstrap(
            (values,),
            np.mean,
            n_resamples=1000,
            method="percentile",
            rng=np.random.default_rng(SEED),
        ).confidence_interval
        assert made[name] == pytest.approx([interval.low, interval.high], rel=1e-6)
    bounds = [0, 100, 300, 10**9]
    for name, low, high in zip(made["buckets"], bounds, bounds[1:], strict=False):
        inside = (lengths[0] >= low) & (lengths[0] < high)
        assert made["buckets"][name]["battles"] == inside.sum()
        rate = made["buckets"][name]["rate"]
        assert rate == (pytest.approx(outcome[inside].mean()) if inside.any() else None)
    x = (lengths[0] - lengths[1]) / np.sqrt(np.mean((lengths[0] - lengths[1]) ** 2.0))

    def loss(v: np.ndarray) -> float:
        z = v[0] + v[1] * x
        fit = outcome * -np.logaddexp(0, -z) + (1 - outcome) * -np.logaddexp(0, z)
        return float(-fit.sum() + v[1] ** 2 / 2)

    best = optimize.minimize(loss, [0.0, 0.0], method="BFGS", options={"gtol": 1e-7})
    assert made["length_controlled_rate"] == pytest.approx(1 / (1 + np.exp(-best.x[0])), abs=1e-5)
    assert made["length_slope"] == pytest.approx(best.x[1], abs=1e-3)
    low, high = made["length_controlled_interval"]
    assert low < made["length_controlled_rate"] < high


def evaluate(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPO / "scripts" / "evaluate.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def candidate_file(path: Path, battles: list[Battle], cut: int) -> Path:
    """A second candidate: the first `cut` characters of either side's answer, the longer one."""
    texts = [max(b.answer, b.opponent_answer, key=len)[:cut] for b in battles]
    rows = [{"id": b.id, "response": text} for b, text in zip(battles, texts, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("scorer", ["length", pytest.param("reward model", marks=pytest.mark.slow)])
def test_command_equals_scipy_on_real_battles(
    tmp_path: Path, battles_file: Path, reward_folder: Path, scorer: str
) -> None:
    battles, left_out = read_battles(battles_file)
    assert (len(battles), left_out) == (993, ["157", "158", "159", "161", "162", "164"])
    if scorer != "length":  # the first 250 are enough of a slow scorer
        rows = battles_file.read_text().splitlines(keepends=True)
        battles_file = tmp_path / "battles.jsonl"
        battles_file.write_text("".join(rows[:250]))
        battles, left_out = read_battles(battles_file)
    files = [candidate_file(tmp_path / f"{cut}.jsonl", battles, cut) for cut in (150, 400)]
    out, cache = tmp_path / "out.json", tmp_path / "scores.jsonl"
    flags = ["--resamples", 1000, "--seed", SEED, "--buckets", 100, 300, "--json", out]
    if scorer != "length":
        flags += ["--reward-model", reward_folder, "--cache", cache]
    command = ["win-rate", "--battles", battles_file, "--answers", *files, *flags]
    done = evaluate(*command)
    assert done.returncode == 0, done.stderr
    made = json.loads(out.read_text())
    sides = [
        [json.loads(line)["response"] for line in file.read_text().splitlines()] for file in files
    ]
    sides.append([battle.opponent_answer for battle in battles])
    lengths = np.array([[len(text) for text in side] for side in sides])
    scores = lengths.astype(float)
    if scorer != "length":
        turns = [[b.turns(text) for b, text in zip(battles, s, strict=True)] for s in sides]
        scores = np.array([own_scores(reward_folder, each) for each in turns])
        ours = np.array([[*row["scores"], row["recorded"]] for row in made["battles"]]).T
        np.testing.assert_allclose(ours, scores, rtol=1e-4, atol=1e-6)
        scores = (
            ours  # equal texts tie to the bit there; a padded batch may differ in the last bits
        )
    for place, candidate in enumerate(made["candidates"]):
        check_against_scipy(candidate, scores[[place, 2]], lengths[[place, 2]])
    test = stats.ttest_rel(scores[0], scores[1])
    assert made["paired_tests"][0]["statistic"] == pytest.approx(test.statistic, rel=1e-6)
    assert made["paired_tests"][0]["p_value"] == pytest.approx(test.pvalue, rel=1e-6)
    assert "independent" in made["assumptions"]
    assert made["left_out"] == {"answer_is_no_text": len(left_out)}
    if scorer != "length":
        before = out.read_bytes(), cache.read_bytes()
        again = evaluate(*command)  # every score is there already
        assert again.returncode == 0, again.stderr
        assert (out.read_bytes(), cache.read_bytes()) == before


def test_recorded_answers_agree_with_voters(battles_file: Path) -> None:
    found = judge(battles_file, [], LengthScorer(), ScoreCache(), Rules(resamples=10))
    battles, _ = read_battles(battles_file)
    decisive = [b for b in battles if b.winner in ("mine", "theirs")]
    agreed = [
        (len(b.answer) - len(b.opponent_answer)) * (1 if b.winner == "mine" else -1)
        for b in decisive
    ]
    assert found.agreement == (sum(x > 0 for x in agreed), len(decisive))
    against = judge(
        battles_file,
        [],
        LengthScorer(),
        ScoreCache(),
        Rules(resamples=10),
    )
    assert against.as_dict() == found.as_dict()  # the seed decides the intervals


def test_an_answer_to_a_battle_that_is_left_out_is_passed_over(tmp_path: Path) -> None:
    path, answers = tmp_path / "b.jsonl", tmp_path / "a.jsonl"
    rows = [battle(id=0), battle(id=1, answer=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers.write_text("".join(f'{{"id": {n}, "response": "abc"}}\n' for n in range(2)))
    found = judge(path, [answers], LengthScorer(), ScoreCache(), Rules(resamples=10))
    assert (found.ids, found.left_out) == (["0"], {"answer_is_no_text": 1})


def test_ties_are_counted_apart_and_half_a_win() -> None:
    found = win_rate([1, 2, 3, 3], [1, 1, 1, 4], [5, 5, 5, 5], [5, 5, 5, 5], resamples=50).total
    assert (found.wins, found.ties, found.losses, found.rate) == (2, 1, 1, 0.625)
    same = win_rate([1, 1], [1, 1], [3, 9], [3, 9], resamples=50)
    assert (same.total.rate, same.length_controlled_rate, same.rate_interval) == (
        0.5,
        0.5,
        (0.5, 0.5),
    )
    won = win_rate([2, 2], [1, 1], [3, 9], [1, 1], resamples=50)
    assert (won.total.rate, won.length_controlled_rate) == (1.0, 1.0)


def test_length_control_takes_out_what_length_bought() -> None:
    rng = np.random.default_rng(0)
    longer = rng.normal(300, 300, 20_000)
    chance = 1 / (1 + np.exp(-(-0.4 + 0.004 * longer)))
    outcome = (rng.random(len(longer)) < chance).astype(float)
    rate, slope = length_controlled(outcome, longer)
    assert outcome.mean() > 0.6
    assert rate == pytest.approx(1 / (1 + np.exp(0.4)), abs=0.02)
    assert slope > 0
    assert length_controlled(outcome, np.zeros(len(outcome)))[0] == pytest.approx(outcome.mean())
    assert length_controlled(outcome, np.ones(len(outcome))) is None


def test_paired_tests_without_spread() -> None:
    same = paired_t([1.5, 2.5, 1.5], [1.5, 2.5, 1.5])
    assert (same.p_value, same.statistic, same.difference) == (1.0, None, 0.0)
    assert "no difference" in same.verdict
    shifted = paired_t([1.1, 2.1, 3.1, 0.3], [1.0, 2.0, 3.0, 0.2])
    assert (shifted.test, shifted.p_value, shifted.statistic) == ("sign test", 0.125, None)
    some = paired_t([1, 2, 3, 5], [1, 1, 1, 1])
    assert some.p_value == pytest.approx(stats.ttest_rel([1, 2, 3, 5], [1, 1, 1, 1]).pvalue)
    assert "few items" in some.verdict
    none = mcnemar([True, False], [True, False])
    assert (none.p_value, none.verdict.startswith("no difference")) == (1.0, True)
    few = mcnemar([True] * 8 + [False] * 2, [False] * 6 + [True] * 4)
    assert few.p_value == pytest.approx(stats.binomtest(6, 8).pvalue)
    with pytest.raises(UserError, match="two lists of one length"):
        paired_t([1.0], [2.0])
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


class Counting(LengthScorer):
    """Stops after so many scores."""

    def __init__(self, most: int) -> None:
        self.left, self.done = most, 0

    def score(self, turns: Any) -> float:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left, self.done = self.left - 1, self.done + 1
        return super().score(turns)


def test_scores_resume_where_they_stopped(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    turns = [[{"role": "assistant", "content": "x" * n}] for n in (1, 2, 3, 2, 4)]
    with pytest.raises(KeyboardInterrupt):
        score_all(Counting(2), turns, ScoreCache(path))
    with path.open("ab") as file:
        file.write(b'{"key": "cut of')
    rest = Counting(9)
    assert score_all(rest, turns, ScoreCache(path)) == [1, 2, 3, 2, 4]
    assert rest.done == 2
    assert len(path.read_text().splitlines()) == 4  # one text, one score
    other = Counting(9)
    other.name = "another scorer"
    score_all(other, turns, ScoreCache(path))
    assert other.done == 4


def test_a_reward_model_that_scores_nothing_is_refused(tmp_path: Path, reward_folder: Path) -> None:
    scorer = RewardModel(reward_folder)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the " * 5000}]
    with pytest.raises(UserError, match="1 of 1 conversations have more tokens"):
        score_all(scorer, [turns], ScoreCache())
    assert scorer.name == RewardModel(reward_folder).name
    for change, said in (
        ({"id2label": {"0": "a", "1": "b"}}, "2 outputs, expected 1"),
        ({"num_hidden_layers": 2}, "tensors are missing"),
    ):
        folder = tmp_path / said[:1]
        folder.mkdir()
        for file in reward_folder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=said):
            RewardModel(folder)
    with pytest.raises(UserError, match=r"no config\.json"):
        RewardModel(tmp_path)


def battle(**changes: Any) -> dict[str, Any]:
    row = {
        "id": 1,
        "messages": [{"role": "user", "content": "q"}],
        "answer": "a",
        "opponent_answer": "b",
        "winner": "mine",
    }
    return {**row, **changes}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (battle(winner="me"), "\"winner\" is 'me', expected one of mine"),
        (battle(id=None), '"id" is None'),
        (battle(messages=[]), "b.jsonl:2"),
        (battle(messages=[{"role": "assistant", "content": "q"}]), "no user's turn before"),
        (battle(id="0"), "found id 0 again"),
        ({"id": 2, "winner": "tie"}, 'found no "messages"'),
        (
            {"id": 2, "winner": "tie", "conversation_a": [], "conversation_b": []},
            "conversation_a does not end",
        ),
    ],
)
def test_bad_battles(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps(battle(id=0)) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(UserError, match=said):
        read_battles(path)


def test_command_refuses_in_one_line(tmp_path: Path) -> None:
    path, answers = tmp_path / "b.jsonl", tmp_path / "a.jsonl"
    path.write_text(json.dumps(battle()) + "\n")
    answers.write_text('{"id": 2, "response": "x"}\n')
    for flags, said in (
        (["--answers", answers], "found key 2, expected a key of the battles"),
        (["--against", "answer"], "can only be measured against opponents"),
        (["--json", tmp_path / "no" / "x.json"], "folder that exists"),
        (["--buckets", "5", "2"], "expected rising numbers"),
    ):
        done = evaluate("win-rate", "--battles", path, *flags)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert said in done.stderr


def test_the_voters_winner_may_be_the_one_to_beat(tmp_path: Path) -> None:
    path, answers = tmp_path / "b.jsonl", tmp_path / "a.jsonl"
    rows = [battle(id=n, winner=w) for n, w in enumerate(("mine", "theirs", "tie", "both_bad"))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers.write_text("".join(f'{{"id": {n}, "response": "abc"}}\n' for n in range(4)))
    rules = Rules(against="winner", resamples=10)
    found = judge(path, [answers], LengthScorer(), ScoreCache(), rules)
    assert (found.left_out, found.ids) == ({"no_winner": 2}, ["0", "1"])
    assert found.candidates[0].result.total.wins == 2


def test_a_reward_model_without_transformers_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="pip install transformers"):
        RewardModel(tmp_path)

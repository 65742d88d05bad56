"""The embedded default: whole, honest, and not to be passed by a constant answer."""

import hashlib
import itertools
import json
import threading
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from hymoe.engine import demo
from hymoe.engine import recipe as recipes
from hymoe.engine.data.chat import render_prompt
from hymoe.engine.data.formats import Message, read_questions, read_rows
from hymoe.engine.data.prepare import prepare_jsonl
from hymoe.engine.data.tokenizer import Tokenizer
from hymoe.engine.errors import UserError
from hymoe.engine.eval.checks import check
from hymoe.engine.eval.instruct import read_prompts, score
from hymoe.engine.generate import generate, stop_ids
from hymoe.engine.hf_checkpoint import load_pretrained
from hymoe.model.cost import count_parameters


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "demo"
    assert demo.ensure_demo(path)
    return path


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def test_base_is_a_checkpoint_with_every_layer_kind(folder: Path) -> None:
    base = folder / "base"
    lm = load_pretrained(base)
    assert set(lm.config.pattern) == set("ME*-")
    assert 0.5e6 < count_parameters(lm.config).total < 2e6
    assert len(list(base.glob("*.safetensors"))) >= 2
    tokenizer = Tokenizer(base)
    assert lm.config.vocab_size == tokenizer.vocab_size
    assert stop_ids(base, tokenizer) == {tokenizer.im_end}


def test_transformers_loads_the_base_and_its_tokenizer(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = folder / "base"
    twin, info = AutoModelForCausalLM.from_pretrained(base, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    theirs, ours = AutoTokenizer.from_pretrained(base), Tokenizer(base)
    messages = [{"role": "user", "content": "JSON list: river, lamp"}]
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == render_prompt([Message(**message) for message in messages], ours)
    lm = load_pretrained(base)
    with torch.no_grad():
        hidden = lm(torch.tensor(ids), torch.tensor([0, len(ids)], dtype=torch.int32))
        expected = twin.eval()(torch.tensor([ids])).logits[0]
        assert torch.allclose(lm.logits(hidden), expected, atol=1e-5 * float(expected.norm()))


def test_every_kept_answer_passes_its_check_and_no_prompt_leaks(folder: Path) -> None:
    prompts = read_prompts(folder / "prompts.jsonl")
    evaluated = {prompt.prompt for prompt in prompts}
    texts = {}
    for name in ("train.jsonl", "heldout.jsonl"):
        rows = list(read_rows(folder / name))
        texts[name] = {row.messages[0].content for row in rows}
        assert not texts[name] & evaluated
    assert not texts["train.jsonl"] & texts["heldout.jsonl"]
    assert len(evaluated) == len(prompts) == 6 * demo.PROMPTS_A_KIND
    # The same prompts are what generate.py reads.
    assert [str(q.id) for q in read_questions(folder / "prompts.jsonl")] == [p.key for p in prompts]
    for example in itertools.islice(demo.examples(5), 300):
        verdict = check(example.instruction_id, example.answer, example.arguments)
        assert verdict.passed, verdict.reason


def test_every_word_is_one_token(folder: Path) -> None:
    tokenizer = Tokenizer(folder / "base")
    for word in demo.WORDS:
        for spelled in (word, word.upper()):
            assert len(tokenizer.encode(spelled)) == 1
            assert tokenizer.encode(f'["{spelled}"]')[1] == tokenizer.encode(spelled)[0]


def test_no_constant_answer_passes_a_tenth_of_a_kind(folder: Path) -> None:
    """Searched over every answer that is right for some prompt, and over short texts made of the words."""
    prompts = read_prompts(folder / "prompts.jsonl")
    by_kind = defaultdict(list)
    for prompt in prompts:
        by_kind[prompt.instruction_ids[0]].append(prompt)
    assert len(by_kind) == 6
    right = [example.answer for part in demo.demo_data()[:2] for example in part]
    more = [example.answer for example in itertools.islice(demo.examples(11), 1200)]
    plain = [
        "",
        "[]",
        "{}",
        "-",
        "- ",
        ", ",
        "yes",
        '""',
        " ".join(demo.WORDS),
        ", ".join(demo.WORDS),
    ]
    single = [
        form for word in demo.WORDS for form in (word, word.upper(), f"- {word}", f'["{word}"]')
    ]
    pairs = [", ".join(pair) for pair in itertools.permutations(demo.WORDS, 2)]
    for answer in {*right, *more, *plain, *single, *pairs}:
        for kind, asked in by_kind.items():
            passed = sum(check(kind, answer, prompt.arguments[0]).passed for prompt in asked)
            assert passed < 0.1 * len(asked), (kind, answer, passed)


def test_the_base_passes_nearly_nothing(folder: Path) -> None:
    base = folder / "base"
    tokenizer, lm = Tokenizer(base), load_pretrained(base)
    prompts = read_prompts(folder / "prompts.jsonl")[::8]
    ids = [render_prompt([Message("user", prompt.prompt)], tokenizer) for prompt in prompts]
    found = generate(lm, ids, max_new_tokens=8, stop_ids=stop_ids(base, tokenizer))
    answers = {p.key: tokenizer.decode(a.ids) for p, a in zip(prompts, found, strict=True)}
    assert score(prompts, answers).prompts.strict < 0.05 * len(prompts)


def test_recipe_reads_about_what_the_file_has(folder: Path) -> None:
    recipe = recipes.load(folder / "recipe.toml")
    assert recipe.model.path == str(folder / "base")
    for ranks in (1, 2, 4):
        recipes.check(recipe, ranks)
    rows, stats = prepare_jsonl(
        recipe.data.path, Tokenizer(recipe.model.path), recipe.data.seq_len, 0
    )
    assert not stats.dropped
    assert (
        0.8 < recipe.train.steps * recipe.train.step_tokens / (len(rows) * recipe.data.seq_len) < 2
    )


def test_the_same_bytes_each_time_and_nothing_left_behind(folder: Path) -> None:
    before = digests(folder)
    assert not demo.ensure_demo(folder)
    (folder / demo.STAMP).write_text("of another version")
    (folder / "train.jsonl").write_text("old")
    assert demo.ensure_demo(folder)
    assert digests(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == ["demo"]


def test_other_files_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(UserError, match="other files"):
        demo.ensure_demo(tmp_path)
    assert (tmp_path / "mine.txt").is_file()


def test_other_ranks_wait_for_rank_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "FOLDER", tmp_path / "demo")
    with pytest.raises(UserError, match="rank 0 did not make it"):
        demo.demo_recipe(1, wait_s=0.0)
    found: list[recipes.Recipe] = []
    waiting = threading.Thread(target=lambda: found.append(demo.demo_recipe(1)))
    waiting.start()
    made = demo.demo_recipe(0)
    waiting.join(60)
    assert found == [made]
    assert json.loads((tmp_path / "demo" / demo.STAMP).read_text())

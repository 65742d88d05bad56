"""From a file of prompts to a file of answers: what is rendered, what is refused, and what an interruption leaves."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hymoe.engine import answers
from hymoe.engine.answers import Task, answer_prompts, render_questions
from hymoe.engine.data.chat import CHAT_TEMPLATE
from hymoe.engine.data.formats import read_questions
from hymoe.engine.data.tokenizer import Tokenizer, train_tokenizer
from hymoe.engine.errors import UserError
from hymoe.engine.generate import generate
from hymoe.engine.hf_checkpoint import save_pretrained
from hymoe.engine.sampling import Sampling
from tests.tiny import tiny_lm

WORDS = ["one", "two", "three", "four", "five", "six", "seven"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "hf"
    trained = folder.with_name("tokenizer.json")
    train_tokenizer(["user\n", "assistant\n", "system\n", "be kind", " ".join(WORDS)] * 2, trained)
    size = Tokenizer(trained).vocab_size
    save_pretrained(tiny_lm(4, vocab_size=size, eos_token_id=2, initializer_range=0.3), folder)
    trained.rename(folder / "tokenizer.json")
    return folder


@pytest.fixture
def task(model_folder: Path, tmp_path: Path) -> Task:
    rows = [{"id": i, "prompt": " ".join(WORDS[: i + 1])} for i in range(len(WORDS))]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Task(
        model=model_folder,
        prompts=tmp_path / "p.jsonl",
        out=tmp_path / "a.jsonl",
        sampling=Sampling(temperature=0.8, seed=3),
        max_new_tokens=6,
        batch=2,
    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(task: Task) -> tuple[list[dict[str, Any]], list[str]]:
    said: list[str] = []
    answer_prompts(task, said.append)
    left = {path.name for path in task.out.parent.iterdir()}
    assert not [name for name in left if name.startswith(".")], left
    return rows_of(task.out), said


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts each call of `generate` was given."""
    counts: list[int] = []

    def counted(lm: Any, prompts: Any, **options: Any) -> Any:
        counts.append(len(prompts))
        return generate(lm, prompts, **options)

    monkeypatch.setattr(answers, "generate", counted)
    return counts


def interrupt(task: Task, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs until some answers are written; then the process is gone."""
    real = answers.AnswersFile.add
    written = 0

    def add(self: Any, row: dict[str, Any]) -> None:
        nonlocal written
        if written == after:
            raise KeyboardInterrupt
        written += 1
        real(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(answers.AnswersFile, "add", add)
        with pytest.raises(KeyboardInterrupt):
            answer_prompts(task, print)


def test_an_interrupted_file_is_continued(
    task: Task, generated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a line that was cut off, once and again; the draws are those of an unbroken run."""
    whole = replace(task, out=task.out.with_name("whole.jsonl"))
    expected, said = run(whole)
    assert [row["id"] for row in expected] == list(range(7))
    assert len({row["response"] for row in expected}) > 3
    assert not said
    interrupt(task, 2, monkeypatch)
    assert len(rows_of(task.out)) == 2
    with task.out.open("a") as file:
        file.write('{"id": 0, "response": "on')
    interrupt(task, 3, monkeypatch)
    assert len(rows_of(task.out)) == 5
    found, said = run(task)
    assert generated == [7, 7, 5, 2]
    assert said == [f"{task.out}: continues, 5 of 7 answers are there"]
    assert found == expected
    assert task.out.read_bytes() == whole.out.read_bytes()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_new_tokens": 7}, "max_new_tokens"),
        ({"sampling": Sampling(temperature=0.8, seed=4)}, "seed"),
        ({"sampling": Sampling(repetition_penalty=1.1)}, "temperature and seed and repetition"),
        ({"system_prompt": "be kind"}, "prompts"),
    ],
)
def test_other_settings_do_not_mix(
    task: Task, change: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(task, 2, monkeypatch)
    before = task.out.read_bytes()
    if "system_prompt" in change:
        (task.out.parent / "s.txt").write_text(change["system_prompt"])
        change = {"system_prompt": task.out.parent / "s.txt"}
    other = replace(task, **change)
    with pytest.raises(UserError, match=f"a.jsonl: has 2 of 7 answers made with another {named}"):
        answer_prompts(other, print)
    assert task.out.read_bytes() == before
    found, _ = run(replace(other, overwrite=True))
    assert len(found) == 7


def test_a_whole_file_is_replaced_and_a_part_of_one_kept(task: Task, generated: list[int]) -> None:
    first, _ = run(task)
    again, said = run(replace(task, max_new_tokens=2))
    assert generated == [7, 7]
    assert not said
    assert again != first
    kept = [{"id": 5, "response": "mine"}, {"id": "1", "response": "mine too"}]
    task.out.write_text("".join(json.dumps(row) + "\n" for row in kept))
    found, _ = run(task)
    assert generated[2:] == [5]
    assert found == [first[0], kept[1], *first[2:5], kept[0], first[6]]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"id": 99, "response": "a"}\n', "a.jsonl:1: found .*99"),
        ('{"id": 1, "response": "a"}\n{"id": 1, "response": "a"}\n', "a.jsonl:2: .* each once"),
        ('{"id": 1}\n', "a.jsonl:1: .*expected id and response"),
        ('{"id": 1, "resp\n{"id": 2, "response": "a"}\n', "a.jsonl:1: .*JSON"),
    ],
)
def test_other_files_are_not_touched(task: Task, content: str, said: str) -> None:
    task.out.write_text(content)
    with pytest.raises(UserError, match=said):
        answer_prompts(task, print)
    assert task.out.read_text() == content


def test_long_prompts_are_refused_or_cut(task: Task) -> None:
    tokenizer = Tokenizer(task.model)
    questions = list(read_questions(task.prompts))
    rendered = render_questions(questions, task, tokenizer)
    limit = len(rendered[4])
    limited = replace(task, max_prompt_tokens=limit)
    with pytest.raises(UserError, match=rf"prompt 5 has {limit + 2} tokens, .* \(so have 2 of 7\)"):
        answer_prompts(limited, print)
    assert not task.out.exists()
    prompts, cut = answers.fit(questions, rendered, replace(limited, too_long="cut"))
    assert cut == 2
    assert prompts[:5] == rendered[:5]
    assert prompts[6] == rendered[6][-limit:]
    _, said = run(replace(limited, too_long="cut"))
    assert said == [f"2 of 7 prompts lost their beginning: more than {limit} tokens"]


def texts(task: Task) -> list[str]:
    tokenizer = Tokenizer(task.model)
    found = render_questions(list(read_questions(task.prompts)), task, tokenizer)
    return [tokenizer.decode(ids) for ids in found]


def test_system_prompts(task: Task, tmp_path: Path) -> None:
    ask = {"role": "user", "content": "one"}
    own = {"role": "system", "content": "two"}
    rows = [{"id": 1, "messages": [own, ask]}, {"id": 2, "prompt": "one"}]
    task.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    system = "<|im_start|>system\n{}<|im_end|>\n".format
    assert texts(task) == [system("two") + asked, asked]
    (tmp_path / "s.txt").write_text("three\n")
    told = replace(task, system_prompt=tmp_path / "s.txt")
    assert texts(told) == [system("three") + asked] * 2
    assert texts(replace(told, system="fill")) == [system("two") + asked, system("three") + asked]
    with pytest.raises(UserError, match=r"no\.txt: cannot be read"):
        texts(replace(task, system_prompt=tmp_path / "no.txt"))


def test_chat_templates(task: Task, tmp_path: Path) -> None:
    """ChatML as Jinja gives the built-in one's ids; another template its own; what it refuses is refused by name."""
    for name, source in {
        "same": CHAT_TEMPLATE,
        "other": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}",
        "strict": "{{ raise_exception('no') }}",
    }.items():
        (tmp_path / f"{name}.jinja").write_text(source)
    choose = lambda name: replace(task, chat_template=str(tmp_path / f"{name}.jinja"))  # noqa: E731
    tokenizer, questions = Tokenizer(task.model), list(read_questions(task.prompts))
    assert render_questions(questions, choose("same"), tokenizer) == render_questions(
        questions, task, tokenizer
    )
    assert texts(choose("other"))[1] == "[user]one two<|im_start|>"
    with pytest.raises(UserError, match=r"prompt 0: .*no"):
        texts(choose("strict"))
    with pytest.raises(UserError, match="no chat_template"):
        texts(replace(task, chat_template="base"))
    # A control token that a user spells stays text.
    task.prompts.write_text(json.dumps({"id": 1, "prompt": "<|im_end|>"}))
    for chosen in (task, choose("same"), choose("other")):
        ids = render_questions(list(read_questions(task.prompts)), chosen, tokenizer)[0]
        assert ids.count(tokenizer.im_end) == (0 if chosen.chat_template.endswith("r.jinja") else 1)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: replace(t, out=t.out.parent / "no" / "a.jsonl"), "expected a file in a folder"),
        (lambda t: replace(t, out=t.out.parent), "expected a file in a folder"),
        (lambda t: replace(t, max_new_tokens=0), "max_new_tokens = 0"),
        (lambda t: replace(t, batch=0), "batch = 0"),
        (lambda t: replace(t, max_prompt_tokens=0), "max_prompt_tokens = 0"),
        (lambda t: replace(t, model=t.out.parent), r"tokenizer\.json"),
    ],
)
def test_bad_input_leaves_nothing(task: Task, spoil: Callable[[Task], Task], said: str) -> None:
    before = sorted(task.out.parent.iterdir())
    with pytest.raises(UserError, match=said):
        answer_prompts(spoil(task), print)
    assert sorted(task.out.parent.iterdir()) == before

"""Prompts with constraints: honest sentences, drawn the same each time, no prompt twice, keys that follow the text."""

import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hymoe.engine.data.formats import read_questions
from hymoe.engine.data.schema import Message
from hymoe.engine.errors import UserError
from hymoe.engine.eval.asking import CLOSED, solved
from hymoe.engine.eval.checks import CHECKS, check
from hymoe.engine.eval.instruct import read_prompts
from hymoe.engine.eval.synthesize import Wanted, prompts, write_prompts
from hymoe.engine.eval.tasks import built_in, of_user
from hymoe.engine.eval.together import go_together


def test_every_kind_is_asked_for_and_says_its_arguments() -> None:
    """All 25 of IFEval are among them; whatever a check needs to know stands in the prompt."""
    made = list(prompts(Wanted(count=1500, seed=random.randrange(1 << 30))))
    counts = Counter(asked.id for one in made for asked in one.asked)
    assert set(counts) == set(CHECKS)
    assert min(counts.values()) > 10
    for one in made:
        assert all(asked.sentence in one.text for asked in one.asked)
        for asked in one.asked:
            for name, value in asked.arguments.items():
                if name in ("language", "nth_paragraph"):
                    continue
                for text in value if isinstance(value, list) else [value]:
                    assert str(text) in one.text, (asked, one.text)
        kinds = [asked.id for asked in one.asked]
        assert len(set(kinds)) == len(kinds) <= 3
        assert all(go_together(*pair) for pair in itertools.combinations(kinds, 2))


def test_exact_counts_say_how_is_counted() -> None:
    kinds = ("count", "words:count", "substrings:count")
    for made in prompts(Wanted(count=40, kinds=kinds, fewest=1, most=1)):
        (asked,) = made.asked
        told = {"count:words": "a word is", "count:sentences": "a sentence ends with"}
        assert told.get(asked.id, "upper or lower case does not matter") in made.text, made.text


@pytest.mark.parametrize("kind", sorted(CLOSED))
def test_closed_prompts_have_the_answer_that_passes(kind: str) -> None:
    for made in prompts(
        Wanted(count=50, seed=random.randrange(1 << 30), kinds=(kind,), fewest=1, most=1)
    ):
        (asked,) = made.asked
        answer = solved(kind, asked.arguments)
        assert check(kind, answer, asked.arguments).passed
        assert not check(kind, answer + " x", asked.arguments).passed
        assert made.text == asked.sentence


def test_the_seed_decides_and_no_prompt_comes_twice(tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.jsonl" for n in range(3)]
    for path, seed in zip(paths, (7, 7, 8), strict=True):
        write_prompts(Wanted(count=300, seed=seed), path)
    first, again, other = (path.read_bytes() for path in paths)
    assert first == again != other
    rows = [json.loads(line) for line in first.splitlines()]
    assert len({row["key"] for row in rows}) == len({row["prompt"] for row in rows}) == 300
    # The files are what the other commands read, as they are.
    asked = read_prompts(paths[0])
    assert [prompt.key for prompt in asked] == [row["key"] for row in rows]
    questions = list(read_questions(paths[0]))
    assert [question.id for question in questions] == [row["key"] for row in rows]
    assert [question.messages[-1].content for question in questions] == [
        row["prompt"] for row in rows
    ]


def test_keys_and_groups_follow_the_text_alone(tmp_path: Path) -> None:
    """Whatever seed made it, the same prompt has the same key, and the same request the same group."""
    tasks = built_in()
    texts: dict[str, set[str]] = {}
    groups: dict[str, set[str]] = {}
    for seed in range(4):
        path = tmp_path / f"{seed}.jsonl"
        write_prompts(
            Wanted(count=400, seed=seed, kinds=("case:upper", "case:lower", "punctuation"), most=1),
            path,
        )
        for line in path.read_text().splitlines():
            row = json.loads(line)
            texts.setdefault(row["prompt"], set()).add(row["key"])
            request = next(task.text for task in tasks if row["prompt"].startswith(task.text))
            groups.setdefault(request, set()).add(row["group"])
    assert len(texts) < 1600  # some came from two seeds
    assert {len(keys) for keys in texts.values()} == {len(keys) for keys in groups.values()} == {1}
    assert len({key for keys in texts.values() for key in keys}) == len(texts)


def test_the_users_prompts_get_constraints(tmp_path: Path) -> None:
    seeds = tmp_path / "mine.jsonl"
    rows: list[dict[str, Any]] = [
        {"id": 1, "prompt": "Is the harbour of Valletta older than that of Marseille?"},
        {
            "id": "b",
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
                {"role": "user", "content": "Tell me about volcanic islands"},
            ],
        },
        {"id": "c", "prompt": "Erz\u00e4hle von der Nordsee"},
    ]
    seeds.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.jsonl"
    write_prompts(Wanted(seeds=seeds, seed=3, fewest=1, most=2), out)
    made = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["seed_id"] for row in made] == ["1", "b", "c"]
    assert {row["source"] for row in made} == {"seed"}
    assert [m["content"] for m in made[1]["messages"][:3]] == ["Be kind.", "Hi", "Hello"]
    assert made[1]["messages"][-1]["content"] == made[1]["prompt"]
    assert made[1]["prompt"].startswith("Tell me about volcanic islands")
    write_prompts(
        Wanted(seeds=seeds, seed=3, count=300, kinds=("keywords", "detectable_format")), out
    )
    made = [json.loads(line) for line in out.read_text().splitlines()]
    assert Counter(row["seed_id"] for row in made) == {"1": 100, "b": 100, "c": 100}
    # Yes, no or maybe is asked for where it is an answer.
    chosen = {
        row["seed_id"]
        for row in made
        if "detectable_format:constrained_response" in row["instruction_id_list"]
    }
    assert chosen == {"1"}
    wanted = {
        w
        for row in made
        for k in row["kwargs"]
        for w in k.get("keywords", [])
        if row["seed_id"] == "b"
    }
    assert {"volcanic", "islands"} <= wanted


def test_words_of_the_users_prompts() -> None:
    task = of_user(
        [Message("user", "Why would those Rivers of rivers flow there, and what about lakes?")], 1
    )
    assert task.words == ("rivers", "flow", "lakes")
    assert not task.is_yes_no
    assert of_user([Message("user", "Is it far?")], 1).is_yes_no
    assert not of_user([Message("user", "Is it far? How far?")], 1).is_yes_no


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kinds": ("nix",)}, "--kinds nix: found no such kind or family"),
        ({"count": 0}, "--count 0: expected 1 or more"),
        ({"count": None}, "--count is missing"),
        ({"fewest": 3, "most": 1}, "--constraints 3-1"),
        ({"fewest": 0}, "--constraints 0-3"),
        ({"kinds": ("case",), "fewest": 2}, "found only 0 different prompts .* that go together"),
        ({"kinds": ("json:list",), "fewest": 2}, "json:list: is a whole prompt by itself"),
        ({"kinds": ("words:repeated",), "count": 2000}, r"found only \d+ different prompts"),
        ({"seeds": Path("absent.jsonl")}, r"absent\.jsonl: no such file"),
        ({"words": Path("absent.txt")}, r"absent\.txt: cannot be read"),
    ],
)
def test_what_cannot_be_made(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        write_prompts(Wanted(**{"count": 10, **changes}), tmp_path / "out.jsonl")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('"case:upper" = ["Laut!"]', None),
        ('"count:words" = ["Genau {num_words} W\u00f6rter."]', None),
        (
            '"count:words" = ["Genau so viele."]',
            r"'count:words': 'Genau so viele\.': expected \{num_words\}",
        ),
        ('"count:words" = ["{num_words} {x}"]', r"expected \{num_words\}"),
        ('"count:words" = ["{num_words"]', "is no wording"),
        ('"count:words" = "{num_words}"', "expected a list of texts"),
        ('"count:words" = []', "expected a list of texts"),
        ('"nix" = ["x"]', "'nix' is unknown"),
    ],
)
def test_wordings_of_the_user(tmp_path: Path, content: str, said: str | None) -> None:
    path = tmp_path / "wordings.toml"
    path.write_text(content, encoding="utf-8")
    wanted = Wanted(count=30, wordings=path, kinds=("count:words", "case:upper"))
    if said is not None:
        with pytest.raises(UserError, match=said):
            list(prompts(wanted))
        return
    text = re.search(r'\["(\w+)', content).group(1)
    assert sum(text in made.text for made in prompts(wanted)) >= 10


def test_lists_are_made_of_the_users_words(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("Zug\n\nHafen\nAmt\nAmt\nOrt A\nWeg\n", encoding="utf-8")
    wanted = Wanted(count=20, words=path, kinds=("list:reversed",))
    with pytest.raises(UserError, match="found 5 different items, expected 6 or more"):
        list(prompts(wanted))
    path.write_text(path.read_text() + "Tor\n")
    used = {item for made in prompts(wanted) for item in made.asked[0].arguments["items"]}
    assert used == {"Zug", "Hafen", "Amt", "Ort A", "Weg", "Tor"}
    path.write_text(path.read_text() + "a, b\n")
    with pytest.raises(UserError, match="'a, b', expected items without commas"):
        list(prompts(wanted))

"""From a mixture's recipe to packed rows: counts, repeats, the same bytes on any number of workers."""

import json
import random
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hymoe.engine.data.loader import Loader
from hymoe.engine.data.mixture import load_mixture
from hymoe.engine.data.pipeline import prepare
from hymoe.engine.data.render import Renderer, Rules
from hymoe.engine.data.schema import Conversation, LeftOut, Message
from hymoe.engine.data.store import PackedRows, read_manifest
from hymoe.engine.data.tokenizer import Tokenizer
from hymoe.engine.errors import UserError

REPO = Path(__file__).resolve().parents[2]
WORDS = ("one", "two", "three", "four", "hi", "there")


def turns(random_: random.Random, longest: int = 12) -> list[dict[str, str]]:
    text = lambda: " ".join(random_.choices(WORDS, k=random_.randint(1, longest)))  # noqa: E731
    return [
        {"role": role, "content": text()}
        for _ in range(random_.randint(1, 3))
        for role in ("user", "assistant")
    ]


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def chats(path: Path, number: int, seed: int, **more) -> None:
    random_ = random.Random(seed)
    write_jsonl(path, [{"messages": turns(random_), "n": i, **more} for i in range(number)])


def mixture(folder: Path, tokenizer_file: Path, sources: str, **top: object) -> Path:
    shutil.copy(tokenizer_file, folder / "tokenizer.json")
    lines = {
        "seq_len": 128,
        "seed": 7,
        "tokenizer": "tokenizer.json",
        "chat_template": "chatml",
        **top,
    }
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items())
    path = folder / "mixture.toml"
    path.write_text(text + sources)
    return path


def made(path: Path, out: str = "packed", workers: int = 1) -> dict:
    return prepare(load_mixture(path), None, path.parent / out, workers, lambda line: None)


def conversations(folder: Path, tokenizer: Tokenizer) -> list[str]:
    """The text of every packed document."""
    rows, found = PackedRows(folder), []
    for i in range(len(rows)):
        ids, _, cu_seqlens = rows[i]
        found += [
            tokenizer.decode(ids[a:b]) for a, b in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)
        ]
    return found


def test_all_of_a_source_comes_once(
    tmp_path: Path, tokenizer_file: Path, tokenizer: Tokenizer
) -> None:
    chats(tmp_path / "a.jsonl", 50, 1)
    path = mixture(tmp_path, tokenizer_file, '[[source]]\nname = "a"\npath = "a.jsonl"\n')
    manifest = made(path)
    rows = [
        json.loads(line)["messages"] for line in (tmp_path / "a.jsonl").read_text().splitlines()
    ]
    want = sorted(
        "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in row) for row in rows
    )
    assert sorted(conversations(tmp_path / "packed", tokenizer)) == want
    (stats,) = manifest["sources"]
    assert (stats["rows_read"], stats["rows_taken"], stats["conversations"]) == (50, 50, 50)
    assert stats["tokens"] == manifest["tokens"]
    assert stats["supervised_tokens"] == manifest["supervised_tokens"]
    assert PackedRows(tmp_path / "packed").verify() == []


@pytest.mark.parametrize(
    ("amount", "repeat", "most", "total"),
    [
        ("count = 20", 1, 1, 20),
        ("count = 120", 1, 3, 120),  # twice everything, and 20 once more
        ("fraction = 0.5", 1, 1, 25),
        ("fraction = 1", 2, 2, 100),
        ("", 3, 3, 150),
        ("count = 10", 60, 60, 600),
    ],
)
def test_amounts(
    tmp_path: Path, tokenizer_file: Path, tokenizer: Tokenizer,
    amount: str, repeat: int, most: int, total: int,
) -> None:  # fmt: skip
    random_ = random.Random(3)
    rows = [{"messages": [{"role": "user", "content": f"{i} {random_.random()}"},
                          {"role": "assistant", "content": "hi"}]} for i in range(50)]  # fmt: skip
    write_jsonl(tmp_path / "a.jsonl", rows)
    source = f'[[source]]\nname = "a"\npath = "a.jsonl"\n{amount}\nrepeat = {repeat}\n'
    manifest = made(mixture(tmp_path, tokenizer_file, source))
    found = conversations(tmp_path / "packed", tokenizer)
    assert manifest["sources"][0]["conversations"] == len(found) == total
    counts = {text: found.count(text) for text in set(found)}
    assert max(counts.values()) == most
    assert min(counts.values()) >= most - 1 or repeat > 1
    assert min(counts.values()) >= repeat


def test_unusable_rows_are_replaced_counted_and_named(tmp_path: Path, tokenizer_file: Path) -> None:
    good = [{"messages": turns(random.Random(i))} for i in range(30)]
    bad = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]}
    ] * 30
    write_jsonl(tmp_path / "a.jsonl", [row for pair in zip(good, bad, strict=True) for row in pair])
    path = mixture(
        tmp_path, tokenizer_file, '[[source]]\nname = "a"\npath = "a.jsonl"\ncount = 25\n'
    )
    (stats,) = made(path)["sources"]
    assert stats["rows_taken"] == stats["conversations"] == 25
    assert stats["dropped"] == {"empty_assistant": stats["rows_read"] - 25}
    assert 25 < stats["rows_read"] <= 60


def test_an_empty_source_is_an_error_not_somebody_elses_rows(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    bad = {"messages": [{"role": "user", "content": "-"}, {"role": "assistant", "content": "x"}]}
    for order in (("a", "b", "c"), ("c", "b", "a"), ("b", "c", "a")):
        folder = tmp_path / "".join(order)
        chats(folder / "a.jsonl", 2, 1)
        chats(folder / "b.jsonl", 1, 2)
        write_jsonl(folder / "c.jsonl", [bad, bad])
        sources = "".join(
            f'[[source]]\nname = "{n}"\npath = "{n}.jsonl"\ncount = 5\n' for n in order
        )
        with pytest.raises(
            UserError, match=r"source c \(c.jsonl\): none of 2 rows is usable \(2 empty_user\)"
        ):
            made(mixture(folder, tokenizer_file, sources))
        assert not list(folder.glob("packed*"))


def test_workers_and_runs_give_the_same_bytes(tmp_path: Path, tokenizer_file: Path) -> None:
    chats(tmp_path / "a" / "1.jsonl", 700, 1)
    chats(tmp_path / "a" / "2.jsonl", 300, 2)
    table = pa.Table.from_pylist([{"messages": turns(random.Random(i))} for i in range(90)])
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=20)
    a = '[[source]]\nname = "a"\npath = "a"\ncount = 400\n'
    sources = a + '[[source]]\nname = "b"\npath = "b.parquet"\nrepeat = 2\n'
    path = mixture(tmp_path, tokenizer_file, sources, deduplicate=True)
    first, second = made(path, "one"), made(path, "two", workers=2)
    assert first["dataset_sha256"] == second["dataset_sha256"]
    files = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "two").iterdir())
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), (
            name
        )
    other = mixture(tmp_path, tokenizer_file, sources, seed=8, deduplicate=True)
    assert made(other, "three")["dataset_sha256"] != first["dataset_sha256"]


def test_duplicates_across_sources_come_once(tmp_path: Path, tokenizer_file: Path) -> None:
    chats(tmp_path / "a.jsonl", 20, 1)
    rows = (tmp_path / "a.jsonl").read_text().splitlines()
    extra = [json.dumps({"messages": turns(random.Random(99 + i), 40)}) for i in range(5)]
    (tmp_path / "b.jsonl").write_text("\n".join(rows[:10] + extra + extra))
    sources = "".join(f'[[source]]\nname = "{n}"\npath = "{n}.jsonl"\n' for n in "ab")
    _, b = made(mixture(tmp_path, tokenizer_file, sources, seq_len=1024, deduplicate=True))[
        "sources"
    ]
    assert b["rows_taken"] == 5
    assert b["dropped"] == {"duplicate": 15}


def test_a_holdout_splits_by_id_and_covers_everything(
    tmp_path: Path, tokenizer_file: Path, tokenizer: Tokenizer
) -> None:
    rows = [
        {"id": f"b{i}", "messages": [{"role": "user", "content": f"question {i}"}], "answer": f"mine {i}",
         "opponent_answer": f"theirs {i}", "winner": ("mine", "theirs", "tie", "both_bad")[i % 4]}
        for i in range(80)
    ]  # fmt: skip
    write_jsonl(tmp_path / "b.jsonl", rows)
    found = {}
    for part in ("train", "heldout"):
        source = f'[[source]]\nname = "b"\npath = "b.jsonl"\nholdout = 0.3\npart = "{part}"\n'
        stats = made(mixture(tmp_path, tokenizer_file, source), part)["sources"][0]
        found[part] = set(conversations(tmp_path / part, tokenizer))
        assert stats["dropped"]["tie"] == stats["dropped"]["both_bad"] == 20
    assert not found["train"] & found["heldout"]
    assert len(found["train"] | found["heldout"]) == 40
    assert len(found["heldout"]) in range(5, 20)
    for text in found["train"] | found["heldout"]:
        number = int(text.split("question ")[1].split("<")[0])
        assert (("mine", "theirs")[number % 4] + f" {number}<") in text


def renderer(
    tokenizer_file: Path, seq_len: int, too_long: str, prompt: str | None = None
) -> Renderer:
    return Renderer(Rules(tokenizer_file, "chatml", tokenizer_file, prompt, seq_len, too_long))


def talk(*sizes: int) -> Conversation:
    """User and assistant in turn, each of so many words."""
    roles = ("user", "assistant")
    return Conversation(
        tuple(Message(roles[i % 2], " ".join(["one"] * n)) for i, n in enumerate(sizes))
    )


def test_too_long(tokenizer_file: Path) -> None:
    whole = renderer(tokenizer_file, 10_000, "drop")
    conversation = talk(3, 3, 3, 30)
    ids, trained = whole.documents(conversation).parts[0]
    first_end = renderer(tokenizer_file, 10_000, "drop").rendered(conversation).turn_ends[0]
    limit = first_end + 15
    with pytest.raises(LeftOut, match="too_long"):
        renderer(tokenizer_file, limit, "drop").documents(conversation)
    for how, end in (("cut", limit), ("cut_turn", first_end)):
        ((found, on),) = renderer(tokenizer_file, limit, how).documents(conversation).parts
        assert found.tolist() == ids[:end].tolist()
        assert on.tolist() == trained[:end].tolist()
    windows = renderer(tokenizer_file, limit, "windows").documents(conversation).parts
    assert [token for part, _ in windows for token in part.tolist()] == ids.tolist()
    assert all(on[1:].any() and len(part) <= limit for part, on in windows)


@pytest.mark.parametrize("too_long", ["cut", "cut_turn"])
def test_a_cut_never_leaves_a_row_without_an_answer(tokenizer_file: Path, too_long: str) -> None:
    with pytest.raises(LeftOut, match="no_supervised_token"):
        renderer(tokenizer_file, 64, too_long).documents(talk(200, 5))


def test_windows_without_an_answer_are_left_out(tokenizer_file: Path) -> None:
    (only,) = renderer(tokenizer_file, 64, "windows").documents(talk(200, 5)).parts
    assert only[1][1:].any()


@pytest.mark.parametrize(
    ("how", "own", "with_none"),
    [("keep", "own", None), ("fill", "own", "P"), ("replace", "P", "P"), ("remove", None, None)],
)
def test_system_prompts(
    tokenizer_file: Path, tokenizer: Tokenizer, how: str, own, with_none
) -> None:
    one = renderer(tokenizer_file, 1000, "drop", "P")
    plain = talk(1, 1)
    for messages, want in (
        ((Message("system", "own"), *plain.messages), own),
        (plain.messages, with_none),
    ):
        text = tokenizer.decode(one.rendered(Conversation(messages), how).ids)
        head = "" if want is None else f"<|im_start|>system\n{want}<|im_end|>\n"
        assert text.startswith(head + "<|im_start|>user")


BAD_RECIPES = {
    "no-source": ("", r"found no \[\[source\]\]"),
    "key": ('[[source]]\nname="a"\npath="a.jsonl"\ncont=1\n', r"a: cont is unknown; did you mean count\?"),
    "both": ('[[source]]\nname="a"\npath="a.jsonl"\ncount=1\nfraction=0.5\n', "has both count and fraction"),
    "float-count": ('[[source]]\nname="a"\npath="a.jsonl"\ncount=1.0\n', r"count = 1.0; expected int"),
    "fraction": ('[[source]]\nname="a"\npath="a.jsonl"\nfraction=5\n', r"fraction = 5.0, expected more than 0"),
    "twice": ('[[source]]\nname="a"\npath="a.jsonl"\n' * 2, r"the name 'a' occurs 2 times"),
    "no-file": ('[[source]]\nname="a"\npath="b.jsonl"\n', r"b.jsonl: no such file"),
    "no-prompt": ('[[source]]\nname="a"\npath="a.jsonl"\nsystem="fill"\n', "'fill', but there is no system_prompt"),
    "where": ('[[source]]\nname="a"\npath="a.jsonl"\nwhere={scor="1"}\n', r"where.scor: found no such column"),
    "format": ('[[source]]\nname="a"\npath="a.jsonl"\nformat="parket"\n', "parket"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_RECIPES)
def test_a_wrong_recipe_is_refused(tmp_path: Path, tokenizer_file: Path, case: str) -> None:
    chats(tmp_path / "a.jsonl", 3, 1)
    sources, message = BAD_RECIPES[case]
    with pytest.raises(UserError, match=message):
        made(mixture(tmp_path, tokenizer_file, sources))
    assert not list(tmp_path.glob("packed*"))


def test_a_broken_row_stops_or_is_counted(tmp_path: Path, tokenizer_file: Path) -> None:
    chats(tmp_path / "a.jsonl", 3, 1)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"messages": [\n')
    sources = '[[source]]\nname="a"\npath="a.jsonl"\n'
    with pytest.raises(UserError, match=r"a.jsonl:4: found no valid JSON"):
        made(mixture(tmp_path, tokenizer_file, sources), workers=2)
    manifest = made(mixture(tmp_path, tokenizer_file, sources, broken="drop"))
    assert manifest["sources"][0]["dropped"] == {"broken": 1}


@pytest.mark.slow
def test_the_reference_mixture(tmp_path: Path, tokenizer_file: Path) -> None:
    """Every source of the reference job in its own schema, few rows each: the recipe's counts are kept to the row."""
    shutil.copy(REPO / "scripts" / "recipes" / "reference_mixture.toml", tmp_path / "mixture.toml")
    (tmp_path / "system_prompt.txt").write_text("Be there.\n")
    base = tmp_path / "base"
    base.mkdir()
    shutil.copy(tokenizer_file, base / "tokenizer.json")
    text = lambda i, n=3: f"{i} " + " ".join(random.Random(i).choices(WORDS, k=n))  # noqa: E731

    def pair(i: int) -> list[dict[str, str]]:
        return [
            {"content": text(i), "role": "user"},
            {"content": text(-i), "role": "assistant"},
        ]

    rows = {
        "verified_instructions": lambda i: {"id": f"v{i}", "prompt": text(i), "messages": pair(i),
                                            "constraints": ["x"]},
        "human_feedback": lambda i: {"id": f"b{i}", "messages": pair(i)[:1], "answer": text(i), "opponent_answer": "no",
                                     "winner": "mine"},
        "tulu3": lambda i: {"id": f"t{i}", "messages": pair(100 + i), "source": "a"},
        "ultrachat": lambda i: {"prompt": text(i), "prompt_id": "p", "messages": pair(200 + i)},
        "nemotron_chat": lambda i: {"uuid": f"u{i}", "license": "x", "generator": "g", "version": "1",
                                    "category": "chat",
                                    "reasoning": "off", "messages": [m | {"tool_calls": []} for m in pair(300 + i)],
                                    "metadata": "{}"},
        "magpie": lambda i: {"conversations": [{"from": "human", "value": text(400 + i)},
                                               {"from": "gpt", "value": "hi"}], "uuid": f"m{i}"},
        "smoltalk": lambda i: {"messages": [{"content": "own", "role": "system"}, *pair(500 + i)], "source": "s"},
        "numina": lambda i: {"source": "c", "problem": text(600 + i), "solution": "one", "messages": pair(600 + i)},
        "code": lambda i: {"id": f"c{i}", "input": text(700 + i), "output": text(i), "domain": "d",
                           "generation_algorithm": "g", "llm_judgement": "{}", "unit_tests": "[]",
                           "tests_execution_status": "[]", "average_test_score": "1" if i % 2 else "0.5"},
    }  # fmt: skip
    for name, row in rows.items():
        table = pa.Table.from_pylist([row(i) for i in range(1, 41)])
        (tmp_path / name).mkdir()
        pq.write_table(table, tmp_path / name / "train.parquet")
    manifest = prepare(
        load_mixture(tmp_path / "mixture.toml"), base, tmp_path / "packed", 1, lambda line: None
    )
    counts = {s["name"]: s["conversations"] for s in manifest["sources"]}
    human = counts.pop("human_feedback")
    assert counts == {
        "verified_instructions": 15000, "tulu3": 40000, "ultrachat": 25000, "nemotron_chat": 15000, "magpie": 15000,
        "smoltalk": 15000, "numina": 8000, "code": 5000,
    }  # fmt: skip
    assert human % 60 == 0
    assert manifest["packing_efficiency"] > 0.98
    rows_ = PackedRows(tmp_path / "packed")
    assert rows_.verify() == []
    tokenizer = Tokenizer(tokenizer_file)
    ids, _, cu_seqlens = rows_[0]
    starts = [tokenizer.decode(ids[a : a + 12]) for a in cu_seqlens[:-1]]
    assert all(start.startswith("<|im_start|>system\nBe there.<|im_end|>\n") for start in starts)
    assert read_manifest(tmp_path / "packed") == manifest


def test_the_loop_counts_what_the_manifest_says(tmp_path: Path, tokenizer_file: Path) -> None:
    """On 4 ranks up to the middle of an epoch, then on 2: every row once an epoch, and the manifest's counts."""
    chats(tmp_path / "a.jsonl", 300, 1)
    path = mixture(tmp_path, tokenizer_file, '[[source]]\nname = "a"\npath = "a.jsonl"\n')
    manifest = made(path)
    rows = PackedRows(tmp_path / "packed")
    per_step = 4
    steps, left = divmod(len(rows), per_step)
    assert steps > 3
    seen, supervised = [], 0
    for n in range(steps):
        world = 4 if n < steps // 2 else 2
        loaders = [Loader(rows, per_step * 128, 128, 128, rank, world, 7) for rank in range(world)]
        seen += loaders[0].row_indices(n)
        supervised += sum(
            int((batch.labels != -100).sum())
            for loader in loaders
            for batch in loader.step(n).micro_batches
        )
    last = loaders[0].row_indices(steps)[:left]
    assert sorted(seen + last) == list(range(len(rows)))
    assert supervised + sum(map(rows.supervised_tokens, last)) == manifest["supervised_tokens"]

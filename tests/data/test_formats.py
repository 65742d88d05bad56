import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from hymoe.engine.data.formats import (
    PAIRS,
    read_jsonl,
    read_questions,
    read_rows,
    recognise,
)
from hymoe.engine.data.schema import Conversation, Message, split_position
from hymoe.engine.errors import UserError
from tests.data.chat_rows import CALL, SPOKEN, TURNS, A, Q, assistant, parse

GOOD = b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}'


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_mark_blank_lines_line_ends_and_a_broken_row(tmp_path: Path) -> None:
    broken = b'{"messages": [\n'
    content = b"\xef\xbb\xbf" + GOOD + b"\n" + broken + b"\n" + GOOD + b"\r\n \r\n" + GOOD
    path = write(tmp_path / "data.jsonl", content)
    with pytest.raises(UserError, match=r"data\.jsonl:2: found no valid JSON"):
        list(read_rows(path))
    skipped: list[UserError] = []
    rows = list(read_rows(path, skipped.append))
    assert [row.where.rpartition(":")[2] for row in rows] == ["1", "4", "6"]
    assert [[m.content for m in row.messages] for row in rows] == [["q", "a"]] * 3
    assert len(skipped) == 1
    assert "data.jsonl:2" in str(skipped[0])


def test_text_is_kept_as_it_is(tmp_path: Path) -> None:
    text = " \u2028 line\u2029 \x85 caf\u00e9\r\n\ttab \U0001f600 "
    row = {"messages": [{"role": "user", "content": text}]}
    for ascii_ in (True, False):
        path = tmp_path / "data.jsonl"
        path.write_text(json.dumps(row, ensure_ascii=ascii_), encoding="utf-8", newline="\n")
        (found,) = read_rows(path)
        assert found.messages[0].content == text


def test_rows_are_streamed(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", GOOD + b"\n" + b"broken")
    rows = read_rows(path)
    assert next(rows).messages[1].content == "a"
    with pytest.raises(UserError, match=":2: "):
        next(rows)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (b"[1]", "expected a JSON object"),
        (b'"text"', "expected a JSON object"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"{}", 'found no keys, expected "messages"'),
        (b'{"text": "x", "id": 1}', 'found id, text, expected "messages"'),
        (b'{"messages": null}', '"messages" is null'),
        (b'{"messages": []}', r'"messages" is \[\]'),
        (b'{"messages": "hi"}', '"messages" is "hi"'),
        (b'{"messages": ["hi"]}', r'"messages"\[0\] is "hi"'),
        (b'{"messages": [{"role": "user"}]}', r'"messages"\[0\] has no content'),
        (b'{"messages": [{"content": "x"}]}', r'"messages"\[0\] has no role'),
        (
            b'{"messages": [{"role": "narrator", "content": "x"}]}',
            'role "narrator", expected one of',
        ),
        (b'{"messages": [{"role": ["user"], "content": "x"}]}', r'role \["user"\]'),
        (b'{"messages": [{"role": "user", "content": 3}]}', "content 3, expected text"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        (b'{"messages": [{"role": "tool", "content": "x"}]}', "has tools"),
        (
            b'{"messages": [{"role": "assistant", "content": "", "reasoning_content": "x"}]}',
            r'"messages"\[0\] has a reasoning field',
        ),
        (
            b'{"messages": [{"role": "assistant", "content": "x", "loss_weight": 0.5}]}',
            '"loss_weight" 0.5, expected 0 or 1',
        ),
    ],
)
def test_bad_rows_name_file_line_and_what_was_found(tmp_path: Path, row: bytes, said: str) -> None:
    path = write(tmp_path / "data.jsonl", GOOD + b"\n\n" + row + b"\n")
    with pytest.raises(UserError, match=rf"data\.jsonl:3.*{said}") as caught:
        list(read_rows(path))
    assert "\n" not in str(caught.value)


def test_null_content_is_no_text(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", GOOD.replace(b'"a"', b"null"))
    (row,) = read_rows(path)
    assert row.messages[1].content is None


@pytest.mark.parametrize("content", [b"", b"\n\r\n  \n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_empty_file(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UserError, match=r"data\.jsonl: found no rows"):
        list(read_jsonl(write(tmp_path / "data.jsonl", content)))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UserError, match="no such file"):
            list(read_jsonl(path))


def test_questions(tmp_path: Path) -> None:
    rows = [
        {
            "id": "a",
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
        },
        {"key": 7, "prompt": "p", "instruction_id_list": []},
    ]
    path = write(tmp_path / "p.jsonl", "\n".join(map(json.dumps, rows)).encode())
    first, second = read_questions(path)
    assert (first.id, [m.role for m in first.messages]) == ("a", ["system", "user"])
    assert (second.id, [(m.role, m.content) for m in second.messages]) == (7, [("user", "p")])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "p"}, '"id" is null'),
        ({"id": "a"}, "neither"),
        ({"id": "a", "prompt": "p", "messages": []}, "both"),
        ({"id": "a", "prompt": None}, "no text of a user"),
        ({"id": "a", "prompt": 3}, "content 3"),
        ({"id": "a", "messages": [{"role": "assistant", "content": "x"}]}, "no text of a user"),
        ({"id": "0", "prompt": "p"}, "id 0 again"),
    ],
)
def test_bad_questions(tmp_path: Path, row: dict[str, object], said: str) -> None:
    rows = [{"id": 0, "prompt": "p"}, row]
    path = write(tmp_path / "p.jsonl", "\n".join(map(json.dumps, rows)).encode())
    with pytest.raises(UserError, match=rf"p\.jsonl:2.*{said}"):
        list(read_questions(path))


@pytest.mark.parametrize(
    ("record", "name", "expected"),
    [
        ({"messages": TURNS}, "messages", [Q, A]),
        ({"messages": SPOKEN}, "messages", [Q, A]),
        ({"messages": TURNS, "prompt": "p", "problem": "x", "solution": "y"}, "messages", [Q, A]),
        ({"conversations": SPOKEN}, "sharegpt", [Q, A]),
        ({"conversations": TURNS, "instruction": "i", "response": "r"}, "sharegpt", [Q, A]),
        ({"conversation": TURNS}, "sharegpt", [Q, A]),
        (
            {"conversations": SPOKEN, "system": "s", "tools": ""},
            "sharegpt",
            [Message("system", "s"), Q, A],
        ),
        ({"instruction": "q", "output": "a"}, "instruction", [Q, A]),
        ({"instruction": "q", "input": "", "output": "a"}, "instruction", [Q, A]),
        (
            {"instruction": "q ", "input": " x\n", "response": "a"},
            "instruction",
            [Message("user", "q \n\n x\n"), A],
        ),
        (
            {"instruction": "q", "context": "x", "response": "a", "category": "c"},
            "instruction",
            [Message("user", "q\n\nx"), A],
        ),
        (
            {"instruction": "q", "instances": [{"input": "x", "output": "a"}]},
            "instruction",
            [Message("user", "q\n\nx"), A],
        ),
        (
            {"instruction": "q", "input": None, "output": "a", "history": [["h", "b"]]},
            "instruction",
            [Message("user", "h"), Message("assistant", "b"), Q, A],
        ),
        *(({prompt: "q", answer: "a"}, "prompt_response", [Q, A]) for prompt, answer in PAIRS),
        (
            {"prompt": [*TURNS, TURNS[0]], "completion": [TURNS[1]]},
            "prompt_response",
            [Q, Message("assistant", "a", train=False), Q, A],
        ),
        (
            {"messages": TURNS[:1], "answer": "a", "opponent_answer": "b", "winner": "mine"},
            "battles",
            [Q, A],
        ),
        (
            {"messages": TURNS[:1], "answer": "b", "opponent_answer": "a", "winner": "theirs"},
            "battles",
            [Q, A],
        ),
        (
            {
                "messages": [*TURNS, TURNS[0]],
                "answer": "a",
                "opponent_answer": "b",
                "winner": "mine",
            },
            "battles",
            [Q, Message("assistant", "a", train=False), Q, A],
        ),
        (
            {"conversation_a": TURNS[:1], "conversation_b": TURNS, "winner": "model_b"},
            "arena",
            [Q, A],
        ),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preference", [Q, A]),
        ({"conversations": SPOKEN[:1], "chosen": SPOKEN[1], "rejected": {}}, "preference", [Q, A]),
        ({"prompt": "q", "chosen": TURNS, "rejected": [], "messages": TURNS}, "preference", [Q, A]),
        (
            {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
            "preference",
            [Q, A],
        ),
    ],
)
def test_formats(record: dict[str, Any], name: str, expected: list[Message]) -> None:
    format_ = recognise(record)
    assert format_.name == name
    assert pickle.loads(pickle.dumps(format_)) == format_
    found = format_.parse(record, "f:1")
    assert isinstance(found, Conversation)
    assert list(found.messages) == expected
    # What it says it reads is enough, and a named format is the same.
    part = {column: record[column] for column in format_.columns}
    assert recognise(part).parse(part, "f:1") == found
    assert parse(record, name) == found
    assert all(message.train is None for message in found.messages[-1:])


def test_what_stands_beside_the_turns() -> None:
    record = {"messages": TURNS, "id": 7, "source": None, "category": "math", "tree_id": "t"}
    assert parse(record) == Conversation((Q, A), source="math", id="7", group="t")
    battle = {"id": "b", "messages": TURNS[:1], "answer": "a", "opponent_answer": "", "tools": None}
    found = parse({**battle, "winner": "mine"})
    assert found == Conversation((Q, A), id="b", group="b")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"winner": "tie", "answer": "a", "opponent_answer": "b", "messages": TURNS}, "tie"),
        ({"winner": "both_bad", "answer": "", "opponent_answer": "", "prompt": "q"}, "both_bad"),
        ({"winner": "tie (bothbad)", "conversation_a": [], "conversation_b": []}, "both_bad"),
        ({"prompt": "q", "completion": "a", "label": False}, "label_false"),
        ({"messages": TURNS, "kto_tag": False}, "label_false"),
        ({"messages": TURNS, "images": ["x.png"]}, "not_text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "not_text"),
        ({"instruction": "q", "instances": [{"output": "a"}] * 2}, "several_instances"),
        ({"instruction": "q", "instances": []}, "no_instances"),
        ({"messages": TURNS, "tools": '[{"name": "f"}]'}, "tools"),
        ({"messages": TURNS, "metadata": '{"tools": [{"name": "f"}]}'}, "tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tools"),
        ({"conversations": [{"from": "function_call", "value": "{}"}]}, "tools"),
        (assistant(tool_calls=[CALL]), "tools"),
        (assistant(function_call={"name": "f"}), "tools"),
    ],
)
def test_rows_left_out(record: dict[str, Any], reason: str) -> None:
    assert parse(record) == reason


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"conversations": "x"}, '"conversations" is "x", expected a list'),
        ({"conversations": []}, r'"conversations" is \[\]'),
        ({"conversations": [{"value": "x"}]}, r'"conversations"\[0\] has no role'),
        ({"conversations": [{"from": "human"}]}, r'"conversations"\[0\] has no content'),
        ({"messages": [{"role": None, "content": "x"}]}, "role null, expected one of system"),
        ({"messages": [{"role": "user", "content": b"x"}]}, "expected text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "part 0 has text null"),
        ({"messages": [{"role": "user", "content": [1]}]}, "part 0 is 1, expected an object"),
        ({"messages": TURNS, "system": 3}, '"system" is 3, expected text'),
        (
            {"messages": [{"role": "system", "content": "s"}], "system": "t"},
            '"system" and a system turn differ',
        ),
        ({"messages": TURNS, "tools": "f"}, '"tools" is "f", expected tool definitions as JSON'),
        ({"messages": TURNS, "tools": [1]}, r'"tools" is \[1\], expected a list of tool'),
        ({"messages": TURNS, "id": "\ud800"}, '"id" has half a surrogate pair'),
        ({"prompt": 3, "response": "a"}, '"prompt" has content 3, expected text'),
        ({"instruction": "q", "input": 3, "output": "a"}, '"input" is 3, expected text'),
        ({"instruction": "q", "instances": [{}]}, "has no output"),
        ({"instruction": "q", "output": "a", "history": [["h"]]}, "expected pairs"),
        (
            {"winner": "me", "answer": "a", "opponent_answer": "b", "messages": TURNS},
            '"winner" is "me", expected one of mine',
        ),
        ({"chosen": "a", "rejected": "b"}, "expected a context in one of messages"),
        (assistant(weight=0.5), '"weight" 0.5, expected 0 or 1'),
        (assistant(train="yes"), '"train" "yes", expected true or false'),
        (assistant(train=True, weight=0), '"weight" 0, expected what its others say'),
        (assistant(train_detail=[{"begin": 0}]), '"train_detail"'),
        (
            {"messages": [{"role": "user", "content": "q", "weight": 1}]},
            "to train on a turn of user",
        ),
        (assistant(reasoning_content=3), "has reasoning 3, expected text"),
    ],
)
def test_malformed_rows(record: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"^f:1: .*{said}") as caught:
        parse(record)
    assert "\n" not in str(caught.value)


def test_a_row_without_the_columns_of_its_source() -> None:
    with pytest.raises(UserError, match='f:1: found prompt, text, expected "messages"'):
        recognise(["messages"]).parse({"text": "x", "prompt": "p"}, "f:1")


def test_unknown_columns_and_names() -> None:
    with pytest.raises(UserError, match=r"^s: found columns text, n, expected .*messages"):
        recognise(["text", "n"], where="s")
    with pytest.raises(UserError, match=r"columns messages, .* such as sharegpt \(conversations\)"):
        recognise(["messages"], "sharegpt")
    with pytest.raises(UserError, match=r"'mesages', expected one of auto, .*mean messages\?"):
        recognise(["messages"], "mesages")


def test_split_positions_are_uniform_and_stay_where_they_are() -> None:
    ids = [f"battle-{i}" for i in range(20_000)]
    at = [split_position(id_, 4242) for id_ in ids]
    assert all(0 <= x < 1 for x in at)
    for share in (0.05, 0.28, 0.5, 0.9):
        assert abs(sum(x < share for x in at) / len(at) - share) < 0.015
    assert at == [split_position(id_, 4242) for id_ in ids]
    other = [split_position(id_, 4243) for id_ in ids]
    both = sum(x < 0.5 and y < 0.5 for x, y in zip(at, other, strict=True)) / len(at)
    assert abs(both - 0.25) < 0.02
    # Pinned: a new version must not move rows from one side to the other.
    assert split_position("battle-0", 4242) == 0.9757561340256133
    assert split_position("caf\u00e9 \U0001f600", -1) != split_position("cafe", -1)

"""One turn after another: roles, parts, flags, tools, reasoning; and rows of any kind at random."""

import json
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest

from hymoe.engine.data.formats import parse_messages
from hymoe.engine.data.schema import ROLES, Conversation, Message
from hymoe.engine.errors import UserError
from tests.data.chat_rows import CALL, SPOKEN, TURNS, A, Q, Turn, assistant, messages, parse


@pytest.mark.parametrize(
    ("turn", "train"),
    [
        ({}, None),
        ({"train": None, "loss_weight": None, "weight": None}, None),
        ({"train": False}, False),
        ({"train": True}, True),
        ({"loss_weight": 0.0}, False),
        ({"loss_weight": 1.0, "weight": 1, "train": True}, True),
        ({"weight": 0}, False),
    ],
)
def test_flags_of_a_turn(turn: Turn, train: bool | None) -> None:
    assert messages(assistant(**turn)) == [Q, Message("assistant", "a", train)]
    spoken = {"conversations": [SPOKEN[0], {**SPOKEN[1], **turn}]}
    assert messages(spoken) == [Q, Message("assistant", "a", train)]


def test_parts_are_joined_as_they_are() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "value": "\r\n b"}, "c"]
    assert messages(assistant(content=parts))[1] == Message("assistant", "a \r\n bc")


def test_names_of_roles() -> None:
    turns = [{"from": x, "value": x} for x in ("developer", "Human", "bot", " USER ", "model")]
    roles = [message.role for message in messages({"conversations": turns})]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    turns = [{"from": "customer", "value": "q"}, {"from": "bot", "value": "a"}]
    own = {"customer": "user"}
    assert messages({"conversations": turns}, roles=own) == [Q, A]
    with pytest.raises(UserError, match='role "customer"'):
        parse({"conversations": turns})
    with pytest.raises(UserError, match=r"roles\.customer = 'client', expected one of system"):
        parse({"conversations": turns}, roles={"customer": "client"})


def test_tools_that_are_kept() -> None:
    spoken = [
        SPOKEN[0],
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "r"},
        SPOKEN[1],
    ]
    turns = [
        TURNS[0],
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "content": "r", "tool_call_id": "c", "name": "f"},
        {**TURNS[1], "tool_calls": []},
    ]
    tools = [{"name": "f", "parameters": {}}]
    found = parse({"conversations": spoken, "tools": json.dumps(tools)}, tools="keep")
    call = Message("assistant", "", None, {"tool_calls": [CALL]})
    assert found == Conversation((Q, call, Message("tool", "r"), A), tools=tuple(tools))
    found = parse({"messages": turns, "metadata": json.dumps({"tools": tools})}, tools="keep")
    call = Message("assistant", "", None, {"tool_calls": [{"id": "c", **CALL}]})
    result = Message("tool", "r", None, {"tool_call_id": "c", "name": "f"})
    assert found == Conversation((Q, call, result, A), tools=tuple(tools))
    for record in ({"conversations": spoken}, {"messages": turns}):
        assert parse(record) == "tools"
        with pytest.raises(UserError, match="has tools, expected none"):
            parse(record, tools="refuse")
    for arguments in ("{x: 1}", "[1]", "1"):
        broken = assistant(tool_calls=[{"function": {"name": "f", "arguments": arguments}}])
        assert parse(broken, tools="keep") == "tool_arguments"
    with pytest.raises(UserError, match=r"tool call .*, expected a function with its name"):
        parse(assistant(tool_calls=[{"function": {}}]), tools="keep")
    with pytest.raises(UserError, match="tools = 'some', expected one of keep, drop, refuse"):
        parse(assistant(), tools="some")


@pytest.mark.parametrize(
    ("content", "stripped", "dropped"),
    [
        ("a", "a", "a"),
        ("<think>r</think>a", "a", "reasoning"),
        ("<think>\nr\n</think>\n\n  a ", "  a ", "reasoning"),
        ("\n<think>r</think> a", "a", "reasoning"),
        ("r</think>\na", "a", "reasoning"),
        ("<think></think>a", "a", "a"),
        ("<think>\n\n</think>\n\na", "a", "a"),
        ("<think></think><think>r</think>a", "a", "reasoning"),
        ("<think>r", "unclosed_reasoning", "unclosed_reasoning"),
        ("the tag <think>x</think>", "the tag <think>x</think>", "the tag <think>x</think>"),
        ("<think>r</think>", "", "reasoning"),
    ],
)
def test_reasoning_in_text(content: str, stripped: str, dropped: str) -> None:
    def answer(rule: str) -> str | None:
        found = parse(assistant(content=content), reasoning=rule)
        return found if isinstance(found, str) else found.messages[1].content

    assert [answer(rule) for rule in ("keep", "strip", "drop")] == [content, stripped, dropped]
    user = {"messages": [{"role": "user", "content": content}]}
    for rule in ("keep", "strip", "drop"):
        assert messages(user, reasoning=rule) == [Message("user", content)]
    with pytest.raises(UserError, match="reasoning = 'fold', expected one of keep, strip, drop"):
        parse(user, reasoning="fold")


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_fields(key: str) -> None:
    record = assistant(**{key: "r"})
    kept = Message("assistant", "a", None, {"reasoning_content": "r"})
    assert messages(record) == [Q, kept]
    assert messages(assistant(content=[{"type": key, "value": "r"}, "a"])) == [Q, kept]
    assert messages(record, reasoning="strip") == [Q, A]
    assert parse(record, reasoning="drop") == "reasoning"
    for nothing in (None, "", " \n"):
        assert messages(assistant(**{key: nothing}), reasoning="drop") == [Q, A]


def test_strict_turns_know_the_same_roles_and_parts() -> None:
    turns = [{"role": "human", "content": [{"type": "text", "text": "q"}]}, TURNS[1]]
    assert parse_messages({"messages": turns}, "f:1") == (Q, A)


TEXTS = (
    "",
    " ",
    "-",
    "a",
    "q\r\n",
    "<think>r</think>a",
    "<|im_end|>",
    "\ud800",
    "\U0001f600",
    "x" * 999,
)
KEYS = (
    *("role", "from", "content", "value", "train", "weight", "loss_weight", "tool_calls", "name"),
    *("reasoning", "thinking", "type", "text", "function", "arguments", "function_call", "id"),
)
COLUMNS = (
    *("messages", "conversations", "system", "tools", "metadata", "prompt", "response", "input"),
    *("output", "instruction", "instances", "history", "answer", "opponent_answer", "winner"),
    *("chosen", "rejected", "conversation_a", "conversation_b", "source", "id", "images", "label"),
)


def random_value(draw: random.Random, depth: int = 0) -> Any:
    """Any JSON, most often close to what belongs there."""
    simple: tuple[Callable[[], Any], ...] = (
        lambda: draw.choice(TEXTS),
        lambda: draw.choice([None, True, False, 0, 1, 0.5, -3, 1e300, float("nan")]),
        lambda: draw.choice(["user", "gpt", "assistant", "tool", "function_call", "mine", "tie"]),
        lambda: draw.choice(["[]", "{", '{"name": "f"}', '[{"name": "f", "arguments": "1"}]']),
    )
    if depth > 3 or draw.random() < 0.4:
        return draw.choice(simple)()
    if draw.random() < 0.5:
        return [random_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {key: random_value(draw, depth + 1) for key in draw.sample(KEYS, draw.randrange(5))}


def random_turn(draw: random.Random) -> Any:
    if draw.random() < 0.01:
        return random_value(draw)
    role = draw.choice(["role", "from"])
    text = draw.choice(["content", "value"])
    turn = {
        role: draw.choice([*ROLES, "human", "gpt", "function_call"]),
        text: draw.choice(TEXTS if draw.random() < 0.1 else TEXTS[:7]),
    }
    for key in draw.sample(KEYS, draw.choice([0] * 8 + [1, 2])):
        turn[key] = random_value(draw, 2)
    return turn


def random_record(draw: random.Random) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for column in draw.sample(COLUMNS, draw.randrange(1, 6)):
        if draw.random() < 0.9 and column in ("messages", "conversations", "chosen", "prompt"):
            record[column] = [random_turn(draw) for _ in range(draw.randrange(1, 5))]
        else:
            record[column] = random_value(draw, draw.randrange(4))
    return record


def test_random_rows_are_a_conversation_a_reason_or_a_user_error() -> None:
    draw = random.Random(0)
    kinds = {"conversation": 0, "reason": 0, "error": 0}
    for _ in range(20_000):
        record = random_record(draw)
        tools, reasoning = (
            draw.choice(["keep", "drop", "refuse"]),
            draw.choice(["keep", "strip", "drop"]),
        )
        before = json.dumps(record)
        found: Conversation | str | UserError
        try:
            found = parse(record, tools=tools, reasoning=reasoning)
        except UserError as error:
            found = error
        assert json.dumps(record) == before  # rows are not written into
        if isinstance(found, UserError):
            kinds["error"] += 1
            assert "\n" not in str(found)
            assert len(str(found)) < 900
            continue
        if isinstance(found, str):
            kinds["reason"] += 1
            assert found.replace("_", "").isalpha()
            continue
        kinds["conversation"] += 1
        assert found.messages
        for message in found.messages:
            assert message.role in ROLES
            assert message.content is None or isinstance(message.content, str)
            (message.content or "").encode()
            assert message.train is None or (message.role == "assistant")
            json.dumps(dict(message.extra or {}), ensure_ascii=False).encode()
            assert tools == "keep" or (
                message.role != "tool" and "tool_calls" not in (message.extra or {})
            )
        assert tools == "keep" or found.tools is None
        pickle.dumps(found)
    assert min(kinds.values()) > 1000, kinds

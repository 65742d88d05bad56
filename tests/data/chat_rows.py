"""Small chat rows and their parsing, for the tests of formats and turns."""

from typing import Any

from hymoe.engine.data.formats import recognise
from hymoe.engine.data.schema import Conversation, Message

Turn = dict[str, Any]
Q, A = Message("user", "q"), Message("assistant", "a")
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SPOKEN = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def parse(record: dict[str, Any], name: str = "auto", **rules: Any) -> Conversation | str:
    return recognise(record, name).parse(record, "f:1", **rules)


def messages(record: dict[str, Any], **rules: Any) -> list[Message]:
    found = parse(record, **rules)
    assert isinstance(found, Conversation)
    return list(found.messages)


def assistant(**turn: Any) -> dict[str, Any]:
    return {"messages": [TURNS[0], {"role": "assistant", "content": "a", **turn}]}

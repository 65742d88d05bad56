"""What every source of conversations becomes: messages of four roles, and where they come from.

Every format of `formats.py` ends here, and rendering, packing and mixing know nothing else. All of it is plain data
that goes from one process to another.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hymoe.engine.errors import UserError

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn."""

    role: str  # one of ROLES
    content: str | None  # as published, to the byte; None where the file says null
    train: bool | None = (
        None  # of an assistant turn: None as the role says, False context only, True explicit
    )
    extra: Mapping[str, Any] | None = (
        None  # for a template: tool_calls, tool_call_id, name, reasoning_content
    )


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row of a source, ready to be rendered."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = (
        None  # the definitions that the row offers its assistant
    )
    source: str | None = (
        None  # the row's own sub-source: its `source`, `category`, `domain` or `dataset`
    )
    id: str | None = None  # the row's own name
    group: str | None = (
        None  # rows of one group belong on one side of a split: a battle's id, a tree's id
    )


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation that waits for an answer."""

    id: str | int  # as in the file
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation and where it stands."""

    where: str  # "file:line", for messages about it
    messages: tuple[Message, ...]


class LeftOut(Exception):
    """A well-formed row is not trained on; the caller counts the reason."""

    def __init__(self, reason: str, detail: str = "") -> None:
        """Keeps the reason, one word such as "tie"; `detail` is for a person."""
        super().__init__(detail or reason)
        self.reason = reason


def split_position(id: str, seed: int) -> float:
    """Where an id stands in [0, 1) under a seed: those below a share are that share of all ids.

    A keyed hash of the id alone: the side on which a row falls depends neither on the other rows nor on their order,
    and a row that comes twice falls on one side twice. Over n ids the share is met to about `1 / sqrt(4 n)`.
    """
    key = hashlib.blake2b(str(seed).encode(), digest_size=32).digest()
    digest = hashlib.blake2b(id.encode(), digest_size=8, key=key).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53  # 53 bits: exact in a float


def checked_text(text: str, where: str) -> str:
    """The text itself, where it is Unicode that can be encoded.

    Raises:
        UserError: it has half a surrogate pair.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{where} has half a surrogate pair, expected valid Unicode") from error
    return text


def shown(value: Any, limit: int = 40) -> str:
    """A value as JSON on one short line, for a message about it."""
    try:
        text = json.dumps(value, default=repr)
    except (RecursionError, TypeError, ValueError):  # too deep, or keys that JSON has not
        text = f"a {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 3] + "..."

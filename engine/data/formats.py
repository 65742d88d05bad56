"""Chat rows from JSONL files, streamed: one JSON object with `messages` on each line.

A file's fault (bytes that are no UTF-8, a line that is no JSON, a message of the wrong type, an
unknown role) stops the reader with file and line. A row that is well formed but useless (an empty
answer, roles out of order) is not a fault of the file: `chat.drop_reason` names it, and it is
counted.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hymoe.engine.errors import UserError

ROLES = ("system", "user", "assistant")
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn."""

    role: str  # one of ROLES
    content: str | None  # None where the file says null


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


def read_jsonl(
    path: Path | str, on_broken: Callable[[UserError], None] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number from 1, object) for each line that is not blank.

    A byte-order mark at the start, CRLF and a missing last line end are all fine.

    Args:
        path: the file.
        on_broken: called for a line that cannot be read, which is then skipped; None raises it.

    Raises:
        UserError: no such file, a line that is no JSON object, or no line at all.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file, expected JSONL")
    found = False
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(BOM) if number == 1 else line
            if not text.strip():
                continue
            found = True
            try:
                row = _parse_line(text, f"{path}:{number}")
            except UserError as error:
                if on_broken is None:
                    raise
                on_broken(error)
                continue
            yield number, row
    if not found:
        raise UserError(f"{path}: found no rows, expected one JSON object a line")


def read_rows(
    path: Path | str, on_broken: Callable[[UserError], None] | None = None
) -> Iterator[Row]:
    """Yields the conversations of a JSONL file whose rows have `messages`.

    Args:
        path: the file.
        on_broken: called for a row that cannot be read, which is then skipped; None raises it.

    Raises:
        UserError: as `read_jsonl`, or a row without well-formed `messages`.
    """
    for number, content in read_jsonl(path, on_broken):
        where = f"{path}:{number}"
        try:
            row = Row(where, parse_messages(content, where))
        except UserError as error:
            if on_broken is None:
                raise
            on_broken(error)
            continue
        yield row


def read_questions(path: Path | str) -> Iterator[Question]:
    """Yields the prompts of a JSONL file: `id` (or `key`), and `messages` or `prompt`, the user's text.

    Raises:
        UserError: as `read_jsonl`; a row without an id, with one that was there, or without a last user turn with text.
    """
    seen: set[str] = set()
    for number, content in read_jsonl(path):
        where = f"{path}:{number}"
        id_ = content.get("id", content.get("key"))
        if not isinstance(id_, str | int) or isinstance(id_, bool):
            raise UserError(f'{where}: "id" is {_shown(id_)}, expected text or a number')
        if str(id_) in seen:
            raise UserError(f"{where}: found id {id_} again, expected each once")
        seen.add(str(id_))
        if ("messages" in content) == ("prompt" in content):
            raise UserError(
                f'{where}: expected either "messages" or "prompt", found '
                + ("both" if "prompt" in content else "neither")
            )
        if "prompt" in content:
            content = {"messages": [{"role": "user", "content": content["prompt"]}]}
        messages = parse_messages(content, where)
        if messages[-1].role != "user" or any(message.content is None for message in messages):
            raise UserError(
                f"{where}: found no text of a user at the end, expected a turn to answer"
            )
        yield Question(id_, messages)


def parse_messages(content: dict[str, Any], where: str) -> tuple[Message, ...]:
    """Checks and returns the `messages` of one row.

    Raises:
        UserError: the list is absent or empty, or a message is not a role of ROLES with text or
            null.
    """
    if "messages" not in content:
        keys = ", ".join(sorted(content)) or "no keys"
        raise UserError(f'{where}: found {keys}, expected "messages"')
    messages = content["messages"]
    if not isinstance(messages, list) or not messages:
        raise UserError(
            f'{where}: "messages" is {_shown(messages)}, expected a list of role and content'
        )
    return tuple(
        _parse_message(message, f'{where}: "messages"[{i}]') for i, message in enumerate(messages)
    )


def _parse_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise UserError(f"{where} is {_shown(message)}, expected an object with role and content")
    missing = [key for key in ("role", "content") if key not in message]
    if missing:
        raise UserError(f"{where} has no {missing[0]}, expected role and content")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise UserError(f"{where} has role {_shown(role)}, expected one of {', '.join(ROLES)}")
    if content is not None and not isinstance(content, str):
        raise UserError(f"{where} has content {_shown(content)}, expected text")
    try:
        (content or "").encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} has half a surrogate pair, expected valid Unicode") from error
    return Message(role, content)


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: found bytes that are not UTF-8 (byte {error.start}), expected JSONL"
        ) from error
    except ValueError as error:
        raise UserError(f"{where}: found no valid JSON ({error}), expected one object") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: found {_shown(row)}, expected a JSON object")
    return row


def _shown(value: Any, limit: int = 40) -> str:
    text = json.dumps(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."

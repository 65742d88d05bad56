"""Rows of published sets -> conversations, recognised by their columns.

The first line of this table whose columns a source has is its format, unless the recipe names one:

| format | columns | becomes |
|---|---|---|
| battles | `answer`, `opponent_answer`, `winner`, and a context | the context and the winning side's answer |
| arena | `conversation_a`, `conversation_b`, `winner` | the winning side's conversation |
| preference | `chosen`, `rejected`, and a context unless they hold it | the context and the chosen answer |
| messages | `messages` | its turns |
| sharegpt | `conversations` or `conversation` | its turns |
| instruction | `instruction`, and `output`, `response` or `instances` | user and assistant; below |
| prompt_response | the first pair of PAIRS | two turns |

So `messages` wins over the `prompt` of ultrachat and the `problem` of NuminaMath, which say the same again.

**Context** is the first of `messages`, `conversations`, `conversation`, `prompt`, `instruction`, `question`, `problem`.
The assistant's earlier turns in it are context only: nobody judged them. The same holds for a `prompt` that is a list.

**Instruction**: `input` or `context`, where it has text, follows the instruction after an empty line; `history`, pairs
of prompt and answer, comes before. `instances` holds the pairs of input and output of one instruction.

**Left out**, by reason: "tie" and "both_bad" of a battle; "label_false", a row that says it is a bad example by a
`label` or `kto_tag` of false; "not_text", a row with images, audio or video; "several_instances", "no_instances"; and
those of `turns.py`: "tools", "tool_arguments", "reasoning", "unclosed_reasoning". Empty turns and roles out of order
are the renderer's.

**Beside the turns**: `system` or `system_prompt` is a first system turn; `tools` (or `tools` in the JSON text of
`metadata`) defines tools, and an empty list of them is none; `source`, `category`, `domain` or `dataset` is the
sub-source. Columns that are not named here are not read; what they hold is no part of the conversation.

A file's fault (a message of the wrong type, an unknown role) is a `UserError` with file, row and key.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from hymoe.engine.data import turns
from hymoe.engine.data.schema import (
    Conversation,
    LeftOut,
    Message,
    Question,
    Row,
    checked_text,
    shown,
)
from hymoe.engine.data.sources import read_jsonl
from hymoe.engine.data.turns import TurnRules
from hymoe.engine.errors import UserError

PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("problem", "solution"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("input", "output"),
)
TURN_COLUMNS = ("messages", "conversations", "conversation")
CONTEXT_COLUMNS = (*TURN_COLUMNS, "prompt", "instruction", "question", "problem")
INSTRUCTION_ANSWERS = ("output", "response", "instances")
INSTRUCTION_EXTRAS = ("input", "context", "history")
SYSTEM_COLUMNS = ("system", "system_prompt")
SOURCE_COLUMNS = ("source", "category", "domain", "dataset")
ID_COLUMNS = ("id", "uuid", "prompt_id", "conversation_id", "question_id", "leaf_id")
MEDIA_COLUMNS = ("image", "images", "audio", "audios", "video", "videos")
LABEL_COLUMNS = ("label", "kto_tag")
GROUP_COLUMN = "tree_id"  # threads of one tree share their first turns
BESIDE = (
    *SYSTEM_COLUMNS,
    *SOURCE_COLUMNS,
    *ID_COLUMNS,
    *MEDIA_COLUMNS,
    *LABEL_COLUMNS,
    GROUP_COLUMN,
    "tools",
    "metadata",
)
# What a set calls the outcome -> "first" or "second" of its two sides, or the reason to leave the battle out.
WINNERS = {
    "mine": "first",
    "model_a": "first",
    "theirs": "second",
    "model_b": "second",
    "tie": "tie",
    "both_bad": "both_bad",
    "tie (bothbad)": "both_bad",
}
STRICT = turns.make_rules(tools="refuse")


@dataclass(frozen=True, slots=True)
class Format:
    """What the rows of a source hold; it goes to worker processes as it is."""

    name: str
    main: tuple[str, ...]  # the columns by which it was recognised
    columns: tuple[
        str, ...
    ]  # all that it reads, of those the source has: what a Parquet reader has to decode

    def parse(
        self,
        record: Mapping[str, Any],
        where: str,
        *,
        roles: Mapping[str, str] | None = None,
        tools: str = "drop",
        reasoning: str = "keep",
    ) -> Conversation | str:
        """The conversation of a row, or the reason to leave it out, for the caller to count.

        Args:
            record: the row.
            where: file and row, for messages about it.
            roles: the source's own names of roles -> `schema.ROLES` or "tool_call"; see `turns.ROLE_NAMES`.
            tools: "keep", "drop" or "refuse" rows with tool calls, results or definitions; see `turns`.
            reasoning: "keep", "strip" or "drop" what an assistant thought; see `turns`.

        Raises:
            UserError: the row is malformed, or holds what a rule refuses.
        """
        rules = turns.make_rules(roles, tools, reasoning)
        missing = [name for name in self.main if name not in record]
        if missing:
            found = ", ".join(sorted(map(str, record))) or "no keys"
            raise UserError(f'{where}: found {found}, expected "{missing[0]}"')
        try:
            _check_row(record, where)
            tool_list = _tools(record, where, rules)
            conversation = _PARSERS[self.name](self, record, where, rules)
            return _beside(conversation, tool_list, record, where)
        except LeftOut as left_out:
            return left_out.reason


def recognise(columns: Collection[str], name: str = "auto", where: str = "") -> Format:
    """The format of a source.

    Args:
        columns: that its rows have.
        name: "auto", or the format that the recipe names.
        where: the source or row, for a message about it.

    Raises:
        UserError: no such format, or the columns are not those of one.
    """
    if name != "auto" and name not in _COLUMNS:
        near = get_close_matches(name, _COLUMNS, n=1)
        raise UserError(
            f"format = {name!r}, expected one of auto, {', '.join(_COLUMNS)}"
            + (f" (did you mean {near[0]}?)" if near else "")
        )
    format_ = _recognised(tuple(columns), name)  # callers ask for every row
    if format_ is not None:
        return format_
    at = f"{where}: " if where else ""
    found = ", ".join(columns) or "none"
    names = _COLUMNS if name == "auto" else (name,)
    needs = "; ".join(f"{known} ({' + '.join(_COLUMNS[known][0])})" for known in names)
    raise UserError(f"{at}found columns {found}, expected those of a known format, such as {needs}")


@lru_cache(maxsize=256)
def _recognised(columns: tuple[str, ...], name: str) -> Format | None:
    for known in _COLUMNS if name == "auto" else (name,):
        main = next((main for main in _COLUMNS[known] if set(main) <= set(columns)), None)
        if main is not None:
            read = {*main, *BESIDE}
            if known in ("battles", "preference"):
                read |= {*CONTEXT_COLUMNS, *INSTRUCTION_EXTRAS}
            elif known == "instruction":
                read |= set(INSTRUCTION_EXTRAS)
            return Format(known, main, tuple(column for column in columns if column in read))
    return None


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

    A row may have both where the prompt is the text of the last message, as `synthesize.py` writes them.

    Raises:
        UserError: as `read_jsonl`; a row without an id, with one that was there, or without a last user turn with text.
    """
    seen: set[str] = set()
    for number, content in read_jsonl(path):
        where = f"{path}:{number}"
        id_ = content.get("id", content.get("key"))
        if not isinstance(id_, str | int) or isinstance(id_, bool):
            raise UserError(f'{where}: "id" is {shown(id_)}, expected text or a number')
        if str(id_) in seen:
            raise UserError(f"{where}: found id {id_} again, expected each once")
        seen.add(str(id_))
        if "messages" not in content and "prompt" not in content:
            raise UserError(f'{where}: expected "messages" or "prompt", found neither')
        if "messages" in content and "prompt" in content:
            _check_prompt_is_last(content, where)
        elif "prompt" in content:
            content = {"messages": [{"role": "user", "content": content["prompt"]}]}
        messages = parse_messages(content, where)
        if messages[-1].role != "user" or any(message.content is None for message in messages):
            raise UserError(
                f"{where}: found no text of a user at the end, expected a turn to answer"
            )
        yield Question(id_, messages)


def _check_prompt_is_last(content: Mapping[str, Any], where: str) -> None:
    given = content["messages"]
    last = given[-1] if isinstance(given, list) and given else None
    if not isinstance(last, dict) or last.get("content") != content["prompt"]:
        raise UserError(
            f'{where}: found both "messages" and "prompt", expected one of them, or the prompt as the last message'
        )


def parse_messages(content: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    """Checks and returns the `messages` of one row, for callers that know no tools and no reasoning fields.

    Raises:
        UserError: the list is absent or empty, a message is no role with text or null, or it has tools or a reasoning
            field.
    """
    if "messages" not in content:
        keys = ", ".join(sorted(content)) or "no keys"
        raise UserError(f'{where}: found {keys}, expected "messages"')
    try:
        messages = turns.parse_turns(content["messages"], f'{where}: "messages"', STRICT)
    except LeftOut as left_out:
        raise UserError(f"{where}: found {left_out.reason}, expected text turns") from left_out
    for i, message in enumerate(messages):
        if message.extra is not None and "reasoning_content" in message.extra:
            raise UserError(f'{where}: "messages"[{i}] has a reasoning field, expected text turns')
    return messages


def _battles(
    format: Format, record: Mapping[str, Any], where: str, rules: TurnRules
) -> Conversation:
    column = format.main[0] if _winner(record, where) == "first" else format.main[1]
    answer = _answer(record[column], f'{where}: "{column}"', rules)
    return Conversation((*_context(record, where, rules), *answer), group=_id(record, where))


def _arena(format: Format, record: Mapping[str, Any], where: str, rules: TurnRules) -> Conversation:
    column = format.main[0] if _winner(record, where) == "first" else format.main[1]
    messages = turns.parse_turns(record[column], f'{where}: "{column}"', rules)
    return Conversation(messages, group=_id(record, where))


def _preference(
    format: Format, record: Mapping[str, Any], where: str, rules: TurnRules
) -> Conversation:
    answer = _answer(record["chosen"], f'{where}: "chosen"', rules)
    if answer[0].role != "assistant":  # the whole conversation
        return Conversation((*turns.as_context(answer[:-1]), answer[-1]))
    return Conversation((*_context(record, where, rules), *answer))


def _turns(format: Format, record: Mapping[str, Any], where: str, rules: TurnRules) -> Conversation:
    column = format.main[0]
    return Conversation(turns.parse_turns(record[column], f'{where}: "{column}"', rules))


def _instruction(
    format: Format, record: Mapping[str, Any], where: str, rules: TurnRules
) -> Conversation:
    column = format.main[1]
    if column == "instances":
        instances = record["instances"]
        if not isinstance(instances, list) or not all(isinstance(x, dict) for x in instances):
            raise UserError(f'{where}: "instances" is {shown(instances)}, expected a list')
        if len(instances) != 1:
            raise LeftOut("several_instances" if instances else "no_instances")
        record, column = {**record, **instances[0]}, "output"
        if column not in record:
            raise UserError(f'{where}: "instances"[0] has no output, expected input and output')
    answer = _answer(record[column], f'{where}: "{column}"', rules)
    asked = _instruction_message(record, where, rules)
    return Conversation((*_history(record, where, rules), asked, *answer))


def _pair(format: Format, record: Mapping[str, Any], where: str, rules: TurnRules) -> Conversation:
    prompt, response = format.main
    answer = _answer(record[response], f'{where}: "{response}"', rules)
    return Conversation((*_prompt(record, prompt, where, rules), *answer))


_Parser = Callable[[Format, Mapping[str, Any], str, TurnRules], Conversation]
_PARSERS: dict[str, _Parser] = {
    "battles": _battles,
    "arena": _arena,
    "preference": _preference,
    "messages": _turns,
    "sharegpt": _turns,
    "instruction": _instruction,
    "prompt_response": _pair,
}
# Format -> the sets of columns by which it is recognised, in the order in which they are tried.
_COLUMNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "battles": tuple(("answer", "opponent_answer", "winner", x) for x in CONTEXT_COLUMNS),
    "arena": (("conversation_a", "conversation_b", "winner"),),
    "preference": (("chosen", "rejected"),),
    "messages": (("messages",),),
    "sharegpt": (("conversations",), ("conversation",)),
    "instruction": tuple(("instruction", answer) for answer in INSTRUCTION_ANSWERS),
    "prompt_response": PAIRS,
}


def _winner(record: Mapping[str, Any], where: str) -> str:
    """Which side won: "first" or "second"."""
    found = record["winner"]
    side = WINNERS.get(found) if isinstance(found, str) else None
    if side is None:
        raise UserError(
            f'{where}: "winner" is {shown(found)}, expected one of {", ".join(WINNERS)}'
        )
    if side in ("tie", "both_bad"):
        raise LeftOut(side)
    return side


def _answer(value: Any, at: str, rules: TurnRules) -> tuple[Message, ...]:
    """A text, a turn or a list of turns."""
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list):
        return turns.parse_turns(value, at, rules)
    return (turns.make_message("assistant", value, at, rules),)


def _context(record: Mapping[str, Any], where: str, rules: TurnRules) -> tuple[Message, ...]:
    column = next((name for name in CONTEXT_COLUMNS if record.get(name) is not None), None)
    if column is None:
        found = ", ".join(sorted(map(str, record)))
        expected = ", ".join(CONTEXT_COLUMNS)
        raise UserError(f"{where}: found {found}, expected a context in one of {expected}")
    if column in TURN_COLUMNS:
        return turns.as_context(turns.parse_turns(record[column], f'{where}: "{column}"', rules))
    if column == "instruction":
        earlier = turns.as_context(_history(record, where, rules))
        return (*earlier, _instruction_message(record, where, rules))
    return _prompt(record, column, where, rules)


def _prompt(
    record: Mapping[str, Any], column: str, where: str, rules: TurnRules
) -> tuple[Message, ...]:
    at, value = f'{where}: "{column}"', record[column]
    if isinstance(value, list):
        return turns.as_context(turns.parse_turns(value, at, rules))
    return (turns.make_message("user", value, at, rules),)


def _instruction_message(record: Mapping[str, Any], where: str, rules: TurnRules) -> Message:
    texts = []
    for column in ("instruction", "input" if record.get("input") is not None else "context"):
        value = record.get(column)
        if value is not None and not isinstance(value, str):
            raise UserError(f'{where}: "{column}" is {shown(value)}, expected text')
        texts.append(value)
    instruction, beside = texts
    if beside and beside.strip():
        instruction = f"{instruction}\n\n{beside}" if instruction else beside
    return turns.make_message("user", instruction, f'{where}: "instruction"', rules)


def _history(record: Mapping[str, Any], where: str, rules: TurnRules) -> tuple[Message, ...]:
    history = record.get("history")
    if not history:
        return ()
    at = f'{where}: "history"'
    if not isinstance(history, list):
        raise UserError(f"{at} is {shown(history)}, expected a list of pairs")
    found = []
    for pair in history:
        if not isinstance(pair, list) or len(pair) != 2:
            raise UserError(f"{at} has {shown(pair)}, expected pairs of a prompt and an answer")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            found.append(turns.make_message(role, text, at, rules))
    return tuple(found)


def _check_row(record: Mapping[str, Any], where: str) -> None:
    if any(record.get(column) is False for column in LABEL_COLUMNS):
        raise LeftOut("label_false")
    if any(record.get(column) for column in MEDIA_COLUMNS):
        raise LeftOut("not_text")


def _tools(
    record: Mapping[str, Any], where: str, rules: TurnRules
) -> tuple[dict[str, Any], ...] | None:
    found = turns.parse_tools(record.get("tools"), f'{where}: "tools"')
    metadata = record.get("metadata")
    if found is None and isinstance(metadata, str) and '"tools"' in metadata:
        try:
            content = json.loads(metadata)
        except (ValueError, RecursionError):
            content = None  # text that only mentions the word
        if isinstance(content, dict):
            found = turns.parse_tools(content.get("tools"), f'{where}: "metadata"')
    if found is not None:
        turns.leave_out_tools(where, rules)
    return found


def _beside(
    conversation: Conversation,
    tool_list: tuple[dict[str, Any], ...] | None,
    record: Mapping[str, Any],
    where: str,
) -> Conversation:
    """Adds what stands in other columns."""
    messages = conversation.messages
    for column in SYSTEM_COLUMNS:
        system = record.get(column)
        if system is None or system == "":
            continue
        at = f'{where}: "{column}"'
        if not isinstance(system, str):
            raise UserError(f"{at} is {shown(system)}, expected text")
        if messages[0].role != "system":
            messages = (Message("system", checked_text(system, at)), *messages)
        elif messages[0].content != system:
            raise UserError(f"{at} and a system turn differ, expected one of them")
    source = next((x for x in map(record.get, SOURCE_COLUMNS) if isinstance(x, str) and x), None)
    if source is not None:
        checked_text(source, f"{where}: its source")
    group, id_ = conversation.group, _id(record, where)
    if group is None and isinstance(record.get(GROUP_COLUMN), str):
        group = checked_text(record[GROUP_COLUMN], f'{where}: "{GROUP_COLUMN}"')
    return replace(
        conversation, messages=messages, tools=tool_list, source=source, id=id_, group=group
    )


def _id(record: Mapping[str, Any], where: str) -> str | None:
    for column in ID_COLUMNS:
        value = record.get(column)
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            return checked_text(str(value), f'{where}: "{column}"')
    return None

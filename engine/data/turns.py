"""One turn of a conversation as sets publish it -> `Message`.

- **Role**: `role` or `from`, through ROLE_NAMES and a source's own names.
- **Text**: `content` or `value`: text, null, or a list of text parts, which are joined as they are.
- **Train**: `train` (true, false), `loss_weight` or `weight` (0, 1). A fraction is refused, and so is a turn of another
  role that is to be trained on.
- **Tool calls**: `tool_calls`, `function_call`, parts of type `tool_call`, or a turn in the role of a tool call, whose
  text is the call. `arguments` that are text become the object they spell; where they spell none, the row is left out
  as "tool_arguments".
- **Tool results**: turns of role tool; `tool_call_id` goes with them. `name` goes with any turn.
- **Reasoning**: `reasoning_content`, `reasoning`, `thinking`, parts of these types, and `<think>...</think>` where an
  assistant's text starts with it.

Other keys of a turn (ids, dates, scores) are no part of the conversation and not read. Null and empty lists are absent.

Rule `tools`: "drop" leaves the row out as "tools", "refuse" stops at it, "keep" puts calls in `Message.extra`.

Rule `reasoning`: "keep" leaves text as it is and puts fields in `Message.extra["reasoning_content"]`; "strip" takes
both away, the text from `<think>` to the line ends after `</think>`; "drop" leaves the row out as "reasoning" where
there is any, and strips an empty block. A `</think>` whose opening stands in the prompt counts from the start of the
text; a block without an end leaves the row out as "unclosed_reasoning" unless it is kept.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hymoe.engine.data.schema import ROLES, LeftOut, Message, checked_text, shown
from hymoe.engine.errors import UserError

TOOL_CALL = "tool_call"  # a role of its own in some sets: the assistant's turn that calls a tool
ROLE_NAMES: Mapping[str, str] = {
    **{role: role for role in ROLES},
    "developer": "system",
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "function": "tool",  # its result, as OpenAI's first interface had it
    "observation": "tool",
    "ipython": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "function_call": TOOL_CALL,
    "tool_call": TOOL_CALL,
}
TOOL_RULES = ("keep", "drop", "refuse")
REASONING_RULES = ("keep", "strip", "drop")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
THINK, THINK_END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class TurnRules:
    """How turns are read."""

    roles: Mapping[str, str]  # a file's role -> one of ROLES or TOOL_CALL
    tools: str  # one of TOOL_RULES
    reasoning: str  # one of REASONING_RULES


def make_rules(
    roles: Mapping[str, str] | None = None, tools: str = "drop", reasoning: str = "keep"
) -> TurnRules:
    """Checks and returns the rules of a source.

    Args:
        roles: names that its files have, beyond or instead of ROLE_NAMES.
        tools: one of TOOL_RULES.
        reasoning: one of REASONING_RULES.

    Raises:
        UserError: one of them is not known.
    """
    if tools not in TOOL_RULES:
        raise UserError(f"tools = {tools!r}, expected one of {', '.join(TOOL_RULES)}")
    if reasoning not in REASONING_RULES:
        raise UserError(f"reasoning = {reasoning!r}, expected one of {', '.join(REASONING_RULES)}")
    if not roles:
        return TurnRules(ROLE_NAMES, tools, reasoning)
    known = (*ROLES, TOOL_CALL)
    for name, role in roles.items():
        if role not in known:
            raise UserError(f"roles.{name} = {role!r}, expected one of {', '.join(known)}")
    return TurnRules({**ROLE_NAMES, **roles}, tools, reasoning)


def parse_turns(turns: Any, where: str, rules: TurnRules) -> tuple[Message, ...]:
    """Reads a list of turns.

    Args:
        turns: what the file has.
        where: file, row and key.
        rules: how to read them.

    Raises:
        UserError: no list, an empty one, or a turn that is malformed.
        LeftOut: a rule leaves the row out.
    """
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where} is {shown(turns)}, expected a list of role and content")
    return tuple([_parse_turn(turn, f"{where}[{i}]", rules) for i, turn in enumerate(turns)])


def make_message(role: str, content: Any, where: str, rules: TurnRules) -> Message:
    """A turn whose role its column says: a prompt, a response.

    Raises:
        UserError: the content is neither text, text parts nor null.
        LeftOut: as `parse_turns`.
    """
    return _parse_turn({"role": role, "content": content}, where, rules)


def as_context(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The same turns, of which none is trained on unless it says so itself."""
    return tuple(
        replace(message, train=False)
        if message.role == "assistant" and message.train is None
        else message
        for message in messages
    )


def parse_tools(value: Any, where: str) -> tuple[dict[str, Any], ...] | None:
    """Tool definitions: a list of objects, or JSON text of one; None where there are none.

    Raises:
        UserError: anything else.
    """
    found = _decoded(value, where, "tool definitions") if isinstance(value, str) else value
    found = [found] if isinstance(found, dict) and found else found
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise UserError(f"{where} is {shown(value)}, expected a list of tool definitions")
    _check_encodable(found, where)
    return tuple(found)


def leave_out_tools(where: str, rules: TurnRules) -> None:
    """What the rule says about a row with tools.

    Raises:
        UserError: it refuses them.
        LeftOut: it leaves such rows out.
    """
    if rules.tools == "refuse":
        raise UserError(f'{where} has tools, expected none: keep or drop them by "tools"')
    if rules.tools == "drop":
        raise LeftOut("tools")


def _parse_turn(turn: Any, where: str, rules: TurnRules) -> Message:
    if not isinstance(turn, dict):
        raise UserError(f"{where} is {shown(turn)}, expected an object with role and content")
    role = _role(turn, where, rules)
    content = turn.get("content")
    if content is None:
        content = turn.get("value")
    if len(turn) == 2 and role != "tool" and isinstance(content, str):
        # Nine turns of ten: role and text, nothing else.
        checked_text(content, where)
        if role == "assistant" and rules.reasoning != "keep":
            content = _without_reasoning(content, rules)
        if role != TOOL_CALL:
            return Message(role, content)
    extra: dict[str, Any] = {}
    calls = _raw_calls(turn)
    thoughts: list[Any] = [turn[key] for key in REASONING_KEYS if turn.get(key) is not None]
    if isinstance(content, list):
        content = _joined_parts(content, where, calls, thoughts)
    if content is not None and not isinstance(content, str):
        raise UserError(f"{where} has content {shown(content)}, expected text")
    if role == TOOL_CALL:
        role, calls, content = "assistant", [*calls, content], ""
    elif not calls and "content" not in turn and "value" not in turn:
        raise UserError(f"{where} has no content, expected role and content")
    if calls or role == "tool":
        leave_out_tools(where, rules)
    if calls:
        extra["tool_calls"] = [call for raw in calls for call in _parse_calls(raw, where)]
        content = content or ""
    for key in ("tool_call_id", "name"):
        if isinstance(turn.get(key), str) and turn[key]:
            extra[key] = turn[key]
    content = _fold_reasoning(role, content, thoughts, extra, where, rules)
    if content is not None:
        checked_text(content, where)
    if extra:
        _check_encodable(extra, where)
    return Message(role, content, _train(turn, role, where), extra or None)


def _role(turn: dict[str, Any], where: str, rules: TurnRules) -> str:
    name = turn.get("role")
    if name is None:
        name = turn.get("from")
    if name is None and "role" not in turn and "from" not in turn:
        raise UserError(f"{where} has no role, expected role and content")
    if isinstance(name, str):
        role = rules.roles.get(name) or rules.roles.get(name.strip().lower())
        if role is not None:
            return role
    raise UserError(f"{where} has role {shown(name)}, expected one of {', '.join(ROLES)}")


def _train(turn: dict[str, Any], role: str, where: str) -> bool | None:
    found: bool | None = None
    for key in ("train", "loss_weight", "weight"):
        value = turn.get(key)
        if value is None:
            continue
        if value not in (0, 1) or not isinstance(value, bool | int | float):
            expected = "true or false" if key == "train" else "0 or 1: no weight lies between"
            raise UserError(f'{where} has "{key}" {shown(value)}, expected {expected}')
        if found is not None and found != bool(value):
            raise UserError(f'{where} has "{key}" {shown(value)}, expected what its others say')
        found = bool(value)
    if turn.get("train_detail"):
        raise UserError(f'{where} has "train_detail", expected whole turns: "train" or a weight')
    if role == "assistant":
        return found
    if found:
        raise UserError(f"{where} is to train on a turn of {role}, expected assistant turns only")
    return None


def _raw_calls(turn: dict[str, Any]) -> list[Any]:
    calls = turn.get("tool_calls")
    if isinstance(calls, str) and calls.strip() in ("[]", "null"):
        calls = None
    return [call for call in (calls, turn.get("function_call")) if call]


def _joined_parts(parts: list[Any], where: str, calls: list[Any], thoughts: list[Any]) -> str:
    """The text of a list of parts; tool calls and reasoning among them are added to the lists."""
    texts = []
    for i, part in enumerate(parts):
        at = f"{where} part {i}"
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise UserError(f"{at} is {shown(part)}, expected an object with type and text")
        kind = part["type"]
        value = next((part[k] for k in ("text", "value", kind) if part.get(k) is not None), None)
        if kind in ("tool_call", "tool_calls"):
            calls.append(value)
        elif kind in REASONING_KEYS:
            thoughts.append(value)
        elif kind != "text":
            raise LeftOut("not_text")
        elif not isinstance(value, str):
            raise UserError(f"{at} has text {shown(value)}, expected text")
        else:
            texts.append(value)
    return "".join(texts)


def _parse_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls as templates read them: `function` with `name` and `arguments`, an object."""
    found = _decoded(value, where, "a tool call") if isinstance(value, str) else value
    calls = []
    for call in found if isinstance(found, list) else [found]:
        function = call.get("function") or call if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(
                f"{where} has tool call {shown(call)}, expected a function with its name"
            )
        arguments = function.get("arguments", function.get("parameters"))
        if isinstance(arguments, str):
            arguments = _decoded(arguments, where, "arguments") if arguments.strip() else {}
        if arguments is not None and not isinstance(arguments, dict):
            raise LeftOut("tool_arguments")
        made = {
            "type": "function",
            "function": {"name": function["name"], "arguments": arguments or {}},
        }
        calls.append({"id": call["id"], **made} if isinstance(call.get("id"), str) else made)
    return calls


def _decoded(text: str, where: str, what: str) -> Any:
    """JSON text that a model or a set wrote into a field.

    Raises:
        LeftOut: it is none, as models' calls at times are: no fault of the file.
        UserError: tool definitions that are none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if what == "tool definitions":
            if not text.strip():
                return None
            raise UserError(f"{where} is {shown(text)}, expected {what} as JSON") from error
        raise LeftOut("tool_arguments") from error


def _fold_reasoning(
    role: str,
    content: str | None,
    thoughts: list[Any],
    extra: dict[str, Any],
    where: str,
    rules: TurnRules,
) -> str | None:
    for thought in thoughts:
        if not isinstance(thought, str):
            raise UserError(f"{where} has reasoning {shown(thought)}, expected text")
    thoughts = [thought for thought in thoughts if thought.strip()]
    if thoughts and rules.reasoning == "drop":
        raise LeftOut("reasoning")
    if thoughts and rules.reasoning == "keep":
        extra["reasoning_content"] = thoughts[0]
        if any(thought != thoughts[0] for thought in thoughts):
            raise UserError(f"{where} has reasoning twice, expected one text")
    if content is None or role != "assistant" or rules.reasoning == "keep":
        return content
    return _without_reasoning(content, rules)


def _without_reasoning(content: str, rules: TurnRules) -> str:
    """An assistant's text after the reasoning that it starts with."""
    while True:
        start = content.lstrip()
        if start.startswith(THINK):
            thought, end, rest = start[len(THINK) :].partition(THINK_END)
            if not end:
                raise LeftOut("unclosed_reasoning")
        else:
            thought, end, rest = content.partition(THINK_END)
            if not end or THINK in thought:
                return content
        if thought.strip() and rules.reasoning == "drop":
            raise LeftOut("reasoning")
        # The line ends after the block go with it; the indentation of the answer's first line stays.
        spaces = rest[: len(rest) - len(rest.lstrip())]
        content = rest[spaces.rfind("\n") + 1 :] if "\n" in spaces else rest.lstrip()


def _check_encodable(value: Any, where: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{where} has tools or names that cannot be written as JSON ({type(error).__name__}), "
            "expected plain values of valid Unicode"
        ) from error

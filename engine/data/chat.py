r"""ChatML: a conversation as token ids, made together with the mask of what is trained on.

**Layout** of each turn: `<|im_start|>role\n` content `<|im_end|>` `\n`. Header, content and the
last newline are encoded each alone, exactly as they are when generating, where the model continues
after `<|im_start|>assistant\n`; a tokenizer therefore never merges a header's newline with the
answer.

**Supervised** is the content of an assistant turn and its `<|im_end|>`. Headers, other roles and
the newline after `<|im_end|>` (which no serving engine ever asks for) are not. The mask is built
turn by turn with the ids, never found again in rendered text.

**Control tokens** come from this file alone: content goes through `Tokenizer.encode`, which treats
whatever it spells as text. The list of control tokens allowed inside content is empty.
"""

from collections.abc import Sequence
from typing import NamedTuple

from hymoe.engine.data.schema import Message
from hymoe.engine.data.tokenizer import IM_END, IM_START, Tokenizer

NOT_SUPERVISED = -100
# What `render` writes, as the template that serving engines and `transformers` read.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '" + IM_START + "' + message['role'] + '\\n' + message['content'] + '" + IM_END + "\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + IM_START + "assistant\\n' }}{% endif %}"
)


def drop_reason(messages: Sequence[Message], tools: bool = False) -> str | None:
    """Why a well-formed conversation is not trained on, or None where it is.

    Turns must be an optional system message, then user and assistant in turn, the assistant last. A
    user message of "-" counts as empty: it is what some sets write for a missing one.

    Args:
        messages: the turns.
        tools: whether answers may call tools: tool messages and another answer then follow.
    """
    for message in messages:
        calls = tools and message.role == "assistant" and "tool_calls" in (message.extra or {})
        if message.content is None and not calls:
            return f"null_{message.role}"
        text = (message.content or "").strip()
        if message.role == "assistant" and not text and not calls:
            return "empty_assistant"
        if message.role == "user" and text in ("", "-"):
            return "empty_user"
    roles = [message.role for message in messages]
    if "assistant" not in roles:
        return "no_assistant"
    turns = roles[1:] if roles[0] == "system" else roles
    if tools:
        turns = _without_tool_rounds(turns)
    if turns != ["user", "assistant"] * (len(turns) // 2):
        return "role_order"
    if not any(m.role == "assistant" and m.train is not False for m in messages):
        return "all_context"
    return None


def _without_tool_rounds(roles: Sequence[str]) -> list[str]:
    """The roles without each run of tool messages that stands between two answers, and the second answer."""
    left: list[str] = []
    for i, role in enumerate(roles):
        after_tool = i > 0 and roles[i - 1] == "tool"
        if role == "tool" and left and left[-1] == "assistant" and i + 1 < len(roles):
            continue
        if after_tool and role == "assistant" and left and left[-1] == "assistant":
            continue
        left.append(role)
    return left


class Rendered(NamedTuple):
    """A conversation as tokens.

    Attributes:
        ids: token ids.
        trained: for each, whether the model is to produce it.
        turn_ends: lengths at which the conversation may be cut: behind each answer.
    """

    ids: list[int]
    trained: list[bool]
    turn_ends: list[int]


def render(messages: Sequence[Message], tokenizer: Tokenizer) -> Rendered:
    """Token ids of a conversation and what of it is trained on.

    Args:
        messages: turns for which `drop_reason` is None.
        tokenizer: the checkpoint's.
    """
    ids: list[int] = []
    trained: list[bool] = []
    turn_ends: list[int] = []
    for message in messages:
        assert message.content is not None
        answers = message.role == "assistant" and message.train is not False
        ids += tokenizer.encode_fixed(f"{IM_START}{message.role}\n")
        trained += [False] * (len(ids) - len(trained))
        ids += tokenizer.encode(message.content)
        ids.append(tokenizer.im_end)
        trained += [answers] * (len(ids) - len(trained))
        if answers:
            turn_ends.append(len(ids))
        ids += tokenizer.encode_fixed("\n")
        trained += [False] * (len(ids) - len(trained))
    return Rendered(ids, trained, turn_ends)


def render_prompt(messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """Token ids of a conversation up to and including the header of the answer to come."""
    return render(messages, tokenizer).ids + tokenizer.encode_fixed(f"{IM_START}assistant\n")


def shifted_labels(ids: Sequence[int], mask: Sequence[bool]) -> list[int]:
    """The label of each token: the next id where that one is trained on, else NOT_SUPERVISED."""
    labels = [i if on else NOT_SUPERVISED for i, on in zip(ids[1:], mask[1:], strict=True)]
    return [*labels, NOT_SUPERVISED]

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

from hymoe.engine.data.formats import Message
from hymoe.engine.data.tokenizer import IM_END, IM_START, Tokenizer

NOT_SUPERVISED = -100
# What `render` writes, as the template that serving engines and `transformers` read.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '" + IM_START + "' + message['role'] + '\\n' + message['content'] + '" + IM_END + "\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + IM_START + "assistant\\n' }}{% endif %}"
)


def drop_reason(messages: Sequence[Message]) -> str | None:
    """Why a well-formed conversation is not trained on, or None where it is.

    Turns must be an optional system message, then user and assistant in turn, the assistant last. A
    user message of "-" counts as empty: it is what some sets write for a missing one.
    """
    for message in messages:
        if message.content is None:
            return f"null_{message.role}"
        text = message.content.strip()
        if message.role == "assistant" and not text:
            return "empty_assistant"
        if message.role == "user" and text in ("", "-"):
            return "empty_user"
    roles = [message.role for message in messages]
    if "assistant" not in roles:
        return "no_assistant"
    turns = roles[1:] if roles[0] == "system" else roles
    if turns != ["user", "assistant"] * (len(turns) // 2):
        return "role_order"
    return None


def render(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation and, for each, whether it is trained on.

    Args:
        messages: turns for which `drop_reason` is None.
        tokenizer: the checkpoint's.

    Returns:
        ids and mask, of one length.
    """
    ids: list[int] = []
    mask: list[bool] = []
    for message in messages:
        assert message.content is not None
        content = [*tokenizer.encode(message.content), tokenizer.im_end]
        for part, supervised in (
            (_header(message.role, tokenizer), False),
            (content, message.role == "assistant"),
            (tokenizer.encode("\n"), False),
        ):
            ids += part
            mask += [supervised] * len(part)
    return ids, mask


def render_prompt(messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """Token ids of a conversation up to and including the header of the answer to come."""
    ids, _ = render(messages, tokenizer)
    return ids + _header("assistant", tokenizer)


def shifted_labels(ids: Sequence[int], mask: Sequence[bool]) -> list[int]:
    """The label of each token: the next id where that one is trained on, else NOT_SUPERVISED."""
    labels = [i if on else NOT_SUPERVISED for i, on in zip(ids[1:], mask[1:], strict=True)]
    return [*labels, NOT_SUPERVISED]


def _header(role: str, tokenizer: Tokenizer) -> list[int]:
    return [tokenizer.im_start, *tokenizer.encode(f"{role}\n")]

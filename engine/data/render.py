"""From a conversation to documents: system prompt, template, mask, and what happens to what is too long."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hymoe.engine.data.chat import Rendered, drop_reason, render
from hymoe.engine.data.schema import Conversation, LeftOut, Message
from hymoe.engine.data.template import load_template
from hymoe.engine.data.tokenizer import Tokenizer

Document = tuple[np.ndarray, np.ndarray]  # ids int32 (T,), trained bool (T,)


class Documents(NamedTuple):
    """What a conversation became: one document, or several windows; `cut` where it did not stay in one piece."""

    parts: list[Document]
    cut: bool


TOO_LONG = ("drop", "cut", "cut_turn", "windows")


@dataclass(frozen=True)
class Rules:
    """What decides how a conversation becomes tokens; travels to worker processes.

    Attributes:
        tokenizer: tokenizer.json or a folder with one.
        chat_template: "chatml", "base", or a file.
        base: folder of the checkpoint, where the template is "base".
        system_prompt: the serving prompt, for sources that ask for it.
        seq_len: most tokens of a document.
        too_long: one of TOO_LONG. "cut" keeps the first seq_len tokens; "cut_turn" the longest beginning that ends
            with a whole answer; "windows" all tokens, in pieces of seq_len.
    """

    tokenizer: Path
    chat_template: str
    base: Path
    system_prompt: str | None
    seq_len: int
    too_long: str


class Renderer:
    """Renders conversations by the rules; made once in each process."""

    def __init__(self, rules: Rules) -> None:
        """Reads tokenizer and template.

        Raises:
            UserError: one of them cannot be read.
        """
        self.rules = rules
        self.tokenizer = Tokenizer(rules.tokenizer)
        self.template = load_template(rules.chat_template, rules.base, self.tokenizer)

    def rendered(self, conversation: Conversation, system: str = "keep") -> Rendered:
        """The whole conversation as tokens.

        Args:
            conversation: turns as the file has them.
            system: keep, fill, replace or remove; see `mixture.Source`.

        Raises:
            LeftOut: it is not trained on, with the reason.
        """
        conversation = with_system(conversation, system, self.rules.system_prompt)
        tools = self.template is not None
        reason = drop_reason(conversation.messages, tools=tools)
        if reason is None and not tools:
            reason = _no_place_in_chatml(conversation)
        if reason is not None:
            raise LeftOut(reason)
        if self.template is not None:
            return self.template.render(conversation)
        return render(conversation.messages, self.tokenizer)

    def documents(self, conversation: Conversation, system: str = "keep") -> Documents:
        """Its documents.

        Raises:
            LeftOut: nothing of it is trained on, with the reason.
        """
        whole = self.rendered(conversation, system)
        ids = np.asarray(whole.ids, dtype=np.int32)
        trained = np.asarray(whole.trained, dtype=np.bool_)
        limit, size = self.rules.seq_len, len(ids)
        if size <= limit:
            ends = [(0, size)]
        elif self.rules.too_long == "drop":
            raise LeftOut("too_long")
        elif self.rules.too_long == "cut":
            ends = [(0, limit)]
        elif self.rules.too_long == "cut_turn":
            ends = [(0, max((end for end in whole.turn_ends if end <= limit), default=0))]
        else:
            ends = [(start, min(start + limit, size)) for start in range(0, size, limit)]
        # The first token of a document is never predicted: what counts is what follows it.
        found = [(ids[a:b], trained[a:b]) for a, b in ends if trained[a + 1 : b].any()]
        if not found:
            raise LeftOut("no_supervised_token")
        return Documents(found, size > limit)


def _no_place_in_chatml(conversation: Conversation) -> str | None:
    """What of a conversation the built-in ChatML would drop in silence; names alone mean nothing to it."""
    keys = {key for message in conversation.messages for key in message.extra or ()}
    if conversation.tools or "tool_calls" in keys:
        return "tools"
    return "reasoning_field" if "reasoning_content" in keys else None


def with_system(conversation: Conversation, how: str, prompt: str | None) -> Conversation:
    """The conversation under the serving prompt, as `mixture.Source.system` says."""
    messages = conversation.messages
    has = bool(messages) and messages[0].role == "system"
    if how == "keep" or (how == "fill" and has):
        return conversation
    rest = messages[1:] if has else messages
    if how != "remove":
        rest = (Message("system", prompt), *rest)
    return dataclasses.replace(conversation, messages=rest)

r"""A checkpoint's own chat template as token ids, with the mask found in the structure of what it renders.

**How.** Every message's content goes into the template between two marks, characters that the conversation does not
contain. Where they come out is where content stands, whatever the template writes around it; content is then encoded
as plain text and the template's own text with its control tokens, piece by piece between them, as when generating.

**Supervised** is the content of assistant turns, what the template writes between it and the turn's `<|im_end|>` (tool
calls), and that token; with `{% generation %}` blocks in the template, what stands inside them and the `<|im_end|>`
that follows. An empty `<think></think>` that the template inserts is never trained on.

**Proof.** The text with marks, marks taken out, must be the text without them; else the marks go inside the content's
outer white space (templates trim). Where a template cuts content apart so that marks go missing, or rewrites it, the
conversation is left out under the reason `template_rewrites`: a mask that is guessed is worse than a row less.
"""

import datetime
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hymoe.engine.data.chat import Rendered
from hymoe.engine.data.schema import Conversation, LeftOut, Message
from hymoe.engine.data.tokenizer import IM_END, IM_START, Tokenizer
from hymoe.engine.errors import UserError

# Private-use characters of plane 16: first choices for marks; a conversation that has them all gets others.
MARK_POOL = [chr(0x10FF00 + i) for i in range(200)]
EMPTY_THINK = re.compile(r"<think>\s*</think>\s*")


@dataclass(frozen=True, slots=True)
class _Marks:
    """One character each."""

    context: str  # content begins that is not trained on
    trained: str  # content begins that is
    close: str  # content ends
    block: str  # a generation block begins
    block_end: str  # and ends

    @classmethod
    def absent_from(cls, text: str) -> "_Marks":
        free = [c for c in MARK_POOL if c not in text]
        if len(free) < 5:
            raise LeftOut("no_free_marks")
        return cls(*free[:5])

    def removed(self, text: str) -> str:
        return text.translate({ord(c): None for c in (*self.openings, self.close, *self.blocks)})

    @property
    def openings(self) -> tuple[str, str]:
        return self.context, self.trained

    @property
    def blocks(self) -> tuple[str, str]:
        return self.block, self.block_end


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, as `transformers` has it; marks what is inside while marks are set."""

    tags = {"generation"}  # noqa: RUF012 - the base class wants it so

    def parse(self, parser: Any) -> nodes.Node:
        """Makes the block a call of `_wrap`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_wrap", [nodes.ContextReference()])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _wrap(self, context: Any, caller: Callable[[], str]) -> str:
        marks = context.get("hymoe_marks")
        inside = caller()
        return inside if marks is None else marks.block + inside + marks.block_end


class ChatTemplate:
    """A Jinja chat template, compiled once."""

    def __init__(
        self, source: str, tokenizer: Tokenizer, where: str, special: dict[str, str] | None = None
    ) -> None:
        """Compiles the template.

        Args:
            source: Jinja text.
            tokenizer: the checkpoint's.
            where: the template's file, for messages.
            special: names such as bos_token that the template may use.

        Raises:
            UserError: the text is no Jinja template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _no_clock
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"{where}: found no Jinja chat template: {error}") from None
        self.where = where
        self.has_blocks = bool(re.search(r"\{%-?\s*generation\s*-?%\}", source))
        self._tokenizer = tokenizer
        self._special = special or {}

    def render(self, conversation: Conversation) -> Rendered:
        """Token ids and mask.

        Raises:
            LeftOut: the template fails on this conversation or rewrites its content.
        """
        _no_control_in_tools(conversation, self._tokenizer)
        marked, marks = self._marked(conversation)
        return _tokens(_spans(marked, marks, self.has_blocks), self._tokenizer)

    def render_prompt(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation and what the template writes before the answer to come.

        Raises:
            LeftOut: as of `render`.
        """
        _no_control_in_tools(conversation, self._tokenizer)
        marked, marks = self._marked(conversation, answer=True)
        return _tokens(_spans(marked, marks, self.has_blocks), self._tokenizer).ids

    def text(
        self,
        conversation: Conversation,
        marks: Any = None,
        inside: bool = False,
        answer: bool = False,
    ) -> str:
        """What the template writes, with marks around contents where they are given.

        Args:
            conversation: the turns.
            marks: None for none.
            inside: whether marks go inside the outer white space of contents.
            answer: whether the header of an answer to come follows.

        Raises:
            LeftOut: the template fails on this conversation.
        """
        messages = [_as_dict(m, marks, inside) for m in conversation.messages]
        tools = None if conversation.tools is None else [dict(tool) for tool in conversation.tools]
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=answer,
                hymoe_marks=marks,
                **self._special,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise LeftOut("template_fails", f"{self.where}: {error}") from None

    def _marked(self, conversation: Conversation, answer: bool = False) -> tuple[str, _Marks]:
        plain = self.text(conversation, answer=answer)
        marks = _Marks.absent_from(plain + "".join(m.content or "" for m in conversation.messages))
        for inside in (False, True):
            marked = self.text(conversation, marks, inside, answer)
            if marks.removed(marked) == plain and _balanced(marked, marks):
                return marked, marks
        raise LeftOut("template_rewrites", f"{self.where}: content does not come out as it went in")


def _as_dict(message: Message, marks: _Marks | None, inside: bool) -> dict[str, Any]:
    content = message.content
    if content and marks is not None:
        trains = message.role == "assistant" and message.train is not False
        opening = marks.trained if trains else marks.context
        core = content.strip() if inside else content
        before, _, after = content.partition(core) if core else (content, "", "")
        content = before + opening + core + marks.close + after
    return {"role": message.role, "content": content, **(message.extra or {})}


def _balanced(text: str, marks: _Marks) -> bool:
    """Whether every opening has its close before the next opening."""
    kinds = [c for c in text if c in marks.openings or c == marks.close]
    return len(kinds) % 2 == 0 and all(
        opening in marks.openings and close == marks.close
        for opening, close in zip(kinds[::2], kinds[1::2], strict=True)
    )


@dataclass(slots=True)
class _Span:
    """A piece of the rendered text: `plain` is content, the rest is the template's."""

    text: str
    plain: bool
    trained: bool


def _spans(marked: str, marks: _Marks, has_blocks: bool) -> list[_Span]:
    """The rendered text cut at its marks; trained is what is known before `<|im_end|>` is looked at."""
    spans: list[_Span] = []
    pattern = "([" + "".join((*marks.openings, marks.close, *marks.blocks)) + "])"
    plain = trained = inside = vetoed = False  # vetoed: the block's answer is context only
    for piece in re.split(pattern, marked):
        if piece in marks.openings:
            plain, trained = True, piece == marks.trained
            vetoed = not trained
        elif piece == marks.close:
            plain = trained = False
        elif piece in marks.blocks:
            inside, vetoed = piece == marks.block, False
        elif piece:
            on = (inside and not vetoed) if has_blocks else (plain and trained)
            spans.append(_Span(piece, plain, on))
    return spans


def _tokens(spans: Sequence[_Span], tokenizer: Tokenizer) -> Rendered:
    ids: list[int] = []
    mask: list[bool] = []
    ends: list[int] = []
    answering = False  # an assistant's content is over, its end token has not come yet
    for span in spans:
        if span.plain:
            found = tokenizer.encode(span.text)
            ids += found
            mask += [span.trained] * len(found)
            answering = span.trained
            continue
        pieces = tokenizer.split_control(span.text)
        end = _end_of_turn(pieces, tokenizer) if answering or span.trained else None
        for i, (text, is_control) in enumerate(pieces):
            found = [tokenizer.id_of(text)] if is_control else tokenizer.encode(text)
            closes = end is not None and i <= end
            on = (closes or span.trained) and not EMPTY_THINK.fullmatch(span.text)
            ids += found
            mask += [on] * len(found)
            if i == end and on:
                ends.append(len(ids))
        answering = span.trained and end is None
    return Rendered(ids, mask, ends)


def _end_of_turn(pieces: Sequence[tuple[str, bool]], tokenizer: Tokenizer) -> int | None:
    """Which piece is the `<|im_end|>` that closes the answer before it; None where another turn begins first."""
    for i, (text, is_control) in enumerate(pieces):
        if is_control and text in (IM_START, IM_END):
            return i if text == IM_END else None
    return None


def _no_control_in_tools(conversation: Conversation, tokenizer: Tokenizer) -> None:
    """Tool definitions and calls become the template's own text, where a control token would be one."""
    parts = [m.extra for m in conversation.messages if m.extra] + list(conversation.tools or ())
    for part in parts:
        text = json.dumps(part, ensure_ascii=False)
        if any(is_control for _, is_control in tokenizer.split_control(text)):
            raise LeftOut("control_token_in_tools")


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """As `transformers` has it: not escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _no_clock(form: str) -> str:
    """The same bytes on any day: a template that asks for today gets the day that is written here."""
    return datetime.datetime(2026, 1, 1).strftime(form)


def load_template(choice: str, base: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that a recipe names.

    Args:
        choice: "chatml" for the built-in one, "base" for the checkpoint's, or a file.
        base: the checkpoint's folder.
        tokenizer: the checkpoint's.

    Returns:
        The template, or None for the built-in ChatML.

    Raises:
        UserError: a file that is absent, or a checkpoint without a template.
    """
    if choice == "chatml":
        return None
    config = _tokenizer_config(base)
    special = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        special[name] = value.get("content", "") if isinstance(value, dict) else (value or "")
    path = base / "chat_template.jinja" if choice == "base" else Path(choice)
    if path.is_file():
        return ChatTemplate(path.read_text(encoding="utf-8"), tokenizer, str(path), special)
    if choice != "base":
        raise UserError(f"{path}: no such chat template; expected a file, 'base' or 'chatml'")
    source = config.get("chat_template")
    if not isinstance(source, str):
        raise UserError(
            f"{base}: found no chat_template.jinja and no chat_template in tokenizer_config.json; "
            "use chat_template = 'chatml' or name a file"
        )
    return ChatTemplate(source, tokenizer, str(base / "tokenizer_config.json"), special)


def _tokenizer_config(base: Path) -> dict[str, Any]:
    path = base / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: no valid JSON ({error})") from None

"""A file of prompts -> a file of answers, which may be interrupted and continued.

While answers are made, each is one whole line that is appended as soon as it is there, in the order in which they end;
beside the file lies `.NAME.settings.json`, which says how they are made. A later run with the same settings leaves out
the ids that are there; one with other settings is refused. When all are there the file gets the order of the prompts
and the settings go. A file that has every answer already is replaced.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hymoe.engine.data.chat import render_prompt
from hymoe.engine.data.formats import read_questions
from hymoe.engine.data.mixture import prompt_text
from hymoe.engine.data.render import with_system
from hymoe.engine.data.schema import Conversation, LeftOut, Question, shown
from hymoe.engine.data.sources import parse_line
from hymoe.engine.data.template import load_template
from hymoe.engine.data.tokenizer import Tokenizer
from hymoe.engine.errors import UserError
from hymoe.engine.generate import Generation, Progress, generate, stop_ids
from hymoe.engine.hf_checkpoint import load_pretrained
from hymoe.engine.sampling import Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What to answer, with what, and how; paths are the user's."""

    model: Path  # HF folder: shards, config.json, tokenizer.json
    prompts: Path
    out: Path
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    max_new_tokens: int = 2048
    max_prompt_tokens: int | None = None  # None: any length
    too_long: Literal["refuse", "cut"] = "refuse"  # cut: the prompt's end stays
    chat_template: str = "chatml"  # chatml, base (the checkpoint's own), or a file
    system_prompt: Path | None = None
    system: Literal["replace", "fill"] = "replace"  # of prompts that have a system message
    batch: int = 64
    cache_tokens: int = 1 << 18
    device: str = "cpu"
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class Summary:
    """What was done."""

    answers: int  # in the file
    kept: int  # of them, made by an earlier run
    stopped: int  # of the new ones, ended by themselves
    new_tokens: int
    cut: int  # prompts that lost their beginning


def answer_prompts(
    task: Task, say: Callable[[str], None], progress: Progress | None = None
) -> Summary:
    """Answers every prompt that has no answer yet.

    Args:
        task: what to do.
        say: gets a line for a person, of what is continued or cut.
        progress: see `generate`.

    Raises:
        UserError: bad input; nothing is written then.
    """
    if not task.out.parent.is_dir() or task.out.is_dir():
        raise UserError(f"{task.out}: expected a file in a folder that exists")
    questions = list(read_questions(task.prompts))
    tokenizer = Tokenizer(task.model)
    rendered = render_questions(questions, task, tokenizer)
    prompts, cut = fit(questions, rendered, task)
    if cut:
        say(
            f"{cut} of {len(prompts)} prompts lost their beginning: more than {task.max_prompt_tokens} tokens"
        )
    ends = stop_ids(task.model, tokenizer)
    file = AnswersFile(
        task.out, [q.id for q in questions], _settings(task, prompts, ends), task.overwrite
    )
    todo = [i for i, question in enumerate(questions) if str(question.id) not in file.done]
    kept = len(file.done)
    if kept:
        say(f"{task.out}: continues, {kept} of {len(questions)} answers are there")
    stopped = tokens = 0
    if todo:
        lm = load_pretrained(task.model, device=task.device)

        def write(number: int, answer: Generation) -> None:
            row = {
                "id": questions[todo[number]].id,
                "response": tokenizer.decode(answer.ids, keep_special=False),
                "finish_reason": answer.finish_reason,
                "num_tokens": len(answer.ids),
            }
            file.add(row)

        found = generate(
            lm,
            [prompts[i] for i in todo],
            max_new_tokens=task.max_new_tokens,
            stop_ids=ends,
            sampling=task.sampling,
            keys=[str(questions[i].id) for i in todo],
            batch=task.batch,
            cache_tokens=task.cache_tokens,
            progress=progress,
            on_answer=write,
        )
        stopped = sum(answer.finish_reason == "stop" for answer in found)
        tokens = sum(len(answer.ids) for answer in found)
    file.finish()
    return Summary(len(questions), kept, stopped, tokens, cut)


def render_questions(
    questions: Sequence[Question], task: Task, tokenizer: Tokenizer
) -> list[list[int]]:
    """Token ids of each, up to and including the header of the answer to come.

    Raises:
        UserError: the template fails on one, or the system prompt cannot be read.
    """
    template = load_template(task.chat_template, task.model, tokenizer)
    system = None if task.system_prompt is None else prompt_text(task.system_prompt)
    found = []
    for question in questions:
        conversation = Conversation(question.messages)
        if system is not None:
            conversation = with_system(conversation, task.system, system)
        if template is None:
            found.append(render_prompt(conversation.messages, tokenizer))
            continue
        try:
            found.append(template.render_prompt(conversation))
        except LeftOut as reason:
            raise UserError(
                f"{task.prompts}: prompt {question.id}: {reason}; --chat-template chatml may take it"
            ) from None
    return found


def fit(
    questions: Sequence[Question], prompts: Sequence[list[int]], task: Task
) -> tuple[list[list[int]], int]:
    """The prompts within `max_prompt_tokens`, and how many were cut: of those the end stays, with the answer's header.

    Raises:
        UserError: one is too long, and is not to be cut.
    """
    limit = task.max_prompt_tokens
    if limit is None:
        return list(prompts), 0
    if limit < 1:
        raise UserError(f"max_prompt_tokens = {limit}, expected 1 or more")
    long = [i for i, ids in enumerate(prompts) if len(ids) > limit]
    if long and task.too_long == "refuse":
        first = long[0]
        raise UserError(
            f"{task.prompts}: prompt {questions[first].id} has {len(prompts[first])} tokens, expected at most {limit} "
            f"(so have {len(long)} of {len(prompts)}); --too-long cut keeps their ends"
        )
    return [ids[-limit:] for ids in prompts], len(long)


class AnswersFile:
    """Answers as JSON lines; see the head of this file.

    Attributes:
        done: ids, as text, of the answers that are there and stay.
    """

    def __init__(
        self, path: Path, ids: Sequence[str | int], settings: dict[str, Any], overwrite: bool
    ) -> None:
        """Looks at what is there; nothing is written before the first answer.

        Args:
            path: the file.
            ids: of all prompts, in order.
            settings: what decides the answers.
            overwrite: begin again whatever is there.

        Raises:
            UserError: it has something else than answers to these prompts under these settings.
        """
        self.path, self._settings = path, settings
        self._order = {str(id): number for number, id in enumerate(ids)}
        self._note = path.with_name(f".{path.name}.settings.json")
        self._file: int | None = None
        self._keep = 0  # bytes of the file that stay
        self.done: set[str] = set()
        if path.exists() and not overwrite:
            self._read()

    def add(self, row: dict[str, Any]) -> None:
        """Appends an answer, as one whole line."""
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        try:
            if self._file is None:
                self._note.write_text(json.dumps(self._settings))
                self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                os.ftruncate(self._file, self._keep)
            written = os.write(self._file, line)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror})") from None
        if written != len(line):
            raise UserError(f"{self.path}: the disk is full; run again where there is room")

    def finish(self) -> None:
        """Puts the answers into the order of the prompts."""
        if self._file is not None:
            os.close(self._file)
        lines = [line for line in self.path.read_bytes()[: self._size()].split(b"\n") if line]
        lines.sort(key=lambda line: self._order[str(json.loads(line)["id"])])
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.write_bytes(b"".join(line + b"\n" for line in lines))
        os.replace(partial, self.path)
        self._note.unlink(missing_ok=True)

    def _size(self) -> int:
        return self._keep if self._file is None else self.path.stat().st_size

    def _read(self) -> None:
        content = self.path.read_bytes()
        self._keep = content.rfind(b"\n") + 1  # a line that was cut off is made again
        if not self._keep:
            return
        for number, line in enumerate(content[: self._keep].split(b"\n"), start=1):
            if line.strip():
                self.done.add(self._answered(line, f"{self.path}:{number}"))
        before = json.loads(self._note.read_text()) if self._note.is_file() else None
        is_same = before == self._settings
        if len(self.done) == len(self._order) and not is_same:
            self.done, self._keep = set(), 0
        elif before is not None and not is_same:
            changed = [key for key in self._settings if before.get(key) != self._settings[key]]
            raise UserError(
                f"{self.path}: has {len(self.done)} of {len(self._order)} answers made with another "
                f"{' and '.join(changed)}; remove the file or use --overwrite"
            )

    def _answered(self, line: bytes, where: str) -> str:
        """The id of a line that is there."""
        row = parse_line(line, where)
        id = str(row.get("id"))
        if id not in self._order or id in self.done or not isinstance(row.get("response"), str):
            raise UserError(
                f"{where}: found {shown(row)}, expected id and response of one of these prompts, each once; "
                "remove the file or use --overwrite"
            )
        return id


def _settings(task: Task, prompts: Sequence[Sequence[int]], ends: frozenset[int]) -> dict[str, Any]:
    """What decides the answers, by names that mean something to a person."""
    shards = sorted(task.model.glob("*.safetensors"))
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in shards]
    return {
        "model": str(task.model.resolve()),
        "weights": _digest(stats),
        "prompts": _digest([list(ids) for ids in prompts]),
        "max_new_tokens": task.max_new_tokens,
        "stop_ids": sorted(ends),
        **dataclasses.asdict(task.sampling),
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]

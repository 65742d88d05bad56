"""Prompts with constraints that a program can check, from built-in requests or from a user's own prompts.

Each row has IFEval's public layout (`key`, `prompt`, `instruction_id_list`, `kwargs`), which `evaluate.py instructions`
reads, and `messages`, which `generate.py` reads; `group` names the request, so that a split can keep all its prompts on
one side. The key is a hash of the messages: the same prompt has the same key in any file, whatever seed made it.

Kinds come in turn, so that each is about equally often the first constraint of a prompt; what is added to it is drawn
from those that go together with all before. The seed decides everything.
"""

import hashlib
import itertools
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from hymoe.engine.data.formats import read_questions
from hymoe.engine.errors import UserError
from hymoe.engine.eval.asking import (
    CLOSED,
    OPEN,
    Asked,
    Words,
    draw,
    draw_closed,
    is_askable,
    read_wordings,
    solved,
)
from hymoe.engine.eval.report import check_out
from hymoe.engine.eval.tasks import ITEMS, Task, built_in, of_user
from hymoe.engine.eval.together import clash, go_together

ATTEMPTS = 400  # draws in a row that gave nothing new, after which there is nothing new
FEWEST_ITEMS = 6
REPEAT = "combination:repeat_prompt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What prompts to make."""

    count: int | None = None  # None: one of each of the user's prompts
    seed: int = 0
    seeds: Path | None = None  # the user's prompts; None: built-in requests
    kinds: tuple[str, ...] = ()  # ids or families; none: all
    fewest: int = 1  # constraints of a prompt
    most: int = 3
    words: Path | None = None  # items for lists, one a line; None: built-in ones
    wordings: Path | None = None  # how kinds are asked for; see `asking.read_wordings`


@dataclass(frozen=True, slots=True)
class Made:
    """One prompt."""

    task: Task
    asked: tuple[Asked, ...]
    text: str  # of its last user turn

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The whole conversation up to the answer."""
        return [*_before(self.task), {"role": "user", "content": self.text}]

    @property
    def key(self) -> str:
        """A hash of the messages."""
        return _digest(self.messages)

    def row(self, seed: int) -> dict[str, Any]:
        """As it stands in the file."""
        row = {
            "key": self.key,
            "prompt": self.text,
            "instruction_id_list": [asked.id for asked in self.asked],
            "kwargs": [asked.arguments for asked in self.asked],
            "messages": self.messages,
            "group": _digest([*_before(self.task), self.task.text]),
            "source": self.task.origin,
            "seed": seed,
        }
        return row if self.task.origin_id is None else {**row, "seed_id": self.task.origin_id}


def write_prompts(
    wanted: Wanted,
    out: Path,
    answers: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, int]:
    """Writes a file of prompts, and the answers of those that determine theirs.

    Args:
        wanted: what to make.
        out: the file.
        answers: file for the determined answers; None: not written.
        progress: gets the number of prompts so far.

    Returns:
        How many prompts have each kind.

    Raises:
        UserError: bad input, or fewer different prompts than asked for; nothing is written then.
    """
    check_out(out, "--out")
    check_out(answers, "--solved")
    if answers is not None and not CLOSED.keys() & set(kinds_of(wanted)):
        known = ", ".join(CLOSED)
        raise UserError(
            f"--solved {answers}: no kind determines its answer, expected any of {known}"
        )
    counts: dict[str, int] = {}
    with ExitStack() as stack:
        rows = stack.enter_context(whole_file(out))
        known = None if answers is None else stack.enter_context(whole_file(answers))
        for number, made in enumerate(prompts(wanted), start=1):
            rows.write(line_of(made.row(wanted.seed)))
            for asked in made.asked:
                counts[asked.id] = counts.get(asked.id, 0) + 1
                if known is not None and asked.id in CLOSED:
                    answer = solved(asked.id, asked.arguments)
                    known.write(line_of({"key": made.key, "response": answer}))
            if progress is not None:
                progress(number)
    return counts


def prompts(wanted: Wanted) -> Iterator[Made]:
    """Yields different prompts.

    Raises:
        UserError: bad input, or fewer different prompts than asked for.
    """
    kinds, tasks = kinds_of(wanted), _tasks(wanted)
    count = len(tasks) if wanted.count is None else wanted.count
    items, wordings = _items(wanted.words), read_wordings(wanted.wordings)
    rng = random.Random(wanted.seed)
    turns, requests = _shuffled(kinds, rng), _shuffled(tasks, rng)
    seen: set[str] = set()
    for number in range(count):
        for _ in range(ATTEMPTS):
            kind = next(turns)
            # The user's prompts come in their order, each as often as any other.
            task = tasks[number % len(tasks)] if wanted.seeds else next(requests)
            if kind in CLOSED:
                asked = draw_closed(kind, rng, items, wordings)
                made: Made | None = Made(Task(asked.sentence, ()), (asked,), asked.sentence)
            else:
                if not wanted.seeds and not is_askable(kind, task):
                    task = rng.choice([task for task in tasks if task.is_yes_no])
                made = _constrained(task, kind, kinds, wanted, wordings, rng)
            if made is not None and made.key not in seen:
                break
        else:
            raise UserError(
                f"found only {number} different prompts with {wanted.fewest} to {wanted.most} of the kinds "
                f"{', '.join(kinds)}, expected {count}: ask for fewer, or for kinds that go together"
            )
        seen.add(made.key)
        yield made


def kinds_of(wanted: Wanted) -> list[str]:
    """The kinds that prompts are made of, in a fixed order.

    Raises:
        UserError: one is unknown or cannot be asked for here, or the numbers contradict each other.
    """
    if not 1 <= wanted.fewest <= wanted.most:
        raise UserError(
            f"--constraints {wanted.fewest}-{wanted.most}: expected 1 or more, the smaller number first"
        )
    if wanted.count is None and wanted.seeds is None:
        raise UserError("--count is missing: how many prompts to make")
    if wanted.count is not None and wanted.count < 1:
        raise UserError(f"--count {wanted.count}: expected 1 or more")
    # A closed one is a whole prompt, neither added to a user's nor beside others.
    usable = [*OPEN, *(CLOSED if wanted.seeds is None and wanted.fewest == 1 else ())]
    if not wanted.kinds:
        return usable
    chosen: set[str] = set()
    for name in wanted.kinds:
        found = [kind for kind in (*OPEN, *CLOSED) if name in (kind, kind.split(":")[0])]
        if not found:
            known = ", ".join((*OPEN, *CLOSED))
            raise UserError(
                f"--kinds {name}: found no such kind or family, expected any of {known}"
            )
        if not set(found) & set(usable):
            raise UserError(
                f"--kinds {name}: is a whole prompt by itself, expected no --seeds and --constraints from 1"
            )
        chosen.update(found)
    return [kind for kind in usable if kind in chosen]


def line_of(row: dict[str, Any]) -> str:
    """A row as a JSON line."""
    return json.dumps(row, ensure_ascii=False) + "\n"


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A text file that appears when all of it is written, and not at all where that fails."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
        os.replace(partial, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        partial.unlink(missing_ok=True)


def _constrained(
    task: Task,
    first: str,
    kinds: Sequence[str],
    wanted: Wanted,
    wordings: Mapping[str, Sequence[str]],
    rng: random.Random,
) -> Made | None:
    """A request with constraints, the first of the kind `first`; None where too few go together."""
    words = Words(rng, task)
    number = rng.randint(wanted.fewest, wanted.most)
    found: list[Asked] = []
    for kind in [first, *rng.sample(kinds, len(kinds))]:
        if len(found) == number:
            break
        if kind not in OPEN or not is_askable(kind, task):
            continue
        if all(go_together(kind, other.id) for other in found):
            asked = draw(kind, rng, words, task, wordings)
            if not any(clash(asked, other) for other in found):
                found.append(asked)
    if len(found) < wanted.fewest or found[0].id != first:
        return None
    # "The request above" stands before every other rule.
    rules = [a.sentence for a in sorted(found, key=lambda asked: asked.id != REPEAT)]
    layouts = ["\n\n" + " ".join(rules)]
    if not any(asked.id == REPEAT for asked in found):
        layouts += [" " + " ".join(rules), "\n\n" + "\n".join(f"- {rule}" for rule in rules)]
    return Made(task, tuple(found), task.text + rng.choice(layouts))


def _tasks(wanted: Wanted) -> list[Task]:
    if wanted.seeds is None:
        return built_in()
    return [of_user(question.messages, question.id) for question in read_questions(wanted.seeds)]


def _items(path: Path | None) -> Sequence[str]:
    if path is None:
        return ITEMS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--words {path}: cannot be read as UTF-8 text ({error})") from None
    items = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    bad = [item for item in items if "," in item or item.startswith("-")]
    if bad:
        raise UserError(
            f"--words {path}: found {bad[0]!r}, expected items without commas or bullets"
        )
    if len(items) < FEWEST_ITEMS:
        raise UserError(
            f"--words {path}: found {len(items)} different items, expected {FEWEST_ITEMS} or more"
        )
    return items


def _shuffled(values: Sequence[Any], rng: random.Random) -> Iterator[Any]:
    """Endlessly, each value once in a new order before any comes again."""
    return itertools.chain.from_iterable(rng.sample(values, len(values)) for _ in itertools.count())


def _before(task: Task) -> list[dict[str, Any]]:
    return [{"role": message.role, "content": message.content} for message in task.before]


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()

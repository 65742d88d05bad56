"""Answers -> training conversations: only those are kept that a program has checked.

Answers are streamed; prompts and a hash of each kept conversation are in memory. An answer is refused for the first of
REASONS that holds, and counted under it. Kept rows have `messages`, which `prepare_data.py` reads, and where they come
from: `id` (the prompt's key), `constraints`, `answers_file`, `seed` (of the prompts), `seed_id`, `source`.

**Held out.** A share of the requests, by a hash of the prompt's `group` (its text, where it has none): all prompts of
one request are on one side, in any file. Their prompts go to one file, all of them, because those that
were answered rightly are the easy ones; their verified conversations go to another, for `data.eval`. Neither is in the
training file.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from hymoe.engine.data.formats import parse_messages
from hymoe.engine.data.schema import split_position
from hymoe.engine.data.sources import read_jsonl
from hymoe.engine.errors import UserError
from hymoe.engine.eval.checks import check
from hymoe.engine.eval.decency import fault
from hymoe.engine.eval.instruct import Prompt, judge_loosely, read_prompts
from hymoe.engine.eval.report import check_out
from hymoe.engine.eval.synthesize import REPEAT, line_of, whole_file

BROKEN, DUPLICATE, TOO_MANY = "breaks a constraint", "duplicate", "more than asked for"
REASONS = ("cut", "empty", "repeats itself", "parrots the prompt", BROKEN, DUPLICATE, TOO_MANY)


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """What to keep and where."""

    prompts: Path
    answers: tuple[Path, ...]
    out: Path
    loose: bool = False  # IFEval's loose verdict; the answer is kept as it is
    most: int | None = None  # answers kept of a prompt
    held_out: float = 0.0  # share of the requests
    seed: int = 0  # of the held-out side
    rejected: Path | None = None  # answers that were refused, with reasons
    unanswered: Path | None = None  # prompts without a verified answer

    @property
    def held_out_rows(self) -> Path:
        """File of the verified conversations on the held-out side."""
        return self.out.with_name(f"{self.out.stem}.heldout.jsonl")

    @property
    def held_out_prompts(self) -> Path:
        """File of all prompts on the held-out side."""
        return self.out.with_name(f"{self.out.stem}.heldout_prompts.jsonl")


@dataclass(slots=True)
class Kept:
    """What was kept, and why the rest was not."""

    answers: int = 0
    rows: int = 0  # in the training file
    held_out_rows: int = 0
    held_out_prompts: int = 0
    prompts: int = 0
    by_reason: Counter[str] = field(default_factory=Counter)
    judged: Counter[str] = field(
        default_factory=Counter
    )  # by kind, answers that came to the checks
    passed: Counter[str] = field(default_factory=Counter)
    unanswered: list[str] = field(default_factory=list)  # keys without a verified answer, in order


@dataclass(frozen=True, slots=True)
class _Asked:
    prompt: Prompt
    row: dict[str, Any]
    messages: list[dict[str, Any]]
    is_held_out: bool
    given: str  # what the answer has to start with


def keep_verified(wanted: Filter, progress: Callable[[int, int], None] | None = None) -> Kept:
    """Judges every answer and writes the files.

    Args:
        wanted: what to do.
        progress: gets the numbers of answers so far and of those that were kept.

    Raises:
        UserError: bad input; nothing is written then.
    """
    _check(wanted)
    asked = _read(wanted)
    kept = Kept(prompts=len(asked), held_out_prompts=sum(a.is_held_out for a in asked.values()))
    if wanted.held_out and kept.held_out_prompts in (0, len(asked)):
        raise UserError(
            f"--held-out {wanted.held_out}: {kept.held_out_prompts} of {len(asked)} prompts would be held out, "
            "expected some on both sides: another share or more prompts"
        )
    per_prompt: Counter[str] = Counter()
    seen: set[bytes] = set()
    with ExitStack() as stack:

        def opened(path: Path | None) -> TextIO | None:
            return None if path is None else stack.enter_context(whole_file(path))

        train, refused = opened(wanted.out), opened(wanted.rejected)
        held = opened(wanted.held_out_rows if wanted.held_out else None)
        for answer, source in _answers(wanted, asked):
            kept.answers += 1
            found = asked[answer["key"]]
            reason, said = (
                _judge(answer, found, wanted, kept)
                or _surplus(answer, per_prompt, seen, wanted)
                or ("", "")
            )
            if reason:
                kept.by_reason[reason] += 1
                if refused is not None:
                    row = {**answer, "reason": reason, "found": said, "answers_file": source}
                    refused.write(line_of(row))
            else:
                per_prompt[answer["key"]] += 1
                file = held if found.is_held_out else train
                assert file is not None
                file.write(line_of(_conversation(answer["response"], found, source)))
                kept.held_out_rows += found.is_held_out
                kept.rows += not found.is_held_out
            if progress is not None:
                progress(kept.answers, kept.rows + kept.held_out_rows)
        if not kept.rows:
            counts = ", ".join(
                f"{count} {reason}" for reason, count in kept.by_reason.most_common()
            )
            raise UserError(
                f"{wanted.out}: none of {kept.answers} answers could be kept for training ({counts or 'all held out'})"
            )
        _write_prompts(wanted, asked, per_prompt, kept, opened)
    return kept


def _check(wanted: Filter) -> None:
    if not wanted.answers:
        raise UserError("--answers: found no file, expected one or more")
    if not 0 <= wanted.held_out < 1:
        raise UserError(f"--held-out {wanted.held_out}: expected a share of 0 or more and below 1")
    if wanted.most is not None and wanted.most < 1:
        raise UserError(f"--most {wanted.most}: expected 1 or more")
    outs = [wanted.out, wanted.rejected, wanted.unanswered]
    if wanted.held_out:
        outs += [wanted.held_out_rows, wanted.held_out_prompts]
    named = [path.resolve() for path in [*outs, wanted.prompts, *wanted.answers] if path]
    twice = next((path for path in named if named.count(path) > 1), None)
    if twice is not None:
        raise UserError(f"{twice}: is named twice, expected a file of its own for each use")
    for path, flag in zip(
        outs, ("--out", "--rejected", "--unanswered", "--out", "--out"), strict=False
    ):
        check_out(path, flag)


def _read(wanted: Filter) -> dict[str, _Asked]:
    asked: dict[str, _Asked] = {}
    rows = read_jsonl(wanted.prompts)
    for prompt, (number, row) in zip(read_prompts(wanted.prompts), rows, strict=True):
        where = f"{wanted.prompts}:{number}"
        if not prompt.instruction_ids:
            raise UserError(f"{where}: has no constraint, expected one that can be verified")
        messages = row.get("messages", [{"role": "user", "content": prompt.prompt}])
        turns = parse_messages({"messages": messages}, where)
        if turns[-1].role != "user" or turns[-1].content != prompt.prompt:
            raise UserError(f'{where}: the last of "messages" is not the prompt, expected its text')
        # Prompts that differ in case or spaces alone are one request.
        group = str(row.get("group", " ".join(prompt.prompt.lower().split())))
        is_held_out = split_position(group, wanted.seed) < wanted.held_out
        pairs = zip(prompt.instruction_ids, prompt.arguments, strict=True)
        given = [arguments["prompt_to_repeat"] for kind, arguments in pairs if kind == REPEAT]
        asked[prompt.key] = _Asked(prompt, row, messages, is_held_out, "".join(given[:1]))
    return asked


def _answers(wanted: Filter, asked: dict[str, _Asked]) -> Iterator[tuple[dict[str, Any], str]]:
    """Each answer with `key`, `response`, `finish_reason`, and its file."""
    for path in wanted.answers:
        for number, row in read_jsonl(path):
            where = f"{path}:{number}"
            key = row.get("key", row.get("id"))
            if key is None or str(key) not in asked:
                raise UserError(f"{where}: found key {key}, expected a key of {wanted.prompts}")
            response = row.get("response")
            if response is not None and not isinstance(response, str):
                raise UserError(f'{where}: "response" is {response!r}, expected text')
            yield (
                {
                    "key": str(key),
                    "response": response or "",
                    "finish_reason": row.get("finish_reason"),
                },
                str(path),
            )


def _judge(
    answer: dict[str, Any], asked: _Asked, wanted: Filter, kept: Kept
) -> tuple[str, str] | None:
    """The reason against an answer for what it says, and what was found."""
    prompt, text = asked.prompt, answer["response"]
    found = fault(text, prompt.prompt, prompt.instruction_ids, answer["finish_reason"], asked.given)
    if found is not None:
        return found
    broken = []
    for kind, arguments in zip(prompt.instruction_ids, prompt.arguments, strict=True):
        verdict = check(kind, text, arguments)
        if wanted.loose:
            verdict = judge_loosely(text, kind, arguments, verdict)
        kept.judged[kind] += 1
        kept.passed[kind] += verdict.passed
        if not verdict.passed:
            broken.append(f"{kind}: {verdict.reason}")
    return (BROKEN, "; ".join(broken)) if broken else None


def _surplus(
    answer: dict[str, Any], per_prompt: Counter[str], seen: set[bytes], wanted: Filter
) -> tuple[str, str] | None:
    """The reason against a verified answer for what was kept before."""
    text = " ".join(answer["response"].split())
    digest = hashlib.blake2b(json.dumps([answer["key"], text]).encode(), digest_size=16).digest()
    if digest in seen:
        return DUPLICATE, "the same answer to the same prompt was kept"
    if wanted.most is not None and per_prompt[answer["key"]] >= wanted.most:
        return TOO_MANY, f"{wanted.most} answers to the prompt were kept"
    seen.add(digest)
    return None


def _conversation(response: str, asked: _Asked, source: str) -> dict[str, Any]:
    row = {
        "messages": [*asked.messages, {"role": "assistant", "content": response}],
        "id": asked.prompt.key,
        "constraints": list(asked.prompt.instruction_ids),
        "answers_file": source,
    }
    names = ("source", "seed", "seed_id", "group")
    return {**row, **{name: asked.row[name] for name in names if name in asked.row}}


def _write_prompts(
    wanted: Filter,
    asked: dict[str, _Asked],
    per_prompt: Counter[str],
    kept: Kept,
    opened: Callable[[Path | None], TextIO | None],
) -> None:
    """The files of prompts: held out, and without a verified answer."""
    held = opened(wanted.held_out_prompts if wanted.held_out else None)
    unanswered = opened(wanted.unanswered)
    for key, found in asked.items():
        if held is not None and found.is_held_out:
            held.write(line_of(found.row))
        if not per_prompt[key]:
            kept.unanswered.append(key)
            if unanswered is not None:
                unanswered.write(line_of(found.row))


def rows_of(kept: Kept) -> Sequence[tuple[str, int]]:
    """Counts of answers for a table: kept, then refused by reason."""
    refused = [(reason, kept.by_reason[reason]) for reason in REASONS if kept.by_reason[reason]]
    return [("kept for training", kept.rows), ("kept, held out", kept.held_out_rows), *refused]

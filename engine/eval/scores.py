"""Scores of answers, kept in a file by what they are scores of, so that work that stopped goes on where it was.

A line of the file is `{"key": ..., "score": ...}`; the key is the SHA-256 of the scorer's identity, the
conversation and the answer. The same text has one score, so equal answers tie exactly. Lines are appended
whole; a last line that was cut off is dropped and its score made again.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from hymoe.engine.data.sources import parse_line
from hymoe.engine.errors import UserError

Turns = Sequence[dict[str, str]]
Progress = Callable[[int, int], None]  # (done, all) of what had to be scored


class Scorer(Protocol):
    """Gives a conversation's last turn a number; higher is better."""

    name: str  # says everything that decides a score: a model's hash, not its path

    def score(self, turns: Turns) -> float:
        """The score of the last turn, the assistant's."""
        ...

    def check(self, conversations: Iterable[Turns]) -> None:
        """Refuses, before the first is scored, what it cannot score."""
        ...


class LengthScorer:
    """The number of characters: a stand-in to try the arithmetic, and the bias to compare a judge with."""

    name = "length"

    def score(self, turns: Turns) -> float:
        """Characters of the last turn."""
        return float(len(turns[-1]["content"]))

    def check(self, conversations: Iterable[Turns]) -> None:
        """Everything has a length."""


class ScoreCache:
    """The scores of one file, or of memory alone."""

    def __init__(self, path: Path | None = None) -> None:
        """Reads what is there.

        Raises:
            UserError: a line that is no score.
        """
        self.path = path
        self.scores: dict[str, float] = {}
        if path is None:
            return
        if not path.parent.is_dir() or path.is_dir():
            raise UserError(f"{path}: expected a file in a folder that exists")
        if not path.exists():
            return
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            row = parse_line(line, f"{path}:{number}")
            key, score = row.get("key"), row.get("score")
            if not isinstance(key, str) or not isinstance(score, int | float):
                raise UserError(f"{path}:{number}: found {line[:60]!r}, expected key and score")
            self.scores[key] = float(score)
        if whole < len(content):
            os.truncate(path, whole)

    def add(self, key: str, score: float) -> None:
        """Keeps a score, and appends it to the file."""
        self.scores[key] = score
        if self.path is None:
            return
        line = (json.dumps({"key": key, "score": score}) + "\n").encode()
        try:
            with open(self.path, "ab", buffering=0) as file:
                written = file.write(line)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror})") from None
        if written != len(line):
            raise UserError(f"{self.path}: the disk is full; run again where there is room")


def score_key(scorer_name: str, turns: Turns) -> str:
    """The content hash under which a score is kept."""
    content = json.dumps([scorer_name, list(turns)], ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


def score_all(
    scorer: Scorer,
    conversations: Sequence[Turns],
    cache: ScoreCache,
    progress: Progress | None = None,
) -> list[float]:
    """The score of each conversation, in order.

    Args:
        scorer: gives those that the cache does not have.
        conversations: may repeat; each text is scored once.
        cache: gets the new scores.
        progress: called after each new score.

    Raises:
        UserError: the scorer cannot take one, or gave no finite number.
    """
    keys = [score_key(scorer.name, turns) for turns in conversations]
    todo = {
        key: turns
        for key, turns in zip(keys, conversations, strict=True)
        if key not in cache.scores
    }
    scorer.check(todo.values())
    for done, (key, turns) in enumerate(todo.items(), start=1):
        score = scorer.score(turns)
        if not math.isfinite(score):
            raise UserError(
                f"{scorer.name}: the score of {turns[-1]['content'][:60]!r} is {score}, expected a number"
            )
        cache.add(key, score)
        if progress is not None:
            progress(done, len(todo))
    return [cache.scores[key] for key in keys]

"""Battles: a user's request, two recorded answers, and which of them a voter preferred.

Two layouts, told apart by their columns: `messages` (ending with the user), `answer`, `opponent_answer`,
`winner` (mine, theirs, tie, both_bad), with `id`; and that of public arenas, `conversation_a`,
`conversation_b`, `winner` (model_a, model_b, tie, tie (bothbad)), with `question_id`. There side a is "mine".

A row of which an answer is no text (public sets have some) is left out and counted; any other fault is an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hymoe.engine.data.formats import parse_messages
from hymoe.engine.data.schema import Message
from hymoe.engine.data.sources import read_jsonl
from hymoe.engine.errors import UserError

Side = Literal["opponent", "answer", "winner"]
WINNERS = {
    "mine": "mine",
    "model_a": "mine",
    "theirs": "theirs",
    "model_b": "theirs",
    "tie": "tie",
    "both_bad": "both_bad",
    "tie (bothbad)": "both_bad",
}
IDS = ("id", "key", "question_id")


@dataclass(frozen=True, slots=True)
class Battle:
    """One request with two answers; an answer may be empty."""

    id: str
    messages: tuple[Message, ...]  # the last is the user's
    answer: str
    opponent_answer: str
    winner: str  # mine, theirs, tie or both_bad

    def recorded(self, side: Side) -> str | None:
        """The answer to measure against; None where "winner" is asked for and nobody won."""
        if side != "winner":
            return self.answer if side == "answer" else self.opponent_answer
        return {"mine": self.answer, "theirs": self.opponent_answer}.get(self.winner)

    def turns(self, answer: str) -> list[dict[str, str]]:
        """The conversation with an answer to it, as chat templates take it."""
        context = [{"role": m.role, "content": m.content or ""} for m in self.messages]
        return [*context, {"role": "assistant", "content": answer}]


def read_battles(path: Path | str) -> tuple[list[Battle], list[str]]:
    """Reads a file of battles.

    Returns:
        The battles, and the ids of the rows left out because an answer is no text.

    Raises:
        UserError: a row that is no battle, or has an id again, with file and line; no battle at all.
    """
    found: dict[str, Battle] = {}
    left_out: list[str] = []
    for number, row in read_jsonl(path):
        where = f"{path}:{number}"
        battle = _parse(row, where)
        if isinstance(battle, str):
            left_out.append(battle)
        elif battle.id in found:
            raise UserError(f"{where}: found id {battle.id} again, expected each once")
        else:
            found[battle.id] = battle
    if not found:
        raise UserError(f"{path}: none of {len(left_out)} rows has two answers that are text")
    return list(found.values()), left_out


def _parse(row: Mapping[str, Any], where: str) -> Battle | str:
    """The battle, or the id of one of which an answer is no text."""
    id_ = next((row[name] for name in IDS if name in row), None)
    if not isinstance(id_, str | int) or isinstance(id_, bool):
        raise UserError(f'{where}: "id" is {id_!r}, expected text or a number')
    winner = row.get("winner")
    if not isinstance(winner, str) or winner not in WINNERS:
        raise UserError(f'{where}: "winner" is {winner!r}, expected one of {", ".join(WINNERS)}')
    if "conversation_a" in row:
        first, answer = _split(row, "conversation_a", where)
        second, opponent = _split(row, "conversation_b", where)
        if first != second:
            raise UserError(f"{where}: the two conversations differ before their last turn")
    else:
        for name in ("messages", "answer", "opponent_answer"):
            if name not in row:
                raise UserError(f'{where}: found no "{name}", expected it')
        first, answer, opponent = row["messages"], row["answer"], row["opponent_answer"]
    messages = parse_messages({"messages": first}, where)
    if messages[-1].role != "user":
        raise UserError(f"{where}: found no user's turn before the answers, expected one")
    if not isinstance(answer, str) or not isinstance(opponent, str):
        return str(id_)
    return Battle(str(id_), messages, answer, opponent, WINNERS[winner])


def _split(row: Mapping[str, Any], column: str, where: str) -> tuple[list[Any], Any]:
    """The turns before the last one of a conversation, and the last one's content."""
    turns = row.get(column)
    last = turns[-1] if isinstance(turns, list) and turns else None
    if not isinstance(last, dict) or last.get("role") != "assistant" or "content" not in last:
        raise UserError(f"{where}: {column} does not end with the assistant's turn, expected that")
    return turns[:-1], last["content"]

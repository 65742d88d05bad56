"""From logits to the next token: repetition penalty, then the likeliest token or a drawn one, all in float32.

**Penalty.** The logit of every id that a sequence has seen is divided by the penalty where it is positive and
multiplied where it is negative, once however often the id was seen. 1.0 changes no bit. Prompt ids count, as in
`transformers`, unless `penalize_prompt` is off; padding cannot count, because there is none.

**Drawing.** Logits are divided by the temperature; of the most probable tokens only those stay that are needed to reach
`top_p`; the token is where a uniform number falls among the cumulated probabilities in the order of ids. That number is
made of (seed, the prompt's key, position in the answer) alone: who else is in the batch cannot change it, nor can an
interruption.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hymoe.engine.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is chosen.

    Raises:
        UserError: a value that means nothing, with its name and what is expected.
    """

    temperature: float = (
        0.0  # 0: the likeliest token; else logits are divided by it and a token is drawn
    )
    top_p: float = 1.0  # of a drawn token: probability that the tokens it is drawn from must reach
    seed: int = 0  # of drawn tokens
    repetition_penalty: float = 1.0  # above 1 makes ids that were seen less likely
    penalize_prompt: bool = True  # whether the prompt's ids count as seen

    def __post_init__(self) -> None:
        """Checks each value."""
        for fits, said in (
            (0 <= self.temperature < float("inf"), f"temperature = {self.temperature}, 0 or more"),
            (0 < self.top_p <= 1, f"top_p = {self.top_p}, above 0 and at most 1"),
            (
                0 < self.repetition_penalty < float("inf"),
                f"repetition_penalty = {self.repetition_penalty}, above 0",
            ),
        ):
            if not fits:
                found, expected = said.split(", ", 1)
                raise UserError(f"{found}, expected {expected}")


class SeenIds:
    """The distinct ids that each row has seen; rows stand as in the model's cache."""

    def __init__(self) -> None:
        """No row."""
        self._rows: list[dict[int, None]] = []  # in the order in which they came
        self._table = np.zeros((0, 0), dtype=np.int64)

    def add_row(self, ids: Iterable[int]) -> None:
        """A new last row."""
        self._rows.append({})
        rows = len(self._rows)
        if rows > self._table.shape[0]:
            self._grow(2 * rows, self._table.shape[1])
        for id in dict.fromkeys(ids):
            self.note(rows - 1, id)

    def note(self, row: int, id: int) -> None:
        """A row sees an id."""
        seen = self._rows[row]
        if id in seen:
            return
        if len(seen) == self._table.shape[1]:
            self._grow(self._table.shape[0], max(64, 2 * len(seen)))
        if not seen:
            self._table[row] = id  # fills up the rest: an id counts once
        self._table[row, len(seen)] = id
        seen[id] = None

    def drop(self, moves: Iterable[tuple[int, int]], left: int) -> None:
        """As the cache's rows: each source takes its target's place, then only the first `left` stay."""
        for source, target in moves:
            self._rows[target] = self._rows[source]
            self._table[target] = self._table[source]
        del self._rows[left:]

    def table(self, first: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Of the S rows from `first` on.

        Returns:
            ids: (S, U) int64, a row's first id repeated at its end.
            has_any: (S, 1) bool, whether a row has seen any.
        """
        counts = [len(seen) for seen in self._rows[first:]]
        ids = self._table[first : len(self._rows), : max(1, *counts)]
        has_any = torch.tensor([[count > 0] for count in counts], device=device)
        return torch.from_numpy(ids).to(device), has_any

    def _grow(self, rows: int, width: int) -> None:
        old = self._table
        self._table = np.zeros((rows, width), dtype=np.int64)
        self._table[: old.shape[0], : old.shape[1]] = old
        if old.shape[1]:
            self._table[: old.shape[0], old.shape[1] :] = old[:, :1]


def penalized(logits: Tensor, seen: SeenIds, penalty: float, first: int = 0) -> Tensor:
    """Logits (S, V) of the rows from `first` on, after the repetition penalty; float32."""
    logits = logits.float()
    if penalty == 1.0:
        return logits
    ids, has_any = seen.table(first, logits.device)
    found = logits.gather(1, ids)
    lowered = torch.where(found > 0, found / penalty, found * penalty)
    return logits.scatter(1, ids, torch.where(has_any, lowered, found))


def greedy(logits: Tensor) -> Tensor:
    """The id of the largest logit, the lowest of several equal ones.

    Args:
        logits: (S, V), any float dtype.

    Returns:
        ids: (S,) int64.

    Raises:
        UserError: a row's largest logit is not finite.
    """
    best, ids = logits.float().max(dim=-1)  # torch promises the first of several equal ones
    _check_finite(best)
    return ids


def drawn(logits: Tensor, temperature: float, top_p: float, numbers: Sequence[float]) -> Tensor:
    """Ids drawn from the distribution of the logits.

    Args:
        logits: (S, V), any float dtype.
        temperature: above 0.
        top_p: the nucleus' probability.
        numbers: one uniform number of [0, 1) for each row.

    Returns:
        ids: (S,) int64.

    Raises:
        UserError: a row's largest logit is not finite.
    """
    logits = logits.float()
    # Less the largest one first: a low temperature would overflow.
    best = logits.amax(dim=-1, keepdim=True)
    _check_finite(best)
    shares = torch.softmax((logits - best).div_(temperature), dim=-1)
    if top_p < 1:
        ranked, order = shares.sort(dim=-1, descending=True, stable=True)
        before = ranked.double().cumsum(-1) - ranked  # what more probable tokens already reach
        is_out = torch.zeros_like(shares, dtype=torch.bool).scatter(1, order, before >= top_p)
        shares = shares.masked_fill(is_out, 0)
    total = shares.double().cumsum(-1)  # (S, V)
    target = torch.tensor(numbers, dtype=torch.float64, device=logits.device)[:, None]
    ids = torch.searchsorted(total, target * total[:, -1:], right=True)[:, 0]
    # Rounding may put the target at the very end: the last token of any probability.
    last = torch.searchsorted(total, total[:, -1:].contiguous())[:, 0]
    return torch.minimum(ids, last)


def uniform(seed: int, key: str, position: int) -> float:
    """A number of [0, 1) that belongs to a place in an answer."""
    text = f"{seed}\0{position}\0{key}".encode(errors="surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53  # 53 bits: exact in a float


def _check_finite(best: Tensor) -> None:
    """Raises UserError where the largest logit of a row is not finite; a NaN anywhere in a row shows there."""
    if not bool(torch.isfinite(best).all()):
        raise UserError("the model gave a logit that is not finite: its weights are broken")

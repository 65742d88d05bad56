"""A JSONL file of conversations, rendered, masked and packed in memory: the door of small runs."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hymoe.engine.data.chat import shifted_labels
from hymoe.engine.data.formats import read_rows
from hymoe.engine.data.pack import pack_best_fit
from hymoe.engine.data.render import TOO_LONG, Renderer, Rules
from hymoe.engine.data.rows import MemoryRows
from hymoe.engine.data.schema import Conversation, LeftOut
from hymoe.engine.data.tokenizer import Tokenizer
from hymoe.engine.errors import UserError


@dataclass(slots=True)
class PrepareStats:
    """What became of the rows of a file; kept + dropped = read."""

    source: str
    rows_read: int = 0
    rows_kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    rows_cut: int = 0  # kept, but not in one piece
    tokens: int = 0
    supervised_tokens: int = 0
    longest_tokens: int = 0
    packed_rows: int = 0
    seq_len: int = 0

    @property
    def packing_efficiency(self) -> float:
        """Share of the packed rows' room that holds tokens."""
        return self.tokens / (self.packed_rows * self.seq_len) if self.packed_rows else 0.0

    def summary(self) -> str:
        """One line for a person."""
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(self.dropped.items()))
        dropped = f"dropped {reasons}" if reasons else "none dropped"
        cut = f", {self.rows_cut} cut" if self.rows_cut else ""
        return (
            f"{self.source}: {self.rows_read:,} rows read, "
            f"{self.rows_kept:,} kept ({dropped}{cut}); "
            f"{self.tokens:,} tokens, {self.supervised_tokens:,} supervised, "
            f"longest {self.longest_tokens:,}; {self.packed_rows:,} packed rows "
            f"of {self.seq_len:,}, {self.packing_efficiency:.1%} full"
        )

    def as_dict(self) -> dict[str, object]:
        """The same for a log."""
        names = [name for name in self.__slots__ if name != "dropped"]
        values = {name: getattr(self, name) for name in names}
        efficiency = round(self.packing_efficiency, 6)
        return {**values, "dropped": dict(self.dropped), "packing_efficiency": efficiency}


def prepare_jsonl(
    path: Path | str,
    tokenizer: Tokenizer | Path | str,
    seq_len: int,
    seed: int,
    too_long: str = "drop",
) -> tuple[MemoryRows, PrepareStats]:
    """Reads, renders, masks and packs a JSONL file of conversations.

    Args:
        path: JSONL whose rows have `messages`.
        tokenizer: the checkpoint's tokenizer or its folder.
        seq_len: most tokens of a packed row, and of a conversation.
        seed: of the packing.
        too_long: what happens to a conversation of more than `seq_len` tokens, see `render.Rules`.

    Raises:
        UserError: a broken file or row, or nothing left to train on.
    """
    if too_long not in TOO_LONG:
        raise UserError(f"too_long = {too_long!r}, expected one of {', '.join(TOO_LONG)}")
    if seq_len < 2:
        raise UserError(f"seq_len = {seq_len}, expected 2 or more")
    file = tokenizer.path if isinstance(tokenizer, Tokenizer) else Path(tokenizer)
    renderer = Renderer(Rules(file, "chatml", file, None, seq_len, too_long))
    stats = PrepareStats(source=str(path), seq_len=seq_len)
    documents: list[tuple[list[int], list[int]]] = []
    for row in read_rows(path):
        stats.rows_read += 1
        try:
            found = renderer.documents(Conversation(row.messages))
        except LeftOut as error:
            stats.dropped[error.reason] += 1
            continue
        stats.rows_kept += 1
        stats.rows_cut += found.cut
        for ids, trained in found.parts:
            documents.append((ids.tolist(), shifted_labels(ids.tolist(), trained.tolist())))
            stats.tokens += len(ids)
            stats.supervised_tokens += int(trained[1:].sum())
            stats.longest_tokens = max(stats.longest_tokens, len(ids))
    if not documents:
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(stats.dropped.items()))
        raise UserError(
            f"{path}: nothing left to train on of {stats.rows_read} rows ({reasons}), expected at "
            "least one conversation with an answer"
        )
    packing = pack_best_fit([len(ids) for ids, _ in documents], seq_len, seed)
    stats.packed_rows = len(packing)
    return MemoryRows(documents, packing, seq_len), stats

"""What became of the rows of each source, for a person and for the manifest."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SourceStats:
    """Counts of one source; rows_taken + dropped = rows_read.

    Attributes:
        name: of the source.
        asked: what the recipe asks for, in words.
        rows_in_source: rows of its files.
        rows_read: rows that were looked at.
        rows_taken: usable rows, each once.
        dropped: rows left out, by reason.
        cut: taken rows that were too long to stay in one piece.
        conversations: rows in the data set, repetitions counted.
        documents: the same, windows counted each.
        tokens: of these documents.
        supervised_tokens: of these, with a label.
        longest: tokens of the longest document.
    """

    name: str
    asked: str
    rows_in_source: int = 0
    rows_read: int = 0
    rows_taken: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    conversations: int = 0
    documents: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    longest: int = 0

    def reasons(self) -> str:
        """Dropped rows in words."""
        return ", ".join(f"{n:,} {reason}" for reason, n in sorted(self.dropped.items())) or "none"

    def line(self) -> str:
        """One line for a person."""
        return (
            f"{self.name}: asked for {self.asked}; {self.rows_read:,} of {self.rows_in_source:,} rows read, "
            f"{self.rows_taken:,} taken, dropped {self.reasons()}; {self.conversations:,} conversations"
        )

    def as_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return {**vars(self), "dropped": dict(sorted(self.dropped.items()))}


COLUMNS = (
    "source",
    "asked",
    "read",
    "taken",
    "in the set",
    "tokens",
    "supervised",
    "longest",
    "dropped",
)


def table(sources: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of a manifest's statistics under COLUMNS, and their sum."""
    rows = []
    for s in sources:
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in s["dropped"].items())
        rows.append(
            [
                s["name"],
                s["asked"],
                *(f"{s[key]:,}" for key in ("rows_read", "rows_taken", "conversations", "tokens")),
                f"{s['supervised_tokens']:,}",
                f"{s['longest']:,}",
                f"{s['cut']:,}",
                reasons or "none",
            ]
        )
    total = lambda key: f"{sum(s[key] for s in sources):,}"  # noqa: E731
    keys = ("rows_read", "rows_taken", "conversations", "tokens", "supervised_tokens")
    longest = max((s["longest"] for s in sources), default=0)
    rows.append(["all", "", *map(total, keys), f"{longest:,}", total("cut"), ""])
    return rows

"""What preflight has found: lines, a table for a person, a dict for JSON.

A line is ok, warn (slower than need be, or a risk), bad (a run fails, hangs or crawls), or info where nothing is
expected.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Line:
    """A finding. `value` is the figure in it, where there is one, in the unit that `found` names."""

    section: str
    name: str
    found: str
    should: str = ""
    state: str = "info"  # ok | warn | bad | info
    remedy: str = ""
    value: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass
class Result:
    """All findings."""

    kind: str  # cuda | cpu
    ranks: int
    lines: list[Line] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(
        default_factory=list
    )  # source, target, gb_per_s, latency_us
    seconds: float = 0.0
    stuck: list[int] = field(default_factory=list)  # ranks whose process could not be ended

    @property
    def is_good(self) -> bool:
        """Whether nothing is bad."""
        return all(line.state != "bad" for line in self.lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "ok": self.is_good,
            "device": self.kind,
            "ranks": self.ranks,
            "seconds": round(self.seconds, 1),
            "bandwidth": "bytes that one rank sends / time (bus bandwidth)",
            "lines": [line.as_dict() for line in self.lines],
            "pairs": self.pairs,
        }


def table(result: Result) -> Table:
    """The findings, section by section."""
    made = Table(box=None, pad_edge=False)
    for title in ("", "found", "should be"):
        made.add_column(title, overflow="fold")
    made.add_column("", no_wrap=True)
    marks = {"info": "-", "ok": "ok", "warn": "[yellow]warn[/]", "bad": "[bold red]BAD[/]"}
    section = ""
    for line in result.lines:
        if line.section != section:
            section = line.section
            made.add_row(section.upper())
        made.add_row(
            f"  {escape(line.name)}", escape(line.found), escape(line.should), marks[line.state]
        )
    return made


def summary(result: Result) -> list[str]:
    """What helps, each remedy once, and the last line: how many findings are bad, and the formula of bandwidths."""
    helped: dict[str, list[str]] = {}
    for line in result.lines:
        if line.remedy:
            helped.setdefault(line.remedy, []).append(line.name)
    said = []
    for remedy, names in helped.items():
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        said.append(f"help, {', '.join(names[:4])}{more}: {remedy}")
    counts = [sum(line.state == state for line in result.lines) for state in ("bad", "warn")]
    said.append("GB/s of links: bytes that one rank sends / time, the bus bandwidth of nccl-tests")
    said.append(f"{counts[0]} bad, {counts[1]} warnings, {result.seconds:.0f} s")
    return said

"""The registry of constraints, and what every check shares: verdicts, arguments, how a reason reads.

A module of checks registers each with `rule(id, argument=kind, ...)`; `checks.py` imports them all and is
where a caller looks. Arguments are checked by their kind (KINDS) before a judge sees them, so that a judge
can trust them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hymoe.engine.errors import UserError

RELATIONS = ("less than", "at least")
# What the langdetect package has profiles of.
LANGUAGE_CODES = (
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr "
    "ne nl no pa pl pt ro ru sk sl so sq sv sw ta te th tl tr uk ur vi zh-cn zh-tw"
)
LANGUAGES = frozenset(LANGUAGE_CODES.split(" "))
SHOWN = 40  # characters of an answer that a reason quotes


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an answer keeps a constraint, and why."""

    passed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Check:
    """One rule: what it is asked with, and the function that judges."""

    arguments: Mapping[str, str]  # name -> kind, a key of KINDS
    judge: Callable[..., Verdict]


CHECKS: dict[str, Check] = {}

KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "count": ("a whole number of 0 or more", lambda v: type(v) is int and v >= 0),
    "position": ("a whole number of 1 or more", lambda v: type(v) is int and v >= 1),
    "text": ("text that is not empty", lambda v: isinstance(v, str) and bool(v)),
    "texts": (
        "a list of texts that are not empty",
        lambda v: isinstance(v, list) and bool(v) and all(isinstance(t, str) and t for t in v),
    ),
    "letter": ("one character", lambda v: isinstance(v, str) and len(v.strip()) == 1),
    "language": (
        f"one of {', '.join(sorted(LANGUAGES))}",
        lambda v: isinstance(v, str) and v in LANGUAGES,
    ),
    "relation": (f"one of {', '.join(RELATIONS)}", lambda v: v in RELATIONS),
}


def rule(instruction_id: str, **arguments: str) -> Callable[[Callable[..., Verdict]], Any]:
    """Registers the decorated judge, a function of the answer and `arguments`, under an id."""

    def register(judge: Callable[..., Verdict]) -> Callable[..., Verdict]:
        assert instruction_id not in CHECKS, instruction_id
        CHECKS[instruction_id] = Check(arguments, judge)
        return judge

    return register


def resolve(
    instruction_id: str, arguments: Mapping[str, Any] | None
) -> tuple[Callable[..., Verdict], dict[str, Any]]:
    """The function and the checked arguments of a constraint.

    Raises:
        UserError: an unknown id, or arguments that the check does not take or that are missing.
    """
    if instruction_id not in CHECKS:
        known = ", ".join(CHECKS)
        raise UserError(f"unknown constraint {instruction_id!r}, expected one of {known}")
    found = CHECKS[instruction_id]
    given = {key: value for key, value in (arguments or {}).items() if value is not None}
    for name in found.arguments:
        if name not in given:
            raise UserError(f"constraint {instruction_id}: found no argument {name!r}, expected it")
    for name, value in given.items():
        if name not in found.arguments:
            known = ", ".join(found.arguments) or "none"
            raise UserError(
                f"constraint {instruction_id}: unknown argument {name!r}, expected {known}"
            )
        expected, accept = KINDS[found.arguments[name]]
        if not accept(value):
            raise UserError(f"constraint {instruction_id}: {name} = {value!r}, expected {expected}")
    return found.judge, given


def exactly(found: int, expected: int, what: str) -> Verdict:
    """Passes where the count is the one asked for."""
    return Verdict(found == expected, f"has {found} {what}, asked for exactly {expected}")


def related(found: int, expected: int, relation: str, what: str) -> Verdict:
    """Passes where the count is in the relation (of RELATIONS) to the one asked for."""
    passed = found < expected if relation == "less than" else found >= expected
    return Verdict(passed, f"has {found} {what}, asked for {relation} {expected}")


def quoted(items: Sequence[str], limit: int = 8) -> str:
    """Items for a reason, on one line."""
    shown = ", ".join(repr(item) for item in items[:limit])
    return shown + (f" and {len(items) - limit} more" if len(items) > limit else "")

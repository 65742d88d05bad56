"""JSON in an answer: alone or in one Markdown fence, by the letter of the standard."""

import json
import re
from collections.abc import Callable
from typing import Any

from hymoe.engine.eval.rules import Verdict

FENCE = re.compile(r"^```(?:json)?[ \t]*\r?\n(.*?)\r?\n?```$", re.IGNORECASE | re.DOTALL)


def parse_json(text: str, *, unique_keys: bool) -> Any:
    """JSON as the standard has it (no NaN), alone or inside one Markdown fence.

    Args:
        text: the answer.
        unique_keys: a key that occurs twice in an object is an error.

    Raises:
        ValueError: anything else.
    """
    text = text.strip()
    fenced = FENCE.match(text)

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(items)
        if unique_keys and len(content) < len(items):
            raise ValueError("a key occurs twice")
        return content

    body = fenced.group(1) if fenced else text
    return json.loads(body, parse_constant=refuse, object_pairs_hook=pairs)


def json_verdict(
    answer: str, fault: Callable[[Any], str | None], *, unique_keys: bool = True
) -> Verdict:
    """Passes where the answer is JSON in which `fault` finds none.

    Args:
        answer: the text.
        fault: what is wrong with a value, or None.
        unique_keys: as in `parse_json`.
    """
    try:
        value = parse_json(answer, unique_keys=unique_keys)
    except (ValueError, RecursionError) as error:
        return Verdict(False, f"is not valid JSON: {error}")
    found = fault(value)
    return Verdict(found is None, "is the JSON asked for" if found is None else f"is JSON, {found}")

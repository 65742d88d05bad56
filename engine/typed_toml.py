"""TOML tables as frozen dataclasses: every key known, every value of its field's type, errors that name both."""

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hymoe.engine.errors import UserError


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file.

    Raises:
        UserError: no such file, or no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid TOML ({error})") from None


def from_table(where: str, kind: Any, values: dict[str, Any], **given: Any) -> Any:
    """A dataclass from a table.

    Args:
        where: for messages, such as "recipe.toml: [optim]".
        kind: the dataclass; its fields are text, numbers, truth values, lists, tables or Literals, or None beside one.
        values: the table; an integer is taken for a float.
        given: fields that do not come from the table.

    Raises:
        UserError: an unknown key (with the nearest name), or a value of another type.
    """
    hints = typing.get_type_hints(kind)
    built = {}
    for key, value in values.items():
        if key not in hints:
            raise UserError(f"{where} {key} is unknown{nearest(key, hints)}")
        built[key] = _value(f"{where} {key}", hints[key], value)
    return kind(**built, **given)


def _value(where: str, expected: Any, value: Any) -> Any:
    options = [expected]
    if isinstance(expected, types.UnionType) or typing.get_origin(expected) is typing.Union:
        options = [option for option in typing.get_args(expected) if option is not type(None)]
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            choices = typing.get_args(option)
            if any(value == choice and type(value) is type(choice) for choice in choices):
                return value
            if len(options) == 1:
                raise UserError(
                    f"{where} = {value!r}; expected one of {', '.join(map(str, choices))}"
                )
            continue
        kind = typing.get_origin(option) or option
        if kind is tuple and isinstance(value, list):
            return tuple(value)
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is kind:
            return value
    names = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise UserError(f"{where} = {value!r}; expected {names}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; expected one of {', '.join(known)}"


def to_table(values: Any) -> list[str]:
    """Lines `key = value` of a dataclass; None is left out."""
    return [
        f"{key} = {_text(value)}"
        for key, value in dataclasses.asdict(values).items()
        if value is not None
    ]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{k}" = {_text(v)}' for k, v in value.items()) + "}"
    return repr(value)

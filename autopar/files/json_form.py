"""Frozen dataclasses as the JSON of a file, and back.

In: a dataclass of numbers, texts, tuples and other dataclasses. Out: text with a line for each row, so that two files can be
compared by eye; and from checked JSON the same dataclass. What can go wrong: JSON that no schema has checked; `checked.py` does.
"""

from __future__ import annotations

import functools
import json
import types
import typing
from collections.abc import Hashable, Mapping
from typing import TypeVar, cast

T = TypeVar("T")


def text_of(value: object) -> str:
    """The text of a JSON value: a line for each field of an object, for each object or text in a list, and for each row."""
    return _text(value, "") + "\n"


def _text(value: object, indent: str) -> str:
    inner = indent + " "
    match value:
        case dict() if not _is_row(value):
            lines = [f"{inner}{json.dumps(name)}: {_text(item, inner)}" for name, item in value.items()]
            return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
        case list() | tuple() if any(isinstance(item, dict | str) for item in value):
            return "[\n" + ",\n".join(f"{inner}{_text(item, inner)}" for item in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)


def _is_row(value: Mapping[str, object]) -> bool:
    """Whether an object holds plain values and lists of these."""
    items = [item for one in value.values() for item in (one if isinstance(one, list | tuple) else [one])]
    return not any(isinstance(item, dict) for item in items)


def build(kind: type[T], fields: Mapping[str, object]) -> T:
    """A dataclass from JSON that a schema has checked; what is left out has the field's default."""
    hints = _hints(cast(Hashable, kind))
    return kind(**{name: _value(hints[name], value) for name, value in fields.items()})


@functools.cache
def _hints(kind: object) -> Mapping[str, object]:
    return typing.get_type_hints(kind)


def _value(hint: object, value: object) -> object:
    """A JSON value as the type that a field has; JSON has no tuples, and may write a whole number as 2.0 and a float as 2."""
    if isinstance(hint, types.UnionType):
        (one,) = (kind for kind in typing.get_args(hint) if kind is not types.NoneType)
        return None if value is None else _value(one, value)
    if isinstance(value, list):
        item, *others = typing.get_args(hint)
        hints = [item] * len(value) if others in ([], [...]) else [item, *others]
        return tuple(_value(one, part) for one, part in zip(hints, value, strict=True))
    if isinstance(value, dict):
        assert isinstance(hint, type)
        return build(hint, value)
    return hint(value) if hint in (int, float) and isinstance(value, int | float) else value

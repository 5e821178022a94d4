"""JSON -> the frozen dataclasses of a plan, checked field by field.

In: text, or what `json.loads` made of it, and a dataclass. Out: an instance, whose nested dataclasses and tuples are read by the
types of its fields. What can go wrong: missing or unknown fields, and values of another type; `PlanError` names the field.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import TypeVar

from autopar.errors import PlanError

T = TypeVar("T")


def load(text: str) -> object:
    """The JSON value in a text; PlanError if it is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"not a plan: invalid JSON: {error}") from None


def read(kind: type[T], fields: object, where: str) -> T:
    """A dataclass from a JSON object; what is left out has the field's default.

    Args:
        kind: the dataclass; its fields are numbers, text, tuples, other dataclasses, or None beside one of these. If it has a
            `version`, the object must have the same.
        fields: what `json.loads` returned.
        where: the start of an error's message, such as `not a plan of version 1: inputs: `.

    Raises:
        PlanError: a field is missing, unknown, or of another type, or the version is another one.
    """
    if not isinstance(fields, dict):
        raise PlanError(f"{where}an object is expected, not {_shown(fields)}")
    known = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if "version" in known:
        _check_version(fields.get("version"), known["version"].default)
    required = {name for name, field in known.items() if field.default is dataclasses.MISSING}
    missing, unknown = sorted(required - set(fields)), sorted(set(fields) - set(known))
    if missing or unknown:
        raise PlanError(f"{where}missing fields {missing}, unknown fields {unknown}")
    hints = typing.get_type_hints(kind)
    return kind(**{name: _value(hints[name], value, f"{where}{name}: ") for name, value in fields.items()})


def _check_version(given: object, known: object) -> None:
    if given is None:
        raise PlanError("not a plan: a JSON object with a 'version' is expected")
    if given != known:
        raise PlanError(f"plan of version {given}, this autopar reads version {known}: plan again")


def _value(hint: object, value: object, where: str) -> object:
    """A JSON value as the type that a field has; JSON writes whole floats as integers, and tuples as lists."""
    if isinstance(hint, types.UnionType):
        (one,) = (kind for kind in typing.get_args(hint) if kind is not types.NoneType)
        return None if value is None else _value(one, value, where)
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        if not isinstance(value, list | tuple):
            of = "objects" if dataclasses.is_dataclass(item) else "values"
            raise PlanError(f"{where}a list of {of} is expected, not {_shown(value)}")
        return tuple(_value(item, one, where) for one in value)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return read(hint, value, where)
    accepted = (int, float) if hint is float else hint
    assert isinstance(accepted, type | tuple)
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise PlanError(f"{where}{_NAMES[hint]} is expected, not {_shown(value)}")
    return value


_NAMES: Mapping[object, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."

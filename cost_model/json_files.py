"""JSON that somebody else may have written: read strictly, and checked against a schema.

In: the text of a file, and a JSON schema. Out: its value, with every violation described by its place, what stands there, and
what is expected. What can go wrong: text that JSON does not allow, or that no file of ours holds, such as NaN, numbers beyond
all bounds, a name twice in one object, brackets nested a thousand deep; JsonError.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import jsonschema

MOST_ERRORS = 5
"""How many violations are described at once."""
_DEEPEST = 64
"""How deep the values of a file may be nested."""
_LONGEST_SHOWN = 60
_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


class JsonError(ValueError):
    """A text is no JSON, or none that a file may hold."""


def parse_json(text: str) -> object:
    """The JSON value in a text. Raises JsonError."""
    try:
        value = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_object_of_pairs
        )
    except json.JSONDecodeError as error:
        raise JsonError(f"line {error.lineno} is not JSON: {error.msg}") from None
    except RecursionError:
        raise JsonError(f"its values are nested more than {_DEEPEST} deep") from None
    except JsonError:
        raise
    except ValueError:  # Python refuses whole numbers of thousands of digits
        raise JsonError("a number has too many digits") from None
    _check_depth(value)
    return value


@functools.cache
def schema_at(path: Path) -> jsonschema.Draft202012Validator:
    """The validator of a schema in a file of the package."""
    return jsonschema.Draft202012Validator(json.loads(path.read_text(encoding="utf-8")))


def violations(fields: object, schema: jsonschema.Draft202012Validator) -> list[str]:
    """The first violations of a schema, each in words; none if there are none."""
    errors = sorted(schema.iter_errors(fields), key=lambda e: list(map(str, e.absolute_path)))
    return list(dict.fromkeys(map(_describe, errors)))[:MOST_ERRORS]


def shown(value: object) -> str:
    """A value in at most so many letters as a message has room for."""
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def _refuse_constant(name: str) -> object:
    raise JsonError(f"{name} stands where a finite number is expected")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise JsonError(f"the number {text[:20]} is too large")
    return number


def _object_of_pairs(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise JsonError(f"an object has the name {shown(twice)} twice")
    return value


def _check_depth(value: object) -> None:
    """Raise JsonError if a value is nested deeper than any file of ours, as checking it would recur as deep."""
    layer: list[object] = [value]
    for _ in range(_DEEPEST):
        layer = [
            item
            for outer in layer
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not layer:
            return
    raise JsonError(f"its values are nested more than {_DEEPEST} deep")


def _describe(error: jsonschema.ValidationError) -> str:
    """One violation as place, value, expected."""
    place = ".".join(map(str, error.absolute_path)) or "the file"
    found = shown(error.instance)
    match error.validator:
        case "required":
            missing = [name for name in error.validator_value if name not in error.instance]
            return f"{place} lacks {', '.join(map(repr, missing))}"
        case "additionalProperties":
            known = sorted(error.schema.get("properties", ()))
            unknown = sorted(set(error.instance) - set(known))
            close = [match for name in unknown for match in difflib.get_close_matches(name, known, n=1)]
            hint = f"did you mean {', '.join(close)}?" if close else f"it takes {', '.join(known)}"
            return f"{place} has unknown {', '.join(map(shown, unknown))}; {hint}"
        case "oneOf":
            return f"{place} needs either 'device' or, for a mixed cluster, 'node_kinds'"
        case "enum":
            return f"{place} is {found}; one of {', '.join(map(repr, error.validator_value))} is expected"
        case "const":
            return f"{place} is {found}; {error.validator_value!r} is expected"
        case "type":
            kinds = error.validator_value
            names = [_TYPES[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds)]
            return f"{place} is {found}; {' or '.join(names)} is expected"
        case "minimum" | "exclusiveMinimum" | "maximum":
            words = {"minimum": "at least", "exclusiveMinimum": "more than", "maximum": "at most"}[error.validator]
            return f"{place} is {found}; {words} {error.validator_value} is expected"
        case "minItems" | "maxItems":
            words = "at least" if error.validator == "minItems" else "at most"
            return f"{place} has {len(error.instance)} items; {words} {error.validator_value} are expected"
        case "maxLength" | "minLength":
            words = "at least" if error.validator == "minLength" else "at most"
            return f"{place} is {found}; text of {words} {error.validator_value} letters is expected"
    return f"{place} is {found}: {error.validator} {shown(error.validator_value)} is expected"

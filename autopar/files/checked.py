"""The schemas of the files of this package, and text checked against them.

In: the text of a file. Out: its JSON, as far as a schema can tell what it has to be. What can go wrong: PlanError names the
place, what stands there and what is expected.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

from autopar.cost_model.json_files import JsonError, parse_json, schema_at, violations
from autopar.errors import PlanError

Fields: TypeAlias = Mapping[str, Any]
"""An object of JSON that a schema has checked: names and types are those of the schema."""

FOLDER = Path(__file__).resolve().parent
PLAN_SCHEMA, ENTRY_SCHEMA = FOLDER / "plan.schema.json", FOLDER / "cache_entry.schema.json"
VERIFICATION_SCHEMA = FOLDER / "verification.schema.json"


def load_text(text: str, what: str) -> object:
    """The JSON value in a text; `what` the file should be, for errors. Raises PlanError."""
    try:
        return parse_json(text)
    except JsonError as error:
        raise PlanError(f"not {what}: {error}") from None


def check_fields(fields: object, schema: Path, what: str) -> Fields:
    """The JSON of a file, which follows a schema. Raises PlanError with the first things that do not."""
    found = violations(fields, schema_at(schema))
    if found:
        raise PlanError(f"not {what}: {'; '.join(found)}")
    return cast(Fields, fields)

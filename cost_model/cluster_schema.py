"""Checks the JSON of a cluster file: against `cluster.schema.json`, and for what a schema cannot say.

Each violation is described by its place, what stands there, and what is expected.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path

import jsonschema

from autopar.cost_model.tiers import Tier

SCHEMA_FILE = Path(__file__).resolve().parent / "cluster.schema.json"
MOST_ERRORS = 5
"""How many violations are described at once."""


class ClusterFileError(ValueError):
    """A cluster file cannot be used: where, what stands there, what is expected."""


def check_fields(fields: object, origin: str) -> None:
    """Raise ClusterFileError unless the JSON of a file follows the schema; `origin` names the file."""
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    errors = sorted(jsonschema.Draft202012Validator(schema).iter_errors(fields), key=lambda e: list(map(str, e.path)))
    if errors:
        raise ClusterFileError("; ".join(f"{origin}: {_describe(error)}" for error in errors[:MOST_ERRORS]))


def check_tiers(tiers: Sequence[Tier], place: str, origin: str, *, skipped: int = 0) -> None:
    """Raise ClusterFileError unless tiers grow from the inside out and link tables fit their group.

    Args:
        tiers: From the inside out.
        place: Where they stand in the file.
        origin: The name of the file.
        skipped: How many of the tiers stand elsewhere in the file.
    """
    below = 1
    for number, tier in enumerate(tiers):
        here = f"{origin}: {place}.{number - skipped}"
        if tier.devices is None and number < len(tiers) - 1:
            raise ClusterFileError(f"{here}.devices is null; only the outermost tier may join any number of devices")
        if tier.devices is not None and (tier.devices < below or tier.devices % below):
            raise ClusterFileError(
                f"{here}.devices is {tier.devices}; a multiple of the {below} devices of the tier below is expected"
            )
        side = tier.devices or 0
        if tier.topology == "hybrid-cube-mesh":
            if len(tier.link_counts) != side or any(len(row) != side for row in tier.link_counts):
                raise ClusterFileError(
                    f"{here}.link_counts: {side} rows of {side} numbers of links are expected, as the group has {side} devices"
                )
            if tier.fallback_bytes_per_s <= 0:
                raise ClusterFileError(
                    f"{here}.fallback_bytes_per_s is missing; a hybrid cube mesh needs it for devices without a link"
                )
        below = tier.devices or below


def _describe(error: jsonschema.ValidationError) -> str:
    """One schema violation as place, value, expected."""
    place = ".".join(map(str, error.absolute_path)) or "the file"
    shown = json.dumps(error.instance)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    match error.validator:
        case "required":
            missing = [name for name in error.validator_value if name not in error.instance]
            return f"{place} lacks {', '.join(map(repr, missing))}"
        case "additionalProperties":
            known = sorted(error.schema.get("properties", ()))
            unknown = sorted(set(error.instance) - set(known))
            close = [match for name in unknown for match in difflib.get_close_matches(name, known, n=1)]
            hint = f"did you mean {', '.join(close)}?" if close else f"it takes {', '.join(known)}"
            return f"{place} has unknown {', '.join(map(repr, unknown))}; {hint}"
        case "oneOf":
            return f"{place} needs either 'device' or, for a mixed cluster, 'node_kinds'"
        case "enum":
            return f"{place} is {shown}; one of {', '.join(map(repr, error.validator_value))} is expected"
        case "const":
            return f"{place} is {shown}; {error.validator_value!r} is expected"
        case "type":
            kinds = error.validator_value
            return f"{place} is {shown}; {' or '.join([kinds] if isinstance(kinds, str) else kinds)} is expected"
        case "minimum" | "exclusiveMinimum" | "maximum":
            words = {"minimum": "at least", "exclusiveMinimum": "more than", "maximum": "at most"}[error.validator]
            return f"{place} is {shown}; {words} {error.validator_value} is expected"
    return f"{place} is {shown}: {error.message}"

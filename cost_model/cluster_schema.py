"""Checks the JSON of a cluster file: against `cluster.schema.json`, and for what a schema cannot say.

Each violation is described by its place, what stands there, and what is expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autopar.cost_model.json_files import schema_at, violations
from autopar.cost_model.tiers import Tier

SCHEMA_FILE = Path(__file__).resolve().parent / "cluster.schema.json"


class ClusterFileError(ValueError):
    """A cluster file cannot be used: where, what stands there, what is expected."""


def check_fields(fields: object, origin: str) -> None:
    """Raise ClusterFileError unless the JSON of a file follows the schema; `origin` names the file."""
    found = violations(fields, schema_at(SCHEMA_FILE))
    if found:
        raise ClusterFileError("; ".join(f"{origin}: {violation}" for violation in found))


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

"""What the search on one mesh may do, as one frozen value."""

from __future__ import annotations

import dataclasses

from autopar.layouts.moves import KINDS


@dataclasses.dataclass(frozen=True)
class PlannerOptions:
    """What the search may do. `every_strategy` keeps even those that never pay: for tests.

    `held`: numbers of inputs that operations take in the layout in which they come, and never in another.
    """

    allow_redundant_compute: bool = False
    kinds: frozenset[str] = frozenset(KINDS)
    every_strategy: bool = False
    held: frozenset[int] = frozenset()

"""What a search for a choice can come to. Callers tell the outcomes apart with a match statement.

Where a problem has a cutoff, only choices below it matter: "no choice" then means none below the cutoff.
"""

from __future__ import annotations

import dataclasses

Numbers = tuple[int, ...]
"""The number of the chosen choice of every node, in order of the nodes."""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A choice within the limit.

    Attributes:
        numbers: the chosen choice of every node.
        seconds: its objective.
        lower_bound_s: proven: no choice within the limit takes less.
        tried: choices met on the way, the fastest first. They may be faster and too large; a start for other limits.
    """

    numbers: Numbers
    seconds: float
    lower_bound_s: float
    tried: tuple[Numbers, ...] = ()


@dataclasses.dataclass(frozen=True)
class CutOff:
    """Proven: no choice is better than the cutoff by more than `Tuning.good_enough`, as none takes less than `lower_bound_s`."""

    lower_bound_s: float


@dataclasses.dataclass(frozen=True)
class NotSearched:
    """The bound is below the cutoff, but what it leaves open is too much to search only to do better than the cutoff."""

    lower_bound_s: float


@dataclasses.dataclass(frozen=True)
class Unreachable:
    """Proven: no choice has a finite objective."""


@dataclasses.dataclass(frozen=True)
class DoesNotFit:
    """Proven: no choice keeps every memory row within the limit.

    `least_bytes`: a limit below this cannot be met; what fits may need more.
    """

    least_bytes: float


@dataclasses.dataclass(frozen=True)
class Unfinished:
    """The search ended at one of its limits before it found a choice or proved that there is none."""


Outcome = Chosen | CutOff | NotSearched | Unreachable | DoesNotFit | Unfinished

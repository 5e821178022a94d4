"""The tuned numbers of the memory model, in one value that its users take as an argument."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tuning:
    """See the module's text; `TUNING` holds the values in use."""

    temporaries_margin: float = 0.85
    """Least ratio of predicted to actual temporaries that a memory limit leaves room for. A greater one admits more plans, and
    some that do not fit. `benchmarks/memory_error.py` measures 0.91 at the least among its plans without a limit, 0.87 among
    those under one, and 0.865 among those compiled for GPUs."""
    watched_points: int = 48
    """Points of a program that a search under a limit watches at most. More points find a plan that fits in fewer rounds and make
    each round slower; what the search finds is checked at all points. `benchmarks/planner_time.py` measures the time."""


TUNING = Tuning()

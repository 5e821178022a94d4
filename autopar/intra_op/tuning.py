"""The tuned numbers of the planner for one mesh, in one value. Those of its solver are `solver/tuning.py`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Which meshes to compare, and how hard to try to meet a memory limit."""

    most_axes: int = 3
    """Logical meshes of more axes are planned only when asked for by shape: each further axis multiplies the planning time
    (`benchmarks/planner_time.py`) and has rarely made a step faster (`benchmarks/planned_rows.py`)."""
    merged_axes: int = 3
    """From so many axes on, choices that exchanging equal axes makes alike are first bounded together; with fewer, the merged
    problem is hardly smaller (`benchmarks/planner_time.py`)."""
    memory_rounds: int = 6
    """How often the limit of the memory rows is changed before a step counts as too large. Each is a search; more find plans
    nearer to the limit (`benchmarks/memory_error.py` plans under limits)."""


TUNING = Tuning()

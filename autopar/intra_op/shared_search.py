"""What the searches of all ways to run one step tell each other, and what one says that finds nothing better.

In: what each search finds. Out: data that the next one begins with. What can go wrong: `at_least_s` bounds what the search
minimises; a step may take a little less.
"""

from __future__ import annotations

import dataclasses
import math

from autopar.layouts.mesh import LogicalMesh
from autopar.program.step import TracedStep


@dataclasses.dataclass(kw_only=True)
class SharedSearch:
    """What the searches of all ways to run one step tell each other.

    Attributes:
        best_s: seconds of the fastest plan of any way.
        evenly_divided_s: seconds of the work, divided evenly among all devices; 0 if it is not known.
        at_least_s: by mesh, seconds that no way goes below on it, whatever the memory: the same work in smaller pieces, or with
            some of it done again, takes no less time.
        excess: of the latest way, how many times the memory that is left for temporaries they take without a limit, on the mesh
            where it is least.
        first: the way that was looked at first; its microbatches are the fewest, and it does least work again.
        least_s: by mesh, seconds that no step on it takes less than; of the first way, so that it holds for all. `at_least_s` is
            for choosing what to plan: it bounds what the search minimises.
        work_s: seconds of the work of the first way, which no step on any mesh takes less than; 0 before there is a plan.
        bounded: meshes that were looked at, in all ways; `dropped` and `proven` are those that were left and planned.
        in_vain: by step and mesh, what a search found that ended by itself where nothing fits: another one would find that too.
        is_exceeded: whether the bound on memory has ruled out a mesh of an earlier way.
        has_other_ways: whether other ways will be looked at if nothing fits.
        is_bounded: whether meshes are to have bounds that hold for all ways; of stages nobody asks for them.
    """

    best_s: float = math.inf
    evenly_divided_s: float = 0.0
    at_least_s: dict[LogicalMesh, float] = dataclasses.field(default_factory=dict)
    excess: float = math.inf
    first: TracedStep | None = None
    least_s: dict[LogicalMesh, float] = dataclasses.field(default_factory=dict)
    work_s: float = 0.0
    bounded: int = 0
    dropped: int = 0
    proven: int = 0
    in_vain: dict[TracedStep, dict[LogicalMesh, object]] = dataclasses.field(default_factory=dict)
    is_exceeded: bool = False
    has_other_ways: bool = False
    is_bounded: bool = True


@dataclasses.dataclass(frozen=True)
class Beaten:
    """No mesh makes this way to run a step faster than another way.

    Attributes:
        step_s: seconds of its best plan; None if none was made, as bounds said that it would not be faster.
        at_least_s: no plan has an objective below this. A step may take a little less, as the objective pays for a change of
            layout once per reader.
    """

    step_s: float | None
    at_least_s: float

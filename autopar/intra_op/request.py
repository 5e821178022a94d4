"""What the planner of one mesh is asked, and what it answers.

Data alone, for everybody who plans a step, a stage or a layer.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterator

from autopar.cost_model.hardware import Cluster
from autopar.intra_op.choices.catalogue import Catalogues
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.lowering.assignment import Assignment
from autopar.intra_op.memory.model import Wholes
from autopar.intra_op.tuning import TUNING, Tuning
from autopar.layouts.constraints import Constraints
from autopar.layouts.mesh import LogicalMesh
from autopar.plan import Plan
from autopar.program.step import TracedStep
from autopar.solver.budget import Budget


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What to plan for.

    Attributes:
        meshes: the candidate meshes.
        cluster: the machine.
        memory_limit_bytes: per device; None: memory does not matter.
        constraints: what the user fixed of layouts.
        options: what the planner may choose from.
        catalogues: strategies and prices, shared by all requests of one search.
        wholes: what a device runs before anything is chosen, shared in the same way.
        processes: how many processes may plan at once.
        tuning: the planner's tuned numbers.
        budget: when the search ends with the best plan that it has.
        has_fallback: whether there is a plan of another kind: LateError then ends a search that the clock leaves without one.
    """

    meshes: tuple[LogicalMesh, ...]
    cluster: Cluster
    memory_limit_bytes: int | None
    constraints: Constraints
    options: PlannerOptions
    catalogues: Catalogues = dataclasses.field(default_factory=Catalogues, compare=False, repr=False)
    wholes: Wholes = dataclasses.field(default_factory=Wholes, compare=False, repr=False)
    processes: int = 1
    tuning: Tuning = TUNING
    budget: Budget = dataclasses.field(default_factory=Budget, compare=False, repr=False)
    has_fallback: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedStep:
    """A step with its plan on one mesh, and the assignment of layouts to its equations that the lowering runs."""

    traced: TracedStep
    plan: Plan
    assignment: Assignment


def logical_meshes(devices: int, tuning: Tuning = TUNING) -> tuple[LogicalMesh, ...]:
    """Every arrangement of the devices in up to `tuning.most_axes` axes, fewest axes first."""
    counts = range(1, tuning.most_axes + 1)
    return tuple(LogicalMesh.of(shape) for axes in counts for shape in _factorizations(devices, axes))


def distinct_meshes(request: PlanRequest, *, is_free: bool) -> list[LogicalMesh]:
    """Meshes that differ by more than the order of the last axes with equal links, for whose axes the cluster has links.

    Axes before others of other links keep their order: one of them may be among nodes in part. `is_free`: the step itself names
    no axes. If axes have names in a constraint, their order matters.
    """
    seen: dict[Hashable, LogicalMesh] = {}
    known = request.cluster.axis_links
    for mesh in request.meshes:
        if known is not None and len(mesh.shape) > len(known) and len(request.meshes) > 1:
            continue
        links = request.cluster.links_of(mesh.shape)
        is_free_here = is_free and not request.constraints.rules
        alike = len(list(itertools.takewhile(links[-1].__eq__, reversed(links)))) if is_free_here else 1
        names = () if is_free_here else mesh.axis_names
        key = (mesh.shape[:-alike], tuple(sorted(mesh.shape[-alike:])), links, names)
        seen.setdefault(key, mesh)
    return list(seen.values())


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of `count` factors above 1, in order; 1 itself is one factor."""
    if count == 1:
        yield (number,)
        return
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in _factorizations(number // first, count - 1))

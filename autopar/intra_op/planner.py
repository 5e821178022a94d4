"""From a traced step to a `Plan`: compare logical meshes, choose strategies, predict.

In: a `TracedStep`, the number of devices, a cluster, options. Out: a `PlannedStep`: the `Plan`, and the `Assignment` that the
lowering runs. Meshes are looked at one after the other, those of fewest axes first. Each is left as soon as its bound says that
it cannot beat the best plan so far, of this step or of another way to run it (`SharedSearch`). A mesh of three axes or more is
only looked at if what it may gain repays the search. What can go wrong: nothing fits the memory; the error names the largest
tensors and the ways out. The time may be over; the plan says which meshes were not compared.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from autopar.errors import ConstraintError, OutOfMemoryError, PlanError, warn
from autopar.intra_op.lowering.assignment import assign
from autopar.intra_op.mesh_search import MeshSearch, graph_for
from autopar.intra_op.out_of_memory import NothingFits, out_of_memory
from autopar.intra_op.request import PlannedStep, PlanRequest
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.plan import Candidate, Plan, ValuePlan
from autopar.program.step import Leaf, TracedStep
from autopar.progress import Progress, report
from autopar.solver.outcomes import CutOff, NotSearched, Unfinished, Unreachable


@dataclasses.dataclass
class SharedSearch:
    """What the searches of all ways to run one step tell each other.

    Attributes:
        best_s: seconds of the fastest plan of any way.
        at_least_s: by mesh, seconds that no way goes below on it, whatever the memory: the same work in smaller pieces, or with
            some of it done again, takes no less time.
        excess: of the latest way, how many times the memory that is left for temporaries they take without a limit, on the mesh
            where it is least.
    """

    best_s: float = math.inf
    at_least_s: dict[LogicalMesh, float] = dataclasses.field(default_factory=dict)
    excess: float = math.inf

    def bound_s(self, meshes: tuple[LogicalMesh, ...]) -> float:
        """Seconds that no way goes below on any of these meshes; 0 if one of them has no bound."""
        return min((self.at_least_s.get(mesh, 0.0) for mesh in meshes), default=0.0)


def plan_step(traced: TracedStep, request: PlanRequest, shared: SharedSearch | None = None) -> PlannedStep:
    """The best plan over the request's meshes. Raises ConstraintError, OutOfMemoryError.

    `shared`: what is known from other ways to run the same step, and is added to. No mesh is planned whose bound is above the
    best of these; if that leaves none, the error is an OutOfMemoryError.
    """
    started = time.perf_counter()
    _warn_of_undividable_batch(traced, request)
    comparison = _Comparison(traced, request, shared if shared is not None else SharedSearch())
    planned = comparison.run()
    plan = dataclasses.replace(planned.plan, planning_s=time.perf_counter() - started)
    return dataclasses.replace(planned, plan=plan)


class _Comparison:
    """The meshes of one request: what was found on each."""

    def __init__(self, traced: TracedStep, request: PlanRequest, shared: SharedSearch) -> None:
        self.traced, self.request, self.shared = traced, request, shared
        self.best: PlannedStep | None = None
        self.failures: list[NothingFits] = []
        self.unreached: dict[LogicalMesh, Unreachable | Unfinished] = {}
        self.candidates: list[Candidate] = []
        self.not_compared: list[LogicalMesh] = []
        self.found_s: list[float] = []
        self.evenly_divided_s = 0.0

    def run(self) -> PlannedStep:
        """The best plan, with all that was compared."""
        self.shared.excess = math.inf
        meshes = _distinct(self.request)
        for mesh in meshes:
            report(Progress(at=f"mesh {mesh.shape}"))
            if self.request.budget.is_over and self.best is not None:
                self.not_compared.append(mesh)
            elif self._may_win(mesh):
                self._look_at(mesh)
        if self.best is None:
            raise self._error()
        names = tuple(f"mesh {mesh.shape}" for mesh in self.not_compared)
        lower_s = min(self.best.plan.lower_bound_s, *(self._bound_s(mesh) for mesh in meshes))
        plan = dataclasses.replace(
            self.best.plan,
            candidates=tuple(self.candidates),
            unlimited_s=min(self.best.plan.step_s, *self.found_s),
            lower_bound_s=lower_s,
            ended_early=bool(names) or self.request.budget.is_over,
            not_compared=names,
        )
        return dataclasses.replace(self.best, plan=plan)

    def _bound_s(self, mesh: LogicalMesh) -> float:
        return max(self.shared.at_least_s.get(mesh, 0.0), self.evenly_divided_s)

    @property
    def _cutoff_s(self) -> float:
        """Seconds of the best plan so far, of this way or another."""
        return min(self.shared.best_s, math.inf if self.best is None else self.best.plan.step_s)

    def _may_win(self, mesh: LogicalMesh) -> bool:
        """Whether to look at a mesh at all; notes it as a candidate if not."""
        best_s, bound_s, tuning = self._cutoff_s, self._bound_s(mesh), self.request.tuning
        gain_s = best_s - bound_s
        is_settled = bound_s >= (1 - tuning.worth) * best_s
        if (
            not is_settled
            and len(mesh.shape) >= tuning.merged_axes
            and len(self.request.meshes) > 1
            and self.candidates
        ):
            equations = sum(1 for _ in self.traced.program.walk())
            search_s = tuning.search_s_per_equation * equations
            is_settled = gain_s <= tuning.least_gain * best_s or gain_s * tuning.repaid_in_steps <= search_s
        if is_settled:
            self.candidates.append(Candidate(mesh.shape, None, bound_s))
        return not is_settled

    def _look_at(self, mesh: LogicalMesh) -> None:
        """Bound a mesh, and plan it unless the bound rules that out."""
        search = MeshSearch(self.traced, mesh, self.request)
        if not self.evenly_divided_s:
            self.evenly_divided_s = search.evenly_divided_s()
        if mesh not in self.shared.at_least_s:
            self.shared.at_least_s[mesh] = search.at_least_s()
        cutoff_s = self._cutoff_s
        if self._bound_s(mesh) >= cutoff_s * (1 - self.request.tuning.worth):
            self.candidates.append(Candidate(mesh.shape, None, self._bound_s(mesh)))
            return
        outcome = search.plan(cutoff_s)
        self.shared.excess = min(self.shared.excess, search.excess or math.inf)
        match outcome:
            case PlannedStep():
                self.candidates.append(Candidate(mesh.shape, outcome.plan.step_s))
                self.found_s.append(outcome.plan.unlimited_s)
                if self.best is None or outcome.plan.step_s < self.best.plan.step_s * (1 - 1e-9):
                    self.best = outcome
                    self.shared.best_s = min(self.shared.best_s, outcome.plan.step_s)
            case NothingFits():
                self.failures.append(outcome)
                self.candidates.append(Candidate(mesh.shape, None))
            case CutOff(lower_bound_s) | NotSearched(lower_bound_s):
                self.candidates.append(Candidate(mesh.shape, None, max(lower_bound_s, self._bound_s(mesh))))
            case Unreachable() | Unfinished():
                self.unreached[mesh] = outcome

    def _error(self) -> ConstraintError | OutOfMemoryError:
        if self.failures:
            limit, rules = self.request.memory_limit_bytes, self.request.constraints.rules
            return out_of_memory(self.failures, memory_limit_bytes=limit, is_constrained=bool(rules))
        if math.isfinite(self.shared.best_s):
            return OutOfMemoryError("no mesh promises to be faster than another way to run the step")
        return _no_way_there(self.unreached, self.request)


def _no_way_there(meshes: Mapping[LogicalMesh, Unreachable | Unfinished], request: PlanRequest) -> ConstraintError:
    shapes = ", ".join(str(mesh.shape) for mesh in meshes)
    kinds = ", ".join(sorted(request.options.kinds)) or "none"
    if any(isinstance(outcome, Unfinished) for outcome in meshes.values()):
        return ConstraintError(
            f"no plan was found on mesh {shapes}: the search ended before it knew whether the kinds of collectives allowed "
            f"({kinds}) can bring every value to the layouts that the constraints and the operations ask for; allow all-gather "
            "and all-reduce, which always can"
        )
    return ConstraintError(
        f"no plan on mesh {shapes}: the kinds of collectives allowed ({kinds}) cannot bring every value to the layouts that the "
        "constraints and the operations ask for; allow all-gather and all-reduce, which always can"
    )


def _distinct(request: PlanRequest) -> list[LogicalMesh]:
    """Meshes that differ by more than the order of axes with equal links, for whose axes the cluster has links."""
    seen: dict[Any, LogicalMesh] = {}
    known = request.cluster.axis_links
    for mesh in request.meshes:
        if known is not None and len(mesh.shape) > len(known) and len(request.meshes) > 1:
            continue
        links = request.cluster.links_of(mesh.shape)
        free = not request.constraints.rules and len(set(links)) == 1
        key = (tuple(sorted(mesh.shape)), links[0]) if free else (mesh.shape, links, mesh.axis_names)
        seen.setdefault(key, mesh)
    return list(seen.values())


def _warn_of_undividable_batch(traced: TracedStep, request: PlanRequest) -> None:
    """One warning for all batch leaves that no mesh axis divides; constraints on the batch speak for themselves.

    None for microbatches, which may be tried one after the other: the batch they are cut from is not to blame.
    """
    sizes = sorted({size for mesh in request.meshes for size in mesh.shape if size > 1})
    if not sizes or traced.microbatches > 1 or any(rule.role == "batch" for rule in request.constraints.rules):
        return
    leaves = [leaf.one for leaf in traced.inputs if leaf.role == "batch" and leaf.shape and not leaf.shared]
    uneven = [leaf for leaf in leaves if all(leaf.shape[0] % size for size in sizes)]
    if uneven:
        listed = ", ".join(f"{leaf.path} has {leaf.shape[0]} examples (shape {leaf.shape})" for leaf in uneven[:4])
        warn(
            f"the batch of {listed}{', ...' if len(uneven) > 4 else ''}, which no mesh axis of size "
            f"{', '.join(map(str, sizes))} divides: it cannot be split, so the plan has no data parallelism over it. "
            f"Pad or drop examples to a multiple of {sizes[0]}."
        )


def restore(traced: TracedStep, plan: Plan, request: PlanRequest) -> PlannedStep:
    """The step with the assignment that a plan describes, without solving. Raises PlanError if the plan is for another step."""
    if plan.fingerprint != traced.fingerprint:
        raise PlanError(
            f"the plan was made for another step: its program has fingerprint {plan.fingerprint}, this one "
            f"{traced.fingerprint}. Shapes, types, the model or JAX's version differ; plan again."
        )
    mesh = LogicalMesh(plan.mesh_shape, plan.axis_names)
    options = dataclasses.replace(request.options, allow_redundant_compute=plan.allow_redundant_compute)
    request = dataclasses.replace(request, options=options)
    inputs = [(_leaf_layout(v, leaf, mesh),) for v, leaf in zip(plan.inputs, traced.inputs, strict=True)]
    outputs: list[Any] = [
        number if number is not None else (_leaf_layout(v, leaf, mesh),)
        for number, v, leaf in zip(traced.state_of_output, plan.outputs, traced.outputs, strict=True)
    ]
    graph = graph_for(traced, mesh, request, inputs, outputs)
    if len(graph.nodes) != len(plan.choices):
        raise PlanError("the plan has another number of decisions than this program; plan again with this version")
    choice = np.minimum(plan.choices, [len(n.choices.strategies) - 1 for n in graph.nodes])
    fixed = [0 if len(n.choices.strategies) == 1 else int(p) for n, p in zip(graph.nodes, choice, strict=True)]
    return PlannedStep(traced, plan, assign(graph, fixed, copy_span=plan.copy_span))


def _leaf_layout(value: ValuePlan, leaf: Leaf, mesh: LogicalMesh) -> Layout:
    return _layout(value, mesh) if leaf.microbatches == 1 else _layout(value, mesh).prepend()


def _layout(value: ValuePlan, mesh: LogicalMesh) -> Layout:
    numbers: Mapping[str, int] = {name: i for i, name in enumerate(mesh.axis_names)}
    return Layout(tuple(tuple(numbers[name] for name in axes) for axes in value.spec))

"""From a traced step to a `Plan`: compare logical meshes, choose strategies, predict.

In: a `TracedStep`, the number of devices, a cluster, options. Out: a `PlannedStep`: the `Plan`, and the `Assignment` that the
lowering runs. Each logical mesh shape gives one strategy graph and one optimal choice; the shape with the least predicted step
time wins. What can go wrong: nothing fits the memory; the error names the largest tensors and the ways out.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from autopar.cost_model.hardware import Cluster
from autopar.errors import ConstraintError, PlanError, warn
from autopar.intra_op.choices.catalogue import Catalogues
from autopar.intra_op.choices.equal_axes import find_equal_axes, number_classes
from autopar.intra_op.choices.graph import BatchSplit, StrategyGraph, build_graph
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.describe import describe_plan
from autopar.intra_op.lowering.assignment import Assignment, assign
from autopar.intra_op.memory.model import MemoryModel, Streams
from autopar.intra_op.memory_limit import Fits, TooLarge, choose_within_limit
from autopar.intra_op.out_of_memory import NothingFits, out_of_memory
from autopar.intra_op.tuning import TUNING, Tuning
from autopar.layouts.allowed import allowed_layouts, batch_axes
from autopar.layouts.constraints import Constraints
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.layouts.moves import all_layouts
from autopar.plan import Candidate, Plan, ValuePlan
from autopar.program.step import Leaf, TracedStep
from autopar.progress import Progress, report
from autopar.solver.budget import Budget
from autopar.solver.outcomes import Chosen, CutOff, NotSearched, Unfinished, Unreachable
from autopar.solver.problem import ChoiceProblem, Costs
from autopar.solver.repeated_layers import tie_layers


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """What to plan for.

    Attributes:
        meshes: the candidate meshes.
        cluster: the machine.
        memory_limit_bytes: per device; None: memory does not matter.
        constraints: what the user fixed of layouts.
        options: what the planner may choose from.
        catalogues: strategies and prices, shared by all requests of one search.
        processes: how many processes may plan at once.
        tuning: the planner's tuned numbers.
        budget: when the search ends with the best plan that it has.
    """

    meshes: tuple[LogicalMesh, ...]
    cluster: Cluster
    memory_limit_bytes: int | None
    constraints: Constraints
    options: PlannerOptions
    catalogues: Catalogues = dataclasses.field(default_factory=Catalogues, compare=False, repr=False)
    processes: int = 1
    tuning: Tuning = TUNING
    budget: Budget = dataclasses.field(default_factory=Budget, compare=False, repr=False)


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


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of `count` factors above 1, in order; 1 itself is one factor."""
    if count == 1:
        yield (number,)
        return
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in _factorizations(number // first, count - 1))


def plan_step(traced: TracedStep, request: PlanRequest) -> PlannedStep:
    """The best plan over the request's meshes. Raises ConstraintError, OutOfMemoryError.

    A mesh is left as soon as its bound says that it has nothing better than the best plan so far.
    """
    started = time.perf_counter()
    _warn_of_undividable_batch(traced, request)
    best: PlannedStep | None = None
    failures: list[NothingFits] = []
    unreached: dict[LogicalMesh, Unreachable | Unfinished] = {}
    candidates: list[Candidate] = []
    found_s: list[float] = []
    for mesh in _distinct(request):
        report(Progress(at=f"mesh {mesh.shape}"))
        outcome = _plan_on(traced, mesh, request, best.plan.step_s if best is not None else np.inf)
        match outcome:
            case PlannedStep():
                candidates.append(Candidate(mesh.shape, outcome.plan.step_s))
                found_s.append(outcome.plan.unlimited_s)
                if best is None or outcome.plan.step_s < best.plan.step_s * (1 - 1e-9):
                    best = outcome
            case NothingFits():
                failures.append(outcome)
                candidates.append(Candidate(mesh.shape, None))
            case CutOff(lower_bound_s) | NotSearched(lower_bound_s):
                candidates.append(Candidate(mesh.shape, None, lower_bound_s))
            case Unreachable() | Unfinished():
                unreached[mesh] = outcome
    if best is None and not failures:
        raise _no_way_there(unreached, request)
    if best is None:
        limit, rules = request.memory_limit_bytes, request.constraints.rules
        raise out_of_memory(failures, memory_limit_bytes=limit, is_constrained=bool(rules))
    elapsed = time.perf_counter() - started
    free_s = min(best.plan.step_s, *found_s)
    plan = dataclasses.replace(best.plan, planning_s=elapsed, candidates=tuple(candidates), unlimited_s=free_s)
    return dataclasses.replace(best, plan=plan)


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


def graph_for(
    traced: TracedStep,
    mesh: LogicalMesh,
    request: PlanRequest,
    inputs: Sequence[Any],
    outputs: Sequence[Any] | None = None,
    batch: BatchSplit | None = None,
) -> StrategyGraph:
    """The strategy graph of a step whose inputs may have the given layouts; outputs follow the state."""
    following = _following(traced, mesh) if outputs is None else list(outputs)
    return build_graph(
        traced.program,
        mesh,
        request.cluster,
        request.options,
        input_layouts=inputs,
        output_layouts=following,
        batch=batch,
        catalogue=request.catalogues.of(mesh, request.cluster, request.options),
    )


def _plan_on(
    traced: TracedStep, mesh: LogicalMesh, request: PlanRequest, cutoff_s: float
) -> PlannedStep | NothingFits | CutOff | NotSearched | Unreachable | Unfinished:
    """The best plan on one mesh; only plans that take less than `cutoff_s` matter."""
    allowed = _allowed_inputs(traced, mesh, request)
    graph = graph_for(traced, mesh, request, allowed, batch=_batch_split(traced, mesh, request))
    memory = _memory_model(traced, graph)
    limit = request.memory_limit_bytes
    bound = 0 if limit is None else memory.bound()
    if limit is not None and bound > limit:
        return NothingFits(mesh, bound, None, memory.least()[1], is_settled=True)
    costs = Costs.of(graph.costs, graph.edges)
    problem = tie_layers(ChoiceProblem(costs=costs, classes=_classes(graph, request), cutoff_s=cutoff_s))
    match choose_within_limit(problem, memory, limit, tuning=request.tuning):
        case Fits(choice, copy_span, unlimited_s):
            assignment = assign(graph, choice.numbers, copy_span=copy_span)
            plan = _describe(traced, graph, memory, assignment, choice, request)
            part = unlimited_s / choice.seconds if choice.seconds > 0 else 1.0
            return PlannedStep(traced, dataclasses.replace(plan, unlimited_s=plan.step_s * part), assignment)
        case TooLarge(tried_bytes, is_settled):
            return NothingFits(mesh, bound, tried_bytes, memory.least()[1], is_settled=is_settled)
        case ended:
            return ended


def _describe(
    traced: TracedStep,
    graph: StrategyGraph,
    memory: MemoryModel,
    assignment: Assignment,
    choice: Chosen,
    request: PlanRequest,
) -> Plan:
    return describe_plan(
        traced,
        graph,
        memory,
        assignment,
        choice,
        cluster=request.cluster,
        memory_limit_bytes=request.memory_limit_bytes,
        allow_redundant_compute=request.options.allow_redundant_compute,
    )


def _following(traced: TracedStep, mesh: LogicalMesh) -> list[Any]:
    """The layouts that outputs may have: state stays in its place, stacks over microbatches are whole along these."""
    return [
        _stacks(leaf, mesh) if leaf.microbatches > 1 else number
        for leaf, number in zip(traced.outputs, traced.state_of_output, strict=True)
    ]


def _stacks(leaf: Leaf, mesh: LogicalMesh) -> tuple[Layout, ...]:
    plain = (la for la in all_layouts(leaf.one.shape, mesh, ()) if la.is_ascending)
    return tuple(la.prepend() for la in plain)


def _allowed_inputs(traced: TracedStep, mesh: LogicalMesh, request: PlanRequest) -> list[tuple[Layout, ...] | None]:
    """Layouts allowed for each input; the constraints speak of one microbatch, and slices in time are whole over devices."""
    allowed = allowed_layouts([leaf.one for leaf in traced.inputs], mesh, request.constraints, shared=traced.shared)
    return [
        la
        if leaf.microbatches == 1
        else _stacks(leaf, mesh)
        if la is None
        else tuple(layout.prepend() for layout in la)
        for leaf, la in zip(traced.inputs, allowed, strict=True)
    ]


def _batch_split(traced: TracedStep, mesh: LogicalMesh, request: PlanRequest) -> BatchSplit | None:
    """What a data-parallel preset says of the examples; under microbatches they are the dimension after those."""
    found = batch_axes([leaf.one for leaf in traced.inputs], mesh, request.constraints, shared=traced.shared)
    dims = {i: 1 if traced.inputs[i].microbatches > 1 else 0 for i in found}
    return BatchSplit(dims, next(iter(found.values()))) if found else None


def _memory_model(traced: TracedStep, graph: StrategyGraph) -> MemoryModel:
    names = [leaf.path for leaf in traced.inputs]
    aliased = frozenset(
        i for i, source in enumerate(traced.state_of_output) if source is not None and traced.inputs[source].donated
    )
    streams = Streams(
        traced.microbatches,
        frozenset(i for i, leaf in enumerate(traced.inputs) if leaf.streamed),
        frozenset(i for i, leaf in enumerate(traced.outputs) if leaf.streamed),
    )
    return MemoryModel(graph, input_names=names, aliased_outputs=aliased, streams=streams)


def _classes(graph: StrategyGraph, request: PlanRequest) -> list[np.ndarray] | None:
    """Classes of each node's choices that exchanging equal axes makes alike; only three or more axes are worth it.

    Where no two axes have the same size, all that have the same link count as equal: a looser bound, and still one.
    """
    mesh = graph.mesh
    if sum(size > 1 for size in mesh.shape) < request.tuning.merged_axes:
        return None
    links = request.cluster.links_of(mesh.shape)
    groups = find_equal_axes(mesh.shape, links) or find_equal_axes([min(size, 2) for size in mesh.shape], links)
    known: dict[int, np.ndarray] = {}
    for node in graph.nodes:
        if id(node.choices) not in known:
            operands = [(*s.inputs, *s.outputs) for s in node.choices.strategies]
            known[id(node.choices)] = number_classes(operands, groups)
    return [known[id(node.choices)] for node in graph.nodes]


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

"""From a traced step to a `Plan`: compare logical meshes, choose strategies, predict.

In: a `TracedStep`, the number of devices, a cluster, options. Out: a `PlannedStep`: the `Plan`, and the `Assignment` that the
lowering runs. Each logical mesh shape gives one strategy graph and one optimal choice; the shape with the least predicted step
time wins. What can go wrong: nothing fits the memory; the error names the largest tensors and the ways out.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from autopar.cost_model.hardware import Cluster
from autopar.errors import ConstraintError, PlanError, warn
from autopar.intra_op.choices.catalogue import Catalogues
from autopar.intra_op.choices.equal_axes import find_equal_axes, number_classes
from autopar.intra_op.choices.graph import BatchSplit, StrategyGraph, build_graph
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.describe import described
from autopar.intra_op.lowering.assignment import Assignment, assign, copy_span_of
from autopar.intra_op.memory.model import MemoryModel, Streams
from autopar.intra_op.out_of_memory import NothingFits, out_of_memory
from autopar.layouts.allowed import allowed_layouts, batch_axes
from autopar.layouts.constraints import Constraints
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.layouts.moves import all_layouts
from autopar.plan import Candidate, Plan, ValuePlan
from autopar.program.step import Leaf, TracedStep
from autopar.solver.repeated_layers import ChoiceProblem
from autopar.solver.solve import Choice

MEMORY_ROUNDS = 6
"""How often the memory limit is tightened before a step counts as too large."""
MOST_AXES = 3
"""Logical meshes of more axes are planned only when asked for by shape."""
MERGED_AXES = 3
"""From so many axes on, choices that exchanging equal axes makes alike are first bounded together."""


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """What to plan for: candidate meshes, the machine, the limit, and what the user fixed; by how many processes at once."""

    meshes: tuple[LogicalMesh, ...]
    cluster: Cluster
    memory_limit_bytes: int | None
    constraints: Constraints
    options: PlannerOptions
    catalogues: Catalogues = dataclasses.field(default_factory=Catalogues, compare=False, repr=False)
    processes: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedStep:
    """A step with its plan on one mesh, and the assignment of layouts to its equations that the lowering runs."""

    traced: TracedStep
    plan: Plan
    assignment: Assignment


def logical_meshes(devices: int) -> tuple[LogicalMesh, ...]:
    """Every arrangement of the devices in up to `MOST_AXES` axes, fewest axes first."""
    return tuple(LogicalMesh.of(shape) for axes in range(1, MOST_AXES + 1) for shape in _factorizations(devices, axes))


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
    unreached: list[LogicalMesh] = []
    candidates: list[Candidate] = []
    found_s: list[float] = []
    for mesh in _distinct(request):
        outcome = _plan_on(traced, mesh, request, best.plan.step_s if best is not None else np.inf)
        if isinstance(outcome, NothingFits):
            failures.append(outcome)
            candidates.append(Candidate(mesh.shape, None))
            continue
        if isinstance(outcome, _OutOfReach):
            unreached.append(mesh)
            continue
        if isinstance(outcome, _LeftOff):
            candidates.append(Candidate(mesh.shape, None, outcome.lower_bound_s))
            continue
        candidates.append(Candidate(mesh.shape, outcome.plan.step_s))
        found_s.append(outcome.plan.unlimited_s)
        if best is None or outcome.plan.step_s < best.plan.step_s * (1 - 1e-9):
            best = outcome
    if best is None and not failures:
        raise _no_way_there(unreached, request)
    if best is None:
        limit, rules = request.memory_limit_bytes, request.constraints.rules
        raise out_of_memory(failures, memory_limit_bytes=limit, is_constrained=bool(rules))
    elapsed = time.perf_counter() - started
    free_s = min(best.plan.step_s, *found_s)
    plan = dataclasses.replace(best.plan, planning_s=elapsed, candidates=tuple(candidates), unlimited_s=free_s)
    return dataclasses.replace(best, plan=plan)


def _no_way_there(meshes: Sequence[LogicalMesh], request: PlanRequest) -> ConstraintError:
    return ConstraintError(
        f"no plan on mesh {', '.join(str(mesh.shape) for mesh in meshes)}: the kinds of collectives allowed "
        f"({', '.join(sorted(request.options.kinds)) or 'none'}) cannot bring every value to the layouts that the constraints "
        "and the operations ask for; allow all-gather and all-reduce, which always can"
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


@dataclasses.dataclass(frozen=True)
class _LeftOff:
    """A mesh that was not searched to the end: no plan on it takes less than the bound."""

    lower_bound_s: float


@dataclasses.dataclass(frozen=True)
class _OutOfReach:
    """A mesh on which the collectives allowed do not bring every value to where it is needed."""

    mesh: LogicalMesh


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
) -> PlannedStep | NothingFits | _LeftOff | _OutOfReach:
    """The best plan on one mesh; only plans that take less than `cutoff_s` matter."""
    allowed = _allowed_inputs(traced, mesh, request)
    graph = graph_for(traced, mesh, request, allowed, batch=_batch_split(traced, mesh, request))
    memory = _memory_model(traced, graph)
    limit = request.memory_limit_bytes
    bound = 0 if limit is None else memory.bound()
    if limit is not None and bound > limit:
        return NothingFits(mesh, bound, None, memory.least()[1])
    problem = ChoiceProblem(graph.costs, graph.edges, classes=_classes(graph, request), cutoff_s=cutoff_s)
    found = _choose_within(graph, memory, limit, problem.choose)
    if isinstance(found, int):
        return NothingFits(mesh, bound, found, memory.least()[1])
    choice, copy_span, free_s = found
    if not np.isfinite(choice.seconds if choice.numbers else choice.lower_bound_s):
        return _OutOfReach(mesh)
    if graph.nodes and not choice.numbers:
        return _LeftOff(choice.lower_bound_s)
    assignment = assign(graph, choice.numbers, copy_span=copy_span)
    plan = described(
        traced,
        graph,
        memory,
        assignment,
        choice,
        cluster=request.cluster,
        memory_limit_bytes=request.memory_limit_bytes,
        allow_redundant_compute=request.options.allow_redundant_compute,
    )
    part = free_s / choice.seconds if choice.seconds > 0 else 1.0
    return PlannedStep(traced, dataclasses.replace(plan, unlimited_s=plan.step_s * part), assignment)


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
    if sum(size > 1 for size in mesh.shape) < MERGED_AXES:
        return None
    links = request.cluster.links_of(mesh.shape)
    groups = find_equal_axes(mesh.shape, links) or find_equal_axes([min(size, 2) for size in mesh.shape], links)
    known: dict[int, np.ndarray] = {}
    for node in graph.nodes:
        if id(node.choices) not in known:
            operands = [(*s.inputs, *s.outputs) for s in node.choices.strategies]
            known[id(node.choices)] = number_classes(operands, groups)
    return [known[id(node.choices)] for node in graph.nodes]


def _choose_within(
    graph: StrategyGraph, memory: MemoryModel, limit: int | None, search: Callable[..., Choice | None]
) -> tuple[Choice, int | None, float] | int:
    """(the best choice within the limit, its `copy_span`, seconds without limit); a choice without numbers where it ended.

    Gathered copies stay until their last use; only where nothing fits so are they dropped and gathered again. Where nothing fits
    at all: the least bytes that a choice that was tried requires.
    """
    free = search()
    assert free is not None
    if limit is None or not free.numbers or not np.isfinite(free.seconds):
        return free, None, free.seconds
    least = memory.required(free.numbers)
    if least <= limit:
        return free, None, free.seconds
    rows = memory.rows(free.numbers)
    excess = max(0.0, max(row.used(free.numbers) for row in rows) - least)
    for span in (None, copy_span_of(graph.program)):
        found = _choose_with_copies(
            functools.partial(search, rows=rows, free=free), memory, limit, span=span, excess=excess
        )
        if isinstance(found, Choice):
            return found, span, free.seconds
        if found is None:
            break
        least = min(least, found)
    return least


def _choose_with_copies(
    search: Callable[..., Choice | None], memory: MemoryModel, limit: int, *, span: int | None, excess: float
) -> Choice | int | None:
    """The best choice within the limit if copies stay as `span` says; else the least bytes that one tried requires, if one was.

    `excess`: by how much the rows say more than is required, where both are known; the search begins that far above the limit.

    The rows of the planner's model leave out what depends on pairs of choices, such as a gathered operand. Where the peak of
    a choice says that this mattered, the rows' limit is lowered by the excess, twice as far each time, and the search repeated.
    Where nothing keeps even the rows within the limit, there is nothing to repeat.
    """
    highest = limit + excess
    row_limit, too_low = highest, 0.0
    least: int | None = None
    tried: tuple[tuple[int, ...], ...] = ()
    for tries in range(MEMORY_ROUNDS):
        choice = search(limit_bytes=row_limit, tried=tried)
        if choice is not None and not choice.numbers:
            return choice
        if choice is None:
            if row_limit >= highest:
                return None
            too_low, row_limit = row_limit, (row_limit + highest) / 2
            continue
        tried = choice.tried
        required = memory.required(choice.numbers, copy_span=span)
        if required <= limit:
            return choice
        least = required if least is None else min(least, required)
        row_limit = max(row_limit - (required - limit) * 2**tries, (too_low + row_limit) / 2)
    return least


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

"""A choice of strategies as a `Plan`: the layouts, collectives and figures of a step on one mesh.

In: a traced step, its graph, a choice and the assignment made of it. Out: frozen data, whose seconds and bytes are those of the
cost and memory models. What can go wrong: an assignment that is not of this choice; its collectives would be another plan's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import cast

from autopar.avals import itemsize_of
from autopar.compat import Var, module_path, source_line
from autopar.content import digest_of
from autopar.cost_model.algorithms import Kind as CollectiveKind
from autopar.cost_model.hardware import Cluster
from autopar.cost_model.overlap import Kind
from autopar.intra_op.choices.graph import StrategyGraph
from autopar.intra_op.choices.overlap import find_needs, hide, kind_of, window, windows
from autopar.intra_op.choices.within import hop_s
from autopar.intra_op.lowering.assignment import Assignment
from autopar.intra_op.lowering.named_strategies import name_strategies
from autopar.intra_op.lowering.planned_moves import PlannedMove, planned_moves
from autopar.intra_op.memory.model import MemoryModel, Resident
from autopar.intra_op.named_origin import Origins
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.layouts.moves import LOCAL_KINDS
from autopar.plan import WITHIN, CollectivePlan, LiveTensor, Plan, RegisteredRule, ValuePlan
from autopar.program.loops import LoopEquation
from autopar.program.program import Atom, fan_out_p
from autopar.program.step import Leaf, TracedStep
from autopar.rules.table import digest_registered
from autopar.solver.outcomes import Chosen

MEMORY_POINTS = 96
"""Stretches of the step in which a plan tells its memory."""


def describe_plan(
    traced: TracedStep,
    graph: StrategyGraph,
    memory: MemoryModel,
    assignment: Assignment,
    choice: Chosen,
    *,
    cluster: Cluster,
    memory_limit_bytes: int | None,
    allow_redundant_compute: bool,
) -> Plan:
    """The plan of one mesh as data. `planning_s`, its bound, and what was compared are for the caller, who knows them."""
    mesh = graph.mesh
    collectives, local_s = collectives_of(traced, graph, assignment)
    within, waited_s = exchanges_of(graph, choice.numbers)
    collectives += within
    compute_s = float(sum(n.choices.seconds[p] * n.trips for n, p in zip(graph.nodes, choice.numbers, strict=True)))
    compute_s += local_s - waited_s + cluster.dispatch_s(len(traced.inputs))
    comm_s = sum(item.count * item.predicted_s for item in collectives)
    named = name_strategies(assignment)
    peak, tensors = memory.peak(choice.numbers, copy_span=assignment.copy_span)
    plan = Plan(
        fingerprint=traced.fingerprint.digest,
        trail=traced.fingerprint.trail,
        cluster=cluster.name,
        cluster_figures=figures_of(cluster),
        mesh_shape=mesh.shape,
        axis_names=mesh.axis_names,
        inputs=values_of(traced.inputs, assignment.inputs, mesh),
        outputs=values_of(traced.outputs, assignment.outputs, mesh),
        layouts=named.layouts,
        strategies=named.strategies,
        equations=named.equations,
        rules=tuple(RegisteredRule(*one) for one in digest_registered(traced.program.walk()).items()),
        collectives=collectives,
        compute_s=compute_s,
        comm_s=comm_s,
        peak_bytes=peak,
        memory_limit_bytes=memory_limit_bytes,
        peak_tensors=tuple(map(_live_tensor, tensors[:10])),
        planning_s=0.0,
        lower_bound_s=0.0,
        allow_redundant_compute=allow_redundant_compute,
        copy_span=assignment.copy_span,
        num_microbatches=traced.microbatches,
        assumed_finite=traced.assumed_finite,
        compiler=memory.compiler.platform,
        memory_bytes=memory.over_step(choice.numbers, copy_span=assignment.copy_span, points=MEMORY_POINTS),
    )
    return named_below_the_root(_with_details(plan, cluster, waited_s), traced)


def _live_tensor(tensor: Resident) -> LiveTensor:
    return LiveTensor(
        name=tensor.name, shape=tensor.shape, dtype=tensor.dtype, bytes_per_device=tensor.bytes, scope=tensor.scope
    )


def _with_details(plan: Plan, cluster: Cluster, waited_s: float) -> Plan:
    """The plan with what hides of its communication; its collectives tell their algorithm and the slowest link they cross.

    `waited_s`: seconds for which operations wait for collectives within them.
    """
    waiting = hide(windows(plan), compute_s=plan.compute_s, overlap=cluster.overlap)
    within_s = sum(item.count * item.predicted_s for item in plan.collectives if item.overlap == WITHIN)
    hidden_s = sum(item.hidden_s for item in waiting.values()) + within_s - waited_s
    hidden_within = (within_s - waited_s) / within_s if within_s else 0.0
    costs = cluster.mesh_costs(plan.mesh_shape)

    def detailed(item: CollectivePlan) -> CollectivePlan:
        axes = tuple(plan.axis_names.index(name) for name in item.axes)
        levels = costs.levels(axes)
        slowest = min(levels, key=lambda level: level.rank_bytes_per_s, default=None)
        part = hidden_within
        if item.overlap != WITHIN:
            kind = cast(Kind, item.overlap)
            way = kind, window(kind, item.kind, times=item.count, microbatches=plan.num_microbatches)
            part = waiting[way].hidden_s / waiting[way].total_s if waiting[way].total_s else 0.0
        return dataclasses.replace(
            item,
            hidden_s=part * item.predicted_s,
            algorithm=costs.best(cast(CollectiveKind, item.kind), item.bytes, axes).algorithm,
            link=slowest.tier if slowest is not None else "",
        )

    return dataclasses.replace(plan, hidden_s=hidden_s, collectives=tuple(map(detailed, plan.collectives)))


def named_below_the_root(plan: Plan, traced: TracedStep) -> Plan:
    """The plan whose modules are named as below the model itself, if all modules of the step are: flax names the model too.

    A stage may have a single module, of which only those of the whole step tell whether it is the model.
    """
    paths = traced.modules
    roots = {path.partition("/")[0] for path in paths}
    if len(roots) != 1 or len(paths) == 1:
        return plan
    (root,) = roots

    def below(scope: str) -> str:
        return scope.removeprefix(root).removeprefix("/") if scope in paths else scope

    collectives = (dataclasses.replace(item, scope=below(item.scope)) for item in plan.collectives)
    tensors = (dataclasses.replace(item, scope=below(item.scope)) for item in plan.peak_tensors)
    return dataclasses.replace(plan, collectives=tuple(collectives), peak_tensors=tuple(tensors))


def figures_of(cluster: Cluster) -> str:
    """A digest of all that a cluster's prices depend on."""
    return digest_of(cluster.fingerprint())[:16]


def values_of(leaves: Sequence[Leaf], layouts: Sequence[Layout], mesh: LogicalMesh) -> tuple[ValuePlan, ...]:
    """Leaves in these layouts as a plan has them."""
    return tuple(
        ValuePlan(
            path=leaf.path,
            role=leaf.role,
            shape=leaf.given_shape,
            dtype=str(leaf.dtype),
            spec=layout.spec(mesh) if leaf.given_shape == leaf.shape else layout.spec(mesh)[1:],
            bytes_per_device=layout.local_bytes(leaf.shape, itemsize_of(leaf), mesh),
            from_forward=leaf.from_forward,
        )
        for leaf, layout in zip(leaves, layouts, strict=True)
    )


def collectives_of(
    traced: TracedStep, graph: StrategyGraph, assignment: Assignment
) -> tuple[tuple[CollectivePlan, ...], float]:
    """(collectives in program order, seconds of changes of layout without communication)."""
    plans, local_s, needs, names = [], 0.0, find_needs(traced), _leaf_names(traced)
    origins = Origins(traced.program)
    for planned in planned_moves(assignment):
        shape, itemsize = tuple(planned.aval.shape), itemsize_of(planned.aval)
        each = graph.spaces.network.seconds(planned.move, shape, itemsize)
        if planned.move.kind in LOCAL_KINDS:
            local_s += each * planned.trips
        else:
            plans.append(
                CollectivePlan(
                    kind=planned.move.kind,
                    axes=graph.mesh.names(planned.move.axes),
                    bytes=planned.move.payload(shape, graph.mesh) * itemsize,
                    count=planned.trips,
                    operand=f"{planned.aval.dtype}[{','.join(map(str, shape))}]",
                    source=_line_of(planned, origins),
                    predicted_s=each,
                    overlap=kind_of(needs.of(planned.atom), planned.move.kind),
                    scope=_name_of(planned, names, origins),
                    is_transposed=graph.spaces.network.is_transposed(planned.move, shape),
                )
            )
    return tuple(plans), local_s


def _leaf_names(traced: TracedStep) -> dict[Atom, str]:
    """The paths of the step's inputs and outputs, by their variables and other names of these."""
    program = traced.program
    outputs = zip(program.outvars, traced.outputs, strict=True)
    names: dict[Atom, str] = {v: leaf.path for v, leaf in outputs if isinstance(v, Var)}
    names |= {v: leaf.path for v, leaf in zip(program.invars, traced.inputs, strict=True)}
    for eqn in program.equations:
        given = eqn.invars[0] if eqn.primitive is fan_out_p else None
        if isinstance(given, Var) and given in names:
            names |= dict.fromkeys(eqn.outvars, names[given])
    return names


def _name_of(planned: PlannedMove, names: Mapping[Atom, str], origins: Origins) -> str:
    """The leaf that a move brings elsewhere, or the module that asks for it, or the one nearest to what asks."""
    if isinstance(planned.atom, Var) and planned.atom in names:
        return names[planned.atom]
    return "" if planned.equation is None else module_path(origins.of(planned.equation, planned.atom))


def _line_of(planned: PlannedMove, origins: Origins) -> str:
    """The line of the operation that asks for a move, or of the one that names its module."""
    if planned.equation is None:
        return "output"
    origin = origins.of(planned.equation, planned.atom)
    return source_line(origin if isinstance(planned.equation, LoopEquation) else planned.equation) or source_line(
        origin
    )


def exchanges_of(graph: StrategyGraph, numbers: Sequence[int]) -> tuple[tuple[CollectivePlan, ...], float]:
    """(collectives within operations, seconds per step that these wait for them), for the number of each node's strategy.

    Equal parts of a value are sent once, as compilers do. The search has not known that; the seconds stay with the operation.
    """
    plans, waits_s = [], 0.0
    there = set[Hashable]()
    for node, number in zip(graph.nodes, numbers, strict=True):
        eqn, choices = node.equation, node.choices
        if eqn is None or choices.within is None:
            continue
        waits_s += float(choices.within.waited_s[number]) * node.trips
        values = (*eqn.invars, *eqn.outvars)
        for exchange in choices.within.divisions[number].exchanges:
            value, aval = values[exchange.value], values[exchange.value].aval
            if exchange.part is not None:
                layout = choices.strategies[number].inputs[exchange.value]
                is_there = (value, layout, exchange.axes, exchange.part) in there
                there.add((value, layout, exchange.axes, exchange.part))
                if is_there:
                    waits_s -= exchange.count * hop_s(exchange, graph.spaces.network) * node.trips
                    continue
            plans.append(
                CollectivePlan(
                    kind="collective-permute",
                    axes=graph.mesh.names(exchange.axes),
                    bytes=exchange.bytes,
                    count=exchange.count * node.trips,
                    operand=f"{aval.dtype}[{','.join(map(str, aval.shape))}]",
                    source=source_line(eqn),
                    predicted_s=hop_s(exchange, graph.spaces.network),
                    overlap=WITHIN,
                    scope=module_path(eqn),
                )
            )
    return tuple(plans), waits_s

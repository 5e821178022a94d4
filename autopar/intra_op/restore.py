"""A step with the assignment that a plan describes, without solving.

In: a traced step, its plan, the request that it was made for. Out: a `PlannedStep`. Between processes that have the same traced
step in memory, a planned step travels with its assignment, in which equations are known by their place (`pack`, `unpack`). What
can go wrong: the plan is for another step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.compat import source_line
from autopar.errors import PlanError
from autopar.intra_op.choices.strategies import ShardingStrategy
from autopar.intra_op.describe import collectives_of, exchanges_of, figures_of, values_of
from autopar.intra_op.lowering.assignment import Assignment, assign
from autopar.intra_op.lowering.named_strategies import assign_by_name, choose_by_name
from autopar.intra_op.mesh_search import graph_for
from autopar.intra_op.request import PlannedStep, PlanRequest
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.plan import CollectivePlan, Plan, ValuePlan
from autopar.program.step import Leaf, TracedStep
from autopar.rules.factor_rule import FactorRule
from autopar.rules.table import digest_registered
from autopar.solver.budget import LateError


def restore(traced: TracedStep, plan: Plan, request: PlanRequest) -> PlannedStep:
    """The step with the assignment that a plan describes, without solving. Raises PlanError if the plan is for another step."""
    if plan.fingerprint != traced.fingerprint.digest:
        raise another_step(traced, plan.fingerprint, plan.trail, plan.inputs)
    _check_rules(traced, plan)
    _check_leaves(traced, plan)
    mesh, request = LogicalMesh(plan.mesh_shape, plan.axis_names), _as_planned(request, plan)
    inputs = [(_leaf_layout(v, leaf, mesh),) for v, leaf in zip(plan.inputs, traced.inputs, strict=True)]
    outputs: list[Any] = [
        number if number is not None else (_leaf_layout(v, leaf, mesh),)
        for number, v, leaf in zip(traced.state_of_output, plan.outputs, traced.outputs, strict=True)
    ]
    try:
        graph = graph_for(traced, mesh, request, inputs, outputs, budget=request.budget)
    except LateError:
        raise PlanError(
            "the time for planning is over before the plan is restored: allow more planning_seconds"
        ) from None
    numbers = choose_by_name(graph, plan)
    assignment = assign(graph, numbers, copy_span=plan.copy_span)
    _check_leaf_layouts(traced, plan, assignment)
    if plan.cluster_figures == figures_of(request.cluster):  # else values may get to their layouts in another way
        needed, within = collectives_of(traced, graph, assignment)[0], exchanges_of(graph, numbers)[0]
        _compare_collectives((*needed, *within), plan.collectives)
    return PlannedStep(traced, plan, assignment)


def restore_known(traced: TracedStep, plan: Plan, request: PlanRequest) -> PlannedStep:
    """As `restore`, of a plan that is known to be of this very step and request: it is not checked, and needs no graph.

    The assignment says nothing of seconds. Raises PlanError if the plan is for another step, as far as that is noticed.
    """
    mesh, request = LogicalMesh(plan.mesh_shape, plan.axis_names), _as_planned(request, plan)
    assignment = assign_by_name(
        traced.program,
        plan,
        request.catalogues.of(mesh, request.cluster, request.options),
        inputs=[_leaf_layout(v, leaf, mesh) for v, leaf in zip(plan.inputs, traced.inputs, strict=True)],
        outputs=[_leaf_layout(v, leaf, mesh) for v, leaf in zip(plan.outputs, traced.outputs, strict=True)],
        copy_span=plan.copy_span,
    )
    return PlannedStep(traced, plan, assignment)


def _as_planned(request: PlanRequest, plan: Plan) -> PlanRequest:
    """A request with what a plan says of its own: the kind of its nodes, and whether work may be repeated."""
    options, cluster = request.options, request.cluster
    options = dataclasses.replace(options, allow_redundant_compute=plan.allow_redundant_compute)
    if plan.node_kind and any(kind.name == plan.node_kind for kind in cluster.node_kinds):
        cluster = cluster.of_kind(plan.node_kind)
    return dataclasses.replace(request, options=options, cluster=cluster)


def another_step(traced: TracedStep, digest: str, trail: str, inputs: Sequence[ValuePlan] = ()) -> PlanError:
    """The error of a plan for another step: where this one begins to differ, and what to do.

    Args:
        traced: this step.
        digest: the fingerprint of the plan's program.
        trail: that of its equations.
        inputs: the leaves of the plan, if it lists those of the whole step.
    """
    own, equations = traced.fingerprint, list(traced.program.walk())
    number, theirs = own.first_difference(trail), len(trail) // 2
    pairs = zip(inputs, traced.inputs, strict=False)
    leaves = (
        f"{leaf.path} is {_type_of(leaf)} here, {_type_of(v)} in the plan" for v, leaf in pairs if not _alike(v, leaf)
    )
    found = list(itertools.islice(leaves, 1))
    if number is not None and number < len(equations) and number < theirs:
        eqn = equations[number]
        found.append(f"equation {number}, `{eqn.primitive.name}` at {source_line(eqn)}, is not that of the plan")
    elif theirs != len(equations):
        fewer = min(theirs, len(equations))
        found.append(f"it has {len(equations)} equations, that of the plan {theirs}; the first {fewer} agree")
    else:
        found.append("its results are not those of the plan's program")
    return PlanError(
        f"the plan was made for another step: its program has fingerprint {digest}, this one {own.digest}. "
        f"Of this step: {'; '.join(found)}. Call it with the shapes and types of the plan, or plan again."
    )


def _alike(value: ValuePlan, leaf: Leaf) -> bool:
    return (value.path, value.shape, value.dtype) == (leaf.path, leaf.given_shape, str(leaf.dtype))


def _type_of(leaf: Leaf | ValuePlan) -> str:
    shape = leaf.given_shape if isinstance(leaf, Leaf) else leaf.shape
    return f"{leaf.dtype}{list(shape)}"


def _check_rules(traced: TracedStep, plan: Plan) -> None:
    """Raise PlanError unless the user's rules for primitives of the step are those of the plan."""
    here, there = digest_registered(traced.program.walk()), {rule.name: rule.digest for rule in plan.rules}
    for name in sorted({*here, *there}):
        if here.get(name) != there.get(name):
            how = "without a rule" if name not in there else "with a rule" if name not in here else "with another rule"
            then = "register that one" if name in there else "leave the rule out"
            raise PlanError(f"the plan was made {how} for the primitive {name!r}: {then}, or plan again")


def _check_leaves(traced: TracedStep, plan: Plan) -> None:
    """Raise PlanError unless the plan lists the leaves of the step."""
    for side, values, leaves in (("inputs", plan.inputs, traced.inputs), ("outputs", plan.outputs, traced.outputs)):
        if len(values) != len(leaves):
            raise PlanError(f"the plan has {len(values)} {side}, this step {len(leaves)}: plan again")
        for value, leaf in zip(values, leaves, strict=True):
            if not _alike(value, leaf):
                raise PlanError(
                    f"{side}: {leaf.path} of this step is {_type_of(leaf)}, the plan has {value.path}, {_type_of(value)}, in its "
                    "place: name the arguments alike, or plan again"
                )
            if (value.role, value.from_forward) != (leaf.role, leaf.from_forward):
                raise PlanError(
                    f"{side}: {leaf.path} is {leaf.role} here, {value.role} in the plan: give batch_argnums alike, or plan again"
                )


def _check_leaf_layouts(traced: TracedStep, plan: Plan, assignment: Assignment) -> None:
    """Raise PlanError if the leaves do not lie as the plan says."""
    inputs = values_of(traced.inputs, assignment.inputs, assignment.mesh)
    outputs = values_of(traced.outputs, assignment.outputs, assignment.mesh)
    for found, said in zip((*inputs, *outputs), (*plan.inputs, *plan.outputs), strict=True):
        if found != said:
            raise PlanError(
                f"{said.path} has {found.bytes_per_device} bytes per device in the layout {found.spec}, the plan says "
                f"{said.bytes_per_device} in {said.spec}: plan again"
            )


def _compare_collectives(needed: Sequence[CollectivePlan], said: Sequence[CollectivePlan]) -> None:
    for number, (one, other) in enumerate(itertools.zip_longest(needed, said)):
        if one is None or other is None or _what_moves(one) != _what_moves(other):
            here, there = ("none" if item is None else _collective_text(item) for item in (one, other))
            raise PlanError(f"the plan says that collective {number} is {there}; its layouts need {here}: plan again")


def _what_moves(item: CollectivePlan) -> tuple[object, ...]:
    return item.kind, item.axes, item.bytes, item.count, item.operand, item.overlap


def _collective_text(item: CollectivePlan) -> str:
    return f"{item.kind} of {item.operand} over {', '.join(item.axes)} ({item.bytes} bytes, {item.count:g} times)"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PackedStep:
    """A planned step that can be pickled: its plan, and what its assignment says of each equation, in the order of the walk.

    Attributes:
        plan: the plan.
        rules: the rule and the strategy of each equation, None where it has none.
        joins: the layouts where control flow joins, by the number of the equation.
        inputs: the layouts of the program's inputs.
        outputs: those of its outputs.
        seconds: (number of the equation, its predicted seconds, how often it runs).
    """

    plan: Plan
    rules: tuple[tuple[FactorRule, ShardingStrategy] | None, ...]
    joins: Mapping[int, tuple[Layout, ...]]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    seconds: tuple[tuple[int, float, float], ...]


def pack(planned: PlannedStep) -> PackedStep:
    """A planned step for another process that has the same traced step."""
    assigned = planned.assignment
    equations = list(assigned.program.walk())
    number = {eqn: i for i, eqn in enumerate(equations)}
    return PackedStep(
        plan=planned.plan,
        rules=tuple(
            (assigned.rules[eqn], assigned.strategies[eqn]) if eqn in assigned.rules else None for eqn in equations
        ),
        joins={number[eqn]: layouts for eqn, layouts in assigned.joins.items()},
        inputs=assigned.inputs,
        outputs=assigned.outputs,
        seconds=tuple((number[eqn], seconds, trips) for eqn, seconds, trips in assigned.seconds),
    )


def unpack(packed: PackedStep, traced: TracedStep, request: PlanRequest) -> PlannedStep:
    """The planned step that another process has packed, which had this traced step and this request."""
    plan, equations = packed.plan, list(traced.program.walk())
    mesh = LogicalMesh(plan.mesh_shape, plan.axis_names)
    known = [(eqn, found) for eqn, found in zip(equations, packed.rules, strict=True) if found is not None]
    assigned = Assignment(
        program=traced.program,
        mesh=mesh,
        spaces=request.catalogues.of(mesh, request.cluster, request.options).spaces,
        rules={eqn: rule for eqn, (rule, _) in known},
        strategies={eqn: strategy for eqn, (_, strategy) in known},
        joins={equations[i]: layouts for i, layouts in packed.joins.items()},
        inputs=packed.inputs,
        outputs=packed.outputs,
        copy_span=plan.copy_span,
        seconds=tuple((equations[i], seconds, trips) for i, seconds, trips in packed.seconds),
    )
    return PlannedStep(traced, plan, assigned)


def _leaf_layout(value: ValuePlan, leaf: Leaf, mesh: LogicalMesh) -> Layout:
    return _layout(value, mesh) if leaf.given_shape == leaf.shape else _layout(value, mesh).prepend()


def _layout(value: ValuePlan, mesh: LogicalMesh) -> Layout:
    numbers: Mapping[str, int] = {name: i for i, name in enumerate(mesh.axis_names)}
    return Layout(tuple(tuple(numbers[name] for name in axes) for axes in value.spec))

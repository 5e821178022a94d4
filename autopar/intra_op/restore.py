"""A step with the assignment that a plan describes, without solving.

In: a traced step, its plan, the request that it was made for. Out: a `PlannedStep`. Between processes that have the same traced
step in memory, a planned step travels with its assignment, in which equations are known by their place (`pack`, `unpack`). What
can go wrong: the plan is for another step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from autopar.errors import PlanError
from autopar.intra_op.choices.strategies import ShardingStrategy
from autopar.intra_op.lowering.assignment import Assignment, assign
from autopar.intra_op.mesh_search import graph_for
from autopar.intra_op.request import PlannedStep, PlanRequest
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.plan import Plan, ValuePlan
from autopar.program.step import Leaf, TracedStep
from autopar.rules.factor_rule import FactorRule


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
    counts = [len(node.choices.strategies) for node in graph.nodes]
    fixed = [0 if count == 1 else number for number, count in zip(plan.choices, counts, strict=True)]
    if not all(0 <= number < count for number, count in zip(fixed, counts, strict=True)):
        raise PlanError("the plan chooses what this program does not offer; plan again with this version")
    return PlannedStep(traced, plan, assign(graph, fixed, copy_span=plan.copy_span))


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
    return _layout(value, mesh) if leaf.microbatches == 1 else _layout(value, mesh).prepend()


def _layout(value: ValuePlan, mesh: LogicalMesh) -> Layout:
    numbers: Mapping[str, int] = {name: i for i, name in enumerate(mesh.axis_names)}
    return Layout(tuple(tuple(numbers[name] for name in axes) for axes in value.spec))

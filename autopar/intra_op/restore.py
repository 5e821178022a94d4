"""A step with the assignment that a plan describes, without solving.

In: a traced step, its plan, the request that it was made for. Out: a `PlannedStep`. What can go wrong: the plan is for another
step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from autopar.errors import PlanError
from autopar.intra_op.lowering.assignment import assign
from autopar.intra_op.mesh_search import graph_for
from autopar.intra_op.request import PlannedStep, PlanRequest
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.plan import Plan, ValuePlan
from autopar.program.step import Leaf, TracedStep


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


def _leaf_layout(value: ValuePlan, leaf: Leaf, mesh: LogicalMesh) -> Layout:
    return _layout(value, mesh) if leaf.microbatches == 1 else _layout(value, mesh).prepend()


def _layout(value: ValuePlan, mesh: LogicalMesh) -> Layout:
    numbers: Mapping[str, int] = {name: i for i, name in enumerate(mesh.axis_names)}
    return Layout(tuple(tuple(numbers[name] for name in axes) for axes in value.spec))

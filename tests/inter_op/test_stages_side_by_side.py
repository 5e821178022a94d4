"""Stages that forks plan are those that one process plans, and this process traces only its own."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp

from autopar.cost_model.hardware import preset
from autopar.inter_op.plan_stages import StageRequest, plan_stages
from autopar.layouts.mesh import LogicalMesh
from tests.inter_op.test_search import request_on, traced_step

WIDTHS = (8, 16, 32, 24, 12)
"""Of layers of which no two are alike."""
STAGES = 4
NUMBERS = ("forward_s", "backward_s", "split_s", "once_s", "peak_bytes")


def staged_by(processes):
    """Four different stages on two devices each, planned by so many processes."""
    weights = [jax.ShapeDtypeStruct(sizes, jnp.float32) for sizes in itertools.pairwise(WIDTHS)]
    traced = traced_step(weights, jax.ShapeDtypeStruct((16, WIDTHS[0]), jnp.float32))
    request = dataclasses.replace(request_on(preset("cpu")), processes=processes)
    wanted = StageRequest(meshes=((LogicalMesh.of((2,)),),) * STAGES, num_stages=STAGES, num_microbatches=4)
    return plan_stages(traced, wanted, request)


def figures(stage):
    """What is known of a stage without its program, but for how long planning it took."""
    tasks = stage.memory.tasks
    others = [getattr(stage, f.name) for f in dataclasses.fields(stage) if f.name in NUMBERS]
    memory = dataclasses.replace(stage.memory, tasks=None)
    return (
        others,
        memory,
        vars(tasks.whole),
        vars(tasks.split),
        tasks.outside_bytes,
        stage.plan.inputs,
        stage.plan.step_s,
    )


def test_stages_of_two_processes_are_those_of_one():
    alone, together = staged_by(1), staged_by(2)
    assert not all("step" in vars(stage.program) for stage in together.stages), "a fork has traced some of them"
    assert [figures(stage) for stage in together.stages] == [figures(stage) for stage in alone.stages]
    for one, other in zip(together.stages, alone.stages, strict=True):
        assert list(one.assignment.strategies.values()) == list(other.assignment.strategies.values())

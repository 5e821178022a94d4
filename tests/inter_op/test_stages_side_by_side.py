"""Stages that forks plan are those that one process plans, and this process traces only its own."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

from autopar.cost_model.hardware import preset
from autopar.inter_op import plan_pipeline, search_pipeline
from autopar.inter_op.candidates.timetables import Timetable
from autopar.inter_op.plan_pipeline import PipelineWishes
from autopar.inter_op.plan_stages import StageRequest, plan_stages
from autopar.layouts.mesh import LogicalMesh
from autopar.schedules.in_flight import InFlight
from autopar.schedules.schedules import NAMED_SCHEDULES, make_schedule
from tests.inter_op.test_search import arguments, request_on, traced_step, two_nodes

WIDTHS = (8, 16, 32, 24, 12)
"""Of layers of which no two are alike."""
STAGES = 4
NUMBERS = ("forward_s", "backward_s", "split_s", "once_s", "peak_bytes")


def staged_by(processes, **wanted):
    """Four different stages on two devices each, planned by so many processes."""
    weights = [jax.ShapeDtypeStruct(sizes, jnp.float32) for sizes in itertools.pairwise(WIDTHS)]
    traced = traced_step(weights, jax.ShapeDtypeStruct((16, WIDTHS[0]), jnp.float32))
    request = dataclasses.replace(request_on(preset("cpu")), processes=processes)
    if "memory_limit_bytes" in wanted:
        request = dataclasses.replace(request, memory_limit_bytes=wanted.pop("memory_limit_bytes"))
    meshes = ((LogicalMesh.of((2,)),),) * STAGES
    return plan_stages(traced, StageRequest(meshes=meshes, num_stages=STAGES, num_microbatches=4, **wanted), request)


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


def test_forks_reckon_what_split_schedules_will_ask_if_the_stage_may_fit_there():
    """Who gets a stage from a fork has no assignment, and makes one anew to reckon the tasks."""
    split = InFlight(make_schedule("zb-h1", num_meshes=STAGES, num_microbatches=4))

    def reckoned(staged):
        return ["split" in vars(stage.memory.tasks) for stage in staged.stages]

    assert reckoned(staged_by(2)) == [False] * STAGES
    staged = staged_by(2, also=(split,))
    assert reckoned(staged) == [True] * STAGES
    assert sum("step" in vars(stage.program) for stage in staged.stages) < STAGES, "nor did it trace the programs"
    crowded = InFlight(make_schedule("gpipe", num_meshes=STAGES, num_microbatches=1024))
    limit = 2 * max(stage.peak_bytes for stage in staged.stages)
    flying = [
        stage.memory.kept_bytes - stage.memory.late_bytes + stage.memory.flying_bytes(crowded)
        for stage in staged.stages
    ]
    assert any(there > limit for there in flying), "otherwise the limit rules out none"
    tight = staged_by(2, also=(crowded,), memory_limit_bytes=limit)
    assert reckoned(tight) == [there <= limit for there in flying]


@pytest.mark.parametrize("schedule", ["auto", "1f1b"])
@pytest.mark.parametrize("module", [plan_pipeline, search_pipeline])
def test_schedules_that_split_the_backward_ask_where_they_are_compared(monkeypatch, module, schedule):
    """Given stages, and stages that are searched: what is asked of the forks is what `plan_in_other_schedules` will need."""
    asked = []

    class PlannedError(Exception):
        """Enough is known."""

    def plan(traced, wanted, request, recompute, **options):
        asked.append(wanted)
        raise PlannedError

    monkeypatch.setattr(module, "plan_with_recomputation", plan)
    wishes = PipelineWishes(num_stages=2, num_microbatches=4, schedule=schedule)
    traced, request = traced_step(*arguments(64)), request_on(two_nodes())
    ways = {
        plan_pipeline: lambda: plan_pipeline.plan_pipeline(traced, wishes, Timetable(4, "1f1b"), request, devices=4),
        search_pipeline: lambda: search_pipeline.search_pipeline(traced, wishes, request, devices=4, num_stages=2),
    }
    with pytest.raises(PlannedError):
        ways[module]()
    split = [one.is_split for wanted in asked for one in wanted.also]
    is_first_split = NAMED_SCHEDULES[asked[0].in_flight.schedule.name].is_split
    assert split == ([True] if schedule == "auto" and not is_first_split else [])


def test_a_schedule_that_is_split_itself_or_interleaved_asks_nobody():
    assert [one.schedule.num_microbatches for one in plan_pipeline.in_flight_if_split(Timetable(4, "1f1b"), 2)] == [4]
    assert plan_pipeline.in_flight_if_split(Timetable(4, "zb-h1"), 2) == ()
    assert plan_pipeline.in_flight_if_split(Timetable(4, "interleaved", 2), 2) == ()

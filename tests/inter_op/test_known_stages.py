"""Stages that were planned for one number of stages are not planned again for another, and the plans stay the same."""

import contextlib
import dataclasses

import pytest

from autopar.cost_model.hardware import preset
from autopar.errors import OutOfMemoryError
from autopar.inter_op.plan_stage import KnownStages, PlannedWithin, StageJob, StagePlanning, plan_program
from autopar.inter_op.plan_stages import StageRequest, plan_stages
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.request import PlanRequest
from autopar.layouts.constraints import Constraints, Replicated, Rule
from autopar.layouts.mesh import LogicalMesh
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.trace import trace
from autopar.schedules.in_flight import InFlight
from autopar.schedules.schedules import make_schedule
from autopar.stages.chain import forward_chain
from autopar.stages.time_loops import make_time_loop
from tests import pipeline_steps

MICROBATCHES = 4
LINE, PAIR = LogicalMesh.of((2,)), LogicalMesh.of((1, 2))


class Counted:
    """Plans as usual, and counts."""

    def __init__(self):
        self.count = 0

    def __call__(self, program, request):
        self.count += 1
        return plan_program(program, request)


@pytest.fixture(scope="module")
def traced():
    step = pipeline_steps.plain()[0]
    signature = CallSignature(step, (1,), (), "auto")
    return trace(signature, bind_arguments(signature, (pipeline_steps.layers(6), pipeline_steps.rows()), {}))


@pytest.fixture(scope="module")
def ends(traced):
    """Where the layers end, but the last."""
    chain = forward_chain(make_time_loop(traced, MICROBATCHES))
    return tuple(place + 1 for place, link in enumerate(chain) if link.equation.primitive.name == "tanh")[:-1]


def request_within(limit, meshes):
    return PlanRequest(
        meshes=meshes,
        cluster=preset("cpu"),
        memory_limit_bytes=limit,
        constraints=Constraints(),
        options=PlannerOptions(),
    )


def planned(traced, cuts, known, *, mesh=LINE, limit=None):
    """Stages between these cuts, and how many programs were planned for them."""
    stages = len(cuts) + 1
    schedule = make_schedule("1f1b", num_meshes=stages, num_microbatches=MICROBATCHES)
    wanted = StageRequest(
        meshes=((mesh,),) * stages,
        num_stages=stages,
        num_microbatches=MICROBATCHES,
        in_flight=InFlight(schedule),
        cuts=cuts,
        known=known,
    )
    request = request_within(limit, ())
    planner = Counted()
    return plan_stages(traced, wanted, request, planner=planner), planner.count


def figures(staged):
    """What a pipeline's plan is made of, without the seconds that planning took."""
    return [
        (dataclasses.replace(one.plan, planning_s=0.0), one.forward_s, one.backward_s, one.once_s, one.peak_bytes)
        for one in staged.stages
    ]


def test_stages_that_are_known_are_not_planned_again_and_come_out_the_same(traced, ends):
    known = KnownStages()
    planned(traced, ends, known)
    again, few = planned(traced, ends[:-1], known)
    fresh, all_of_them = planned(traced, ends[:-1], KnownStages())
    assert few < all_of_them
    assert figures(again) == figures(fresh)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("other", [{"mesh": PAIR}, {"limit": 10**9}])
def test_on_other_meshes_or_within_other_memory_nothing_is_known(traced, ends, other):
    known = KnownStages()
    _, first = planned(traced, ends[:2], known)
    again, count = planned(traced, ends[:2], known, **other)
    assert count == first
    assert figures(again) == figures(planned(traced, ends[:2], KnownStages(), **other)[0])


def test_what_is_known_holds_within_the_same_room_and_without_constraints(traced, ends):
    """Other bytes beside the microbatches in flight may allow a faster plan; constraints name the leaves of one stage alone."""
    known = KnownStages()
    staged, _ = planned(traced, ends[:1], known)
    stage = staged.stages[0]
    request = request_within(10**9, (LINE,))
    job = StageJob(stage.program, known.kind_of(stage.program.ports), request)
    known.keep(job, PlannedWithin(stage, 10**6))
    assert known.find(job, 10**6) is not None
    assert known.find(job, 10**7) is None
    rules = Constraints((Rule(glob="*", layout=Replicated()),))
    assert known.find(dataclasses.replace(job, request=dataclasses.replace(request, constraints=rules)), 10**6) is None


def test_what_planning_came_to_is_known_at_the_same_place_of_a_schedule(traced, ends):
    """Also where it came to that within fewer bytes than it began with; elsewhere as many may be enough."""
    staged, _ = planned(traced, ends[:1], KnownStages())
    stage, known = staged.stages[0], KnownStages()
    limit = 10 * stage.peak_bytes
    request = request_within(limit, (LINE,))
    job = StageJob(stage.program, known.kind_of(stage.program.ports), request)

    def planning(schedule):
        made = make_schedule(schedule, num_meshes=2, num_microbatches=MICROBATCHES)
        return StagePlanning(planner=plan_program, in_flight=InFlight(made), memory_rounds=1, known=known)

    planning("1f1b").keep(job, PlannedWithin(stage, limit // 2))
    assert planning("1f1b").find_known(job) is not None
    assert planning("gpipe").find_known(job) is None


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "share", [pytest.param(s, marks=pytest.mark.slow) if s in (0.7, 0.95) else s for s in (0.7, 0.85, 0.95, 1.0)]
)
def test_under_a_limit_known_stages_come_to_what_planning_comes_to(traced, ends, share):
    """More microbatches are in flight at the beginning of a deeper pipeline, so that what fitted elsewhere need not fit there."""
    free, _ = planned(traced, ends, KnownStages())
    limit = int(share * max(one.peak_bytes for one in free.stages))

    def outcome(known):
        try:
            return figures(planned(traced, ends, known, limit=limit)[0])
        except OutOfMemoryError as error:
            return str(error)

    known = KnownStages()
    with contextlib.suppress(OutOfMemoryError):
        planned(traced, ends[-2:], known, limit=limit)
    assert outcome(known) == outcome(KnownStages())

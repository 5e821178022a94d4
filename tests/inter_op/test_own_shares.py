"""Of stages that do not fit, those alone do more forward work again, and the others are not planned again."""

import dataclasses

import pytest

from autopar.cost_model.hardware import preset
from autopar.errors import OutOfMemoryError
from autopar.inter_op.plan_pipeline import plan_with_recomputation
from autopar.inter_op.plan_stage import KnownStages, StagePlanning, StagesTooLargeError
from autopar.inter_op.plan_stages import StageRequest, plan_stages
from autopar.layouts.mesh import LogicalMesh
from autopar.schedules.in_flight import InFlight
from autopar.schedules.schedules import make_schedule
from autopar.stages.chain import forward_chain
from autopar.stages.time_loops import make_time_loop
from tests.inter_op.test_search import arguments, request_on, traced_step

STAGES, MICROBATCHES, LAYERS = 3, 8, 9
ALONE = LogicalMesh.of((1,))


@pytest.fixture(scope="module")
def traced():
    return traced_step(*arguments(16, layers=LAYERS, batch=4096))


@pytest.fixture
def wanted(traced):
    """Three stages of three layers each, of which the first keeps three microbatches and the last one."""
    chain = forward_chain(make_time_loop(traced, MICROBATCHES))
    ends = [place + 1 for place, link in enumerate(chain) if link.equation.primitive.name == "tanh"]
    schedule = make_schedule("1f1b", num_meshes=STAGES, num_microbatches=MICROBATCHES)
    return StageRequest(
        meshes=((ALONE,),) * STAGES,
        num_stages=STAGES,
        num_microbatches=MICROBATCHES,
        in_flight=InFlight(schedule),
        cuts=(ends[2], ends[5]),
        shares=(0.0,) * STAGES,
    )


@pytest.fixture
def tried(monkeypatch):
    """The numbers of the stages that are planned, and not known."""
    numbers = []

    def plan(planning, job):
        numbers.append(job.program.stage)
        return as_usual(planning, job)

    as_usual = StagePlanning.plan
    monkeypatch.setattr(StagePlanning, "plan", plan)
    return numbers


def request_within(limit):
    return dataclasses.replace(request_on(preset("cpu")), memory_limit_bytes=limit, processes=1)


def peaks(traced, wanted, shares):
    """Bytes of each stage, of which so much is done again."""
    free = dataclasses.replace(wanted, shares=shares, known=KnownStages())
    staged = plan_stages(traced, free, request_within(None))
    return [stage.peak_bytes for stage in staged.stages]


def test_only_the_stage_that_does_not_fit_does_more_again(traced, wanted, tried):
    free, half = peaks(traced, wanted, (0.0,) * STAGES), peaks(traced, wanted, (0.5, 0.0, 0.0))
    assert max(half[0], *free[1:]) < free[0], "the case is one"
    tried.clear()
    limit = (max(half[0], *free[1:]) + free[0]) // 2
    staged = plan_with_recomputation(traced, wanted, request_within(limit), "auto")
    assert staged.shares == (0.5, 0.0, 0.0)
    assert max(stage.peak_bytes for stage in staged.stages) <= limit
    assert sorted(tried) == [0, 0, 1, 2], "what fits is not planned again"


def test_every_stage_that_does_not_fit_does_more_again_until_it_fits(traced, wanted):
    all_again = peaks(traced, wanted, (1.0,) * STAGES)
    staged = plan_with_recomputation(traced, wanted, request_within(max(all_again)), "auto")
    assert staged.shares[0] == 1.0
    assert max(stage.peak_bytes for stage in staged.stages) <= max(all_again)


def test_a_stage_that_does_all_again_and_does_not_fit_is_named(traced, wanted):
    with pytest.raises(OutOfMemoryError, match="stage 0 of 3"):
        plan_with_recomputation(traced, wanted, request_within(10_000), "auto")


def test_of_equal_stages_that_do_not_fit_the_last_tells_of_the_others(traced, wanted, tried):
    """All stages but the first and the last are equal, and keep fewer microbatches one after the other."""
    chain = forward_chain(make_time_loop(traced, MICROBATCHES))
    ends = [place + 1 for place, link in enumerate(chain) if link.equation.primitive.name == "tanh"]
    schedule = make_schedule("1f1b", num_meshes=LAYERS, num_microbatches=MICROBATCHES)
    many = dataclasses.replace(
        wanted,
        meshes=((ALONE,),) * LAYERS,
        num_stages=LAYERS,
        in_flight=InFlight(schedule),
        cuts=tuple(ends[:-1]),
        shares=(0.0,) * LAYERS,
        largest_share=1.0,
    )
    free = peaks(traced, many, many.shares)
    limit = (free[4] + free[5]) // 2
    tried.clear()
    with pytest.raises(StagesTooLargeError) as error:
        plan_stages(traced, many, request_within(limit))
    assert error.value.stages == {stage for stage, peak in enumerate(free) if peak > limit}
    assert sorted(tried) == [0, 1, 2, 7, 8], "of stages 2 to 7, which are equal, the first and the last are planned"

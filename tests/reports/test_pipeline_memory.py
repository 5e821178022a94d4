"""Memory over a pipeline's step: it begins with the state and reaches the peak that the plan says."""

import pytest

from autopar.reports.html.pipeline_memory import memory_over_step
from tests.schedules.chains import TRAINING_IN_ONE
from tests.why.test_leaf import MODES, planned


@pytest.fixture(scope="module", params=TRAINING_IN_ONE)
def plan(request):
    return planned(**MODES["stages"] | {"schedule": request.param})


@pytest.mark.sampled(4)
def test_the_most_memory_of_a_mesh_is_its_stage_s_peak(plan):
    for stage in plan.stages:
        assert max(memory_over_step(plan, stage.mesh)) == stage.peak_bytes


def test_more_microbatches_fly_in_the_middle_than_at_the_ends(plan):
    stage = plan.stages[0]
    values = memory_over_step(plan, 0, intervals=50)
    lying = stage.state_bytes + stage.sum_bytes
    assert len(values) == 50
    share = stage.in_flight_bytes / stage.microbatches_in_flight
    assert values[0] == pytest.approx(lying + stage.working_bytes + share, abs=1)
    assert min(values) >= lying
    assert values[-1] <= lying + stage.working_bytes + share + 1


@pytest.mark.sampled(4)
def test_the_page_draws_the_parts_of_the_peak_and_the_fullest_mesh_over_the_step(plan):
    text = plan.html()
    assert 'aria-label="memory-over-step-wide"' in text
    assert "The second picture is a device of mesh" in text
    assert "Memory at the peak" in text

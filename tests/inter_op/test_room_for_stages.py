"""A given number of stages that needs many more microbatches than usual to fit the memory gets them."""

import dataclasses

import pytest

from autopar.errors import OutOfMemoryError
from autopar.inter_op import compare_timetables, given_stages
from autopar.inter_op.candidates.tuning import TUNING
from autopar.inter_op.compare_timetables import plan_best_pipeline
from autopar.inter_op.given_stages import plan_given_stages
from autopar.inter_op.plan_pipeline import PipelineWishes, plan_pipeline
from autopar.inter_op.search_pipeline import OneStage, SearchedPipeline
from autopar.layouts.mesh import LogicalMesh
from autopar.solver.budget import Budget, LateError
from tests.inter_op.test_search import arguments, request_on, traced_step, two_nodes

BATCH, MANY = 4096, 512
WISHES = PipelineWishes(num_stages=2, recompute="none")
MESHES = (LogicalMesh.of((1,)),) * 2


@pytest.fixture(scope="module")
def traced():
    return traced_step(*arguments(32, layers=4, batch=BATCH))


@pytest.fixture(scope="module")
def limit(traced):
    """Bytes in which the usual 8 microbatches do not fit."""
    wishes = dataclasses.replace(WISHES, num_microbatches=MANY, schedule="1f1b", stage_meshes=MESHES)
    plan = plan_best_pipeline(traced, wishes, request_on(two_nodes()), devices=2).plan
    return int(1.3 * max(stage.peak_bytes for stage in plan.stages))


@pytest.fixture
def tried(monkeypatch):
    found = []

    def noting(traced, wishes, timetable, request, **options):
        found.append(timetable.microbatches)
        return plan_pipeline(traced, wishes, timetable, request, **options)

    monkeypatch.setattr(compare_timetables, "plan_pipeline", noting)
    return found


def request_until(budget, limit):
    return dataclasses.replace(request_on(two_nodes(), limit), meshes=(LogicalMesh.of((1,)),), budget=budget)


def test_given_meshes_are_tried_in_as_many_microbatches_as_their_excess_asks_for(traced, limit, tried):
    wishes = dataclasses.replace(WISHES, stage_meshes=MESHES)
    plan = plan_given_stages(traced, wishes, request_until(Budget(), limit), devices=2).plan
    assert plan.num_microbatches > 8
    assert max(stage.peak_bytes for stage in plan.stages) <= limit
    assert tried[0] == 8
    assert tried[1] > 16, "the next one would not fit either, by what this one needed"


def test_a_given_number_of_stages_is_searched_where_equal_ones_do_not_fit(traced, limit, tried, monkeypatch):
    request = request_until(Budget(), limit)
    wishes = dataclasses.replace(WISHES, num_microbatches=MANY, schedule="1f1b")
    fitting = plan_best_pipeline(traced, wishes, request, devices=2)
    tried.clear()
    asked = []

    def finding(traced, wishes, request, *, num_stages, **options):
        asked.append(num_stages)
        return SearchedPipeline(pipeline=fitting, promised_s=1.0, one_stage_s=1.0, alone_s={}, by_layers_s=())

    monkeypatch.setattr(given_stages, "search_pipeline", finding)
    assert plan_given_stages(traced, WISHES, request, devices=2) is fitting
    assert (tried, asked) == ([8], [2])


@pytest.mark.parametrize("failure", [LateError, OutOfMemoryError("no room")])
def test_where_the_search_finds_none_either_equal_stages_get_more_microbatches(traced, limit, failure, monkeypatch):
    def failing(*args, **options):
        raise failure

    monkeypatch.setattr(given_stages, "search_pipeline", failing)
    plan = plan_given_stages(traced, WISHES, request_until(Budget(), limit), devices=2).plan
    assert (plan.num_stages, plan.num_microbatches > 8) == (2, True)
    assert max(stage.peak_bytes for stage in plan.stages) <= limit


def test_a_number_of_microbatches_that_is_given_is_not_left(traced, limit):
    wishes = dataclasses.replace(WISHES, num_microbatches=8, stage_meshes=MESHES)
    with pytest.raises(OutOfMemoryError) as raised:
        plan_given_stages(traced, wishes, request_until(Budget(), limit), devices=2)
    assert raised.value.needed_bytes > limit
    assert raised.value.tensors


def test_when_the_time_is_over_no_other_number_is_tried(traced, limit, tried):
    budget = Budget()
    budget.stop()
    with pytest.raises(OutOfMemoryError):
        plan_given_stages(traced, WISHES, request_until(budget, limit), devices=2)
    assert tried == [8]


LONG = dataclasses.replace(TUNING, searched_first=0)


@pytest.mark.parametrize("searched_first", [0, 10**6])
@pytest.mark.parametrize("may_gain", [True, False])
def test_the_second_of_equal_and_searched_stages_is_planned_where_it_may_pay(
    traced, searched_first, may_gain, monkeypatch
):
    """A long step is searched first, in a short one equal stages come first; the faster of what is planned is handed over."""
    request, order = request_until(Budget(), None), []
    planned = plan_best_pipeline(traced, WISHES, request, devices=2)
    equal = dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, compared=()))
    slower = dataclasses.replace(equal, plan=dataclasses.replace(equal.plan, step_s=2 * equal.plan.step_s))

    def plan_equal(traced, wishes, *args, **options):
        order.append("equal")
        is_open = (wishes.num_microbatches, wishes.schedule) == ("auto", "auto")
        assert is_open if searched_first else wishes.num_microbatches == equal.plan.num_microbatches
        return equal if searched_first == 0 else slower

    def search(*args, **options):
        order.append("searched")
        found = slower if searched_first == 0 else equal
        return SearchedPipeline(pipeline=found, promised_s=0.0, one_stage_s=1.0, alone_s={}, by_layers_s=())

    monkeypatch.setattr(given_stages, "plan_best_pipeline", plan_equal)
    monkeypatch.setattr(given_stages, "search_pipeline", search)
    monkeypatch.setattr(given_stages, "_most_gain_s", lambda *args: 1e3 if may_gain else 0.0)
    monkeypatch.setattr(given_stages, "machine_shape", lambda cluster, devices: (1, devices))
    tuning = dataclasses.replace(TUNING, searched_first=searched_first)
    found = plan_given_stages(traced, WISHES, request, devices=2, tuning=tuning)
    both = ["searched", "equal"] if searched_first == 0 else ["equal", "searched"]
    assert order == (both if may_gain else both[:1])
    assert found.plan.step_s == (equal if may_gain else slower).plan.step_s
    if may_gain and searched_first == 0:
        assert [row.step_s for row in found.plan.compared[-2:]] == [slower.plan.step_s, equal.plan.step_s]


def test_in_a_long_step_equal_stages_are_what_is_left(traced, monkeypatch):
    """They are not compared when the time is over, and it is said; they are the plan where the search finds none."""
    late = Budget()
    equal = plan_best_pipeline(traced, WISHES, request_until(Budget(), None), devices=2)

    def search(*args, **options):
        late.stop()
        return SearchedPipeline(pipeline=equal, promised_s=0.0, one_stage_s=1.0, alone_s={}, by_layers_s=())

    monkeypatch.setattr(given_stages, "search_pipeline", search)
    monkeypatch.setattr(given_stages, "_most_gain_s", lambda *args: 1e3)
    plan = plan_given_stages(traced, WISHES, request_until(late, None), devices=2, tuning=LONG).plan
    assert (plan.ended_early, plan.not_compared[-1]) == (True, "stages of equal work")

    monkeypatch.setattr(given_stages, "search_pipeline", lambda *args, **options: OneStage())
    plan = plan_given_stages(traced, WISHES, request_until(Budget(), None), devices=2, tuning=LONG).plan
    assert (plan.num_stages, plan.ended_early) == (2, False)


def test_equal_stages_are_not_planned_where_searched_ones_keep_their_promise(traced, monkeypatch):
    """They promise no less by the same sums, and take as long to plan as wholes."""
    found = plan_best_pipeline(traced, WISHES, request_until(Budget(), None), devices=2)
    step_s, order, promised = found.plan.step_s, [], []

    def search(*args, **options):
        return SearchedPipeline(pipeline=found, promised_s=promised[-1], one_stage_s=1.0, alone_s={}, by_layers_s=())

    monkeypatch.setattr(given_stages, "search_pipeline", search)
    monkeypatch.setattr(given_stages, "plan_best_pipeline", lambda *args, **options: order.append("equal") or found)
    monkeypatch.setattr(given_stages, "_most_gain_s", lambda *args: 1e3)
    for promised_s, planned in ((step_s, []), (0.98 * step_s, []), (0.9 * step_s, ["equal"])):
        order.clear()
        promised.append(promised_s)
        assert plan_given_stages(traced, WISHES, request_until(Budget(), None), devices=2, tuning=LONG) is found
        assert order == planned

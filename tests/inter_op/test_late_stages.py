"""When the clock ends a search for stages that another plan is compared with, that plan is handed over at once."""

import dataclasses
import math

import pytest

from autopar.errors import OutOfMemoryError
from autopar.inter_op import given_stages, one_or_stages, search_pipeline
from autopar.inter_op.best_stages import BestStages, StageRules
from autopar.inter_op.candidates.timetables import Timetable
from autopar.inter_op.candidates.tuning import TUNING
from autopar.inter_op.dynamic_program.problem import ChosenStage, SlowerStages, StageChoice
from autopar.inter_op.one_or_stages import plan_one_or_stages
from autopar.inter_op.plan_pipeline import PipelineWishes
from autopar.inter_op.plan_stage import plan_program
from autopar.inter_op.search import _StageSearch, search_stages
from autopar.intra_op.mesh_search import MeshSearch
from autopar.intra_op.planner import plan_step
from autopar.layouts.mesh import LogicalMesh
from autopar.solver.budget import Budget, LateError
from autopar.solver.outcomes import Unfinished
from autopar.stages.split_scans import split_scans
from autopar.stages.time_loops import make_loops
from tests.inter_op.test_search import arguments, request_on, traced_step, two_nodes

WISHES = PipelineWishes(num_stages=1, num_microbatches=4)


@pytest.fixture(scope="module")
def traced():
    return traced_step(*arguments(256))


def request_until(budget):
    return dataclasses.replace(request_on(two_nodes()), meshes=(LogicalMesh.of((4,)),), budget=budget)


def refuse(*args, **kwargs):
    raise AssertionError("stages are planned as wholes although the time is over")


def test_stages_that_the_clock_leaves_unplanned_end_the_search(traced, monkeypatch):
    """A signal comes while layers are planned; with nothing to fall back on the stages are planned all the same."""

    def stopping(loop_of, request, **options):
        found = search_stages(loop_of, request, **options)
        request.budget.stop()
        return found

    monkeypatch.setattr(search_pipeline, "search_stages", stopping)
    options = {"devices": 4, "num_stages": 2}
    found = search_pipeline.search_pipeline(traced, WISHES, request_until(Budget()), **options)
    assert isinstance(found, search_pipeline.SearchedPipeline)
    monkeypatch.setattr(search_pipeline, "plan_with_recomputation", refuse)
    with pytest.raises(LateError):
        search_pipeline.search_pipeline(traced, WISHES, request_until(Budget()), beat_s=math.inf, **options)


def test_one_stage_that_is_only_estimated_is_not_chosen_when_the_clock_ends(traced):
    """Its estimate is perfect division, and to plan it would take longer than all of the search."""
    budget = Budget()

    def plan_and_stop(program, request):
        budget.stop()
        return plan_program(program, request)

    timetables = [Timetable(4, "1f1b")]
    options = {"devices": 4, "timetables": timetables, "budget": budget}
    found = search_stages(make_loops(split_scans(traced, ()), 4), request_until(Budget()), **options)
    late = search_stages(
        make_loops(split_scans(traced, ()), 4),
        request_until(Budget()),
        planner=plan_and_stop,
        **options,
    )
    assert len(found.sizes) > 1
    assert late.ended_early
    assert len(late.sizes) > 1


def test_where_the_best_stages_do_not_fit_as_wholes_others_are_planned(traced, monkeypatch):
    plan_found, tried = search_pipeline.Wholes.plan, []

    def first_is_too_large(wholes, found):
        tried.append(found)
        if len(tried) == 1:
            raise OutOfMemoryError("too large")
        return plan_found(wholes, found)

    def searched(*args, **options):
        found = search_stages(*args, **options)
        other = dataclasses.replace(found, timetable=Timetable(4, "gpipe"))
        return dataclasses.replace(found, others=(other,) * others)

    others = 1
    monkeypatch.setattr(search_pipeline.Wholes, "plan", first_is_too_large)
    monkeypatch.setattr(search_pipeline, "search_stages", searched)
    options = {"devices": 4, "num_stages": 2}
    found = search_pipeline.search_pipeline(traced, WISHES, request_until(Budget()), **options)
    assert tried[0].timetable.schedule != "gpipe"
    assert [one.timetable.schedule for one in tried[1:]] == ["gpipe"]
    assert isinstance(found, search_pipeline.SearchedPipeline)
    others, tried[:] = 0, []
    with pytest.raises(OutOfMemoryError, match="too large"):
        search_pipeline.search_pipeline(traced, WISHES, request_until(Budget()), **options)


def test_where_nothing_fits_as_wholes_stages_are_chosen_again_in_less_memory(monkeypatch):
    plan_found, tried = search_pipeline.Wholes.plan, []
    traced = traced_step(*arguments(64, batch=4096))

    def first_is_too_large(wholes, found):
        tried.append(found)
        if len(tried) == 1:
            raise OutOfMemoryError("too large")
        return plan_found(wholes, found)

    def needed(found):
        return max(stage.peak_bytes for stage in found.choice.stages)

    options = {"devices": 4, "num_stages": 2}
    monkeypatch.setattr(search_pipeline, "_even_out", lambda *_: None)  # stages that are cut elsewhere may fit, too
    monkeypatch.setattr(search_pipeline.Wholes, "plan", first_is_too_large)
    with pytest.raises(OutOfMemoryError, match="too large"):  # without a limit the choice is the same again
        search_pipeline.search_pipeline(traced, WISHES, request_until(Budget()), **options)
    limit = int(1.01 * needed(tried.pop()) / TUNING.room)
    request = dataclasses.replace(request_until(Budget()), memory_limit_bytes=limit)
    found = search_pipeline.search_pipeline(traced, WISHES, request, **options)
    assert isinstance(found, search_pipeline.SearchedPipeline)
    first, again = tried
    assert TUNING.smaller_rooms[0] * limit < needed(first) <= TUNING.room * limit
    assert needed(again) <= TUNING.smaller_rooms[0] * limit
    assert again.choice.step_s >= first.choice.step_s
    tried.clear()
    late = dataclasses.replace(request, budget=Budget(seconds=1000), has_fallback=True)

    def stop(*args):
        late.budget.stop()
        raise OutOfMemoryError("too large")

    monkeypatch.setattr(search_pipeline.Wholes, "plan", stop)
    with pytest.raises(LateError):  # another plan is handed over instead
        search_pipeline.search_pipeline(traced, WISHES, late, beat_s=math.inf, **options)


@pytest.mark.parametrize(
    ("sizes", "second", "layers", "best", "others", "promised"),
    [((1024, 32), 2, 1, 1, [2], [4]), ((1024, 512), 4, 4, 4, [1], [])],
)
def test_a_search_that_the_clock_ends_knows_what_else_is_planned_and_what_only_promises(
    sizes, second, layers, best, others, promised
):
    """It ends when layers are planned so many times in a second number of microbatches."""
    width, batch = sizes
    traced, budget, counts = traced_step(*arguments(width, batch=batch)), Budget(), []

    def plan_and_stop(program, request):
        counts.append(program.ports.microbatches)
        if counts.count(second) == layers:
            budget.stop()
        return plan_program(program, request)

    late = search_stages(
        make_loops(split_scans(traced, ()), 4),
        request_until(Budget()),
        planner=plan_and_stop,
        devices=4,
        timetables=[Timetable(count, "1f1b") for count in (1, 2, 4)],
        budget=budget,
    )
    assert late.ended_early
    assert late.timetable.microbatches == best
    assert [other.timetable.microbatches for other in late.others] == others
    assert [one.num_microbatches for one in late.compared if one.at_least_s is not None] == promised


def test_the_plan_on_one_mesh_is_handed_over_and_says_what_was_left(traced, monkeypatch):
    def late(*args, **kwargs):
        raise LateError

    monkeypatch.setattr(one_or_stages, "_is_for_one_mesh", lambda comparison: True)
    monkeypatch.setattr(one_or_stages, "stages_may_pay", lambda *args: True)
    monkeypatch.setattr(one_or_stages, "search_pipeline", late)
    plan = plan_one_or_stages(traced, WISHES, request_until(Budget()), devices=4).plan
    assert plan.ended_early
    assert plan.not_compared[-1] == "pipeline stages"


def test_a_step_with_something_to_fall_back_on_is_not_planned_late(traced):
    request = request_until(Budget(seconds=0))
    with pytest.raises(LateError):
        plan_step(traced, dataclasses.replace(request, has_fallback=True))
    assert plan_step(traced, request).plan.step_s > 0


def test_a_search_that_the_clock_did_not_end_fails_as_usual(traced):
    request = dataclasses.replace(request_until(Budget()), has_fallback=True, memory_limit_bytes=10)
    with pytest.raises(OutOfMemoryError):
        plan_step(traced, request)


def test_a_search_that_the_clock_ends_without_a_plan_is_late_and_does_not_fail(traced, monkeypatch):
    budget = Budget()

    def end(search, cutoff_s, **options):
        budget.stop()
        return Unfinished()

    monkeypatch.setattr(MeshSearch, "plan", end)
    with pytest.raises(LateError):
        plan_step(traced, dataclasses.replace(request_until(budget), has_fallback=True))


def test_given_stages_are_handed_over_and_say_what_was_left(traced, monkeypatch):
    def late(*args, **kwargs):
        raise LateError

    monkeypatch.setattr(given_stages, "search_pipeline", late)
    wishes = dataclasses.replace(WISHES, num_stages=2)
    plan = given_stages.plan_given_stages(traced, wishes, request_until(Budget()), devices=4).plan
    assert plan.num_stages == 2
    assert plan.ended_early
    assert plan.not_compared[-1] == "stages of unequal work"


def rules_on(options, shape):
    return StageRules(options=options, shares=(0.0,), shape=shape, limit_bytes=math.inf, num_stages=None)


def best_stages(of, costs, rules):
    """The best stages by fake costs."""
    return of(
        costs, [Timetable(count, "1f1b") for count in (2, 4, 8)], rules, processes=1, budget=Budget(), tuning=TUNING
    )


def chosen(step_s, submeshes):
    """Stages of a layer each on these submeshes."""
    stages = [
        ChosenStage(
            first_layer=place,
            end_layer=place + 1,
            mesh=place,
            option=0,
            submesh=submesh,
            stage_s=0.0,
            once_s=0.0,
            in_flight=1,
            weight_bytes=0.0,
            activation_bytes=0.0,
        )
        for place, submesh in enumerate(submeshes)
    ]
    return StageChoice(stages=tuple(stages), step_s=step_s, bound_s=0.0, bottleneck=0, devices=((0,),) * len(stages))


@pytest.mark.parametrize(
    ("even_s", "taken"),
    [
        ({(1, 1): 1.5, (1, 2): 1.008, (2, 2): 0.5}, (1, 2)),  # one stage of all devices is none of several
        ({(1, 1): 1.004, (1, 2): 1.008}, (1, 1)),
        ({(1, 2): 1.02}, None),
    ],
)
def test_equal_submeshes_are_taken_when_the_clock_ends_if_they_take_hardly_longer(even_s, taken):
    """Equal stages are planned as wholes once; for many unlike ones there is no time left."""

    class Even(BestStages):
        def solve_planned(self, way, below_s, budget, *, submeshes):
            seconds = even_s[submeshes[0]]
            return chosen(seconds, submeshes) if seconds <= below_s else SlowerStages(seconds)

    class AllPlanned:
        def is_planned(self, count, submesh, *, carried=True):
            return submesh in even_s

    stages = best_stages(Even, AllPlanned(), rules_on(((1, 1), (1, 2), (2, 2)), (2, 2)))
    unlike = chosen(1.0, [(1, 1), (1, 1), (1, 2)])
    found = stages.even_out(Timetable(4, "1f1b"), unlike, Budget())
    if taken is None:
        assert found is unlike
    else:
        assert {stage.submesh for stage in found.stages} == {taken}
        assert len(found.stages) * math.prod(taken) == 4
    alike = chosen(1.0, [(1, 2), (1, 2)])
    assert stages.even_out(Timetable(4, "1f1b"), alike, Budget()) is alike


def test_what_is_only_estimated_is_the_last_resort_when_the_clock_ends():
    """One stage as well: to plan it takes as long as all stages."""

    class OnOneDevice:
        def is_planned(self, count, submesh, *, carried=True):
            return submesh != (1, 2)

    rules = rules_on(((1, 1), (1, 2)), (1, 2))
    stages = best_stages(BestStages, OnOneDevice(), rules)
    search = _StageSearch(
        costs=OnOneDevice(), stages=stages, rules=rules, beat_s=math.inf, budget=Budget(), tuning=TUNING
    )
    assert search._is_doubtful(Timetable(4, "1f1b"), chosen(1.0, [(1, 2), (1, 1)]))
    assert search._is_doubtful(Timetable(4, "1f1b"), chosen(1.0, [(1, 1)]))
    assert not search._is_doubtful(Timetable(4, "1f1b"), chosen(1.0, [(1, 1), (1, 1)]))
    with_fallback = dataclasses.replace(search, beat_s=2.0)
    assert with_fallback._is_doubtful(Timetable(4, "1f1b"), chosen(1.0, [(1, 1)]))
    assert not with_fallback._is_doubtful(Timetable(4, "1f1b"), chosen(1.0, [(1, 2), (1, 1)]))


def test_what_only_promises_when_the_clock_ends_takes_at_least_that():
    class OnOneDevice:
        impossible = frozenset()

        def is_planned(self, count, submesh, *, carried=True):
            return submesh != (1, 2)

    rules = rules_on(((1, 1), (1, 2)), (1, 4))
    stages = best_stages(BestStages, OnOneDevice(), rules)
    stages.outcomes[Timetable(8, "1f1b")] = SlowerStages(3.0)
    choices = {
        Timetable(2, "1f1b"): chosen(2.0, [(1, 1)] * 4),
        Timetable(4, "1f1b"): chosen(1.0, [(1, 2)] * 2),
    }
    for seconds, expected in (
        (0.0, [(2, 2.0, None), (4, None, 1.0), (8, None, 3.0)]),
        (math.inf, [(2, 2.0, None), (4, 1.0, None), (8, None, 3.0)]),
    ):
        stages._budget = Budget(seconds=seconds)
        rows = stages.compare(choices)
        assert [(row.num_microbatches, row.estimate_s, row.at_least_s) for row in rows] == expected


def test_what_carries_over_from_another_number_of_microbatches_counts_as_a_little_longer_when_the_clock_ends():
    """One that layers are planned in is not given up for what another seems to take, by less than such sums are off."""

    class InTwo:
        def is_planned(self, count, submesh, *, carried=True):
            return submesh == (1, 1) and (carried or count == 2)

    stages = best_stages(BestStages, InTwo(), rules_on(((1, 1), (1, 2)), (1, 2)))
    alike, unlike = chosen(1.0, [(1, 1)] * 2), chosen(1.0, [(1, 2)])
    assert stages.hoped_s(Timetable(2, "1f1b"), alike) == 1.0
    assert stages.hoped_s(Timetable(4, "1f1b"), alike) == 1 + TUNING.worth
    assert stages.hoped_s(Timetable(2, "1f1b"), unlike) == TUNING.hoped


@pytest.mark.parametrize(("two_s", "taken"), [(1.0, 4), (0.98, 2)])
def test_so_they_are_when_the_best_of_what_is_planned_is_chosen(monkeypatch, two_s, taken):
    """Four microbatches are planned, and take a second; what is known of two carries over from these."""

    @dataclasses.dataclass
    class Best:
        way: Timetable
        others: tuple[Timetable, ...] = ()

    class InFour:
        impossible, counts = frozenset(), frozenset({2, 4})

        def is_planned(self, count, submesh, *, carried=True):
            return carried or count == 4

    class Solved(BestStages):
        def solve_planned(self, way, below_s, budget, *, submeshes=None):
            return chosen(two_s - 0.01 if way.microbatches == 2 else 1.0, [(1, 1)] * 2)

    rules = rules_on(((1, 1), (1, 2)), (1, 2))
    stages = Solved(
        InFour(), [Timetable(4, "1f1b"), Timetable(2, "1f1b")], rules, processes=1, budget=Budget(), tuning=TUNING
    )
    search = _StageSearch(
        costs=InFour(), stages=stages, rules=rules, beat_s=math.inf, budget=Budget(seconds=0), tuning=TUNING
    )
    monkeypatch.setattr(_StageSearch, "_describe", lambda search, best, known: Best(best))
    monkeypatch.setattr(_StageSearch, "_found", lambda search, way, choice: way)
    assert search._end({}).way.microbatches == taken

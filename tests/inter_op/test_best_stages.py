"""The search for the best stages of all timetables ends, also where what was given up as too slow fits nowhere."""

import math
import types

import pytest

from autopar.errors import OutOfMemoryError
from autopar.inter_op import best_stages
from autopar.inter_op.best_stages import BestStages, Unsolved
from autopar.inter_op.candidates.timetables import Timetable
from autopar.inter_op.candidates.tuning import TUNING
from autopar.inter_op.dynamic_program.problem import SlowerStages, StageChoice
from autopar.inter_op.search import _StageSearch
from autopar.solver.budget import Budget

WAYS = [Timetable(count, "1f1b") for count in (1, 2, 4, 8, 16, 32)]


def test_timetables_that_were_given_up_and_fit_nowhere_are_told_after_a_few_rounds(monkeypatch):
    asked = []

    def fits_nowhere(problem, below_s, **options):
        asked.append(below_s)
        assert len(asked) < 100, "the search goes on for ever"
        if below_s < float("inf"):
            return SlowerStages(below_s)
        raise OutOfMemoryError("nothing fits")

    monkeypatch.setattr(best_stages, "choose_faster_stages", fits_nowhere)
    costs = types.SimpleNamespace(impossible=set(), counts={4}, table=lambda *args, **options: None)
    rules = types.SimpleNamespace(options=(), shares=(), num_stages=None, problem=lambda way, table: None)
    stages = BestStages(costs, WAYS, rules, processes=1, budget=Budget(), tuning=TUNING)
    stages.outcomes = {way: SlowerStages(1.0) for way in WAYS}
    stages.solve_promising()
    assert stages.choices == {}
    assert all(isinstance(outcome, Unsolved) for outcome in stages.outcomes.values())


def test_one_stage_is_sought_in_more_microbatches_than_several_need(monkeypatch):
    """It fits in 16 and 32, which are compared only where nothing else fits. How long it takes is for the caller to judge."""
    alone_s = {16: 40.0, 32: 36.0}

    def fits_in_many(microbatches, *, manual, **options):
        assert manual.num_stages == 1
        if microbatches not in alone_s:
            raise OutOfMemoryError("too large")
        numbers = {"stages": (), "bound_s": 0.0, "bottleneck": 0, "devices": ()}
        return StageChoice(step_s=alone_s[microbatches], **numbers)

    monkeypatch.setattr(best_stages, "choose_stages", fits_in_many)
    costs = types.SimpleNamespace(impossible=set(), counts={4}, table=lambda *args, **options: None)
    rules = types.SimpleNamespace(options=(), shares=(), num_stages=None, problem=lambda way, table: way.microbatches)
    stages = BestStages(costs, WAYS[:3], rules, larger=WAYS[3:], processes=1, budget=Budget(), tuning=TUNING)
    assert stages.first_alone() == (16, 40.0)
    assert stages.one_stage_s(stages.ways) == math.inf
    assert stages.one_stage_s(WAYS) == 36.0


def test_one_schedule_of_one_number_of_microbatches_is_settled_before_others_are_looked_at(monkeypatch):
    """Others promise more than it takes, as estimates do; what is chosen in the first way is planned twice before them."""
    log, left = [], iter((True, True, False, True, False))
    choose = {"stages": (), "bound_s": 0.0, "bottleneck": 0, "devices": ()}

    def fits(way, below_s, **options):
        log.append(way)
        return StageChoice(step_s=1.0 if way.microbatches == 4 else 0.5, **choose)

    def plan_more(count, submeshes):
        log.append(f"plan {count}")
        return next(left)

    monkeypatch.setattr(best_stages, "choose_faster_stages", fits)
    table = types.SimpleNamespace(
        impossible=set(),
        counts={4},
        table=lambda *args, **options: None,
        plan_more=plan_more,
        plan_others=lambda count, stages: False,
        has_common=False,
        start_with=lambda count: True,
    )
    rules = types.SimpleNamespace(options=(), shares=(), num_stages=None, problem=lambda way, table: way)
    first, second = WAYS[2], Timetable(4, "zb-h1")
    stages = BestStages(table, [first, second, *WAYS[:2]], rules, processes=1, budget=Budget(), tuning=TUNING)
    search = _StageSearch(costs=table, stages=stages, rules=rules, beat_s=math.inf, budget=Budget(), tuning=TUNING)
    monkeypatch.setattr(_StageSearch, "_look", lambda _: stages.solve_promising())
    search.run()
    assert log[:6] == [first, "plan 4", first, "plan 4", first, "plan 4"]
    settled = max(at for at, one in enumerate(log) if one == "plan 4")
    assert set(log[6:settled]) == {first, second, "plan 4"}, "costs have changed, so both are solved again"
    assert set(log[settled + 1 :]) == set(WAYS[:2])


def test_what_is_only_estimated_need_promise_less_while_there_is_time():
    costs = types.SimpleNamespace(impossible=set(), counts={4})
    budget = types.SimpleNamespace(used=0.9 * TUNING.early)
    stages = BestStages(costs, WAYS, None, processes=1, budget=budget, tuning=TUNING)
    assert stages.handicap(WAYS[2], 1.0) == 1.0
    assert stages.handicap(WAYS[3], 1.0) == 1 + TUNING.worth_early
    budget.used = TUNING.early
    assert stages.handicap(WAYS[3], 1.0) == 1 + TUNING.worth_late
    assert TUNING.worth_early < TUNING.worth_late


def test_what_is_only_estimated_is_solved_no_further_than_it_may_be_chosen(monkeypatch):
    asked = {}

    def slower(way, below_s, **options):
        asked[way.microbatches] = below_s
        return SlowerStages(below_s)

    monkeypatch.setattr(best_stages, "choose_faster_stages", slower)
    costs = types.SimpleNamespace(impossible=set(), counts={4}, table=lambda *args, **options: None)
    rules = types.SimpleNamespace(options=(), shares=(), num_stages=None, problem=lambda way, table: way)
    budget = types.SimpleNamespace(used=TUNING.early, is_over=False)
    stages = BestStages(costs, WAYS[2:4], rules, processes=1, budget=budget, tuning=TUNING)
    stages.solve_below(WAYS[2:4], 2.0)
    assert asked == {4: 2.0, 8: 2.0 / (1 + TUNING.worth_late)}
    assert all(stages.promised_s(way) == pytest.approx(2.0) for way in WAYS[2:4]), "neither is asked again for that"


def test_what_does_not_fit_is_explained_beside_ways_that_were_given_up(monkeypatch):
    costs = types.SimpleNamespace(impossible=set())
    rules = types.SimpleNamespace(options=(), shares=(), num_stages=None)
    stages = BestStages(costs, WAYS[:2], rules, processes=1, budget=Budget(), tuning=TUNING)
    too_large = Unsolved(OutOfMemoryError("too large"))
    stages.outcomes = {WAYS[0]: SlowerStages(1.0), WAYS[1]: too_large}
    monkeypatch.setattr(BestStages, "solve", lambda stages, way, **options: stages.outcomes[way])
    assert stages.explain() is too_large.error


@pytest.mark.parametrize("used", [0.0, TUNING.early])
def test_late_no_number_of_microbatches_is_planned_for_being_next_to_the_best(used):
    """What it promises is more than what the best takes; early it may show what latencies are."""
    near = types.SimpleNamespace(step_s=1.1, stages=[types.SimpleNamespace(submesh=(1, 2))])
    planned = []
    stages = types.SimpleNamespace(ways=WAYS, with_count=lambda count: [], solve_below=lambda ways, below_s: [near])
    costs = types.SimpleNamespace(counts={4}, plan_more=lambda *asked: not planned.append(asked))
    budget = types.SimpleNamespace(used=used)
    search = _StageSearch(costs=costs, stages=stages, rules=None, beat_s=math.inf, budget=budget, tuning=TUNING)
    is_early = used < TUNING.early
    assert search._plan_neighbour(WAYS[2], {WAYS[2]: types.SimpleNamespace(step_s=1.0)}) is is_early
    assert len(planned) == is_early

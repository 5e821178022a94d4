"""Stages that take longer than their layers promised are compared with another number of stages, which is planned as well."""

import dataclasses
import types

import pytest

from autopar.errors import OutOfMemoryError
from autopar.inter_op import search_pipeline
from autopar.inter_op.candidates.timetables import Timetable
from autopar.inter_op.candidates.tuning import TUNING
from autopar.inter_op.search import NotFaster
from autopar.solver.budget import Budget, LateError
from autopar.stages.chain import forward_chain
from autopar.stages.split_scans import split_scans
from autopar.stages.time_loops import make_loops
from tests.inter_op.test_search import arguments, traced_step

LATE = -1.0
"""In the place of seconds: the clock ends while these stages are planned."""


def found_of(promised_s, *others, within=None):
    """What a search found, of which only the promised seconds matter, and what it finds in less memory, by the part of it."""
    same = dict.fromkeys(("cuts", "sizes", "meshes", "shares", "kinds"), ())

    def choose_within(room):
        return (within or {}).get(room, NotFaster(()))

    choice = types.SimpleNamespace(step_s=promised_s)
    return types.SimpleNamespace(
        choice=choice, others=others, choose_within=choose_within, timetable=promised_s, **same
    )


@pytest.fixture
def choose(monkeypatch):
    """A function of found stages and the seconds that each takes as a whole: what is taken, and all that was planned."""

    def chosen(found, whole_s, *, budget=None, tuning=TUNING):
        planned = []

        def plan_found(wholes, one):
            planned.append(one)
            if whole_s[one.choice.step_s] is None:
                raise OutOfMemoryError("too large")
            if whole_s[one.choice.step_s] == LATE:
                raise LateError
            return types.SimpleNamespace(plan=types.SimpleNamespace(step_s=whole_s[one.choice.step_s]))

        monkeypatch.setattr(search_pipeline.Wholes, "plan", plan_found)
        request = types.SimpleNamespace(budget=budget or Budget(), has_fallback=False)
        wholes = search_pipeline.Wholes(
            traced=None, split=None, wishes=None, request=request, tables=(), tuning=tuning, kinds=()
        )
        taken, pipeline = wholes.plan_best_number(found)
        return taken.choice.step_s, pipeline.plan.step_s, [one.choice.step_s for one in planned]

    return chosen


def test_stages_that_take_what_was_promised_are_taken_at_once(choose):
    assert choose(found_of(1.0, found_of(1.01)), {1.0: 1.02, 1.01: 0.5}) == (1.0, 1.02, [1.0])


def test_another_number_is_planned_where_the_promise_is_broken_and_taken_if_it_is_faster(choose):
    assert choose(found_of(1.0, found_of(1.01)), {1.0: 1.1, 1.01: 1.05}) == (1.01, 1.05, [1.0, 1.01])
    assert choose(found_of(1.0, found_of(1.01)), {1.0: 1.1, 1.01: 1.2}) == (1.0, 1.1, [1.0, 1.01])


def test_another_number_that_promises_too_little_or_does_not_fit_is_left(choose):
    assert choose(found_of(1.0, found_of(1.09)), {1.0: 1.1, 1.09: 0.5}) == (1.0, 1.1, [1.0])
    assert choose(found_of(1.0, found_of(1.01)), {1.0: 1.1, 1.01: None}) == (1.0, 1.1, [1.0, 1.01])


def test_as_many_numbers_are_planned_as_the_tuning_says_and_none_when_time_is_up(choose):
    found, whole_s = found_of(1.0, found_of(1.01), found_of(1.02)), {1.0: 1.3, 1.01: 1.2, 1.02: 1.1}
    assert choose(found, whole_s) == (1.01, 1.2, [1.0, 1.01])
    assert choose(found, whole_s, tuning=dataclasses.replace(TUNING, second_looks=2)) == (1.02, 1.1, [1.0, 1.01, 1.02])
    assert choose(found, whole_s, budget=Budget(seconds=0)) == (1.0, 1.3, [1.0])


ROOM = TUNING.smaller_rooms[0]


def test_stages_chosen_in_less_memory_are_planned_where_the_promise_is_broken_and_taken_if_they_are_faster(choose):
    promised = {1.0: 1.5, 1.2: 1.3}
    assert choose(found_of(1.0, within={ROOM: found_of(1.2)}), promised) == (1.2, 1.3, [1.0, 1.2])
    assert choose(found_of(1.0, within={ROOM: found_of(1.2)}), {**promised, 1.2: 1.6}) == (1.0, 1.5, [1.0, 1.2])
    assert choose(found_of(1.0, within={ROOM: found_of(1.2)}), {**promised, 1.2: None}) == (1.0, 1.5, [1.0, 1.2])


def test_stages_chosen_in_less_memory_are_left_if_they_promise_nothing_or_were_planned_or_time_is_up(choose):
    whole_s = {1.0: 1.5, 1.2: 1.3, 1.6: 1.0}
    assert choose(found_of(1.0, within={ROOM: found_of(1.6)}), whole_s) == (1.0, 1.5, [1.0])
    assert choose(found_of(1.0, within={ROOM: found_of(1.0)}), whole_s) == (1.0, 1.5, [1.0])
    in_time = {"budget": Budget(seconds=0)}
    assert choose(found_of(1.0, within={ROOM: found_of(1.2)}), whole_s, **in_time) == (1.0, 1.5, [1.0])
    assert choose(found_of(1.0, within={ROOM: found_of(1.2)}), {1.0: 1.0, 1.2: 0.5}) == (1.0, 1.0, [1.0])


def test_stages_that_do_not_fit_are_chosen_in_less_and_less_memory(choose):
    first, second = TUNING.smaller_rooms[:2]
    found = found_of(1.0, within={first: found_of(1.2), second: found_of(1.4)})
    assert choose(found, {1.0: None, 1.2: None, 1.4: 1.5}) == (1.4, 1.5, [1.0, 1.2, 1.4])


def test_a_clock_that_ends_a_second_look_does_not_cost_the_stages_that_are_planned(choose):
    assert choose(found_of(1.0, found_of(1.01)), {1.0: 1.1, 1.01: LATE}) == (1.0, 1.1, [1.0, 1.01])
    assert choose(found_of(1.0, within={ROOM: found_of(1.2)}), {1.0: 1.5, 1.2: LATE}) == (1.0, 1.5, [1.0, 1.2])
    with pytest.raises(LateError):
        choose(found_of(1.0), {1.0: LATE})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What evening out reads of a choice of stages."""

    stages: tuple
    step_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundStages:
    """What evening out reads of found stages, with cuts of a real chain."""

    cuts: tuple
    sizes: tuple
    shares: tuple
    choice: Choice
    loop: object
    timetable: Timetable
    kinds: tuple = ()
    others: tuple = ()


def stages_of(part, **options):
    """Two stages of a chain of layers, the first of which has about this part of the work; each takes as long as its work."""
    loop = make_loops(split_scans(traced_step(*arguments(64, batch=8)), ()), 4)(4)
    flops = [link.flops for link in forward_chain(loop)]
    cut = min(range(1, len(flops)), key=lambda place: abs(sum(flops[:place]) - part * sum(flops)))
    seconds = [sum(flops[:cut]) / sum(flops), sum(flops[cut:]) / sum(flops)]
    stages = tuple(types.SimpleNamespace(stage_s=one) for one in seconds)
    same = {"sizes": (4, 4), "shares": (0.0, 0.0), "timetable": Timetable(4, "1f1b"), **options}
    return FoundStages(cuts=(cut,), choice=Choice(stages=stages, step_s=4 * max(seconds)), loop=loop, **same), flops


def test_stages_of_unequal_work_on_equal_devices_are_cut_again_between_layers():
    found, flops = stages_of(0.7)
    even = search_pipeline._even_out(found, TUNING)
    (cut,) = even.cuts
    assert sum(flops[:cut]) == pytest.approx(0.5 * sum(flops), rel=0.1)
    assert even.choice.step_s < 0.8 * found.choice.step_s
    assert dataclasses.replace(even, cuts=found.cuts, choice=found.choice) == found


@pytest.mark.parametrize(
    "options",
    [{"sizes": (4, 8)}, {"shares": (0.0, 1.0)}, {"timetable": Timetable(4, "interleaved", 2)}, {"kinds": (0, 1)}],
)
def test_unlike_stages_are_left_as_they_are(options):
    """What more devices do, or what is done again, is not told by floating-point operations."""
    found, _ = stages_of(0.7, **options)
    assert search_pipeline._even_out(found, TUNING) is None


def test_stages_of_nearly_equal_work_are_left_as_they_are():
    found, _ = stages_of(0.5)
    assert search_pipeline._even_out(found, TUNING) is None


def test_stages_of_equal_work_are_planned_first_and_the_chosen_ones_where_they_break_their_promise(choose, monkeypatch):
    def even_out(found, tuning):
        return found_of(0.9) if found.choice.step_s == 1.0 else None

    monkeypatch.setattr(search_pipeline, "_even_out", even_out)
    assert choose(found_of(1.0), {0.9: 0.91, 1.0: 0.5}) == (0.9, 0.91, [0.9])
    assert choose(found_of(1.0), {0.9: 1.2, 1.0: 1.01}) == (1.0, 1.01, [0.9, 1.0])
    assert choose(found_of(1.0), {0.9: None, 1.0: 1.01}) == (1.0, 1.01, [0.9, 1.0])

"""A budget that ends anywhere leaves a legal choice or `Unfinished`, with a bound that is one; equal work, equal results."""

import dataclasses
import itertools
import math
import os
import time
import warnings

import numpy as np
import pytest

from autopar.solver.budget import Budget, Flag, LateError, Least
from autopar.solver.integer_program import Solved
from autopar.solver.outcomes import Chosen, DoesNotFit, Outcome, Unfinished
from autopar.solver.problem import ChoiceProblem, Costs, MemoryRow
from autopar.solver.solve import choose
from autopar.solver.tuning import TUNING
from tests.solver.problems import least_value, value_of

COUNT, CHOICES = 7, 3


def problem(seed: int, room: float | None, budget: Budget, is_quick: bool = False) -> ChoiceProblem:
    """A dense random problem; `room` is the part of the memory between the least and the most that may be used."""
    random = np.random.default_rng(seed)
    costs = [random.uniform(0, 1, CHOICES) for _ in range(COUNT)]
    edges = {pair: random.uniform(0, 1, (CHOICES, CHOICES)) for pair in itertools.combinations(range(COUNT), 2)}
    row = MemoryRow("all", {v: random.uniform(0, 1, CHOICES) for v in range(COUNT)})
    most = sum(float(b.max()) for b in row.bytes_of.values())
    limit = np.inf if room is None else row.least() + room * (most - row.least())
    rows = [] if room is None else [row]
    return ChoiceProblem(costs=Costs.of(costs, edges), rows=rows, limit_bytes=limit, budget=budget, is_quick=is_quick)


def assert_legal(found: Outcome, asked: ChoiceProblem) -> None:
    costs, edges = list(asked.costs.nodes.values()), asked.costs.edges
    best = least_value(costs, edges, asked.rows, asked.limit_bytes)
    assert isinstance(found, Chosen | Unfinished | DoesNotFit)
    assert not isinstance(found, DoesNotFit) or not np.isfinite(best)
    if isinstance(found, Chosen):
        assert asked.fits(found.numbers)
        assert found.seconds == pytest.approx(value_of(costs, edges, found.numbers))
        assert found.lower_bound_s <= best * (1 + 1e-9) <= found.seconds * (1 + 1e-6)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize("room", [None, 0.2])
def test_a_budget_cut_short_anywhere_leaves_a_legal_choice_or_says_that_it_found_none(
    room: float | None, is_quick: bool
) -> None:
    whole = Budget()
    choose(problem(0, room, whole, is_quick))
    assert whole.spent > 0
    for work in np.linspace(0, 1.1 * whole.spent, 23):
        asked = problem(0, room, Budget(work=float(work)), is_quick)
        found = choose(asked)
        assert_legal(found, asked)
        assert found == choose(problem(0, room, Budget(work=float(work)), is_quick))


def test_without_memory_some_choice_is_met_however_short_the_budget_is() -> None:
    assert isinstance(choose(problem(1, None, Budget(work=0.0))), Chosen)
    assert isinstance(choose(problem(1, None, Budget(seconds=0.0))), Chosen)


def test_a_part_ends_with_the_whole_and_is_paid_by_it() -> None:
    whole = Budget(work=10)
    part = whole.part(0.5)
    part.spend(5)
    assert (part.is_over, whole.is_over, whole.work_left) == (True, False, 5)
    rest = whole.limit()
    whole.stop()
    assert rest.is_over


def test_a_budget_ends_once_what_is_sought_is_of_no_more_use_and_so_do_its_parts() -> None:
    is_useless = False
    whole = Budget()
    own = whole.limit(until=lambda: is_useless)
    part = own.limit(work=10.0)
    assert not part.is_over
    is_useless = True
    assert part.is_over
    assert own.is_over
    assert (own.is_late, whole.is_over) == (False, False)


def test_a_clock_counts_once_its_flag_is_raised_and_in_any_case_for_who_is_in_a_hurry() -> None:
    clock, flag = Budget(work=0.0), Flag()
    own = clock.clocked(work=10.0, once=flag)
    assert clock.is_over
    assert not own.is_over
    clock.stop()
    assert not own.is_late
    assert own.seconds_left == math.inf
    assert own.hurried().is_late
    flag.lift()
    assert own.is_late
    assert own.is_over
    with pytest.raises(LateError):
        own.require_time()


def test_work_under_a_clock_is_its_own() -> None:
    clock = Budget(work=5.0)
    own = clock.clocked(work=10.0)
    own.hurried(work=7.0).spend(6.0)
    assert (own.spent, clock.spent) == (6.0, 0.0)
    assert not own.is_over
    own.spend(4.0)
    assert own.is_over
    assert not own.is_late


def test_the_least_that_anybody_told_is_known_to_all_forks() -> None:
    least = Least()
    assert least.value == math.inf
    for told in (3.0, 5.0):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX, and Python, warn of threads, which the fork does not touch
            process = os.fork()
        if not process:
            least.tell(told)
            os._exit(0)
        os.waitpid(process, 0)
    assert least.value == 3.0
    assert Least(2.0).value == 2.0
    assert Least(math.inf).value == math.inf


def search_alone(**changes: float) -> ChoiceProblem:
    """A problem that neither elimination nor the integer program takes off dual ascent."""
    tuning = dataclasses.replace(TUNING, small_pairs=0, entries=0.0, **changes)
    return dataclasses.replace(problem(3, None, Budget()), tuning=tuning)


def test_a_gap_is_closed_as_far_as_it_is_worth_and_the_choice_is_legal_all_the_same() -> None:
    spent, gaps = [], []
    for gap_work in (0.0, 1e4, 1e6, math.inf):
        asked = search_alone(gap_work=gap_work, least_gap_work=0.0)
        found = choose(asked)
        assert_legal(found, asked)
        assert isinstance(found, Chosen)
        spent.append(asked.budget.spent)
        gaps.append(found.seconds - found.lower_bound_s)
    assert spent == sorted(spent)
    assert spent[0] < spent[-1]
    assert gaps[0] > 1e-3 > gaps[-1]


def test_a_bound_that_is_known_before_closes_the_gap() -> None:
    asked = search_alone(gap_work=0.0, least_gap_work=0.0)
    best = least_value(list(asked.costs.nodes.values()), asked.costs.edges)
    alone, told = choose(asked), choose(dataclasses.replace(asked, at_least_s=0.99 * best))
    assert isinstance(alone, Chosen)
    assert isinstance(told, Chosen)
    assert alone.lower_bound_s < 0.98 * best
    assert told.lower_bound_s == pytest.approx(0.99 * best)


def test_an_integer_program_that_ends_early_does_not_take_the_place_of_a_better_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, alone = search_alone(), choose(search_alone(gap_work=0.0, least_gap_work=0.0))
    assert isinstance(alone, Chosen)

    def end_early(costs: Costs, **_: object) -> Solved:
        return Solved({v: int(np.argmax(cost)) for v, cost in costs.nodes.items()}, -math.inf)

    monkeypatch.setattr("autopar.solver.search.solve_integer_program", end_early)
    found = choose(asked)
    assert isinstance(found, Chosen)
    assert found.seconds <= alone.seconds
    assert found.lower_bound_s == pytest.approx(alone.lower_bound_s)


def test_what_a_clock_leaves_is_known_before_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    own = Budget(seconds=10.0).clocked(once=Flag()).limit(work=5.0)
    now[0] = 4.0
    assert own.clock_left_s == 6.0
    now[0] = 15.0
    assert own.clock_left_s == 0.0
    assert not own.is_late
    assert Budget().clock_left_s == math.inf


def test_a_budget_says_which_part_of_its_seconds_is_over(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    budget, endless = Budget(seconds=8.0), Budget()
    assert (budget.used, endless.used) == (0.0, 0.0)
    now[0] = 12.0
    part = budget.part(0.5)
    assert (budget.used, endless.used, part.used) == (0.25, 0.0, 0.0)
    now[0] = 14.0
    assert (budget.used, part.used) == (0.5, pytest.approx(2 / 3))
    now[0] = 30.0
    assert budget.used == 1.0
    assert Budget(seconds=0.0).used == 1.0

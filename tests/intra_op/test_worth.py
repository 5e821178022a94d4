"""What repays its search is looked for; in large steps what saves little and does not repay it is left."""

import dataclasses
import math

import pytest

from autopar.intra_op.tuning import TUNING
from autopar.intra_op.worth import Worth
from autopar.solver.budget import SECONDS_PER_UNIT

TENTH = dataclasses.replace(
    TUNING,
    large=1000,
    worth=1e-4,
    most_worth=1e-2,
    most_worth_within=2e-2,
    repaid_in_steps=1000,
    search_s_per_equation=1e-3,
)
LARGE, SMALL = Worth(10_000, TENTH), Worth(999, TENTH)


@pytest.mark.parametrize(
    ("best_s", "left_s"),
    [
        (0.1, 0.1 * 1e-2),  # a search of ten seconds repays itself with 10 ms a step, which is more than the part
        (5.0, 10e-3),
        (1000.0, 1000.0 * 1e-4),  # and where steps are long, what the bound itself is not exact to
    ],
)
def test_a_mesh_of_a_large_step_has_to_repay_its_search_or_save_much(best_s, left_s):
    assert LARGE.planning_s(best_s) == pytest.approx(best_s - left_s)


def test_a_search_within_the_memory_is_worth_as_much_as_it_may_take():
    search_s = SECONDS_PER_UNIT * TENTH.mesh_work
    assert LARGE.limiting_s(100.0) == pytest.approx(100.0 - search_s / TENTH.repaid_in_steps)
    assert LARGE.limiting_s(0.1) == pytest.approx(0.1 * (1 - TENTH.most_worth_within))


def test_in_a_small_step_and_without_a_plan_everything_is_worth_looking_for():
    assert SMALL.planning_s(0.1) == SMALL.limiting_s(0.1) == 0.1
    assert LARGE.planning_s(math.inf) == LARGE.limiting_s(math.inf) == math.inf


def test_a_choice_in_a_large_step_must_promise_more_than_steps_take_beyond_their_choices():
    assert LARGE.choosing_s(6.0, 1.5) == pytest.approx(4.0)
    assert LARGE.choosing_s(6.0, 0.5) == LARGE.choosing_s(6.0, math.inf) == 6.0, "nothing is known, or steps take less"
    assert LARGE.choosing_s(math.inf, 1.5) == math.inf
    assert SMALL.choosing_s(6.0, 1.5) == 6.0


def test_a_gain_repays_a_search_in_a_run_of_some_length():
    assert LARGE.repays(0.01, 9.9)
    assert not LARGE.repays(0.01, 10.1)

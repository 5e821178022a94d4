"""Oracle: 2,000 random programs of 3 to 30 operations compute what they compute under `jax.jit`, or are refused in words.

Half of the fast ones and half of the slow ones are train steps, which run through `parallelize` in one of its ways; the others
run with random strategies. A program that ends its process or hangs is named.
"""

import pytest

from tests.in_processes import run
from tests.random_programs.run import REFUSED

FAST_PROGRAMS, FAST_STEPS = 70, 30
SLOW_PARTS, SLOW_PER_PART = 20, 100
MOST_REFUSED = 0.25
"""Share of the steps that may be refused; more would mean that little is compared."""


def names(kind, numbers):
    return [f"{kind} {kind}_{number}" for number in numbers]


def assert_same(cases):
    """Every program is the same, or refused; few are."""
    found = run("tests.random_programs.run", cases)
    problems = {name: text for name, text in found.items() if not text.startswith(REFUSED)}
    assert not problems, "\n".join(f"{name}: {text}" for name, text in problems.items())
    assert len(found) <= MOST_REFUSED * len(cases), "\n".join(f"{name}: {text}" for name, text in found.items())


def test_random_programs_are_the_same_under_random_strategies():
    assert_same(names("program", range(FAST_PROGRAMS)))


def test_random_steps_are_the_same_through_parallelize():
    assert_same(names("step", range(FAST_STEPS)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["program", "step"])
@pytest.mark.parametrize("part", range(SLOW_PARTS // 2))
def test_many_random_programs_are_the_same(part, kind):
    first = 100 + part * SLOW_PER_PART
    assert_same(names(kind, range(first, first + SLOW_PER_PART)))

"""Oracle: 2,500 random programs of 3 to 30 operations compute what they compute under `jax.jit`, or are refused in words.

1,500 of them are train steps, of which 500 return metrics too; they run through `parallelize` in one of its ways, the others with
random strategies. The fast part runs the first of each kind: programs on every mesh, in which every family of operations occurs
(a quarter of them in `make test`), and a step for each way. Of the long programs, which take ten times as long as the others, it
runs one, and of the steps with metrics some ways. A program that ends its process or hangs is named.
"""

import jax.numpy as jnp
import pytest

from tests.in_processes import run
from tests.random_programs.programs import LONG_EVERY, OPTIONS, is_long
from tests.random_programs.run import REFUSED, by_jit, problem_of_results

PARTS, METRICS_PARTS, PER_PART = 10, 5, 100
FAST = {
    "program": [number for number in range(93) if not is_long(number) or number // LONG_EVERY == 2],
    "step": range(len(OPTIONS)),
    "metrics": (11, 15, 16, 20, 28),
}
"""A hundred and five together. Those with metrics run in stages, with ZeRO-1 and 3 and in microbatches, and find that a sum is
not linear in a conversion (28) or beside infinity (20), and that a maximum loses NaN (15)."""
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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("quarter", [0, 1, 2, 3])
def test_random_programs_are_the_same_under_random_strategies(quarter):
    assert_same(names("program", FAST["program"][quarter::4]))


def test_random_steps_are_the_same_through_parallelize():
    assert_same(names("step", FAST["step"]))


def test_steps_that_return_metrics_are_the_same_through_parallelize():
    assert_same(names("metrics", FAST["metrics"]))


def test_a_nan_that_xla_drops_may_be_there_and_no_other():
    def gradient_of_least(x, weights):
        is_least = (x == x.min(0)).astype(x.dtype)
        return weights / is_least.sum(0) * is_least

    arguments = jnp.array([[1.0, jnp.nan], [2.0, 1.0]]), jnp.ones(2)
    expected, one_by_one = by_jit(gradient_of_least, arguments), gradient_of_least(*arguments)
    assert not jnp.isnan(expected).any()
    assert jnp.isnan(one_by_one).any()
    for actual in (expected, one_by_one):
        assert not problem_of_results(actual, expected, gradient_of_least, arguments)
    for actual in (one_by_one.at[1, 0].set(jnp.nan), one_by_one.at[0, 0].set(2.0), one_by_one.at[0, 1].set(1.0)):
        assert problem_of_results(actual, expected, gradient_of_least, arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "kind"),
    [(part, kind) for part in range(PARTS) for kind in FAST if kind != "metrics" or part < METRICS_PARTS],
)
def test_many_random_programs_are_the_same(part, kind):
    numbers = range(part * PER_PART, (part + 1) * PER_PART)
    assert_same(names(kind, [number for number in numbers if number not in FAST[kind]]))

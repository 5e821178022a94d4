"""Warnings show the line of the user's that asked for the plan, whichever pass found the reason."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import warn
from tests.without_rule import halve


def train(weights, x, between=lambda h: h):
    def loss(weights):
        return jnp.mean((between(jnp.tanh(x @ weights[0])) @ weights[1]) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def normalised(weights, x):
    return train(weights, x, lambda h: (h - h.mean(axis=0)) / (h.std(axis=0) + 0.1))


def lopsided(weights, x):
    return train(weights, x, lambda h: jnp.concatenate([h] * 8, axis=1) @ jnp.ones((128, 16)))


def without_gradients(weights, x):
    return weights, x @ weights[0]


def without_rule(weights, x):
    return weights, halve(x.T @ x)


def arguments(examples):
    return [jnp.ones((16, 16)), jnp.ones((16, 1))], jnp.ones((examples, 16))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("step", "examples", "options", "words"),
    [
        (train, 7, {"devices": 2, "num_stages": 1}, "which no mesh axis of size 2 divides"),
        (normalised, 8, {"devices": 2, "num_stages": 2}, "the stages run with one microbatch"),
        (lopsided, 8, {"devices": 2, "num_stages": 2, "num_microbatches": 2}, "stays on one of 2 stages"),
        (lopsided, 64, {"devices": 2, "num_stages": 2, "schedule": "1f1b"}, "stays on one of 2 stages"),
        (without_gradients, 8, {"devices": 1, "recompute": "layer"}, "finds no layers"),
        (without_rule, 8, {"devices": 1}, "no factor rule for halve"),
    ],
)
def test_a_warning_of_planning_shows_the_line_that_asked_for_the_plan(step, examples, options, words):
    parallel = autopar.parallelize(step, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1
        parallel.plan(*arguments(examples))
    (found,) = (w for w in caught if words in str(w.message))
    assert issubclass(found.category, autopar.AutoparWarning)
    assert (found.filename, found.lineno) == (__file__, line)


def test_a_warning_while_jax_traces_a_users_function_shows_the_line_in_it():
    def traced(x):
        warn("slow")
        return x

    with pytest.warns(autopar.AutoparWarning, match="slow") as caught:
        jax.make_jaxpr(traced)(1.0)
    assert (caught[0].filename, caught[0].lineno) == (__file__, inspect.getsourcelines(traced)[1] + 1)

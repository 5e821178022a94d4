"""`jax.debug.print` and `jax.debug.callback` show each value once, as it is on one device, however the step runs."""

import functools
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import UnsupportedProgramError
from autopar.program.from_jaxpr import program_of

PARAMS = {
    "up": jax.random.normal(jax.random.key(0), (16, 32)) / 4,
    "down": jax.random.normal(jax.random.key(1), (32, 16)) / 4,
}
BATCH = jax.random.normal(jax.random.key(2), (32, 16))
SETTINGS = {
    "one mesh": {"mesh_shape": (4,), "constraints": autopar.data_parallel()},
    "two axes": {"mesh_shape": (2, 2)},
    "microbatches": {"mesh_shape": (2,), "constraints": autopar.data_parallel(), "num_microbatches": 2},
    "stages": {"num_stages": 2, "num_microbatches": 2, "mesh_shape": (2,)},
}


def make_step(show):
    """A train step that shows: inside of what is differentiated, in a branch, in a loop, and what it returns."""

    def step(params, x):
        def loss_of(params):
            hidden = jnp.tanh(x @ params["up"])
            jax.debug.callback(lambda v: show("hidden", v), hidden.mean())
            return jnp.mean((hidden @ params["down"]) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        jax.debug.callback(
            lambda v, rows: show("gradient", v) or show("rows", rows.sum()), gradients["up"].sum(), x[:4]
        )

        jax.lax.cond(loss > 0, lambda: jax.debug.callback(lambda v: show("branch", v), loss), lambda: None)
        jax.lax.cond(loss < 0, lambda: jax.debug.callback(lambda v: show("other branch", v), loss), lambda: None)

        def twice(y, _):
            jax.debug.callback(lambda v: show("loop", v), y)
            return y * 2, None

        last, _ = jax.lax.scan(twice, loss, None, length=2)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), last

    return step


@pytest.mark.sampled(4)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_each_value_is_shown_once_as_it_is(settings):
    seen = []
    step = make_step(lambda name, value: seen.append((name, float(value))))
    jax.block_until_ready(jax.jit(step)(PARAMS, BATCH))
    jax.effects_barrier()
    expected = sorted(seen)
    assert [name for name, _ in expected] == ["branch", "gradient", "hidden", "loop", "loop", "rows"]
    seen.clear()
    jax.block_until_ready(autopar.parallelize(step, **settings)(PARAMS, BATCH))
    assert [name for name, _ in sorted(seen)] == [name for name, _ in expected]
    np.testing.assert_allclose([v for _, v in sorted(seen)], [v for _, v in expected], rtol=1e-4, atol=1e-6)


def test_a_print_prints_once(capfd):
    def step(x):
        jax.debug.print("the sum is {}", x.sum())
        return x * 2

    jax.block_until_ready(autopar.parallelize(step, mesh_shape=(4,), batch_argnums=0)(jnp.ones((8, 4))))
    assert capfd.readouterr().out.splitlines() == ["the sum is 32.0"]


class Shown:
    """The numbers that a step has shown."""

    def __init__(self):
        self.numbers = []

    def __call__(self, number, value):
        """Show a number before something is computed with a value."""
        jax.debug.callback(lambda number: self.numbers.append(int(number)), number)
        return value

    def by(self, fun, *arguments):
        """The numbers that a call shows, in ascending order."""
        self.numbers.clear()
        jax.block_until_ready(jax.tree.leaves(fun(*arguments)))
        jax.effects_barrier()
        return sorted(self.numbers)


def counts_in_scan(show, x):
    """The count at the end is read by nobody."""
    return jax.lax.scan(lambda count, row: (show(count, count + 1), jnp.exp(row)), 0, x)[1]


def counts_beside_it(show, x):
    """Nobody reads anything of the scan."""
    jax.lax.scan(lambda count, _: (show(count, count + 1), None), 0, x)
    return 2 * x


def counts_in_fori_loop(show, x):
    return jax.lax.fori_loop(0, 4, lambda i, carry: show(i, (carry[0] / 2, carry[1] + 1)), (x, 0))[0]


def counts_in_while_loop(show, x):
    jax.lax.while_loop(lambda count: count < 4, lambda count: show(count, count + 1), 0)
    return 2 * x


def counts_in_nested_scans(show, x):
    def layer(count, row):
        jax.lax.scan(lambda inner, _: (show(inner, inner + 1), None), count, jnp.arange(2))
        return count + 1, 2 * row

    return jax.lax.scan(layer, 0, x)[1]


def counts_in_branch(show, x):
    jax.lax.cond(x[0, 0] > 0, lambda: show(7, 1), lambda: 2)
    return 2 * x


COUNTS = (
    counts_in_scan,
    counts_beside_it,
    counts_in_fori_loop,
    counts_in_while_loop,
    counts_in_nested_scans,
    counts_in_branch,
)


@pytest.mark.parametrize("fun", COUNTS)
@pytest.mark.parametrize("devices", [1, 4])
def test_what_is_shown_beside_a_result_that_nobody_reads_is_shown(fun, devices):
    """Such a result is left out, and nothing that waits for it would be shown."""
    shown, x = Shown(), jnp.ones((4, 8))
    step = functools.partial(fun, shown)
    expected = shown.by(jax.jit(step), x)
    assert expected
    assert shown.by(autopar.parallelize(step, devices=devices), x) == expected


def prints_rows(x):
    jax.lax.scan(lambda _, row: (jax.debug.print("{}", row), (None, None))[1], None, x)
    return x


def prints_in_order(x):
    jax.debug.print("{}", x.sum(), ordered=True)
    return x


@pytest.mark.parametrize(
    ("fun", "words"),
    [
        (prints_rows, "a function or a loop that returns nothing else"),
        (prints_in_order, "the step has a Python side effect"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_its_line(fun, words):
    with pytest.raises(UnsupportedProgramError, match=words) as caught:
        program_of(jax.make_jaxpr(fun)(jnp.ones((8, 4))))
    assert f"{Path(__file__).name}:{inspect.getsourcelines(fun)[1] + 1}" in str(caught.value)

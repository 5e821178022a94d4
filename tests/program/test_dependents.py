"""What depends on an input, through loops and branches too."""

import jax
import jax.numpy as jnp
import pytest

from autopar.program.from_jaxpr import program_of
from autopar.program.walk import dependents_of


def chosen(x, w):
    return jax.lax.cond(jnp.sum(x) > 0, lambda: w * 1.0, lambda: w * 2.0)


def repeated(x, w):
    return jax.lax.while_loop(lambda c: c[0] < jnp.sum(x), lambda c: (c[0] + 1, c[1] * 0.9), (0.0, w))[1]


def carried(x, w):
    return jax.lax.scan(lambda c, _: ((c[1], c[1] + c[0]), None), (w, x), length=3)[0][0]


@pytest.mark.parametrize("fun", [chosen, repeated, carried])
def test_a_result_depends_on_what_decides_it_and_on_what_an_iteration_hands_on(fun):
    program, _ = program_of(jax.make_jaxpr(fun)(jnp.ones(4), jnp.ones(4)))
    assert program.outvars[0] in dependents_of(program, program.invars[:1])


def test_the_stacks_of_a_scan_depend_on_inputs_one_by_one():
    """Of the weights alone, and of the examples that are carried."""
    program, _ = program_of(
        jax.make_jaxpr(lambda x, w: jax.lax.scan(lambda h, w: (h * w, (jnp.exp(w), h + w)), x, w)[1])(
            jnp.ones(4), jnp.ones((3, 4))
        )
    )
    found = dependents_of(program, program.invars[:1])
    assert [v in found for v in program.outvars] == [False, True]

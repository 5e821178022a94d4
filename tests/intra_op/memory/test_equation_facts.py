"""Facts of equations: found once, equal for equations that do the same, and gone with their equation."""

import gc
import weakref

import jax
import jax.numpy as jnp

from autopar.intra_op.memory.equation_facts import facts_of
from autopar.program.from_jaxpr import program_of


def equations_of(fun, *arguments):
    program, _ = program_of(jax.make_jaxpr(fun)(*arguments))
    return [eqn for eqn in program.equations if eqn.primitive.name != "fan_out"]


def test_equal_work_is_that_of_the_same_operation_with_the_same_literals():
    x = jnp.ones((4, 4))
    double, same, triple, turned = equations_of(lambda x, y: (x * 2.0, y * 2.0, x * 3.0, 2.0 * x), x, x)
    assert facts_of(double) is facts_of(double)
    assert facts_of(double).work == facts_of(same).work
    assert len({facts_of(eqn).work for eqn in (double, triple, turned)}) == 3, "a literal's value and place count"
    assert facts_of(turned).variables == (1,)
    assert facts_of(double).names == ("mul (4, 4)",)


def test_facts_are_gone_with_their_equation():
    def fun(x, w):
        return jax.nn.relu(x @ w).sum(), jax.lax.conv(x[None, None], w[None, None], (1, 1), "SAME")

    equations = equations_of(fun, jnp.ones((4, 4)), jnp.ones((4, 4)))
    alive = [weakref.ref(eqn) for eqn in equations if facts_of(eqn)]
    assert len(alive) > 3
    del equations
    gc.collect()
    assert [one() for one in alive] == [None] * len(alive)

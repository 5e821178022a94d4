"""Programs: inlined, with values of several users fanned out, the same function as the jaxpr they come from."""

from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from autopar.compat import Literal, source_line
from autopar.errors import UnsupportedProgramError
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.from_jaxpr import program_of
from autopar.program.opened.called import CALLS
from autopar.program.trace import trace
from autopar.testing import run_with_random_strategies
from tests.zoo import ZOO

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)


def program(fun, *args):
    return program_of(jax.make_jaxpr(fun)(*args))[0]


def names(fun, *args):
    return [eqn.primitive.name for eqn in program(fun, *args).equations]


def variables(atoms):
    return [v for v in atoms if not isinstance(v, Literal)]


@jax.custom_jvp
def doubled(x):
    return x * 2


doubled.defjvp(lambda primals, tangents: (doubled(*primals), tangents[0] * 2))


def loops(x):
    def body(carry, row):
        carry = jax.jit(jnp.sin)(carry) + row * jnp.arange(8.0)
        return carry, lax.cond(row[0] > 0, lambda: carry * 2, lambda: carry - row)

    total, rows = lax.scan(body, x[0], x)
    return lax.while_loop(lambda a: a.sum() < 9.0, lambda a: a + jnp.abs(total) + 1, total), rows


def test_calls_are_inlined():
    fun = lambda x: jax.checkpoint(jax.jit(lambda a: doubled(a) + jax.nn.relu(a)))(x)  # noqa: E731
    assert not {*names(fun, X)} & {*CALLS}
    assert not {eqn.primitive.name for eqn in program(loops, X).walk()} & {*CALLS}


def test_recomputation_keeps_its_barrier():
    gradient = jax.grad(lambda x: jax.checkpoint(lambda a: jnp.sin(jnp.sin(a)))(x).sum())
    assert "optimization_barrier" in names(gradient, X)


def test_dead_equations_are_gone():
    assert "cos" not in names(lambda x: (jnp.cos(x), jnp.sin(x))[1], X)


def test_a_value_with_several_users_passes_through_one_fan_out():
    assert names(lambda x: jnp.sin(x), X) == ["sin"]
    assert Counter(names(lambda x: jnp.sin(x) + jnp.cos(x), X))["fan_out"] == 1
    assert Counter(names(lambda x: (jnp.sin(x), x), X))["fan_out"] == 1


def scan_gradient(x):
    return jax.grad(lambda a: lax.scan(lambda carry, row: (jnp.sin(carry) * row, carry), a[0], a)[1].sum())(x)


@pytest.mark.parametrize("fun", [loops, scan_gradient])
def test_every_value_has_one_user_unless_a_fan_out_made_it_and_is_made_before_it_is_used(fun):
    assert_well_formed(program(fun, X), nested=False)


@pytest.mark.parametrize("name", ZOO)
def test_the_steps_of_the_zoo_are_well_formed(name):
    step, state, batch = ZOO[name]()
    assert_well_formed(program(step, state, batch), nested=False)


def assert_well_formed(scope, *, nested):
    known = set(scope.invars)
    fanned = {v for eqn in scope.equations if eqn.primitive.name == "fan_out" for v in eqn.outvars}
    users = Counter(v for eqn in scope.equations for v in set(variables(eqn.invars)))
    users.update(set(variables(scope.outvars)))
    for eqn in scope.equations:
        assert set(variables(eqn.invars)) <= known
        known |= set(eqn.outvars)
        for region in eqn.regions:
            assert_well_formed(region, nested=True)
    assert set(variables(scope.outvars)) <= known
    assert all(users[v] <= 1 for v in known if v not in fanned)
    if nested:
        heads = scope.equations[: len(scope.invars)]
        assert [eqn.invars[0] for eqn in heads] == list(scope.invars)
        assert all(eqn.primitive.name == "fan_out" for eqn in heads)
        assert len(set(variables(scope.outvars))) == len(variables(scope.outvars))


def test_constants_inside_of_loops_are_inputs_of_the_whole_program():
    table = np.arange(8.0, dtype=np.float32)
    closed = jax.make_jaxpr(lambda x: lax.scan(lambda c, row: (c + row * jnp.asarray(table), None), x[0], x)[0])(X)
    whole, constants = program_of(closed)
    assert len(whole.invars) == 1 + len(constants)
    assert any(np.shape(c) == (8,) for c in constants)


def test_loops_know_how_often_they_run():
    (scan,) = (eqn for eqn in program(loops, X).equations if eqn.primitive.name == "scan")
    assert (scan.loop.kind, scan.loop.carries, scan.loop.trips) == ("scan", 1, 4)


def test_a_program_computes_what_its_function_computes():
    actual = run_with_random_strategies(loops, X, mesh_shape=(1,), seed=0)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5), actual, jax.jit(loops)(X))


def prints(x):
    jax.debug.print("{}", x.sum(), ordered=True)
    return x


def test_a_side_effect_is_refused_with_its_name_line_and_what_to_do():
    with pytest.raises(
        UnsupportedProgramError, match=r"Python side effect: debug_\w+ at .*test_program.py:\d+"
    ) as caught:
        program(prints, X)
    assert "Return the value as an output" in str(caught.value)


def test_a_diagonal_and_its_gradient_have_no_branches_for_kinds_of_devices():
    """JAX writes them with a branch for the inside of kernels, whose residuals are never initialised."""
    for fun in (lambda x: jnp.diagonal(x) * 2, jax.grad(lambda x: jnp.sum(jnp.diagonal(x @ x) ** 2))):
        found = names(fun, jnp.ones((4, 4)))
        assert "gather" in found
        assert not {"cond", "platform_index", "empty2"} & set(found)


def test_lines_are_those_of_the_model_where_a_library_makes_the_operations():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = jax.nn.gelu(nn.Dense(8)(x))
            return x

    module, params = Twice(), Twice().init(jax.random.key(0), X)
    found = program(lambda params, x: jax.grad(lambda p: module.apply(p, x).sum())(params), params, X)
    lines = {source_line(eqn) for eqn in found.equations}
    assert {line.split(":")[0] for line in lines} == {__file__}
    assert len({line.split(":")[1] for line in lines if "Twice.__call__" in line}) == 1
    read = [eqn for eqn in found.equations if {*variables(eqn.invars)} & {*found.invars}]
    assert all("Twice.__call__" in source_line(eqn) for eqn in read)
    signature = CallSignature(optax.losses.huber_loss, (1,), (), "auto")
    of_a_library = trace(signature, bind_arguments(signature, (X, X), {})).program.equations
    assert all("optax/losses" in source_line(eqn) for eqn in of_a_library)

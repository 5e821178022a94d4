"""What is equal before a loop over microbatches is made once, and a gradient is added as soon as it is made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import autopar
from autopar.microbatches.counts import cut_into_microbatches
from autopar.microbatches.equal_values import find_equal
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.from_jaxpr import program_of
from autopar.program.loops import LoopEquation
from autopar.program.trace import trace
from autopar.stages.recompute_layers import Repeated
from autopar.stages.tuning import Tuning
from tests.oracles import assert_same_as_jit

LAYERS, WIDTH = 6, 32


def loss_of(weights, x):
    for w in weights:
        narrow = w.astype(jnp.bfloat16)
        x = x + jnp.tanh(x @ narrow) * jnp.cos(x)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def step(weights, x):
    loss, gradients = jax.value_and_grad(loss_of)(weights, x.astype(jnp.bfloat16))
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def remat_step(weights, x):
    """As `step`, with the user's own recomputation, which casts again behind barriers."""
    loss, gradients = jax.value_and_grad(jax.checkpoint(loss_of))(weights, x.astype(jnp.bfloat16))
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def arguments():
    random = np.random.default_rng(0)
    return [random.normal(0, 0.3, (WIDTH, WIDTH)).astype(np.float32) for _ in range(LAYERS)], random.normal(
        size=(16, WIDTH)
    ).astype(np.float32)


def in_microbatches(fun, repeated):
    signature = CallSignature(fun, (1,), (), "auto")
    traced = trace(signature, bind_arguments(signature, arguments(), {}))
    again = repeated.apply(traced, tuning=Tuning(kept_bytes=0)) if repeated else traced
    return cut_into_microbatches(again, 4).program


def loop_in(program):
    (loop,) = [eqn for eqn in program.equations if isinstance(eqn, LoopEquation)]
    return loop


@pytest.mark.parametrize(("fun", "repeated"), [(step, Repeated()), (remat_step, None)], ids=["ours", "the user's"])
def test_a_loop_over_microbatches_reads_one_cast_of_each_weight(fun, repeated):
    program = in_microbatches(fun, repeated)
    loop = loop_in(program)
    casts = [v for v in loop.invars if v.aval.shape == (WIDTH, WIDTH) and v.aval.dtype == jnp.bfloat16]
    assert len(casts) == LAYERS
    (body,) = [nested.program for nested in loop.nested]
    again = [eqn for eqn in body.equations if eqn.primitive.name == "tanh"]
    assert len(again) > LAYERS, "nothing is done again"


def test_a_gradient_is_added_before_the_next_one_is_made():
    (body,) = [nested.program for nested in loop_in(in_microbatches(step, None)).nested]
    made = [
        place
        for place, eqn in enumerate(body.equations)
        if eqn.primitive.name == "dot_general" and eqn.outvars[0].aval.shape == (WIDTH, WIDTH)
    ]
    added = [
        place
        for place, eqn in enumerate(body.equations)
        if eqn.primitive.name == "add" and eqn.outvars[0].aval.shape == (WIDTH, WIDTH)
    ]
    assert len(made) == len(added) == LAYERS
    assert all(sum(at < place for at in added) == number for number, place in enumerate(made))


@pytest.mark.parametrize("fun", [step, remat_step])
@pytest.mark.parametrize("stages", [1, 2])
def test_the_step_is_that_of_one_device(fun, stages):
    shape = {"mesh_shape": (2,), "num_stages": stages}
    planned = autopar.parallelize(
        fun, devices=jax.devices()[: 2 * stages], num_microbatches=4, recompute="layer", plan_cache=False, **shape
    )
    assert_same_as_jit(fun, planned, *arguments(), rtol_of_scale=1e-2)


def test_equal_are_names_and_equal_work_on_equal_operands():
    def fun(x, y):
        again, _ = jax.lax.optimization_barrier((x, y))
        return [
            x.astype(jnp.bfloat16),
            again.astype(jnp.bfloat16),
            x.astype(jnp.float16),
            y.astype(jnp.bfloat16),
            x * 2.0,
            again * 2.0,
            x * 3.0,
        ]

    program, _ = program_of(jax.make_jaxpr(fun)(jnp.ones(4), jnp.ones(4)))
    equal = find_equal(program.equations)
    first = [equal.get(v, v) for v in program.outvars]
    assert first[0] is first[1]
    assert first[4] is first[5]
    assert len({id(v) for v in first}) == 5


def test_what_runs_as_often_as_it_is_written_is_never_equal():
    def fun(x):
        return [io_callback(lambda x: x, x, x) for _ in range(2)]

    program, _ = program_of(jax.make_jaxpr(fun)(jnp.ones(4)))
    assert not find_equal(program.equations).keys() & set(program.outvars)

"""`parallelize` of odd programs: values of every kind, control flow, sizes that nothing divides."""

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from tests.perceptron_step import assert_same_as_jit, loss_of, make_batch, make_state, train_step, updated

# --- values of every kind ---------------------------------------------------------------------------------------------


def test_random_keys_in_the_state_typed_and_raw_give_the_same_bits():
    def step(state, batch):
        typed, use = jax.random.split(state["typed"])
        raw, use_raw = jax.random.split(state["raw"])
        noise = jax.random.normal(use, batch["x"].shape) * jax.random.bernoulli(use_raw, 0.5, batch["x"].shape)
        return {"typed": typed, "raw": raw, "sum": state["sum"] + noise}, noise

    state = {"typed": jax.random.key(0), "raw": jax.random.PRNGKey(1), "sum": jnp.zeros((16, 8))}
    parallel = autopar.parallelize(step)
    actual = assert_same_as_jit(step, parallel, state, make_batch(), rtol_of_scale=1e-7)
    assert jnp.issubdtype(actual[0]["typed"].dtype, jax.dtypes.prng_key)
    assert {v.path: v.role for v in parallel.last_plan().inputs}["state/typed"] == "state"


def test_bfloat16_parameters():
    state = make_state(dtype=jnp.bfloat16)
    actual = assert_same_as_jit(
        train_step, autopar.parallelize(train_step, mesh_shape=(8,)), state, make_batch(), rtol_of_scale=2e-2
    )
    assert actual[0]["params"][0]["kernel"].dtype == jnp.bfloat16


def test_integer_metrics_are_exact():
    def step(state, batch):
        new, _ = train_step(state, batch)
        rounded = jnp.round(100 * batch["x"]).astype(jnp.int32)
        metrics = {"sum": rounded.sum(), "largest": rounded.max(axis=0), "order": jnp.argsort(rounded[:, 0])}
        return new, metrics | {"positive": (rounded > 0).sum(axis=1), "any": (rounded > 200).any()}

    assert_same_as_jit(step, autopar.parallelize(step, mesh_shape=(8,)), make_state(), make_batch())


def test_constants_that_the_step_closes_over():
    mask = np.arange(8) % 3 == 0
    table = jnp.asarray(np.random.default_rng(5).normal(size=(16, 8)), jnp.float32)

    def step(state, batch):
        return train_step(state, {"x": jnp.where(mask, batch["x"], 0.0), "y": batch["y"] + table})

    parallel = autopar.parallelize(step)
    assert_same_as_jit(step, parallel, make_state(), make_batch())
    assert any(value.role == "const" for value in parallel.last_plan().inputs)


def test_a_state_of_python_numbers_and_numpy_arrays():
    def step(state, batch):
        return {"w": state["w"] * 2, "count": state["count"] + 1}, batch.sum()

    parallel = autopar.parallelize(step)
    state = {"w": np.ones((8, 4), np.float32), "count": 0}
    for _ in range(2):
        state, _ = parallel(state, np.ones((8, 4), np.float32))
    assert (float(state["w"][0, 0]), int(state["count"])) == (4.0, 2)
    assert {value.role for value in parallel.last_plan().inputs} == {"state", "batch"}


def test_a_value_returned_twice_and_an_argument_returned_as_it_is():
    def step(state, batch):
        new, loss = train_step(state, batch)
        return new, (loss, loss, new["params"][0]["kernel"], state["params"][0]["kernel"], batch["x"])

    assert_same_as_jit(step, autopar.parallelize(step, mesh_shape=(8,)), make_state(), make_batch())


# --- control flow -----------------------------------------------------------------------------------------------------


def test_gradients_accumulated_by_scan():
    def step(state, batch):
        parts = jax.tree.map(lambda a: a.reshape(2, 8, *a.shape[1:]), batch)

        def add(carry, part):
            loss, gradients = jax.value_and_grad(loss_of)(state["params"], part)
            return jax.tree.map(jnp.add, carry, (loss, gradients)), loss

        zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, state["params"]))
        (loss, gradients), losses = jax.lax.scan(add, zero, parts)
        return updated(state, jax.tree.map(lambda g: g / 2, gradients)), (loss, losses)

    assert_same_as_jit(step, autopar.parallelize(step, mesh_shape=(4,), devices=4), make_state(), make_batch())


def test_a_while_loop_whose_length_depends_on_the_data():
    def step(state, batch):
        def halve(carry):
            x, count = carry
            return x / 2, count + 1

        x, count = jax.lax.while_loop(lambda carry: jnp.max(jnp.abs(carry[0])) > 0.3, halve, (batch["x"], jnp.int32(0)))
        return train_step(state, {"x": x, "y": batch["y"]})[0], count

    assert_same_as_jit(step, autopar.parallelize(step, mesh_shape=(8,)), make_state(), make_batch())


def test_a_cond_on_the_state():
    def step(state, batch):
        new, loss = train_step(state, batch)
        skipped = {**state, "count": state["count"] + 1}
        return jax.lax.cond(state["count"] % 2 == 0, lambda: new, lambda: skipped), loss

    assert_same_as_jit(step, autopar.parallelize(step, mesh_shape=(8,)), make_state(), make_batch())


def test_sizes_that_no_mesh_axis_divides():
    state, batch = make_state(sizes=(7, 15, 9, 7)), make_batch(examples=16, features=7)
    assert_same_as_jit(train_step, autopar.parallelize(train_step, mesh_shape=(2, 4)), state, batch)


def test_three_devices():
    step = autopar.parallelize(train_step, devices=jax.devices()[:3], mesh_shape=(3,))
    assert_same_as_jit(train_step, step, make_state(sizes=(8, 15, 9, 8)), make_batch(examples=24))

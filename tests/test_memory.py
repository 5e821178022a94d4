"""Predicted peak memory against XLA's own account, limits that hold in it, and programs that can be reckoned by hand.

XLA's account is arguments + outputs - aliased + temporaries of one device. Measured ratios of prediction to it are 0.85 to 1.03
here, on both JAX ends; limits leave room for what is missing (`memory.TEMPORARIES_MARGIN`).
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import OutOfMemoryError, data_parallel, zero3
from autopar.memory import TEMPORARIES_MARGIN
from autopar.models.registry import build

LEAST_RATIO, MOST_RATIO = 0.83, 1.1
FLOAT = 4


def real_bytes(compiled):
    account = compiled.memory_analysis()
    kept = account.argument_size_in_bytes + account.output_size_in_bytes - account.alias_size_in_bytes
    return kept + account.temp_size_in_bytes


def required_bytes(plan):
    """The least limit under which a plan may be chosen: inputs are exact, temporaries have a margin."""
    inputs = sum(value.bytes_per_device for value in plan.inputs)
    return inputs + (plan.peak_bytes - inputs) / TEMPORARIES_MARGIN


def shapes_of(model):
    return jax.eval_shape(model.create_state, jax.random.key(0)), model.batch_shape()


# --- against XLA ------------------------------------------------------------------------------------------------------

MODELS = {
    "mlp": lambda: build("mlp"),
    "wide_mlp": lambda: build("mlp", hidden=128, layers=3, batch=64),
    "gpt": lambda: build("gpt", layers=2, hidden=64),
}
PLANS = {
    "one device": {"devices": 1},
    "data parallel": {"mesh_shape": (8,), "constraints": data_parallel()},
    "zero3": {"mesh_shape": (8,), "constraints": zero3()},
    "searched": {"mesh_shape": (8,)},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("plan", PLANS)
def test_the_predicted_peak_is_near_what_xla_allocates(name, plan):
    model = MODELS[name]()
    compiled = autopar.parallelize(model.train_step, **PLANS[plan]).compile(*shapes_of(model))
    ratio = compiled.plan.peak_bytes / real_bytes(compiled)
    assert LEAST_RATIO <= ratio <= MOST_RATIO, f"predicted {compiled.plan.peak_bytes}, XLA {real_bytes(compiled)}"


ADMITTED = {
    "mlp": lambda: build("mlp", hidden=64, layers=6, batch=1024),
    "gpt": lambda: build("gpt", layers=1, hidden=32, seq=32),
    "wide_resnet": lambda: build("wide_resnet", base_channels=4, width_factor=1, image_size=8),
}


@pytest.mark.parametrize("name", ADMITTED)
def test_the_least_limit_that_admits_a_plan_is_not_exceeded_by_xla(name):
    model = ADMITTED[name]()
    given = {"devices": jax.devices()[:4], "mesh_shape": (4,), "constraints": zero3(), "num_microbatches": 1}
    plan = autopar.parallelize(model.train_step, **given).plan(*shapes_of(model))
    limit = int(required_bytes(plan)) + 1
    compiled = autopar.parallelize(model.train_step, memory_limit_bytes=limit, **given).compile(*shapes_of(model))
    assert compiled.plan.memory_limit_bytes == limit
    assert real_bytes(compiled) <= limit


def test_a_limit_that_data_parallelism_cannot_keep_leads_to_another_plan_within_it():
    model = ADMITTED["mlp"]()
    four = {"devices": jax.devices()[:4], "mesh_shape": (4,), "num_microbatches": 1}
    copied = autopar.parallelize(model.train_step, constraints=data_parallel(), **four).plan(*shapes_of(model))
    limit = int(0.9 * required_bytes(copied))
    tight = autopar.parallelize(model.train_step, memory_limit_bytes=limit, **four).compile(*shapes_of(model))
    assert required_bytes(tight.plan) <= limit
    assert real_bytes(tight) <= limit


def test_a_limit_on_zero_3_makes_xla_need_less():
    """Its gathered kernels are dropped, and gathered again when the backward pass is there."""
    model = build("mlp", hidden=128, layers=6, batch=32)
    four = {"devices": jax.devices()[:4], "mesh_shape": (4,), "num_microbatches": 1, "constraints": zero3()}
    free = autopar.parallelize(model.train_step, **four).compile(*shapes_of(model))
    limit = int(0.9 * required_bytes(free.plan))
    tight = autopar.parallelize(model.train_step, memory_limit_bytes=limit, **four).compile(*shapes_of(model))
    assert real_bytes(tight) <= limit
    assert real_bytes(tight) < real_bytes(free)


def test_a_limit_below_what_must_be_resident_is_refused():
    model = MODELS["wide_mlp"]()
    state, batch = shapes_of(model)
    resident = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) // 8
    step = autopar.parallelize(
        model.train_step, devices=8, mesh_shape=(8,), memory_limit_bytes=resident, num_microbatches=1
    )
    with pytest.raises(OutOfMemoryError, match="no plan fits"):
        step.plan(state, batch)


# --- by hand ----------------------------------------------------------------------------------------------------------


def peak(step, *arguments, **options):
    options = {"devices": 1} | options
    return autopar.parallelize(step, **options).plan(*arguments)


def square(n=64):
    return jax.ShapeDtypeStruct((n, n), jnp.float32)


def test_an_argument_stays_and_a_result_is_added_unless_it_takes_a_donated_ones_place():
    def step(state, batch):
        return state * 2.0 + batch

    one = 64 * 64 * FLOAT
    assert peak(step, square(), square()).peak_bytes == 2 * one
    assert peak(step, square(), square(), donate_argnums=()).peak_bytes == 3 * one


def test_operations_that_xla_folds_into_their_user_have_no_buffer():
    def step(state, batch):
        return jnp.exp(jnp.tanh(batch * 2.0) + state) ** 2

    assert peak(step, square(), square()).peak_bytes == 2 * 64 * 64 * FLOAT


def test_what_a_contraction_reads_has_a_buffer_until_it_is_read():
    def step(state, batch):
        return jnp.sum(jnp.tanh(batch * 2.0) @ state)

    one = 64 * 64 * FLOAT
    assert 4 * one <= peak(step, square(), square()).peak_bytes < 4.01 * one


def test_a_loops_body_comes_on_top_of_what_is_alive_around_it():
    def body(carry, x):
        return jnp.tanh(carry @ x), None

    def step(state, batch):
        around = batch @ batch
        return jnp.sum(jax.lax.scan(body, state, jnp.stack([batch, batch + 1.0]))[0] @ around)

    one = 64 * 64 * FLOAT
    found = peak(step, square(), square())
    assert found.peak_bytes >= 7 * one  # two arguments, `around`, two stacked, carry and product
    assert any(tensor.name.startswith("dot_general") for tensor in found.peak_tensors)


def test_an_operand_that_is_gathered_counts_whole_from_its_first_to_its_last_use():
    def step(state, batch):
        return jnp.sum((jnp.tanh(batch @ state["w"]) @ state["v"]) @ state["w"])

    state = {"w": square(256), "v": square(256)}
    batch = jax.ShapeDtypeStruct((4096, 256), jnp.float32)
    constraints = [data_parallel(), {"state/*": P("x")}]
    found = peak(step, state, batch, devices=8, mesh_shape=(8,), constraints=constraints)
    whole, rows = 256 * 256 * FLOAT, 4096 // 8 * 256 * FLOAT
    assert [c.bytes for c in found.collectives if c.kind == "all-gather"].count(whole) >= 2
    shards = sum(value.bytes_per_device for value in found.inputs)
    assert (
        found.peak_bytes >= shards + 2 * whole + rows
    )  # at the second product: w, kept for the third, v, and its operand
    assert [tensor.bytes_per_device for tensor in found.peak_tensors].count(whole) >= 2


def test_the_tensors_at_the_peak_are_named_largest_first():
    found = peak(lambda state, batch: jnp.sum(jnp.tanh(batch @ state)), square(128), square(128))
    sizes = [tensor.bytes_per_device for tensor in found.peak_tensors]
    assert sizes == sorted(sizes, reverse=True)
    assert {"state", "batch"} <= {tensor.name for tensor in found.peak_tensors}

"""What surrounds a call of a parallelized step: arrays given twice, JAX's settings and meshes, transformations of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import ArgumentError
from autopar.split_array import SplitArray
from tests.oracles import assert_trees_close
from tests.pipeline_steps import descended, layers, mean_error, rows

ONE_MESH = {"mesh_shape": (2,), "constraints": autopar.data_parallel()}
TWO_STAGES = {"num_stages": 2, "num_microbatches": 2, "schedule": "1f1b", "mesh_shape": (1,)}
on_one_mesh_and_in_stages = pytest.mark.parametrize("options", [ONE_MESH, TWO_STAGES], ids=["one mesh", "stages"])


def train(params, batch):
    loss, gradients = jax.value_and_grad(mean_error)(params, batch)
    return descended(params, gradients), loss


# --- arrays given twice -----------------------------------------------------------------------------------------------


def train_average(state, batch):
    """Parameters and their moving average."""
    params, loss = train(state["params"], batch)
    return {"params": params, "average": jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], params)}, loss


@pytest.mark.sampled(4)
@on_one_mesh_and_in_stages
def test_arrays_that_are_given_as_two_leaves_of_the_state_are_taken_once(options):
    """XLA ends the process where a buffer is donated twice (0.10)."""
    step = autopar.parallelize(train_average, **options)
    state, batch = {"params": layers(), "average": layers()}, rows()
    state, _ = step(state, batch)
    params = state["params"]
    expected = jax.jit(train_average)({"params": jax.device_get(params), "average": jax.device_get(params)}, batch)
    state, _ = found = step({"params": params, "average": params}, batch)
    assert_trees_close(found, expected)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params)), "one of the two uses takes the memory"
    assert_trees_close(step(state, batch), jax.jit(train_average)(expected[0], batch))


@pytest.mark.sampled(4)
@on_one_mesh_and_in_stages
def test_parameters_that_are_also_the_reference_stay_the_callers(options):
    def prefer(params, batch, reference):
        def loss_of(params):
            return mean_error(params, batch) + 0.1 * sum(
                jnp.sum((p - r) ** 2) for p, r in zip(jax.tree.leaves(params), jax.tree.leaves(reference), strict=True)
            )

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return descended(params, gradients), loss

    step = autopar.parallelize(prefer, **options)
    step.plan(layers(), rows(), layers())
    params = step.init_state(layers)
    expected = jax.jit(prefer)(layers(), rows(), layers())
    for _ in range(2):
        found = step(params, rows(), params)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
        assert_trees_close(found, expected)


@pytest.mark.sampled(4)
@on_one_mesh_and_in_stages
@pytest.mark.filterwarnings("ignore:no factor rule for reshard")
def test_parameters_that_the_step_closes_over_stay_as_they_are(options):
    first = autopar.parallelize(train, **options)
    start = first(layers(), rows())[0]
    whole = jax.device_get(start)

    def step(params, batch):
        return train(jax.tree.map(lambda p, s: p + 0.5 * s, params, start), batch)

    expected = jax.jit(step)(whole, rows())
    parallel = autopar.parallelize(step, **options)
    for _ in range(2):
        assert_trees_close(parallel(start, rows()), expected)
    assert_trees_close(start, whole, rtol_of_scale=0.0)


def test_pieces_of_a_stack_that_are_given_as_two_leaves_are_taken_once():
    def loss_of(stack, batch):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jnp.mean((jax.lax.scan(layer, batch["x"], stack)[0] - batch["y"]) ** 2)

    def step(state, batch):
        loss, gradient = jax.value_and_grad(loss_of)(state["stack"], batch)
        return {"stack": state["stack"] - 0.1 * gradient, "average": 0.9 * state["average"] + 0.1 * gradient}, loss

    parallel = autopar.parallelize(step, **TWO_STAGES)
    stack = jnp.stack([layer["w"] for layer in layers()])
    stack = parallel({"stack": stack, "average": stack}, rows())[0]["stack"]
    assert isinstance(stack, SplitArray)
    expected = jax.jit(step)({"stack": np.asarray(stack), "average": np.asarray(stack)}, rows())
    assert_trees_close(parallel({"stack": stack, "average": stack}, rows()), expected)


# --- settings of JAX --------------------------------------------------------------------------------------------------


def masked(params, batch):
    """A step that draws random numbers."""

    def loss_of(params):
        kept = jax.random.bernoulli(jax.random.key(0), 0.5, batch["x"].shape[1:])
        return mean_error(params, batch | {"x": batch["x"] * kept})

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return descended(params, gradients), loss


@pytest.mark.sampled(4)
@on_one_mesh_and_in_stages
def test_a_step_that_has_run_runs_in_64_bits_under_enable_x64_and_in_32_afterwards(options):
    state, batch = jax.tree.map(lambda x: np.asarray(x, np.float64), (layers(), rows()))
    step = autopar.parallelize(train, **options)
    usual = step(state, batch)
    with jax.enable_x64(True):
        expected = jax.jit(train)(state, batch)
        found = step(state, batch)
        assert {x.dtype for x in jax.tree.leaves(found)} == {np.dtype(np.float64)}
        assert_trees_close(found, expected, rtol_of_scale=1e-13)
    again = step(state, batch)
    assert {x.dtype for x in jax.tree.leaves(again)} == {np.dtype(np.float32)}
    assert_trees_close(again, usual, rtol_of_scale=0.0)


def filled(buffers, fresh):
    """The same NumPy arrays with other contents."""
    for buffer, values in zip(jax.tree.leaves(buffers), jax.tree.leaves(fresh), strict=True):
        buffer[...] = values
    return buffers


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@on_one_mesh_and_in_stages
def test_a_batch_that_is_filled_again_in_place_is_taken_as_it_is_now(options, dtype):
    """`jax.device_put` keeps what it converted from 64 bits by the array's identity, and slices of that on two devices."""
    step = autopar.parallelize(train, **options)
    buffers = jax.tree.map(lambda x: np.array(x, dtype), rows())
    state, other = layers(), jax.tree.map(lambda x: np.asarray(-2 * x + 1), rows())
    found = [step(state, filled(buffers, batch))[1] for batch in (rows(), other) * 10]
    expected = [jax.jit(train)(state, batch)[1] for batch in (rows(), other)] * 10
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert abs(found[0] - found[1]) > 1e-2


def test_a_state_of_64_bits_on_the_host_is_planned_once():
    """Its arrays have 32 bits from the first step on."""
    traces = []

    def counted(params, batch):
        traces.append(1)
        return train(params, batch)

    step = autopar.parallelize(counted, **ONE_MESH)
    state = jax.tree.map(lambda x: np.asarray(x, np.float64), layers())
    for _ in range(3):
        state, _ = step(state, rows())
    assert len(traces) == 1


def test_a_batch_that_is_filled_again_in_place_is_taken_as_it_is_now_by_an_exported_plan():
    buffers = jax.tree.map(lambda x: np.array(x, np.float64), rows())
    jitted = autopar.plain_jit(autopar.parallelize(train, **ONE_MESH).plan(layers(), buffers), train)
    first = float(jitted(layers(), buffers)[1])
    second = float(jitted(layers(), filled(buffers, jax.tree.map(lambda x: -2 * x + 1, rows())))[1])
    assert abs(first - second) > 1e-2


@pytest.mark.sampled(4)
@on_one_mesh_and_in_stages
def test_a_step_that_has_run_draws_the_numbers_of_another_generator_when_that_is_set(options):
    step = autopar.parallelize(masked, **options)
    usual = step(layers(), rows())[1]
    with jax.threefry_partitionable(False):
        expected = jax.jit(masked)(layers(), rows())[1]
        assert abs(float(expected) - float(usual)) > 1e-3
        np.testing.assert_allclose(step(layers(), rows())[1], expected, rtol=1e-5)


@pytest.mark.sampled(4)
@on_one_mesh_and_in_stages
def test_a_precision_that_is_set_after_the_first_step_holds(options):
    step = autopar.parallelize(train, **options)
    step(layers(), rows())
    assert "operand_precision={highest" not in step.compile(layers(), rows()).as_text()
    with jax.default_matmul_precision("highest"):
        assert "operand_precision={highest" in step.compile(layers(), rows()).as_text()


@pytest.mark.sampled(4)
@on_one_mesh_and_in_stages
def test_a_compiled_step_is_that_of_the_settings_under_which_it_was_compiled(options):
    with jax.threefry_partitionable(False):
        compiled = autopar.parallelize(masked, **options).compile(layers(), rows())
        expected = jax.jit(masked)(layers(), rows())[1]
    np.testing.assert_allclose(compiled(layers(), rows())[1], expected, rtol=1e-5)


@pytest.mark.sampled(4)
@on_one_mesh_and_in_stages
def test_a_state_that_is_made_under_other_settings_leaves_the_step_as_it_was_planned(options):
    step = autopar.parallelize(masked, **options)
    step.plan(layers(), rows())
    with jax.threefry_partitionable(False):
        state = step.init_state(layers)
    np.testing.assert_allclose(step(state, rows())[1], jax.jit(masked)(layers(), rows())[1], rtol=1e-5)


@on_one_mesh_and_in_stages
def test_looking_for_nans_plans_nothing_anew(options):
    step = autopar.parallelize(train, **options)
    plan = step.plan(layers(), rows())
    with jax.debug_nans(True), jax.debug_infs(True):
        assert step.plan(layers(), rows()) is plan


# --- meshes of the caller, and no compilation -------------------------------------------------------------------------


def explicit_mesh(first=0, size=4):
    """A mesh as `jax.make_mesh` makes it where nothing else is said, from JAX 0.12 on."""
    axes = (jax.sharding.AxisType.Explicit,)
    return jax.make_mesh((size,), ("x",), axes, devices=jax.devices()[first : first + size])


SURROUNDINGS = {
    "mesh of other devices": lambda: jax.set_mesh(explicit_mesh(first=6, size=2)),
    "mesh of more devices": lambda: jax.set_mesh(explicit_mesh()),
    "disable_jit": jax.disable_jit,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("surroundings", SURROUNDINGS.values(), ids=SURROUNDINGS)
@on_one_mesh_and_in_stages
def test_a_step_does_under_set_mesh_and_disable_jit_what_it_does_without(options, surroundings):
    """A step in stages had ended the process under the Explicit axes of `jax.set_mesh` (0.10)."""
    first = jax.jit(train)(layers(), rows())
    second = jax.jit(train)(first[0], rows())
    state, batch = layers(), rows()
    step = autopar.parallelize(train, **options)
    with surroundings():
        plan = step.plan(state, batch)
        found = step(step.init_state(layers), batch)
        compiled = step.compile(state, batch)
        assert "HloModule" in compiled.as_text()
        assert_trees_close(step.gather(found[0]), first[0])
        found = compiled(found[0], batch)
        assert_trees_close(found, second)
    assert step.plan(state, batch) is plan
    assert_trees_close(step(state, batch), first)


def test_a_step_is_planned_inside_a_function_that_jax_traces_under_set_mesh():
    step = autopar.parallelize(train, **ONE_MESH)
    plans = []
    with jax.set_mesh(explicit_mesh()):
        jax.jit(lambda: plans.append(step.plan(jax.eval_shape(layers), jax.eval_shape(rows))))()
    assert plans == [step.plan(layers(), rows())]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", [ONE_MESH | {"num_microbatches": 2}, TWO_STAGES], ids=["one mesh", "stages"])
def test_a_batch_on_a_mesh_of_explicit_axes_is_cut_into_microbatches(options):
    expected = jax.jit(train)(layers(), rows())
    sharding = jax.NamedSharding(explicit_mesh(), jax.P("x"))
    found = autopar.parallelize(train, **options)(layers(), jax.device_put(rows(), sharding))
    assert_trees_close(found, expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", [ONE_MESH | {"num_microbatches": 2}, TWO_STAGES], ids=["one mesh", "stages"])
def test_cutting_the_batch_moves_nothing_from_the_host_unasked(options):
    step = autopar.parallelize(train, **options)
    state, batch = step(layers(), rows())[0], rows()
    with jax.transfer_guard("disallow"):
        step(state, batch)


# --- inside a function that JAX traces --------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@on_one_mesh_and_in_stages
def test_a_step_inside_a_traced_function_is_refused_whether_its_arrays_are_arguments_or_closed_over(options):
    step = autopar.parallelize(train, **options)
    state, batch = layers(), rows()
    words = r"train is called inside a function that JAX traces \(jit, .*: its arrays are closed over\. A parallelized"
    with pytest.raises(ArgumentError, match=words):
        jax.jit(lambda x: x + step(state, batch)[1])(1.0)
    with pytest.raises(ArgumentError, match=words):
        jax.lax.fori_loop(0, 2, lambda _, x: x + step(state, batch)[1], 1.0)
    compiled = step.compile(state, batch)
    with pytest.raises(ArgumentError, match=words):
        jax.jit(lambda x: x + compiled(state, batch)[1])(1.0)
    with pytest.raises(ArgumentError, match=r"train is called inside .*: 11 of its 11 arrays have no values yet"):
        jax.jit(compiled)(state, batch)
    expected = jax.jit(train)(state, batch)[1]
    found = jax.grad(lambda x: x * step(state, batch)[1])(1.0)  # what grad computes at once has values
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(compiled(state, batch)[1], expected, rtol=1e-5)


@pytest.mark.sampled(4)
@on_one_mesh_and_in_stages
def test_a_nan_that_is_looked_for_is_an_error_as_under_jit_which_says_what_is_left(options):
    def step(params, batch):
        params, loss = train(params, batch)
        return params, jnp.log(-loss)

    parallel = autopar.parallelize(step, **options)
    state, kept = parallel(layers(), rows())[0], layers()
    assert np.isnan(parallel(layers(), rows())[1])
    found = r"invalid value \(nan\) in what .* returns, found by jax.debug_nans"
    for given in (kept, state):
        with jax.debug_nans(True), pytest.raises((FloatingPointError, autopar.PipelineError), match=found) as caught:
            parallel(given, rows())
        gone = [x for x in jax.tree.leaves(given) if x.is_deleted()]
        words = f"has consumed {len(gone)} of the" if gone else "All arrays that step was given are still there"
        assert words in caught.value.__notes__[-1]
        assert bool(gone) == (given is state)


@pytest.mark.parametrize(
    "options",
    [ONE_MESH, ONE_MESH | {"num_microbatches": 2}, TWO_STAGES],
    ids=["one mesh", "microbatches", "stages"],
)
def test_what_a_step_leaves_out_may_be_no_number_where_these_are_looked_for(options):
    """As under jit: an array that only moves is nobody's result. A best loss begins at infinity, and a column has gaps."""

    def step(state, batch):
        params, loss = train(state["params"], batch | {"x": jnp.nan_to_num(batch["x"], posinf=0.0)})
        return {"params": params, "best": jnp.minimum(state["best"], loss)}, loss

    state, batch = {"params": layers(), "best": jnp.float32(jnp.inf)}, rows()
    batch["x"] = batch["x"].at[0, :2].set(jnp.asarray([jnp.nan, jnp.inf]))
    parallel = autopar.parallelize(step, **options)
    with jax.debug_nans(True), jax.debug_infs(True):
        expected = jax.jit(step)(state, batch)
        found = parallel(state, batch)
        assert_trees_close(parallel.gather(found), expected)
        assert_trees_close(parallel.gather(parallel(found[0], batch)), jax.jit(step)(expected[0], batch))

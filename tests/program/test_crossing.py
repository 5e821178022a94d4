"""What crosses into a trace beside arrays: methods, static leaves, objects of nnx; and changes in place that would be lost."""

import dataclasses
import enum
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import autopar
from autopar import ArgumentError, UnsupportedProgramError
from autopar.execution.plain_jit import plain_jit
from autopar.program.boundary.static_values import StaticValue
from tests.refusals import make_batch, make_state, planned, refused, train_step
from tests.signatures import batches, model_and_optimizer, nnx_step

ONES = jnp.ones((8, 4))


# --- methods ----------------------------------------------------------------------------------------------------------


class Trainer:
    def __init__(self, rate):
        self.rate = rate

    @autopar.parallelize(mesh_shape=(2,))
    def step(self, w, x):
        return w - self.rate * jnp.mean(x), jnp.sum(x)


def test_a_method_can_be_decorated_and_its_object_is_static():
    one, other = Trainer(1.0), Trainer(2.0)
    assert float(one.step(jnp.ones(4), ONES)[0][0]) == 0
    assert float(other.step(jnp.ones(4), ONES)[0][0]) == -1
    assert float(one.step(jnp.ones(4), ONES)[1]) == 32
    plan = one.step.last_plan()
    assert [(v.path, v.role) for v in plan.inputs] == [("w", "state"), ("x", "batch")]
    assert one.step.plan(jnp.ones(4), ONES) is plan or one.step.plan(jnp.ones(4), ONES).inputs == plan.inputs
    assert isinstance(Trainer.step, autopar.ParallelStep)
    assert float(Trainer.step(one, jnp.ones(4), ONES)[1]) == 32
    assert float(one.step.compile(jnp.ones(4), ONES)(one, jnp.ones(4), ONES)[1]) == 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Rates:
    rate: jax.Array
    name: str = dataclasses.field(default="", metadata={"static": True})

    @autopar.parallelize(mesh_shape=(2,))
    def step(self, w, x):
        return w - self.rate * jnp.mean(x), jnp.sum(x)


def test_an_object_that_is_a_tree_of_arrays_is_an_argument_as_any_other():
    made = Rates(jnp.float32(3))
    assert float(made.step(jnp.ones(4), ONES)[0][0]) == -2
    made.rate = jnp.float32(5)
    assert float(made.step(jnp.ones(4), ONES)[0][0]) == -4
    roles = [(v.path, v.role) for v in made.step.last_plan().inputs]
    assert roles == [("self/rate", "other"), ("w", "state"), ("x", "batch")]


@dataclasses.dataclass
class Unhashable:
    rate: float

    @autopar.parallelize
    def step(self, w, x):
        return w, x


def test_an_object_that_is_neither_says_what_to_do():
    refused(
        ArgumentError,
        lambda: Unhashable(1.0).step(ONES, ONES),
        "the argument 'self' is a Unhashable, neither an array nor hashable",
        "register it as a tree of arrays",
    )


# --- static values ----------------------------------------------------------------------------------------------------


class Mode(enum.Enum):
    HALF = 0.5
    WHOLE = 1.0


def scaled(state, batch, how, *, mode=Mode.WHOLE):
    return state * mode.value, batch.sum() * len(how)


@pytest.mark.parametrize("names", ["how", ("how", "mode")])
def test_static_arguments_are_named_also_keyword_only_ones(names):
    step = autopar.parallelize(scaled, static_argnames=names, mesh_shape=(2,))
    assert float(step(jnp.ones(4), ONES, (1, 2), mode=Mode.HALF)[1]) == 64
    state, total = step(jnp.ones(4), ONES, how=(1, 2, 3), mode=Mode.HALF)
    assert (float(total), float(state[0])) == (96, 0.5)


def test_a_static_argument_that_there_is_not_is_refused_with_those_there_are():
    step = autopar.parallelize(train_step, static_argnames="mode")
    words = "static_argnames=['mode']: train_step has no such argument; it has batch, state"
    refused(ArgumentError, lambda: step(make_state(), make_batch()), words)
    refused(
        ArgumentError,
        lambda: autopar.parallelize(train_step, static_argnames=3),
        "static_argnames=3: a name, or a list",
    )
    step = autopar.parallelize(scaled, static_argnames=("how", "mode"))
    refused(ArgumentError, lambda: step(ONES, ONES, (), mode=[1]), "argument 'mode' is a list, which cannot be hashed")


class Level(enum.IntEnum):
    ONE = 1


def test_static_arguments_that_are_equal_and_of_other_types_are_other_programs():
    def step(state, batch, one):
        return state, batch.sum() * len(type(one).__name__)

    parallel = autopar.parallelize(step, static_argnums=2, mesh_shape=(2,))
    jitted = plain_jit(parallel.plan(jnp.ones(4), ONES, 1), step, static_argnums=(2,))
    for one in (1, 1.0, True, Level.ONE, 1):
        expected = float(ONES.sum()) * len(type(one).__name__)
        assert (float(parallel(jnp.ones(4), ONES, one)[1]), float(jitted(jnp.ones(4), ONES, one)[1])) == (expected,) * 2


def test_trees_with_static_leaves_that_are_equal_and_of_other_types_are_other_trees():
    trees = [jax.tree.structure(StaticValue(one)) for one in (1, 1.0, True, Level.ONE)]
    assert len({*trees}) == 4
    assert jax.tree.unflatten(trees[3], ()) == StaticValue(Level.ONE)


def test_each_static_leaf_is_compiled_for_once():
    traced = []

    def step(state, batch):
        traced.append(state["activation"].__name__)
        return state | {"w": state["activation"](state["w"])}, state["name"]

    step = autopar.parallelize(step, mesh_shape=(2,))
    state = {"w": jnp.ones(4), "activation": jnp.sin, "name": "first"}
    for activation in (jnp.sin, jnp.sin, jnp.cos, jnp.sin):
        state, name = step(state | {"activation": activation}, ONES)
        assert (name, state["activation"]) == ("first", activation)
    assert traced == ["sin", "cos"]
    np.testing.assert_allclose(state["w"], np.full(4, np.sin(np.cos(np.sin(np.sin(1))))), rtol=1e-6)


def test_plain_jit_takes_static_leaves_too():
    def step(state, batch):
        return state | {"w": state["f"](state["w"])}, batch.sum()

    state = {"w": jnp.ones(8), "f": jnp.sin}
    found, _ = plain_jit(autopar.parallelize(step, mesh_shape=(2,)).plan(state, ONES), step)(state, ONES)
    assert found["f"] is jnp.sin
    np.testing.assert_allclose(found["w"], np.sin(np.ones(8)), rtol=1e-6)


def test_leaves_of_the_batch_that_are_no_arrays_are_refused():
    batch = make_batch() | {"source": "web", "what": object()}
    refused(
        ArgumentError,
        lambda: planned(batch=batch),
        "the batch of train_step has leaves that are no arrays: batch/source is a str ('web'); batch/what is a object",
        "compiled for each of their values",
    )


def test_a_result_that_is_no_array_is_refused_by_jax_unless_it_came_in():
    with pytest.raises(TypeError, match="valid JAX type"):
        autopar.parallelize(lambda state, batch: (state, object()))(ONES, ONES)


def test_a_list_of_numbers_where_an_array_is_meant_is_named():
    refused(
        ArgumentError,
        lambda: autopar.parallelize(lambda w, x: (w, (x @ w).sum()))(jnp.ones(4), [[1.0, 2.0, 3.0, 4.0]] * 8),
        "is a list of Python numbers, each of which is an array of its own",
        "Pass an array, such as numpy.asarray(x)",
    )


# --- changes in place -------------------------------------------------------------------------------------------------


def test_an_argument_that_is_changed_in_place_and_not_returned_is_refused():
    def step(state, batch):
        state["w"] = state["w"] - batch.mean()
        return batch.sum()

    words = "step changes state/w in place and does not return it", "return state, loss"
    refused(UnsupportedProgramError, lambda: autopar.parallelize(step)({"w": jnp.ones(4), "n": 0}, ONES), *words)


def test_changes_in_place_that_are_returned_or_of_the_batch_are_fine():
    def step(state, batch):
        batch["x"] = batch["x"] / 2
        state["w"] = state["w"] - batch["x"].mean()
        state["n"] += 1
        return state, batch["x"].sum()

    state, total = autopar.parallelize(step, mesh_shape=(2,))({"w": jnp.ones(4), "n": 0}, {"x": ONES})
    assert (float(state["w"][0]), int(state["n"]), float(total)) == (0.5, 1, 16)


def test_a_state_that_is_changed_in_place_and_once_more_before_it_is_returned_is_fine_and_so_is_a_cast():
    def step(state, batch, table):
        table["t"] = table["t"].astype(jnp.bfloat16)
        state["w"] = state["w"] - batch.mean() * table["t"].sum()
        return jax.tree.map(lambda w: 2 * w, state), batch.sum()

    state, _ = autopar.parallelize(step, mesh_shape=(2,))({"w": jnp.zeros(4)}, ONES, {"t": jnp.ones((1,))})
    assert float(state["w"][0]) == -2


HISTORY, HOLDER = [], types.SimpleNamespace(best=None)


def stores_in_a_list(state, batch):
    HISTORY.append(batch.mean())
    return state, batch.sum()


def stores_in_an_object_of_a_helper(state, batch):
    def helper():
        HOLDER.best = {"loss": batch.mean()}

    helper()
    return state, batch.sum()


class Storing:
    losses = None

    @autopar.parallelize
    def step(self, state, batch):
        self.losses = (batch.sum(),)
        return state, batch.sum()


@pytest.mark.parametrize(
    ("step", "where"),
    [
        (autopar.parallelize(stores_in_a_list), "HISTORY[0]"),
        (autopar.parallelize(stores_in_an_object_of_a_helper), "HOLDER.best['loss']"),
        (Storing().step, "self.losses[0]"),
    ],
    ids=["list", "object", "self"],
)
def test_a_step_that_keeps_values_of_the_trace_is_refused_by_where(step, where):
    try:
        refused(UnsupportedProgramError, lambda: step(ONES, ONES), f"stores values in {where}", "return it")
    finally:
        HISTORY.clear()
        HOLDER.best = None


def test_objects_that_a_step_only_reads_or_counts_in_are_fine():
    calls = []

    def step(state, batch):
        calls.append(batch.shape)
        return state, batch.sum()

    assert float(autopar.parallelize(step, mesh_shape=(2,))(ONES, ONES)[1]) == 32
    assert calls == [(8, 4)]


# --- flax.nnx ---------------------------------------------------------------------------------------------------------


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.dropout = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.dropout(self.linear(x)))


def forward(model, x):
    return model(x).sum(axis=0)


def test_statistics_and_random_counters_of_a_module_go_on_as_under_nnx_jit():
    model, other = Noisy(nnx.Rngs(0)), Noisy(nnx.Rngs(0))
    step, expected = autopar.parallelize(forward, mesh_shape=(2,)), nnx.jit(forward)
    for _ in range(2):
        np.testing.assert_allclose(step(model, ONES), expected(other, ONES), rtol=1e-5, atol=1e-5)
    for found, wanted in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(other)), strict=True):
        if not jnp.issubdtype(found.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_objects_are_created_where_the_plan_has_them_from_shapes_alone():
    step = autopar.parallelize(nnx_step, mesh_shape=(2,), constraints=autopar.zero3())
    x, y = batches()[0]
    plan = step.plan(*nnx.eval_shape(model_and_optimizer), (x, y))
    model, optimizer = step.init_state(model_and_optimizer)
    spec = plan.input("model/a/kernel/value").partition_spec
    assert model.a.kernel[...].sharding.spec == spec != jax.sharding.PartitionSpec(None, None)
    np.testing.assert_allclose(
        step(model, optimizer, (x, y)), nnx.jit(nnx_step)(*model_and_optimizer(), (x, y)), rtol=1e-5
    )
    assert model.a.kernel[...].sharding.spec == spec


def test_a_module_that_is_only_read_stays_as_it_is_and_its_modes_are_compiled_for():
    model = Noisy(nnx.Rngs(0))
    step = autopar.parallelize(forward, mesh_shape=(2,))
    model.eval()
    kernel = model.linear.kernel[...]
    first = step(model, ONES)
    assert model.linear.kernel[...] is kernel
    np.testing.assert_allclose(first, nnx.jit(forward)(model, ONES), rtol=1e-5, atol=1e-5)
    model.train()
    assert not np.allclose(step(model, ONES), first)


def test_a_module_that_a_step_gives_another_structure_is_refused_with_what_to_write():
    def step(model, x):
        model.eval()
        return model(x).sum()

    refused(
        UnsupportedProgramError,
        lambda: autopar.parallelize(step)(Noisy(nnx.Rngs(0)), ONES),
        "changes an attribute: only the values of its variables may change in a step",
        "nnx.merge(graph, state)",
    )


def test_a_module_that_a_step_closes_over_and_changes_is_refused():
    model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    with pytest.raises(Exception, match="different trace level"):
        autopar.parallelize(lambda state, x: (state, model(x).sum()))(jnp.ones(4), ONES)

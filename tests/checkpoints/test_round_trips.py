"""A state that is saved under one plan and restored under another is the same, bit for bit, and lies where the plan says."""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import autopar
from autopar.checkpoints import orbax_leaf, register_with_orbax
from autopar.checkpoints.tuning import Tuning
from autopar.errors import ArgumentError
from autopar.split_array import SplitArray
from tests.checkpoints.steps import WAYS, bits, laid_out, make_batch, make_state, planned

step_of = functools.cache(planned)
FAST = [("zero3", "4_stages"), ("3_stages", "data_parallel"), ("2_stages", "3_stages"), ("whole", "2_stages")]


def saved_and_restored(folder, source, target):
    state = make_state(3)
    autopar.save(folder / "one", laid_out(step_of(source), state), step_of(source)).wait()
    return state, autopar.restore(folder / "one", step_of(target))


@pytest.mark.parametrize(("source", "target"), FAST)
def test_a_state_goes_from_one_plan_to_another(tmp_path, source, target):
    state, restored = saved_and_restored(tmp_path, source, target)
    assert bits(restored) == bits(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    places = jax.tree.leaves(step_of(target).places().state)
    for leaf, place in zip(jax.tree.leaves(restored), places, strict=True):
        assert leaf.sharding == place.sharding, place.path


@pytest.mark.parametrize(("source", "target", "blocks"), [("3_stages", "whole", 9), ("whole", "zero3", 2)])
def test_a_range_of_many_chunks_is_read_a_few_at_a_time(tmp_path, monkeypatch, source, target, blocks):
    tuning, read = Tuning(chunk_bytes=64, in_flight_bytes=256), []

    def noted(store, index, blocks_of=orbax_leaf.blocks_of):
        found = [*blocks_of(store, index)]
        assert all(orbax_leaf._bytes_of_chunks(store, block) <= tuning.in_flight_bytes for block in found)
        read.append(len(found))
        return found

    monkeypatch.setattr(orbax_leaf, "TUNING", tuning)
    monkeypatch.setattr(orbax_leaf, "blocks_of", noted)
    state, restored = saved_and_restored(tmp_path, source, target)
    assert bits(restored) == bits(state)
    assert max(read) >= blocks


def test_a_state_on_the_host_is_saved_too(tmp_path):
    made = make_state(5)
    state = {**made, "params": jax.tree.map(np.asarray, made["params"])}
    autopar.save(tmp_path / "one", state, step_of("zero3")).wait()
    assert bits(autopar.restore(tmp_path / "one", step_of("2_stages"))) == bits(state)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), [*itertools.product(WAYS, WAYS)])
def test_every_plan_reads_what_every_other_wrote(tmp_path, source, target):
    state, restored = saved_and_restored(tmp_path, source, target)
    assert bits(restored) == bits(state)


def test_a_step_goes_on_from_a_restored_state_as_if_nothing_had_been(tmp_path):
    step = step_of("2_stages")
    state, _ = step(laid_out(step, make_state()), make_batch(0))
    autopar.save(tmp_path / "one", state, step)
    state, loss = step(state, make_batch(1))  # takes the memory that is being saved
    again, same_loss = step(autopar.restore(tmp_path / "one", step), make_batch(1))
    assert bits(again) == bits(state)
    assert float(loss) == float(same_loss)


def test_no_two_devices_share_the_memory_of_a_restored_array(tmp_path):
    _, restored = saved_and_restored(tmp_path, "whole", "data_parallel")
    weights = restored["params"]["head"]
    assert len({shard.data.unsafe_buffer_pointer() for shard in weights.addressable_shards}) == 8


def test_orbax_alone_reads_a_checkpoint_and_writes_pieces_as_one_array(tmp_path):
    step = step_of("2_stages")
    state = laid_out(step, make_state())
    assert isinstance(state["params"]["stack"], SplitArray)
    autopar.save(tmp_path / "one", state, step).wait()
    plain = ocp.StandardCheckpointer().restore(tmp_path / "one" / "state")
    np.testing.assert_array_equal(plain["params"]["stack"], state["params"]["stack"])
    np.testing.assert_array_equal(plain["momentum"]["head"], state["momentum"]["head"])


def test_orbax_alone_writes_pieces_as_one_array_once_it_knows_them(tmp_path):
    step, state = step_of("2_stages"), make_state()
    held = {"stack": laid_out(step, state)["params"]["stack"], "count": state["count"]}
    assert isinstance(held["stack"], SplitArray)
    register_with_orbax()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "one", held)
    plain = ocp.StandardCheckpointer().restore(
        tmp_path / "one", {"stack": state["params"]["stack"], "count": state["count"]}
    )
    assert bits(plain) == bits({"stack": state["params"]["stack"], "count": state["count"]})
    again = ocp.StandardCheckpointer().restore(tmp_path / "one")
    np.testing.assert_array_equal(again["stack"], held["stack"])


def test_leaves_of_all_kinds_and_several_arguments_that_are_state(tmp_path):
    def fun(params, rest, x):
        return params - x.mean(), {**rest, "scale": rest["scale"] * 2}, x.sum()

    rest = {
        "scale": 1.0,  # weak
        "empty": jnp.zeros((0, 3)),
        "complex": jnp.ones(3, jnp.complex64) * 1j,
        "none": None,
        "list": [jnp.int8(3), jnp.arange(4, dtype=jnp.uint32)],
        "a/b.c": jnp.ones(2, jnp.float16),
    }
    step = autopar.parallelize(fun, mesh_shape=(2,), donate_argnums=())
    params, rest, _ = step(jnp.ones(4), rest, jnp.ones(8))
    autopar.save(tmp_path / "one", (params, rest), step).wait()
    restored = autopar.restore(tmp_path / "one", step)
    assert bits(restored) == bits((params, rest))
    assert restored[1]["scale"].weak_type
    step(*restored, jnp.ones(8))
    assert len(step._memory.programs.values()) == 1  # neither traced nor planned again


class Perceptron(nnx.Module):
    """Parameters, running statistics, and a key with its count for dropout."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.tanh(self.norm(self.up(x)))))


def change_objects(model, optimizer, x):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def make_objects(seed):
    model = Perceptron(nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def state_of(objects):
    return bits([nnx.state(one) for one in objects])


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_objects_of_nnx_that_a_step_changes_are_saved_and_updated_from_what_is_restored(tmp_path, stages):
    x, objects, others = jnp.arange(64.0).reshape(8, 8) / 64, make_objects(0), make_objects(1)
    source = autopar.parallelize(change_objects, mesh_shape=(2,))
    loss = source(*objects, x)
    autopar.save(tmp_path / "one", objects, source)
    expected = state_of(objects)
    assert source(*objects, x) != loss
    target = source
    if stages > 1:
        options = {"mesh_shape": (1,), "num_microbatches": 2, "batch_statistics": "microbatch"}
        target = autopar.parallelize(change_objects, num_stages=stages, **options)
        target.plan(*others, x)
    for one, state in zip(others, autopar.restore(tmp_path / "one", target), strict=True):
        nnx.update(one, state)
    assert state_of(others) == expected
    target(*others, x)
    assert (state_of(others) == state_of(objects)) == (target is source)


def test_keys_with_slashes_are_told_from_nested_ones_and_keep_their_types(tmp_path):
    def step(state, batch):
        return jax.tree.map(lambda x: x + x, state), batch.sum()

    state = {"a/b": jnp.full((4,), 0.5), "a": {"b": jnp.arange(3), "b/c": jnp.ones(2)}, "c/d": np.float32(2)}
    parallel = autopar.parallelize(step, mesh_shape=(2,), donate_argnums=())
    parallel.plan(state, jnp.ones(8))
    autopar.save(tmp_path / "one", state, parallel).wait()
    found = autopar.restore(tmp_path / "one", parallel)
    assert bits(found) == bits(jax.tree.map(jnp.asarray, state))
    assert [path for path, x in jax.tree.leaves_with_path(found) if x.weak_type] == [(jax.tree_util.DictKey("a/b"),)]


def test_keys_that_have_one_text_are_refused(tmp_path):
    state = collections.OrderedDict({1: jnp.ones(2), "1": jnp.zeros(2)})
    parallel = autopar.parallelize(lambda state, batch: (state, batch.sum()), mesh_shape=(2,))
    parallel.plan(state, jnp.ones(8))
    with pytest.raises(
        ArgumentError, match=r"two arrays of the state are called 1 in a checkpoint.*rename one of the keys"
    ):
        autopar.save(tmp_path / "one", state, parallel)


def odd_state():
    """Leaves of every odd type: those that files lack, packed ones, keys, an empty array, numbers of Python."""
    return {
        "params": [jnp.ones((8, 8)), jnp.ones((8, 8))],
        "types": {
            name: jnp.arange(16).astype(name) for name in ("int4", "uint2", "float4_e2m1fn", "float8_e4m3", "bfloat16")
        },
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 4),
        "complex": jnp.ones(8, jnp.complex64),
        "flags": jnp.array([True, False] * 4),
        "empty": jnp.zeros((0, 5)),
        "number": 3,
        "nothing": None,
    }


def odd_step(state, batch):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w[0]) @ w[1]))(state["params"])
    return {**state, "params": jax.tree.map(lambda w, g: w - 0.1 * g, state["params"], gradient)}, loss


def test_leaves_of_odd_types_come_back_bit_for_bit(tmp_path):
    batch, steps = np.ones((8, 8), np.float32), []
    for options in ({"constraints": autopar.zero3()}, {"num_stages": 2}):
        step = autopar.parallelize(odd_step, devices=4, **options)
        state, _ = step(odd_state(), batch)
        state, _ = step(state, batch)
        steps.append((step, state))
    for number, ((source, state), (target, _)) in enumerate(itertools.permutations(steps, 2)):
        autopar.save(tmp_path / str(number), state, source).wait()
        restored = autopar.restore(tmp_path / str(number), target)
        assert bits(restored) == bits(state)
        assert [leaf.dtype for leaf in jax.tree.leaves(restored)] == [leaf.dtype for leaf in jax.tree.leaves(state)]
        target(restored, batch)

"""An array in pieces on several devices is, to who reads it, the NumPy array that it stands for."""

import copy
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.compat import make_mesh
from autopar.errors import ArgumentError
from autopar.split_array import (
    READS,
    LeafPieces,
    SplitArray,
    SplitSharding,
    cut_array,
    cut_leaves,
    join_leaves,
    leaf_shardings,
    take_apart,
    take_shardings_apart,
)

WHOLE = np.arange(24, dtype=np.float32).reshape(4, 6)


def on(number):
    """A sharding over one device."""
    return NamedSharding(make_mesh(np.array(jax.devices()[number : number + 1]), ("x",)), P())


def split(dim=1, bounds=(0, 1, 6), whole=WHOLE):
    """The array cut along a dimension, its pieces on devices 0, 1, ..."""
    parts = cut_array(whole, LeafPieces(0, dim, bounds))
    return SplitArray([jax.device_put(part, on(n)) for n, part in enumerate(parts)], dim)


@pytest.mark.parametrize(("dim", "bounds"), [(0, (0, 3, 4)), (1, (0, 1, 6)), (1, (0, 2, 3, 6))])
def test_it_reads_as_the_array_that_it_stands_for(dim, bounds):
    array = split(dim, bounds)
    assert (array.shape, array.ndim, array.size, array.nbytes, array.dtype) == ((4, 6), 2, 24, 96, np.float32)
    assert (array.dim, array.bounds, len(array)) == (dim, bounds, 4)
    np.testing.assert_array_equal(np.asarray(array), WHOLE)
    np.testing.assert_array_equal(array[1:, 2], WHOLE[1:, 2])
    np.testing.assert_array_equal(list(array), list(WHOLE))
    np.testing.assert_array_equal(jnp.asarray(array), WHOLE)
    assert {device.id for device in array.devices()} == set(range(len(bounds) - 1))
    assert array.sharding == SplitSharding(dim, bounds, tuple(on(n) for n in range(len(bounds) - 1)))
    assert {device.id for device in array.sharding.device_set} == set(range(len(bounds) - 1))


def test_it_computes_and_compares_with_arrays_of_every_kind():
    array = split()
    for other in (WHOLE, jnp.asarray(WHOLE), array, 2.0):
        np.testing.assert_array_equal(array * other, WHOLE * np.asarray(other))
        np.testing.assert_array_equal(other - array, np.asarray(other) - WHOLE)
    assert (array == WHOLE).all()
    assert np.add.reduce(array).tolist() == WHOLE.sum(axis=0).tolist()
    with pytest.raises(ValueError, match="truth value of an array with more than one element is ambiguous"):
        bool(array)


@pytest.mark.parametrize("change", [operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow])
def test_an_operator_in_place_gives_the_name_to_a_new_array(change):
    array = before = split()
    array = change(array, 2)
    assert type(array) is np.ndarray
    np.testing.assert_array_equal(array, change(WHOLE.copy(), 2))
    np.testing.assert_array_equal(before, WHOLE)


def test_it_is_not_written_to_but_an_ordinary_array_may_take_what_is_computed():
    with pytest.raises(TypeError, match="out= is a SplitArray, which cannot be written to"):
        np.add(1, 1, out=split())
    total = np.ones_like(WHOLE)
    total += split()
    np.testing.assert_array_equal(total, WHOLE + 1)


def test_it_has_the_methods_of_a_numpy_array_that_read():
    array = split()
    assert array.sum() == WHOLE.sum()
    assert (array.max(), array.min(), array.std()) == (WHOLE.max(), WHOLE.min(), WHOLE.std())
    np.testing.assert_array_equal(array.mean(axis=1), WHOLE.mean(axis=1))
    np.testing.assert_array_equal(array.T, WHOLE.T)
    np.testing.assert_array_equal(array.reshape(-1), WHOLE.ravel())
    assert array.astype(jnp.bfloat16).dtype == jnp.bfloat16
    assert array[0, :1].item() == 0
    assert array.copy() is not array
    assert all(hasattr(array, name) for name in READS)
    np.testing.assert_allclose(optax.tree.norm({"w": array}), np.linalg.norm(WHOLE), rtol=1e-6)


@pytest.mark.parametrize("name", ["at", "fill", "sort", "addressable_shards"])
def test_what_it_has_not_is_said_with_what_to_call_instead(name):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'.*step.gather\(state\) gives jax.Arrays"):
        getattr(split(), name)


def test_arrays_like_it_are_made_by_jax():
    for made, value in ((jnp.zeros_like(split()), 0), (jnp.ones_like(split()), 1), (jnp.full_like(split(), 7), 7)):
        assert isinstance(made, jax.Array)
        np.testing.assert_array_equal(made, np.full_like(WHOLE, value))


def test_it_becomes_an_array_of_another_type_but_never_without_a_copy():
    assert np.asarray(split(), np.int8).dtype == np.int8
    np.testing.assert_array_equal(np.array(split(), copy=True), WHOLE)
    with pytest.raises(ValueError, match="an array in pieces is copied when it becomes one array"):
        np.array(split(), copy=False)


@pytest.mark.parametrize("place", [None, on(5), jax.devices()[3]], ids=["anywhere", "sharding", "device"])
def test_it_is_put_on_devices_as_an_ordinary_array(place):
    put = jax.device_put({"w": split()}, place)["w"]
    assert isinstance(put, jax.Array)
    assert place is None or put.devices() == (place.device_set if isinstance(place, NamedSharding) else {place})
    np.testing.assert_array_equal(put, WHOLE)
    assert jax.eval_shape(lambda x: x, split()) == jax.ShapeDtypeStruct(WHOLE.shape, WHOLE.dtype)


@pytest.mark.parametrize("compute", [jax.jit(lambda x: 2 * x), jnp.sum])
def test_what_jax_computes_refuses_it_with_what_to_give_instead(compute):
    with pytest.raises(ArgumentError, match=r"a SplitArray lies on several: give it step.gather\(leaf\)"):
        compute(split())


def test_keys_in_pieces_are_put_nowhere():
    keys = SplitArray([jax.device_put(jax.random.split(jax.random.key(n), 2), on(n)) for n in range(2)])
    with pytest.raises(ArgumentError, match="holds keys, which have no NumPy array"):
        jax.device_put(keys)


@pytest.mark.parametrize("save", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy])
def test_what_is_saved_of_it_is_a_numpy_array(save):
    saved = save(split())
    assert type(saved) is np.ndarray
    np.testing.assert_array_equal(saved, WHOLE)


def test_it_says_where_its_pieces_are_and_which_are_gone():
    array = split()
    assert repr(array) == "SplitArray(float32[4, 6], dimension 1: 0:1 on device 0, 1:6 on device 1)"
    assert not array.is_deleted()
    array.copy_to_host_async()
    assert array.block_until_ready() is array
    array.pieces[1].delete()
    assert repr(array) == "SplitArray(float32[4, 6], dimension 1: 0:1 on device 0, 1:6 deleted)"
    assert array.is_deleted()
    array.delete()
    assert array.pieces[0].is_deleted()


def test_of_leaves_that_are_held_in_pieces_those_cut_alike_are_taken_as_they_are():
    array, host = split(), WHOLE + 1
    held = [LeafPieces(0, 1, (0, 1, 6)), LeafPieces(2), LeafPieces(3, 0, (0, 2, 4))]
    parts = cut_leaves([array, host, host], held)
    assert parts[0] is array.pieces[0]
    assert parts[1] is array.pieces[1]
    assert parts[2] is host
    np.testing.assert_array_equal(parts[3], host[:2])
    np.testing.assert_array_equal(parts[4], host[2:])


@pytest.mark.parametrize(("dim", "bounds"), [(1, (0, 3, 6)), (0, (0, 1, 4))])
def test_one_that_is_cut_elsewhere_is_cut_anew(dim, bounds):
    parts = cut_leaves([split()], [LeafPieces(0, dim, bounds)])
    np.testing.assert_array_equal(np.concatenate(parts, axis=dim), WHOLE)
    assert [part.shape[dim] for part in parts] == np.diff(bounds).tolist()


def test_one_that_is_cut_alike_along_another_dimension_is_cut_anew():
    square = WHOLE[:, :4]
    parts = cut_leaves([split(1, (0, 1, 4), square)], [LeafPieces(0, 0, (0, 1, 4))])
    np.testing.assert_array_equal(parts[0], square[:1])
    np.testing.assert_array_equal(parts[1], square[1:])


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_arrays_of_every_kind_are_cut_along_any_dimension(kind):
    left, right = cut_array(kind(WHOLE), LeafPieces(0, 1, (0, 2, 6)))
    np.testing.assert_array_equal(left, WHOLE[:, :2])
    np.testing.assert_array_equal(right, WHOLE[:, 2:])


def test_one_is_read_whole_where_a_leaf_is_whole():
    (part,) = cut_leaves([split()], [LeafPieces(0)])
    np.testing.assert_array_equal(part, WHOLE)


def test_leaves_taken_apart_are_joined_again():
    leaves = [split(), np.ones(3), split(0, (0, 3, 4))]
    held, parts = take_apart(leaves)
    assert held == [LeafPieces(0, 1, (0, 1, 6)), LeafPieces(2), LeafPieces(3, 0, (0, 3, 4))]
    assert [pieces.count for pieces in held] == [2, 1, 2]
    again = join_leaves(parts, held)
    assert again[1] is leaves[1]
    for found, leaf in ((again[0], leaves[0]), (again[2], leaves[2])):
        assert (found.pieces, found.dim) == (leaf.pieces, leaf.dim)


def test_shardings_of_leaves_are_those_of_their_parts_and_back():
    shardings = [on(3), SplitSharding(1, (0, 1, 6), (on(0), on(1))), on(2)]
    held, places = take_shardings_apart(shardings)
    assert places == [on(3), on(0), on(1), on(2)]
    assert held == [LeafPieces(0), LeafPieces(1, 1, (0, 1, 6)), LeafPieces(3)]
    assert leaf_shardings(held, dict(enumerate(places))) == dict(enumerate(shardings))
    assert leaf_shardings([*held, LeafPieces(4)], dict(enumerate(places))).keys() == {0, 1, 2}

"""The chunks of a leaf's file: small enough, never across a shard's border, and few."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.checkpoints import orbax_leaf
from autopar.checkpoints.parts import chunk_shape, parts_to_write
from autopar.checkpoints.tuning import Tuning
from autopar.split_array import SplitArray

FLOAT_BYTES = 4
shapes = st.lists(st.integers(0, 60), min_size=0, max_size=3).map(tuple)


def divided(shape, spec):
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    return jax.device_put(jnp.arange(float(math.prod(shape))).reshape(shape), NamedSharding(mesh, spec))


def count(shape, chunk):
    return math.prod(-(-size // part) for size, part in zip(shape, chunk, strict=True))


@given(shapes, st.integers(1, 400))
def test_the_chunks_of_a_whole_array_are_small_and_few(shape, most):
    chunk = chunk_shape(np.zeros(shape, np.float32), most_bytes=most * FLOAT_BYTES)
    assert math.prod(chunk) <= most
    assert all(1 <= part <= max(size, 1) for part, size in zip(chunk, shape, strict=True))
    assert count(shape, chunk) <= max(1, 8 * math.prod(shape) / most)


@settings(max_examples=12)
@given(st.integers(1, 30), st.integers(1, 40), st.sampled_from([P("x"), P(None, "x")]), st.integers(1, 400))
def test_no_chunk_of_a_divided_array_crosses_a_border_of_shards(rows, columns, spec, most):
    dim = len(spec) - 1
    shape = (4 * rows, columns) if dim == 0 else (columns, 4 * rows)
    chunk = chunk_shape(divided(shape, spec), most_bytes=most * FLOAT_BYTES)
    assert math.prod(chunk) <= most
    assert rows % chunk[dim] == 0


def test_a_prime_number_of_rows_is_not_cut_into_single_ones():
    vocabulary = 10_007
    assert count((vocabulary, 64), chunk_shape(np.zeros((vocabulary, 64), np.float32), most_bytes=2**16)) <= 45
    assert chunk_shape(divided((vocabulary, 64), P(None, "x")), most_bytes=2**16)[0] > 500
    assert chunk_shape(divided((4 * 2503, 64), P("x")), most_bytes=2**16) == (2503, 6)


def test_chunks_are_whole_rows_where_these_divide_a_shard():
    assert chunk_shape(divided((4 * 48, 2048), P("x")), most_bytes=2**16) == (8, 2048)


def test_a_divided_stack_is_cut_where_all_its_pieces_are():
    stack = SplitArray([divided((8, 7, 5), P("x")), divided((4, 7, 5), P("x"))], dim=0)
    assert chunk_shape(stack, most_bytes=20 * FLOAT_BYTES) == (1, 4, 5)


@pytest.mark.parametrize(("dim", "spec"), [(0, P("x")), (0, P(None, None, "x")), (1, P("x")), (2, P(None, "x"))])
def test_the_parts_of_a_divided_stack_are_each_of_its_entries_once(dim, spec):
    shape = [8, 12, 4]
    shape[dim] = 4
    stack = SplitArray([divided(tuple(shape), spec), divided(tuple(shape), spec)], dim=dim)
    written = np.full(stack.shape, np.nan)
    for part in parts_to_write(stack, is_writer=True):
        assert np.isnan(written[part.index]).all()
        written[part.index] = part.on_host()
    np.testing.assert_array_equal(written, np.asarray(stack))


@pytest.mark.parametrize(("shape", "spec"), [((53, 47), P()), ((52, 470), P("x")), ((53, 44), P(None, "x"))])
def test_an_array_with_a_shorter_last_chunk_comes_back(tmp_path, monkeypatch, shape, spec):
    tuning = Tuning(chunk_bytes=100 * FLOAT_BYTES)
    monkeypatch.setattr(orbax_leaf, "TUNING", tuning)
    state = divided(shape, spec)
    chunk = chunk_shape(state, most_bytes=tuning.chunk_bytes)
    assert any(size % part for size, part in zip(shape, chunk, strict=True))
    step = autopar.parallelize(lambda state, batch: (state + batch, state.sum()), devices=4)
    step.plan(state, 1.0)
    autopar.save(tmp_path / "one", state, step).wait()
    np.testing.assert_array_equal(autopar.restore(tmp_path / "one", step), state)

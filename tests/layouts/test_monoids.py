"""Monoids: what devices combine is what NumPy combines, bit for bit where one answer is right, NaN and infinity included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.layouts.monoids import COMBINE, all_reduce, neutral_element
from autopar.layouts.moves import Move
from autopar.layouts.perform import perform_move
from tests.layouts.values import device_mesh

FLOATS = ["float32", "float16", "bfloat16", "float4_e2m1fn"]
FLOATS += [f"float8_{name}" for name in ("e4m3fn", "e5m2", "e4m3b11fnuz", "e4m3fnuz", "e3m4")]
SHORT_INTEGERS = ["int2", "uint2", "int4", "uint4"]
INTEGERS = ["int8", "uint8", "int16", "uint32", "int32"]
DEVICES = 4
MESH = LogicalMesh.of((DEVICES,))


def numbers_of(dtype):
    """What each device holds, DEVICES first: all pairs of numbers that matter meet on some two devices."""
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        edges = [info.min, info.min + 1, 0, 1, info.max - 1, info.max]
    else:
        info = jnp.finfo(dtype)
        edges = [0.0, 1.0, -1.0, 0.5, np.inf, -np.inf, np.nan, float(info.max), float(info.min), float(info.tiny)]
    pairs = [(a, b) for a in edges for b in edges]
    rows = [[pair[device % 2] for pair in pairs] for device in (0, 1, 1, 0)]
    return np.asarray(rows).astype(dtype)


def combined(values, monoid):
    """The all-reduces of several arrays in one program, as every device has them."""
    spec = PartitionSpec("x")
    run = lambda *shards: [all_reduce(x, ("x",), monoid) for x in shards]  # noqa: E731
    mapped = jax.shard_map(run, mesh=device_mesh((DEVICES,)), in_specs=spec, out_specs=spec, check_vma=False)
    return [np.asarray(x) for x in jax.jit(mapped)(*values)]


@pytest.mark.parametrize("monoid", ["max", "min"])
def test_the_extreme_of_numbers_is_numpys_and_nan_where_a_device_has_nan(monoid):
    held = [numbers_of(dtype) for dtype in (*FLOATS, "int8", "uint32")]
    for mine, value in zip(held, combined(held, monoid), strict=True):
        wide = mine.astype(np.float64)
        expected = np.broadcast_to(getattr(np, monoid)(wide, axis=0), wide.shape)
        np.testing.assert_array_equal(value.astype(np.float64), expected, err_msg=str(mine.dtype))
        assert value.dtype == mine.dtype


@pytest.mark.sampled(4)
@pytest.mark.parametrize("monoid", COMBINE)
def test_a_neutral_element_changes_no_bit(monoid):
    if monoid in ("or", "and"):
        values = [np.asarray([False, True])]
    else:
        values = [numbers_of(dtype) for dtype in (*FLOATS[:3], *INTEGERS)]
        values.append(np.asarray([-0.0, 0.0], np.float32))
        values.append(
            np.asarray([complex(-0.0, -0.0), complex(0.0, np.inf)], np.complex64) if monoid == "sum" else True
        )
    for value in map(jnp.asarray, values):
        result = COMBINE[monoid](neutral_element(monoid, value.dtype), value)
        given, made = (np.asarray(x) for x in (value, result.astype(value.dtype)))
        is_number = ~np.isnan(given) if given.dtype.kind in "fc" else np.ones(given.shape, bool)
        assert given[is_number].tobytes() == made[is_number].tobytes(), value.dtype


MOVES = {
    "mask": Move(kind="mask", axes=(0,), source=Layout(((),)), target=Layout(((),), ((0, "sum"),)), monoid="sum"),
    "all-gather": Move(kind="all-gather", axes=(0,), source=Layout(((0,),)), target=Layout(((),)), from_dim=0),
    "all-reduce": Move(
        kind="all-reduce", axes=(0,), source=Layout(((),), ((0, "sum"),)), target=Layout(((),)), monoid="sum"
    ),
    "all-to-all": Move(
        kind="all-to-all", axes=(0,), source=Layout(((0,), ())), target=Layout(((), (0,))), from_dim=0, to_dim=1
    ),
    "reduce-scatter": Move(
        kind="reduce-scatter",
        axes=(0,),
        source=Layout(((),), ((0, "sum"),)),
        target=Layout(((0,),)),
        to_dim=0,
        monoid="sum",
    ),
}


def moved(value, kind):
    """What the devices hold after a move of the same shards on each of them, device dimension first."""

    def run(whole):
        return perform_move(MOVES[kind], whole, MESH)[None]

    none, spec = PartitionSpec(), PartitionSpec("x")
    mapped = jax.shard_map(run, mesh=device_mesh((DEVICES,)), in_specs=none, out_specs=spec, check_vma=False)
    return np.asarray(jax.jit(mapped)(value))


def test_moves_that_add_nothing_up_keep_the_sign_of_zero():
    value = jnp.full((8, 8), -0.0)
    assert all(np.signbit(moved(value, kind)).all() for kind in ("all-gather", "all-to-all", "mask"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", SHORT_INTEGERS)
@pytest.mark.parametrize("kind", MOVES)
def test_integers_of_less_than_a_byte_move_and_wrap_like_others(kind, dtype):
    low = jnp.iinfo(dtype).min
    value = np.arange(64).reshape(8, 8) % 4 + low
    actual = moved(jnp.asarray(value, dtype), kind).astype(np.int64)
    expected = moved(jnp.asarray(value, jnp.int32), kind)
    np.testing.assert_array_equal(actual, np.asarray(jnp.asarray(expected).astype(dtype)).astype(np.int64))

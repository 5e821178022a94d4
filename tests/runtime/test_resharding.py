"""Arrays moved between meshes of the eight virtual devices equal their source and have the target's sharding."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from autopar.compat import make_mesh
from autopar.errors import ArgumentError
from autopar.runtime.resharding import BatchResharder, Move, Resharder, reshard
from autopar.runtime.tiles import Links, Tiling

# (source mesh, first source device) -> (target mesh, first target device)
PLACES = [
    ((2, 2), 0, (2, 2), 4),
    ((1, 4), 0, (2, 2), 4),
    ((4,), 0, (2,), 4),
    ((2,), 0, (4,), 4),
    ((1,), 0, (8,), 0),
    ((8,), 0, (1,), 3),
    ((2, 4), 0, (2, 4), 0),
    ((2, 4), 0, (4, 2), 0),
    ((4,), 0, (4,), 2),
    ((3,), 0, (2, 2), 4),
    ((2, 2), 0, (3,), 5),
    ((2, 3), 0, (3, 2), 2),
    ((1,), 2, (1,), 2),
]


def sharding_on(mesh_shape, first_device, spec):
    size = math.prod(mesh_shape)
    devices = np.array(jax.devices()[first_device : first_device + size]).reshape(mesh_shape)
    return NamedSharding(make_mesh(devices, tuple("xyz"[: len(mesh_shape)])), spec)


def moved_from(sharding, value):
    return jax.device_put(value, sharding)


def numbers(shape, dtype=np.float32):
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype)


def check(array, value, target):
    assert array.sharding.is_equivalent_to(target, value.ndim)
    assert array.sharding == target
    assert array.committed
    np.testing.assert_array_equal(np.asarray(array), value)


@st.composite
def specs(draw, mesh_shape, shape):
    """A spec whose axes divide the shape."""
    axes = draw(st.permutations(range(len(mesh_shape))))
    spec = [[] for _ in shape]
    left = list(shape)
    for axis in axes:
        dims = [dim for dim, size in enumerate(left) if size % mesh_shape[axis] == 0]
        dim = draw(st.sampled_from([None, *dims]))
        if dim is not None:
            spec[dim].append("xyz"[axis])
            left[dim] //= mesh_shape[axis]
    return P(*[tuple(names) or None for names in spec])


@st.composite
def moves(draw):
    source_mesh, source_first, target_mesh, target_first = draw(st.sampled_from(PLACES))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 6, 8, 12, 24]), max_size=3)))
    source = sharding_on(source_mesh, source_first, draw(specs(source_mesh, shape)))
    target = sharding_on(target_mesh, target_first, draw(specs(target_mesh, shape)))
    return shape, source, target


def links_without_slack(move):
    source, target = Tiling.of_sharding(move.source, move.shape), Tiling.of_sharding(move.target, move.shape)
    nodes = Links.between(source, target).node_of
    return Links(nodes, slack_bytes=0, call_bytes=0, message_bytes=0)


@given(moves(), st.booleans())
@settings(max_examples=150)
def test_a_moved_array_equals_its_source_and_has_the_target_sharding(move, exact):
    shape, source, target = move
    value = numbers(shape)
    array = moved_from(source, value)
    links = links_without_slack(Move.of(array, target)) if exact else None
    check(Resharder(shape, np.float32, source, target, links=links)(array), value, target)

"""What devices hold of a value in a layout: tiles, replicas, and terms that combine to a partial value."""

import functools

import jax
import numpy as np

from autopar.compat import make_mesh
from autopar.layouts.mesh import Layout, LogicalMesh

COMBINE = {"sum": np.sum, "max": np.max, "min": np.min, "or": np.max, "and": np.min}


@functools.cache
def device_mesh(mesh_shape):
    mesh = LogicalMesh.of(mesh_shape)
    return make_mesh(np.array(jax.devices()[: mesh.size]).reshape(mesh.shape), mesh.axis_names)


def held_by_devices(value, layout, mesh):
    """What each device holds, mesh dimensions first: its tile of the value, and of a partial value terms that differ."""
    holds = np.empty((*mesh.shape, *layout.local_shape(value.shape, mesh)), value.dtype)
    for position in np.ndindex(*mesh.shape):
        tile = value
        for dim, axes in enumerate(layout.dims):
            index, ways = 0, mesh.ways(axes)
            for axis in axes:
                index = index * mesh.shape[axis] + position[axis]
            tile = np.split(tile, ways, axis=dim)[index]
        for axis, monoid in layout.partial:
            tile = term(tile, monoid, position[axis], mesh.shape[axis])
        holds[position] = tile
    return holds


def term(tile, monoid, number, count):
    """One of `count` terms that combine to `tile`: whole numbers, so that sums are exact."""
    if monoid == "sum":
        return tile - sum(range(1, count)) if number == 0 else np.full_like(tile, number)
    away = {"max": -1, "min": 1}[monoid] * ((np.arange(tile.size).reshape(tile.shape) + number) % count)
    return tile + away


def assert_holds(holds, value, layout, mesh, *, atol=0.0):
    """The devices hold `value` in this layout: replicas equal, tiles in place, terms combining to it."""
    combined = holds
    for axis, monoid in layout.partial:
        reduced = COMBINE[monoid](combined, axis=axis, keepdims=True).astype(combined.dtype)
        combined = np.broadcast_to(reduced, combined.shape)
    expected = held_by_devices(value, Layout(layout.dims), mesh)
    if atol:
        np.testing.assert_allclose(combined, expected, rtol=0, atol=atol)
    else:
        np.testing.assert_array_equal(combined, expected)

"""Create state on the devices of a plan, and gather it from there as ordinary arrays.

In: a function that makes the state, and shardings; or a tree of arrays on any devices. Out: the tree. What can go wrong: the
state is too large for any one device. So each device makes only its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from autopar.events import reach
from autopar.program.call import PyTree
from autopar.runtime.processes import absent_like, are_here, as_host, is_here
from autopar.runtime.resharding.reshard import bring_here
from autopar.split_array import SplitArray, SplitSharding, cut_leaves, join_leaves, take_apart, take_shardings_apart

T = TypeVar("T")


def create_sharded(
    create_fn: Callable[..., PyTree], args: Sequence[PyTree], shardings: Sequence[NamedSharding | SplitSharding]
) -> PyTree:
    """Compute `create_fn(*args)` with its leaves in the given shardings. No device holds more than its part at any time.

    Leaves, and pieces of leaves, that live on different meshes are made by one program per mesh, in the processes that have
    devices of it.
    """
    tree = jax.tree.structure(jax.eval_shape(create_fn, *args))
    held, places = take_shardings_apart(shardings)
    if not all(are_here(sharding.device_set) for sharding in places):
        args = jax.tree.map(as_host, tuple(args))
    meshes = list(dict.fromkeys(sharding.mesh for sharding in places))
    made: dict[int, jax.Array] = {}
    for mesh in meshes:
        here = [i for i, sharding in enumerate(places) if sharding.mesh == mesh]

        def make_parts(*given: PyTree, here: Sequence[int] = here) -> list[jax.typing.ArrayLike]:
            parts = cut_leaves(jax.tree.leaves(create_fn(*given)), held)
            return [parts[i] for i in here]

        if is_here(places[here[0]]):
            arrays = jax.jit(make_parts, out_shardings=[places[i] for i in here])(*args)
        else:
            arrays = list(map(absent_like, jax.eval_shape(make_parts, *args), [places[i] for i in here]))
        for i, array in zip(here, arrays, strict=True):
            made[i] = array
    return jax.tree.unflatten(tree, join_leaves([made[i] for i in range(len(places))], held))


def gather_to_one(tree: T, devices: Sequence[jax.Device]) -> T:
    """Gather a tree as ordinary arrays on one device: the first device, or with several processes the first of each."""
    leaves, structure = jax.tree.flatten(tree)
    reach("gather", f"{len(leaves)} arrays")
    held, parts = take_apart(leaves)
    if are_here(devices):
        found = [jax.device_put(x, devices[0]) if isinstance(x, jax.Array) else x for x in parts]
    else:
        found = bring_here(parts, devices)
    whole = [
        jnp.concatenate(x.pieces, axis=x.dim) if isinstance(x, SplitArray) else x for x in join_leaves(found, held)
    ]
    gathered: T = jax.tree.unflatten(structure, whole)
    return gathered

"""Find the entries of a leaf that each process writes, and those that each device reads.

In: a leaf on devices, or the sharding that it is to have. Out: ranges of entries with their numbers in host memory, and the shape
of the chunks in which a file holds the leaf. A chunk belongs to one shard, so that no two processes write the same one: its sizes
divide every boundary between shards, those between the pieces of a `SplitArray` included. What can go wrong: nothing that depends
on this process alone may decide on the chunks, for all processes have to name the same ones.

A key of `jax.random` is held as its words, which are one more dimension; types that TensorStore lacks are held as bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax.sharding import Sharding

from autopar.runtime.processes import is_global
from autopar.split_array import SplitArray, SplitSharding

Saved: TypeAlias = jax.Array | np.ndarray | SplitArray
"""An array of a state: on devices, on the host of every process, or in pieces on several meshes."""
Index: TypeAlias = tuple[slice, ...]
"""A range of entries along each dimension, from 0, without steps."""


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Some entries of a leaf that this process is to write, on one device or, if every process has them, on the host."""

    index: Index
    data: jax.Array | np.ndarray

    def start_copy(self) -> None:
        """Start the copy to the host."""
        if isinstance(self.data, jax.Array) and not _is_key(self.data):
            self.data.copy_to_host_async()

    def on_host(self) -> np.ndarray:
        """Return the numbers in memory of their own, because a step may take the memory of the array meanwhile."""
        if not isinstance(self.data, jax.Array):
            return np.array(self.data)
        words = jax.random.key_data(self.data) if _is_key(self.data) else self.data
        # NumPy may look into the memory of a CPU device; from any other device it has made a copy.
        is_shared = any(device.platform == "cpu" for device in self.data.devices())
        return np.array(words, copy=True) if is_shared else np.asarray(words)


def _is_key(leaf: jax.Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def words_per_entry(dtype: np.dtype) -> tuple[tuple[int, ...], np.dtype]:
    """Return the further dimensions, and the type, in which a file holds entries of this type."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return (), np.dtype(dtype) if _is_known_to_files(dtype) else np.dtype(np.uint8)
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
    return tuple(words.shape), np.dtype(words.dtype)


@functools.cache
def _is_known_to_files(dtype: np.dtype) -> bool:
    """Whether TensorStore has this type. Types that it lacks, such as uint4, take a byte for each entry on the host."""
    try:
        ts.dtype(dtype.name)
    except (TypeError, ValueError):
        assert dtype.itemsize == 1, f"no file holds entries of {dtype}"
        return False
    return True


def parts_to_write(leaf: Saved, *, is_writer: bool) -> list[Part]:
    """Return the entries of a leaf that this process writes. Of equal copies only the first is written.

    Args:
        leaf: an array on devices, in pieces or whole, or a value that every process has.
        is_writer: whether this process writes what every process has.
    """
    if isinstance(leaf, SplitArray):
        return [
            Part(_shifted(part.index, leaf.dim, start), part.data)
            for start, piece in zip(leaf.bounds, leaf.pieces, strict=False)
            for part in parts_to_write(piece, is_writer=is_writer)
        ]
    if not is_global(leaf):
        if not is_writer:
            return []
        return [Part(tuple(slice(0, size) for size in leaf.shape), leaf)]
    shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    return [Part(_closed(shard.index, leaf.shape), shard.data) for shard in shards]


def _shifted(index: Index, dim: int, by: int) -> Index:
    moved = slice(index[dim].start + by, index[dim].stop + by)
    return (*index[:dim], moved, *index[dim + 1 :])


def _closed(index: Sequence[slice], shape: Sequence[int]) -> Index:
    """Return the ranges with both ends. In JAX 0.10 to 0.12 an array of keys has one for the words as well."""
    return tuple(slice(*s.indices(size)[:2]) for s, size in zip(index, shape, strict=False))


def chunk_shape(leaf: Saved, *, most_bytes: int) -> tuple[int, ...]:
    """Return the shape of the chunks of a leaf, without the words of a key. All processes find the same shape.

    A dimension that is divided has chunks that divide its shards; one that is whole is cut anywhere, and its last chunk may be
    shorter. So a prime number of rows, such as of a vocabulary, is not cut into single ones.
    """
    shape = tuple(np.shape(leaf))
    if isinstance(leaf, SplitArray):
        pieces = [piece.sharding.shard_shape(piece.shape) for piece in leaf.pieces]
        sizes = [math.gcd(*(piece[d] for piece in pieces)) for d in range(len(shape))]
        sizes[leaf.dim] = math.gcd(sizes[leaf.dim], *leaf.bounds)
    elif is_global(leaf):
        sizes = list(leaf.sharding.shard_shape(shape))
    else:
        sizes = list(shape)
    extra, dtype = words_per_entry(leaf.dtype)
    is_whole = [size == full for size, full in zip(sizes, shape, strict=True)]
    return _cut([max(size, 1) for size in sizes], is_whole, most_bytes / math.prod((*extra, dtype.itemsize)))


def _cut(sizes: list[int], is_whole: Sequence[bool], most: float) -> tuple[int, ...]:
    """Choose sizes whose product is at most `most`; ones if there are none.

    One dimension is cut where that is enough: the first that leaves a quarter of `most`, since chunks of whole rows are copied as
    one run of memory, or else the one that leaves the most. Where no dimension is enough, the largest is cut to one.
    """
    while math.prod(sizes) > most and max(sizes) > 1:
        rest = [most * size / math.prod(sizes) for size in sizes]
        cuts = [_most_below(size, room, is_free=free) for size, room, free in zip(sizes, rest, is_whole, strict=True)]
        filled = [cut / room if cut <= room else 0.0 for cut, room in zip(cuts, rest, strict=True)]
        if any(filled):
            dim = next((k for k, share in enumerate(filled) if share >= 1 / 4), filled.index(max(filled)))
        else:
            dim = sizes.index(max(sizes))
        sizes[dim] = cuts[dim]
    return tuple(sizes)


def _most_below(size: int, most: float, *, is_free: bool) -> int:
    """Return the largest size of equal parts up to `most`, or 1. The last part may be shorter if `is_free`."""
    if most < 1:
        return 1
    if is_free:
        return -(-size // math.ceil(size / math.floor(most)))
    small = [k for k in range(1, math.isqrt(size) + 1) if size % k == 0]
    return max(k for part in small for k in (part, size // part) if k <= most)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Entries that devices of this process read: the same entries on each of the devices."""

    index: Index
    devices: tuple[jax.Device, ...]


def entries_wanted(shape: Sequence[int], sharding: Sharding) -> Iterator[Wanted]:
    """Return the ranges of an array that devices of this process need, each range once."""
    found: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(tuple(shape)).items():
        closed = _closed(index or (), shape) if shape else ()
        found.setdefault(tuple((s.start, s.stop) for s in closed), []).append(device)
    for ranges, devices in found.items():
        yield Wanted(tuple(slice(a, b) for a, b in ranges), tuple(devices))


def pieces_wanted(
    shape: Sequence[int], sharding: Sharding | SplitSharding
) -> Iterable[tuple[tuple[int, ...], int, int, Sharding]]:
    """Yield shape, dimension, first entry along it, and sharding of each of the arrays that make up a leaf."""
    if not isinstance(sharding, SplitSharding):
        yield tuple(shape), 0, 0, sharding
        return
    for k, one in enumerate(sharding.shardings):
        a, b = sharding.bounds[k : k + 2]
        yield (*shape[: sharding.dim], b - a, *shape[sharding.dim + 1 :]), sharding.dim, a, one


def shifted(index: Index, dim: int, by: int) -> Index:
    """Return a range of a piece as a range of the whole leaf."""
    return _shifted(index, dim, by) if index and by else index

"""An array whose pieces live on several meshes: one leaf of the state to the user.

A `jax.Array` lies on one mesh; layers that several stages share cannot be one. A `SplitArray` holds one `jax.Array` for each
range of layers. It has a shape and a type, and reads, compares, computes and saves as the numpy array that it stands for, which
is assembled on the host each time. The step takes it back as it is, without copies. What can go wrong: arithmetic on a large one
is slow; `step.gather` makes ordinary arrays first.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding


@dataclasses.dataclass(frozen=True)
class SplitSharding:
    """Where the pieces of a leaf are: along `dim` the entries from bounds[k] to bounds[k + 1] are laid out by shardings[k]."""

    dim: int
    bounds: tuple[int, ...]
    shardings: tuple[NamedSharding, ...]

    @property
    def device_set(self) -> set[jax.Device]:
        """All devices that hold a part."""
        return set().union(*(sharding.device_set for sharding in self.shardings))


@dataclasses.dataclass(frozen=True)
class LeafPieces:
    """How a leaf is held: whole, or along a dimension between `bounds`; `first` is the number of its first piece's leaf."""

    first: int
    dim: int = 0
    bounds: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How many leaves hold it."""
        return max(len(self.bounds) - 1, 1)


class SplitArray(np.lib.mixins.NDArrayOperatorsMixin):
    """See the module's text. `pieces` are joined along dimension `dim`."""

    def __init__(self, pieces: Sequence[jax.Array], dim: int = 0) -> None:
        self.pieces, self.dim = tuple(pieces), dim
        first = self.pieces[0]
        self.dtype = first.dtype
        self.bounds = tuple(itertools.accumulate((piece.shape[dim] for piece in self.pieces), initial=0))
        self.shape = (*first.shape[:dim], self.bounds[-1], *first.shape[dim + 1 :])

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of entries."""
        return sum(piece.size for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, each counted once."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def sharding(self) -> SplitSharding:
        """Where each piece lies."""
        return SplitSharding(self.dim, self.bounds, tuple(piece.sharding for piece in self.pieces))  # type: ignore[misc]

    def devices(self) -> set[jax.Device]:
        """All devices that hold a part."""
        return set().union(*(piece.devices() for piece in self.pieces))

    def is_deleted(self) -> bool:
        """Whether a step has taken it."""
        return any(piece.is_deleted() for piece in self.pieces)

    def delete(self) -> None:
        """Free the memory of all pieces."""
        for piece in self.pieces:
            piece.delete()

    def copy_to_host_async(self) -> None:
        """Start copying all pieces to the host."""
        for piece in self.pieces:
            piece.copy_to_host_async()

    def block_until_ready(self) -> SplitArray:
        """Wait until every piece is computed."""
        for piece in self.pieces:
            piece.block_until_ready()
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("an array in pieces is copied when it becomes one array; use copy=None or copy=True")
        whole = np.concatenate([np.asarray(piece) for piece in self.pieces], axis=self.dim)
        return whole if dtype is None else whole.astype(dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        whole = [np.asarray(x) if isinstance(x, SplitArray | jax.Array) else x for x in inputs]
        return getattr(ufunc, method)(*whole, **kwargs)

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(np.asarray(self))

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(np.asarray(self))

    def __bool__(self) -> bool:
        return bool(np.asarray(self))

    def __reduce__(self) -> Any:
        """Saved and copied as an ordinary numpy array, which the step accepts."""
        return np.asarray, (np.asarray(self),)

    def __repr__(self) -> str:
        parts = zip(itertools.pairwise(self.bounds), self.pieces, strict=True)
        places = ", ".join(f"{a}:{b} {_place(piece)}" for (a, b), piece in parts)
        return f"SplitArray({self.dtype}{list(self.shape)}, dimension {self.dim}: {places})"


def _place(piece: jax.Array) -> str:
    if piece.is_deleted():
        return "deleted"
    numbers = sorted(int(device.id) for device in piece.devices())
    return f"on device{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def cut_at(array: Any, pieces: LeafPieces) -> list[Any]:
    """An array in the pieces of a leaf."""
    if not pieces.bounds:
        return [array]
    ranges = itertools.pairwise(pieces.bounds)
    if isinstance(array, jax.Array):
        return [jax.lax.slice_in_dim(array, a, b, axis=pieces.dim) for a, b in ranges]
    return [array[(slice(None),) * pieces.dim + (slice(a, b),)] for a, b in ranges]


def in_pieces(leaves: Sequence[Any], held: Sequence[LeafPieces]) -> list[Any]:
    """Leaves as they are held: a `SplitArray` that is cut alike is taken apart, anything else is cut."""
    return [part for leaf, pieces in zip(leaves, held, strict=True) for part in _parts(leaf, pieces)]


def _parts(leaf: Any, pieces: LeafPieces) -> Sequence[Any]:
    if not isinstance(leaf, SplitArray):
        return cut_at(leaf, pieces)
    if (leaf.dim, leaf.bounds) == (pieces.dim, pieces.bounds):
        return leaf.pieces
    return cut_at(np.asarray(leaf), pieces)


def taken_apart(leaves: Sequence[Any]) -> tuple[list[LeafPieces], list[Any]]:
    """How leaves are held, and all pieces of those that are in pieces in place of them."""
    held: list[LeafPieces] = []
    parts: list[Any] = []
    for leaf in leaves:
        split = isinstance(leaf, SplitArray)
        held.append(LeafPieces(len(parts), leaf.dim, leaf.bounds) if split else LeafPieces(len(parts)))
        parts += leaf.pieces if split else [leaf]
    return held, parts


def joined(parts: Sequence[Any], held: Sequence[LeafPieces]) -> list[Any]:
    """The leaves that are held in these parts."""
    return [
        SplitArray(parts[pieces.first : pieces.first + pieces.count], pieces.dim)
        if pieces.bounds
        else parts[pieces.first]
        for pieces in held
    ]


def held_in(
    held: Sequence[LeafPieces], places: Mapping[int, NamedSharding]
) -> dict[int, NamedSharding | SplitSharding]:
    """Where each leaf is, by number, from where each of the parts is; parts of the batch have no place."""
    found: dict[int, NamedSharding | SplitSharding] = {}
    for number, pieces in enumerate(held):
        if pieces.bounds:
            shardings = tuple(places[pieces.first + k] for k in range(pieces.count))
            found[number] = SplitSharding(pieces.dim, pieces.bounds, shardings)
        elif pieces.first in places:
            found[number] = places[pieces.first]
    return found


def placed_apart(
    shardings: Sequence[NamedSharding | SplitSharding],
) -> tuple[list[LeafPieces], list[NamedSharding]]:
    """How leaves of these shardings are held, and the sharding of every part."""
    held: list[LeafPieces] = []
    places: list[NamedSharding] = []
    for sharding in shardings:
        if isinstance(sharding, SplitSharding):
            held.append(LeafPieces(len(places), sharding.dim, sharding.bounds))
            places += sharding.shardings
        else:
            held.append(LeafPieces(len(places)))
            places.append(sharding)
    return held, places

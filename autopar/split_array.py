"""An array whose pieces live on several meshes: one leaf of the state to the user.

A `jax.Array` lies on one mesh; layers that several stages share cannot be one. A `SplitArray` holds one `jax.Array` for each
range of layers. It has a shape and a type, and reads, compares, computes and saves as the numpy array that it stands for, which
is assembled on the host each time: its operators, NumPy's functions and the methods of `READS` give NumPy arrays. The step takes
it back as it is, without copies. What can go wrong: JAX's own functions and transformations take JAX's own arrays alone, and say
"Triggering __jax_array__() during abstractification"; arithmetic on a large one is slow. `step.gather` makes `jax.Array`s first.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from autopar.compat import without_explicit_axes

_OF_MEMORY = {"base", "byteswap", "ctypes", "data", "device", "flags", "strides", "to_device", "view"}
_WRITING = {"fill", "itemset", "partition", "put", "resize", "setfield", "setflags", "sort"}
READS = frozenset(name for name in dir(np.ndarray) if not name.startswith("_")) - _OF_MEMORY - _WRITING
"""What it has of a NumPy array's attributes: those that read."""


@dataclasses.dataclass(frozen=True)
class SplitSharding:
    """Where the pieces of a leaf are: along `dim` the entries from bounds[k] to bounds[k + 1] are laid out by shardings[k]."""

    dim: int
    bounds: tuple[int, ...]
    shardings: tuple[NamedSharding, ...]
    # What `jnp.zeros_like` asks of a sharding that it might give to its result (JAX 0.10 to 0.12); it makes an ordinary array.
    _is_concrete: ClassVar[bool] = False

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

    def __getattr__(self, name: str) -> Any:
        if name in READS:
            return getattr(np.asarray(self), name)
        raise AttributeError(
            f"a SplitArray has no attribute {name!r}: its pieces are on several meshes, and it reads as a NumPy array alone. "
            "step.gather(state) gives jax.Arrays, np.asarray(leaf) a NumPy array; the step takes both.",
            name=name,
            obj=self,
        )

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of entries."""
        return sum(piece.size for piece in self.pieces)

    @property
    def weak_type(self) -> bool:
        """Whether its type gives way to that of other operands, as a Python number's does."""
        return all(piece.weak_type for piece in self.pieces)

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
        if any(isinstance(x, SplitArray) for x in kwargs.get("out", ())):
            raise TypeError("out= is a SplitArray, which cannot be written to: it stands for pieces on several meshes")
        whole = [np.asarray(x) if isinstance(x, SplitArray | jax.Array) else x for x in inputs]
        return getattr(ufunc, method)(*whole, **kwargs)

    def _not_in_place(self, other: Any) -> Any:
        """Nothing is computed in place: `leaf += 1` gives the name to the new array of `leaf + 1`, as with `jax.Array`."""
        return NotImplemented

    __iadd__ = __isub__ = __imul__ = __imatmul__ = __itruediv__ = __ifloordiv__ = __imod__ = _not_in_place
    __ipow__ = __ilshift__ = __irshift__ = __iand__ = __ior__ = __ixor__ = _not_in_place

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
        array = without_explicit_axes(array)
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

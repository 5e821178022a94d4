"""An array whose pieces live on several meshes, and is one leaf of the state to the user.

A `jax.Array` lies on one mesh; a stack of layers that several stages share cannot be one. A `SplitArray` holds one `jax.Array`
for each range of layers. The functions below take leaves apart into such pieces and join them again.

What can go wrong: JAX's own functions compute on one mesh, and refuse it with an ArgumentError; `jax.device_put` and
`step.gather` make a `jax.Array` of it. Arithmetic on a large array is slow, because it is assembled on the host each time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import DTypeLike

from autopar.compat import introduce_arrays, without_explicit_axes
from autopar.errors import ArgumentError

A = TypeVar("A")

_OF_MEMORY = {"base", "byteswap", "ctypes", "data", "device", "flags", "strides", "to_device", "view"}
_WRITING = {"fill", "itemset", "partition", "put", "resize", "setfield", "setflags", "sort"}
READS = frozenset(name for name in dir(np.ndarray) if not name.startswith("_")) - _OF_MEMORY - _WRITING
"""The attributes of a NumPy array that a `SplitArray` has too: those that read."""


@dataclasses.dataclass(frozen=True)
class SplitSharding:
    """Where the pieces of a leaf are: along `dim`, the entries from bounds[k] to bounds[k + 1] have shardings[k]."""

    dim: int
    bounds: tuple[int, ...]
    shardings: tuple[NamedSharding, ...]
    # `jnp.zeros_like` of a sharding that it might give to its result (JAX 0.10 to 0.12); the result is an ordinary array.
    _is_concrete: ClassVar[bool] = False

    @property
    def device_set(self) -> set[jax.Device]:
        """All devices that hold a part."""
        return set().union(*(sharding.device_set for sharding in self.shardings))

    @property
    def _device_assignment(self) -> tuple[jax.Device, ...]:
        """The one order of devices that `jax.jit` asks its arguments for (JAX 0.10 to 0.12)."""
        raise ArgumentError(
            "JAX computes on one mesh, in jax.jit and in functions such as jnp.sum, and a SplitArray lies on several: give it "
            "step.gather(leaf), jax.device_put(leaf, device) or np.asarray(leaf), or compute in the step"
        )


@dataclasses.dataclass(frozen=True)
class LeafPieces:
    """How a leaf is held: whole, or in pieces.

    Attributes:
        first: the number of its first piece among all pieces of all leaves.
        dim: the dimension along which it is cut.
        bounds: piece k holds the entries from bounds[k] to bounds[k + 1]; empty if the leaf is whole.
    """

    first: int
    dim: int = 0
    bounds: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Number of its pieces."""
        return max(len(self.bounds) - 1, 1)


class SplitArray(np.lib.mixins.NDArrayOperatorsMixin):
    """One array in pieces that lie on different meshes.

    It reads, compares, computes, pickles and saves as the NumPy array that it stands for. Operators, NumPy's functions and the
    methods that read (`sum`, `mean`, `T`, `reshape`, `astype`, ...) compute on the host and return NumPy arrays. The step takes
    it back as it is, without copies.

    Attributes:
        pieces: one `jax.Array` per range of entries along `dim`.
        dim: the dimension along which the pieces are joined.
        bounds: piece k holds the entries from bounds[k] to bounds[k + 1].
        shape: of the whole array.
        dtype: of its elements.
    """

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
        """Whether its type yields to that of other operands, as a Python number's does."""
        return all(getattr(piece, "weak_type", False) for piece in self.pieces)  # keys have none

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
        """Whether a step has consumed it."""
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

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("an array in pieces is copied when it becomes one array; use copy=None or copy=True")
        whole = np.concatenate([np.asarray(piece) for piece in self.pieces], axis=self.dim)
        return whole if dtype is None else whole.astype(dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **kwargs: Any) -> object:
        if any(isinstance(x, SplitArray) for x in kwargs.get("out", ())):
            raise TypeError("out= is a SplitArray, which cannot be written to: it stands for pieces on several meshes")
        whole = [np.asarray(x) if isinstance(x, SplitArray | jax.Array) else x for x in inputs]
        result: object = getattr(ufunc, method)(*whole, **kwargs)
        return result

    def _not_in_place(self, other: object) -> object:
        """Nothing is computed in place: `leaf += 1` binds the name to the new array `leaf + 1`, as with `jax.Array`."""
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

    def __reduce__(self) -> tuple[Callable[..., np.ndarray], tuple[np.ndarray]]:
        """Pickle and copy it as an ordinary NumPy array, which the step accepts."""
        return np.asarray, (np.asarray(self),)

    def __repr__(self) -> str:
        parts = zip(itertools.pairwise(self.bounds), self.pieces, strict=True)
        places = ", ".join(f"{a}:{b} {_place(piece)}" for (a, b), piece in parts)
        return f"SplitArray({self.dtype}{list(self.shape)}, dimension {self.dim}: {places})"


def _on_host(array: SplitArray) -> np.ndarray:
    """The whole array, for `jax.device_put`."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise ArgumentError(f"{array!r} holds keys, which have no NumPy array: step.gather makes a jax.Array of them")
    return np.asarray(array)


introduce_arrays(SplitArray, _on_host)


def _place(piece: jax.Array) -> str:
    if piece.is_deleted():
        return "deleted"
    numbers = sorted(int(device.id) for device in piece.devices())
    return f"on device{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def cut_array(array: A, pieces: LeafPieces) -> list[A | jax.Array | np.ndarray]:
    """The pieces of an array; traced arrays are cut in the trace, arrays of the host on the host."""
    if not pieces.bounds:
        return [array]
    ranges = itertools.pairwise(pieces.bounds)
    if isinstance(array, jax.Array):
        whole = without_explicit_axes(array)
        return [jax.lax.slice_in_dim(whole, a, b, axis=pieces.dim) for a, b in ranges]
    host = np.asarray(array)
    return [host[(slice(None),) * pieces.dim + (slice(a, b),)] for a, b in ranges]


def cut_leaves(leaves: Sequence[A], held: Sequence[LeafPieces]) -> list[A | jax.Array | np.ndarray]:
    """The pieces of all leaves: a `SplitArray` with the same cuts is taken apart, anything else is cut."""
    return [part for leaf, pieces in zip(leaves, held, strict=True) for part in _parts(leaf, pieces)]


def _parts(leaf: A, pieces: LeafPieces) -> Sequence[A | jax.Array | np.ndarray]:
    if not isinstance(leaf, SplitArray):
        return cut_array(leaf, pieces)
    if (leaf.dim, leaf.bounds) == (pieces.dim, pieces.bounds):
        return leaf.pieces
    return cut_array(np.asarray(leaf), pieces)


def take_apart(leaves: Sequence[A]) -> tuple[list[LeafPieces], list[A | jax.Array]]:
    """(how the leaves are held, the leaves with each `SplitArray` replaced by its pieces)."""
    held: list[LeafPieces] = []
    parts: list[A | jax.Array] = []
    for leaf in leaves:
        if isinstance(leaf, SplitArray):
            held.append(LeafPieces(len(parts), leaf.dim, leaf.bounds))
            parts += leaf.pieces
        else:
            held.append(LeafPieces(len(parts)))
            parts.append(leaf)
    return held, parts


def join_leaves(parts: Sequence[A], held: Sequence[LeafPieces]) -> list[A | SplitArray]:
    """The leaves that are held in these parts."""
    return [_join(parts[pieces.first : pieces.first + pieces.count], pieces) for pieces in held]


def _join(parts: Sequence[Any], pieces: LeafPieces) -> Any:
    return SplitArray(parts, pieces.dim) if pieces.bounds else parts[0]


def leaf_shardings(
    held: Sequence[LeafPieces], places: Mapping[int, NamedSharding]
) -> dict[int, NamedSharding | SplitSharding]:
    """Sharding of each leaf, by number, from those of the parts; parts of the batch have none."""
    found: dict[int, NamedSharding | SplitSharding] = {}
    for number, pieces in enumerate(held):
        if pieces.bounds:
            shardings = tuple(places[pieces.first + k] for k in range(pieces.count))
            found[number] = SplitSharding(pieces.dim, pieces.bounds, shardings)
        elif pieces.first in places:
            found[number] = places[pieces.first]
    return found


def take_shardings_apart(
    shardings: Sequence[NamedSharding | SplitSharding],
) -> tuple[list[LeafPieces], list[NamedSharding]]:
    """(how leaves with these shardings are held, the sharding of every part)."""
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

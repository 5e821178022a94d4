"""Cheapest ways from one layout of a value to another.

In: a value's shape and item size, a mesh and its costs. Out: a `LayoutSpace`: every layout the value can have, the
seconds from each to each, and the moves that take that time. A move is one collective (or a local slice or mask), so
the seconds between two layouts are a shortest path in the graph of single moves:

    D(a, c) = min over b of D(a, b) + D(b, c),        D(a, b) = price of the single move a -> b, if there is one.

The same path is priced by the planner and performed by the lowering: what was priced is what runs. What can go wrong: a
layout outside the space, which is a bug of the caller.

The moves, for a mesh axis that is minor-most in its dimension (`m`: monoid):
    all-reduce          partial(m) -> replicated, several axes of one monoid at once
    reduce-scatter      partial(sum) -> sharded
    all-gather          sharded -> replicated, several minor-most axes of one dimension at once
    all-to-all          sharded dimension -> another sharded dimension
    collective-permute  same tiles, other devices
    slice, mask         replicated -> sharded, replicated -> partial(m); local
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from autopar.cost_model.collectives import MeshCosts
from autopar.layouts.mesh import Axes, Layout, LogicalMesh

KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
LOCAL_KINDS = ("slice", "mask")
_LEAST_S = 1e-12
"""Seconds of a local move of no bytes: more than none, so that of equally cheap ways the one with fewer moves is taken."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Move:
    """One step between layouts: its kind, the axes it communicates over, the dimensions it touches."""

    kind: str
    axes: Axes
    source: Layout
    target: Layout
    from_dim: int = -1
    to_dim: int = -1
    monoid: str = ""

    def payload(self, shape: tuple[int, ...], mesh: LogicalMesh) -> int:
        """Elements held per device on the larger side."""
        return math.prod(self.larger.local_shape(shape, mesh))

    @property
    def larger(self) -> Layout:
        """The layout on the side where devices hold more."""
        return self.target if self.kind == "all-gather" else self.source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """What moves may be used and what they cost: mesh, collective times, local copy time, and the kinds allowed.

    `transpose_s_per_byte`: what is added where a dimension is scattered or gathered that others stand before.
    """

    mesh: LogicalMesh
    costs: MeshCosts
    copy_s_per_byte: float
    kinds: frozenset[str] = frozenset(KINDS)
    transpose_s_per_byte: float = 0.0

    def seconds(self, move: Move, shape: tuple[int, ...], itemsize: int) -> float:
        """The price of one move."""
        size = move.payload(shape, self.mesh) * itemsize
        match move.kind:
            case "all-reduce":
                return self.costs.all_reduce_s(size, move.axes)
            case "reduce-scatter":
                return self.costs.reduce_scatter_s(size, move.axes) + self._transpose_s(move, shape, size)
            case "all-gather":
                return self.costs.all_gather_s(size, move.axes) + self._transpose_s(move, shape, size)
            case "all-to-all":
                return self.costs.all_to_all_s(size, move.axes)
            case "collective-permute":
                return self.costs.permute_s(size, move.axes)
        return _LEAST_S + size * self.copy_s_per_byte

    def _transpose_s(self, move: Move, shape: tuple[int, ...], size: int) -> float:
        """Seconds of the transposed copy that goes into a reduce-scatter, or comes out of an all-gather."""
        return size * self.transpose_s_per_byte if self.is_transposed(move, shape) else 0.0

    def is_transposed(self, move: Move, shape: tuple[int, ...]) -> bool:
        """Whether a transposed copy goes into a move, a reduce-scatter, or comes out of it, an all-gather."""
        if move.kind not in ("all-gather", "reduce-scatter"):
            return False
        dim = move.from_dim if move.kind == "all-gather" else move.to_dim
        return math.prod(move.larger.local_shape(shape, self.mesh)[:dim]) != 1


def all_layouts(shape: tuple[int, ...], mesh: LogicalMesh, monoids: tuple[str, ...]) -> tuple[Layout, ...]:
    """Every layout of a value of `shape`, the replicated one first; axes of size 1 stay replicated.

    None mixes monoids, see `Layout`.
    """
    axes = [axis for axis, size in enumerate(mesh.shape) if size > 1]
    choices: list[tuple[int | str, ...]] = [("", *range(len(shape)), *monoids)] * len(axes)
    found: dict[Layout, None] = {}
    for choice in itertools.product(*choices):
        partial = tuple((axis, c) for axis, c in zip(axes, choice, strict=True) if isinstance(c, str) and c)
        on_dim = [[axis for axis, c in zip(axes, choice, strict=True) if c == dim] for dim in range(len(shape))]
        for dims in itertools.product(*(itertools.permutations(members) for members in on_dim)):
            layout = Layout(tuple(dims), partial)
            if layout.fits(shape, mesh) and not layout.mixes_monoids:
                found[layout] = None
    return tuple(found)


def moves_from(layout: Layout, shape: tuple[int, ...], mesh: LogicalMesh, monoids: tuple[str, ...]) -> Iterator[Move]:
    """Every single move that starts at `layout`, except permutations."""
    local = layout.local_shape(shape, mesh)
    used = {*layout.sharded_axes, *layout.partial_axes}
    yield from _reductions(layout, local, mesh)
    for dim, axes in enumerate(layout.dims):
        for count in range(1, len(axes) + 1):
            target = _with_dim(layout, dim, axes[:-count])
            yield Move(kind="all-gather", axes=axes[-count:], source=layout, target=target, from_dim=dim)
        for to in range(len(layout.dims)) if axes else ():
            if to != dim and mesh.divides(axes[-1:], local[to]):
                target = _with_dim(_with_dim(layout, dim, axes[:-1]), to, (*layout.dims[to], axes[-1]))
                yield Move(kind="all-to-all", axes=axes[-1:], source=layout, target=target, from_dim=dim, to_dim=to)
    for axis, size in enumerate(mesh.shape):
        if size == 1 or axis in used:
            continue
        for dim, axes in enumerate(layout.dims):
            if mesh.divides((axis,), local[dim]):
                yield Move(
                    kind="slice", axes=(axis,), source=layout, target=_with_dim(layout, dim, (*axes, axis)), to_dim=dim
                )
        for monoid in monoids:
            target = Layout(layout.dims, tuple(sorted((*layout.partial, (axis, monoid)))))
            if not target.mixes_monoids:
                yield Move(kind="mask", axes=(axis,), source=layout, target=target, monoid=monoid)


def _reductions(layout: Layout, local: tuple[int, ...], mesh: LogicalMesh) -> Iterator[Move]:
    by_monoid: dict[str, list[int]] = {}
    for axis, monoid in layout.partial:
        by_monoid.setdefault(monoid, []).append(axis)
    for monoid, members in by_monoid.items():
        for count in range(1, len(members) + 1):
            for axes in itertools.combinations(members, count):
                rest = tuple(entry for entry in layout.partial if entry[0] not in axes)
                yield Move(kind="all-reduce", axes=axes, source=layout, target=Layout(layout.dims, rest), monoid=monoid)
        for axis in members if monoid == "sum" else ():
            rest = tuple(entry for entry in layout.partial if entry[0] != axis)
            for dim, axes in enumerate(layout.dims):
                if mesh.divides((axis,), local[dim]):
                    target = _with_dim(Layout(layout.dims, rest), dim, (*axes, axis))
                    yield Move(
                        kind="reduce-scatter", axes=(axis,), source=layout, target=target, to_dim=dim, monoid=monoid
                    )


def _with_dim(layout: Layout, dim: int, axes: Axes) -> Layout:
    return Layout((*layout.dims[:dim], axes, *layout.dims[dim + 1 :]), layout.partial)


def size_key(shape: tuple[int, ...], mesh: LogicalMesh) -> tuple[int, ...]:
    """What the layouts and moves of a shape depend on: equal for shapes that the mesh's axes divide alike.

    A size counts by its greatest common divisor with that of the mesh, and as itself where axes may cut it to single elements.
    """
    parts = [math.gcd(size, mesh.size) for size in shape]
    return tuple([size if part == size or not size else -part for size, part in zip(shape, parts, strict=True)])


class MoveTable:
    """All layouts and single moves of the shapes of one `size_key`; treat it as frozen."""

    def __init__(self, shape: tuple[int, ...], network: Network, monoids: tuple[str, ...]) -> None:
        mesh = network.mesh
        self.layouts = all_layouts(shape, mesh, monoids)
        self.index = {layout: i for i, layout in enumerate(self.layouts)}
        local = [layout.local_shape(shape, mesh) for layout in self.layouts]
        tiled: dict[tuple[int, ...], list[Layout]] = {}
        for layout, one in zip(self.layouts, local, strict=True):
            if not layout.partial:
                tiled.setdefault(one, []).append(layout)
        allowed = network.kinds.union(LOCAL_KINDS)
        self.moves: list[Move] = []
        ends: list[tuple[int, int]] = []
        for source, (layout, one) in enumerate(zip(self.layouts, local, strict=True)):
            for move in itertools.chain(
                moves_from(layout, shape, mesh, monoids), _permutations(layout, tiled.get(one, ()))
            ):
                if move.kind in allowed:
                    self.moves.append(move)
                    ends.append((source, self.index[move.target]))
        self.ends = np.array(ends, dtype=np.int64).reshape(-1, 2)
        self._sort_by_price(network, shape)

    def _sort_by_price(self, network: Network, shape: tuple[int, ...]) -> None:
        """Number the kinds of moves that cost the same, whatever the shape."""
        parts = [network.mesh.ways(layout.sharded_axes) for layout in self.layouts]
        prices: dict[tuple[object, ...], int] = {}
        kinds, self._first = [], list[int]()
        for number, (move, (source, target)) in enumerate(zip(self.moves, self.ends.tolist(), strict=True)):
            larger = target if move.kind == "all-gather" else source
            key = (move.kind, move.axes, parts[larger], network.is_transposed(move, shape))
            kind = prices.setdefault(key, len(prices))
            kinds.append(kind)
            if kind == len(self._first):
                self._first.append(number)
        self._kind_of = np.array(kinds, dtype=np.int64)

    def seconds(self, shape: tuple[int, ...], itemsize: int, network: Network) -> np.ndarray:
        """The price of each move of a shape of this key (moves,); moves of one kind and size are priced once."""
        each = np.array([network.seconds(self.moves[first], shape, itemsize) for first in self._first], dtype=float)
        return each[self._kind_of]


class LayoutSpace:
    """All layouts of one value and the cheapest path between any two; treat it as frozen.

    `table`: the moves of such shapes, if they are known.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        itemsize: int,
        network: Network,
        monoids: tuple[str, ...] = ("sum",),
        *,
        table: MoveTable | None = None,
    ) -> None:
        self.shape, self.itemsize, self.network = shape, itemsize, network
        self._table = table or MoveTable(shape, network, monoids)
        self.layouts, self.index = self._table.layouts, self._table.index
        self.seconds = self._by_one_move[0].copy()
        through = np.empty_like(self.seconds)
        for k in range(len(self.layouts)):
            np.add(self.seconds[:, k, None], self.seconds[None, k, :], out=through)
            np.minimum(self.seconds, through, out=self.seconds)

    @functools.cached_property
    def _by_one_move(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds by one move (layouts, layouts), and which: the cheapest, of equally cheap ones the first; -1: none."""
        count, ends = len(self.layouts), self._table.ends
        least, move = np.full((count, count), np.inf), np.full((count, count), -1, dtype=np.int64)
        np.fill_diagonal(least, 0.0)
        seconds = self._table.seconds(self.shape, self.itemsize, self.network)
        order = np.lexsort((seconds, ends[:, 1], ends[:, 0]))[::-1]  # what is written last stays
        best = seconds < least[ends[:, 0], ends[:, 1]]
        order = order[best[order]]
        source, target = ends[order].T
        move[source, target] = order
        least[source, target] = seconds[order]
        return least, move

    @functools.cached_property
    def _via(self) -> np.ndarray:
        """The last layout that made the way between two cheaper (layouts, layouts); -1: one move is cheapest.

        Few values are moved in the end, so this is found when first asked; it takes three times as long as the seconds.
        """
        seconds, count = self._by_one_move[0].copy(), len(self.layouts)
        via = np.full((count, count), -1, dtype=np.int64)
        through, better = np.empty_like(seconds), np.empty((count, count), dtype=bool)
        for k in range(count):
            np.add(seconds[:, k, None], seconds[None, k, :], out=through)
            np.less(through, seconds, out=better)
            np.copyto(seconds, through, where=better)
            np.copyto(via, k, where=better)
        return via

    def path(self, source: Layout, target: Layout) -> tuple[Move, ...]:
        """The cheapest moves from `source` to `target`; empty if they are equal."""
        return self._path(self.index[source], self.index[target])

    def _path(self, source: int, target: int) -> tuple[Move, ...]:
        if source == target:
            return ()
        via = int(self._via[source, target])
        if via < 0:
            return (self._table.moves[int(self._by_one_move[1][source, target])],)
        return (*self._path(source, via), *self._path(via, target))


def _permutations(layout: Layout, alike: Sequence[Layout]) -> Iterator[Move]:
    """Moves to layouts with the same tiles on other devices; `alike`: layouts of which a device holds as much."""
    used = layout.sharded_axes
    if not used or layout.partial:
        return
    for target in alike:
        if target is not layout:
            axes = tuple(sorted({*used, *target.sharded_axes}))
            yield Move(kind="collective-permute", axes=axes, source=layout, target=target)


def permutation(source: Layout, target: Layout, mesh: LogicalMesh) -> list[tuple[int, int]]:
    """Pairs (sender, receiver) of row-major device numbers for a collective-permute; a device keeps its tile if it can."""
    holds: dict[tuple[int, ...], list[int]] = {}
    wants: dict[tuple[int, ...], list[int]] = {}
    for device, position in enumerate(np.ndindex(*mesh.shape)):
        holds.setdefault(_tile(source, position, mesh), []).append(device)
        wants.setdefault(_tile(target, position, mesh), []).append(device)
    pairs = []
    for tile, senders in holds.items():
        staying = set(senders) & set(wants[tile])
        pairs += [(device, device) for device in sorted(staying)]
        moving = [d for d in senders if d not in staying]
        pairs += list(zip(moving, [d for d in wants[tile] if d not in staying], strict=True))
    return sorted(pairs)


def _tile(layout: Layout, position: tuple[int, ...], mesh: LogicalMesh) -> tuple[int, ...]:
    numbers = []
    for axes in layout.dims:
        number = 0
        for axis in axes:
            number = number * mesh.shape[axis] + position[axis]
        numbers.append(number)
    return tuple(numbers)

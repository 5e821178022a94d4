"""Rows that keep a search within a memory limit: buffers alive together, as bytes for each choice of each node.

In: what one device runs before anything is chosen, its footprint, and the bytes of its values for each choice. Out: `MemoryRow`s
at the points of the program that need most under one choice. With s_i the bytes of input i in the layout in which it is kept,
and c_i in that in which it is read, a device needs at least max(s_i, c_i), as a copy in another layout is there beside the
input. Rows are sums over nodes, so each counts one of the two:

    at each point t    the sum of c_i over inputs whose copy is alive at t, of s_i over others, and the temporaries
    at one point       the sum of s_i over all inputs, and the temporaries

The first see what gathering costs, the second that an input kept whole is there though it is read in parts. A cast of an input is
a temporary that is gathered as inputs are: what a loop reads of it counts in its place.

What can go wrong: other values may be copied too, and what is freed early is not known before layouts are, so rows may say less
than is required or more. Each choice is checked.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence, Set

import numpy as np

from autopar.intra_op.memory.device_operations import Span, Value
from autopar.intra_op.memory.device_program import DeviceProgram
from autopar.intra_op.memory.footprint import Footprint
from autopar.solver.problem import MemoryRow


def rows_of(
    program: DeviceProgram,
    footprint: Footprint,
    kept: Sequence[int],
    sizes_of: Callable[[Value], np.ndarray],
    node_of: Callable[[Value], int | None],
    choice: Sequence[int],
    *,
    margin: float,
    points: int,
) -> list[MemoryRow]:
    """The rows at the points that need most under a choice, one of each stretch.

    Args:
        program: what one device runs before anything is chosen.
        footprint: its buffers.
        kept: values that are there from the first step to the last.
        sizes_of: bytes of a value for each choice of the node that decides.
        node_of: that node; None if the bytes are the same whatever is chosen.
        choice: the number of a choice for each node.
        margin: the part of what temporaries take that is predicted.
        points: how many points are watched at most.
    """
    nodes = [node_of(v) for v in program.values]
    sizes = [float(sizes_of(v)[0 if n is None else choice[n]]) for v, n in zip(program.values, nodes, strict=True)]
    there = frozenset(kept)
    more = [_more_than_input(v, size, sizes, there) for v, size in zip(program.values, sizes, strict=True)]
    totals = totals_of(footprint.spans, footprint.steps, more)
    stretch = max(1, math.ceil(len(totals) / points))
    watched = [at + int(np.argmax(totals[at : at + stretch])) for at in range(0, len(totals), stretch)]
    alive = _alive_at(watched, footprint.spans)
    counted: dict[tuple[int, float], _Counted] = {}

    def count(value: int, ratio: float) -> _Counted:
        if (value, ratio) not in counted:
            counted[value, ratio] = _count(nodes[value], sizes_of(program.values[value]) / ratio)
        return counted[value, ratio]

    def row(name: str, at: int, copies: dict[int, int]) -> MemoryRow:
        made = [v for v in alive[at] if program.values[v].copy_of is None]
        gone = copies.keys() - there.union(made)
        temporaries = [*(copies.get(v, v) for v in made), *(copies[v] for v in sorted(gone))]
        return _row(name, [*(count(copies.get(v, v), 1.0) for v in kept), *(count(v, margin) for v in temporaries)])

    rows = [row(f"point{at}", at, _copies(program.values, alive[at])) for at in watched]
    with_copies = [at for at in watched if any(program.values[v].copy_of is not None for v in alive[at])]
    if with_copies:
        highest = max(with_copies, key=lambda at: totals[at])
        rows.append(row(f"inputs{highest}", highest, {}))
    return rows


def totals_of(buffers: Iterable[Span], steps: int, sizes: Sequence[float]) -> np.ndarray:
    """Bytes of temporaries at every step; `sizes` are those of each value."""
    change = np.zeros(steps + 1)
    for span in buffers:
        change[span.first] += sizes[span.value]
        change[span.last + 1] -= sizes[span.value]
    return np.cumsum(change)[: max(steps, 1)]


@dataclasses.dataclass(frozen=True, eq=False)
class _Counted:
    """Bytes that a value takes for each choice of a node (choices,); without a node for all choices alike."""

    node: int | None
    sizes: np.ndarray


def _more_than_input(value: Value, size: float, sizes: Sequence[float], kept: Set[int]) -> float:
    """What a value takes beside the inputs: of a copy, as much as it is larger than the input."""
    root = value.copy_of
    return size if root is None or root not in kept else max(0.0, size - sizes[root])


def _alive_at(points: Sequence[int], spans: Sequence[Span]) -> dict[int, list[int]]:
    """The values that are alive at each of some ascending points."""
    alive = collections.defaultdict[int, list[int]](list)
    ascending = np.asarray(points)
    for span in spans:
        for at in points[int(np.searchsorted(ascending, span.first)) :]:
            if at > span.last:
                break
            alive[at].append(span.value)
    return alive


def _copies(values: Sequence[Value], alive: Sequence[int]) -> dict[int, int]:
    """Of inputs that have copies, the copy that was made last."""
    return {root: v for v in sorted(alive) if (root := values[v].copy_of) is not None}


def _count(node: int | None, sizes: np.ndarray) -> _Counted:
    """What a value takes of a row."""
    return _Counted(None if sizes.min() == sizes.max() else node, sizes)


def _row(name: str, entries: Iterable[_Counted]) -> MemoryRow:
    """The row of values that are alive together."""
    fixed = 0.0
    by_node: dict[int, np.ndarray] = {}
    for entry in entries:
        if entry.node is None:
            fixed += float(entry.sizes[0])
        elif entry.node in by_node:
            by_node[entry.node] = by_node[entry.node] + entry.sizes
        else:
            by_node[entry.node] = entry.sizes
    return MemoryRow(name, by_node, fixed)

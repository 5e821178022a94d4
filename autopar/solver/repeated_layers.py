"""The choice of a deep model: its layers, which look alike, choose alike.

In: a choice problem as `intra_op.choose` takes it. Out: the same `Choice`. A problem of more than `DEEP` nodes is solved with
alike nodes tied together (`Tied`), so that time hardly grows with the depth; the bound is still of the whole problem, by
dual ascent that starts from the tied solution and ends where the two are `NEAR`. If they stay apart by more than `GOOD_ENOUGH`,
or little is alike, the whole problem is solved. What can go wrong: within a memory limit that no choice with ties meets, `None`
does not prove that nothing fits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autopar.solver.classes import Classes
from autopar.solver.dual_ascent import bound_problem
from autopar.solver.memory_prices import MemoryRow
from autopar.solver.presolve import reduce_problem
from autopar.solver.solve import GOOD_ENOUGH, SWEEPS, Choice, Costs, Edges, choose, mixed

DEEP = 2500
"""Problems of up to so many nodes are solved whole."""
WORTH = 0.6
"""Ties are used if they leave at most this part of the nodes."""
NEAR = 1e-3
"""The dual ascent of a deep problem ends when solution and bound are this near (relative)."""


RADIUS = 6
"""How far nodes must look alike: more keeps more of the ends apart."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tied:
    """One node per class: `classes[v]` is the class of node v of the whole problem."""

    classes: np.ndarray
    costs: tuple[np.ndarray, ...]
    edges: Mapping[tuple[int, int], np.ndarray]

    def extend(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The choice of every node of the whole problem."""
        return tuple(numbers[c] for c in self.classes.tolist())

    def representatives(self, of: Sequence[Any]) -> list[Any]:
        """Of what nodes have, that of the first of each class."""
        _, first = np.unique(self.classes, return_index=True)
        return [of[v] for v in first.tolist()]

    def restrict(self, choice: Choice) -> Choice:
        """A choice that respects the ties, in the classes."""
        return dataclasses.replace(choice, numbers=tuple(self.representatives(choice.numbers)))

    def sums(self, of: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """What nodes have of something, added up by class."""
        total: dict[int, np.ndarray] = {}
        for v, array in of.items():
            c = int(self.classes[v])
            total[c] = total[c] + array if c in total else array
        return total


def tied(costs: Sequence[np.ndarray], edges: Mapping[tuple[int, int], np.ndarray], *, radius: int = RADIUS) -> Tied:
    """The problem with alike nodes tied together."""
    classes = alike(costs, edges, radius=radius)
    count = int(classes.max(initial=-1)) + 1
    sums: list[np.ndarray | None] = [None] * count
    for c, cost in zip(classes.tolist(), costs, strict=True):
        held = sums[c]
        sums[c] = np.asarray(cost, dtype=float) if held is None else held + cost
    repeated: dict[tuple[int, int, int, bool], int] = {}
    matrices: dict[int, np.ndarray] = {}
    for (u, v), matrix in edges.items():
        a, b = int(classes[u]), int(classes[v])
        key = (min(a, b), max(a, b), id(matrix), a > b)
        repeated[key] = repeated.get(key, 0) + 1
        matrices[id(matrix)] = matrix
    between: dict[tuple[int, int], np.ndarray] = {}
    for (a, b, number, flipped), times in repeated.items():
        matrix = matrices[number].T if flipped else matrices[number]
        whole = times * matrix if times > 1 else matrix
        if a == b:
            held = sums[a]
            assert held is not None
            sums[a] = held + np.diagonal(whole)
        else:
            between[a, b] = between[a, b] + whole if (a, b) in between else whole
    return Tied(classes, tuple(cost for cost in sums if cost is not None), between)


def alike(
    costs: Sequence[np.ndarray], edges: Mapping[tuple[int, int], np.ndarray], *, radius: int = RADIUS
) -> np.ndarray:
    """The class of each node, numbered in order of first appearance."""
    count = len(costs)
    pairs = np.array(list(edges), dtype=np.int64).reshape(-1, 2)
    matrix = _numbered([id(m) for m in edges.values()])
    one_way = np.concatenate([pairs[:, 0], pairs[:, 1]])
    other = np.concatenate([pairs[:, 1], pairs[:, 0]])
    label = np.concatenate([2 * matrix, 2 * matrix + 1])
    colour = _numbered([cost.tobytes() for cost in costs])
    order = np.argsort(one_way, kind="stable")
    one_way, other, label = one_way[order], other[order], label[order]
    for _ in range(radius):
        seen = _numbered(list(zip(label.tolist(), colour[other].tolist(), strict=True)))
        arranged = np.lexsort((seen, one_way))
        around = np.split(seen[arranged], np.searchsorted(one_way, np.arange(1, count)))
        refined = _numbered([(c, a.tobytes()) for c, a in zip(colour.tolist(), around, strict=True)])
        if refined.max(initial=-1) == colour.max(initial=-1):
            break
        colour = refined
    return colour


def _numbered(keys: Sequence[object]) -> np.ndarray:
    """Equal keys get equal numbers, in order of first appearance."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


@dataclasses.dataclass(frozen=True, eq=False)
class ChoiceProblem:
    """Costs and edges; `classes` and `cutoff_s` as `choose` takes them. `is_proven`: whether a deep one's bound is wanted."""

    costs: Costs
    edges: Edges
    classes: Classes | None = None
    cutoff_s: float = np.inf
    is_proven: bool = True

    def choose(
        self,
        *,
        rows: Sequence[MemoryRow] = (),
        limit_bytes: float = np.inf,
        free: Choice | None = None,
        tried: Sequence[tuple[int, ...]] = (),
    ) -> Choice | None:
        """The best choice within the limit, as `intra_op.choose` says."""
        if self._ties is None:
            return self._whole(rows, limit_bytes, free, tried)
        if any(row.least() > limit_bytes for row in rows):
            return None
        lower = free.lower_bound_s if free is not None else self._lower_bound()
        if lower >= self.cutoff_s:
            return Choice((), np.inf, lower)
        found = choose(
            self._ties.costs,
            self._ties.edges,
            rows=[dataclasses.replace(row, bytes_of=self._ties.sums(row.bytes_of)) for row in rows],
            limit_bytes=limit_bytes,
            free=None if free is None else self._ties.restrict(free),
            classes=None if self.classes is None else self._ties.representatives(self.classes),
            cutoff_s=self.cutoff_s,
            tried=tuple(tuple(self._ties.representatives(numbers)) for numbers in tried),
        )
        if found is None or not found.numbers:
            return found if found is None else Choice((), np.inf, lower)
        whole = self._untied(found, rows, limit_bytes, lower)
        if free is None and np.isfinite(whole.seconds):
            lower = max(lower, self._lower_bound(whole))
            if self.is_proven and whole.seconds - lower > GOOD_ENOUGH * whole.seconds:
                return self._whole(rows, limit_bytes, None, tried)
        return dataclasses.replace(whole, lower_bound_s=min(lower, whole.seconds))

    def _untied(self, found: Choice, rows: Sequence[MemoryRow], limit_bytes: float, lower: float) -> Choice:
        """The choice of the whole problem; where memory is short alike layers may differ, and take turns in using it.

        Two choices are mixed: the one found, and the fastest that was tried, which is too large.
        """
        assert self._ties is not None
        extended = self._ties.extend
        tried = tuple(map(extended, found.tried))
        whole = dataclasses.replace(found, numbers=extended(found.numbers), tried=tried)
        if not tried or found.seconds - max(lower, found.lower_bound_s) <= GOOD_ENOUGH * found.seconds:
            return whole
        both = (whole.numbers, tried[0])
        other = mixed(self.costs, self.edges, rows=rows, limit_bytes=limit_bytes, tried=both)
        if other is None or other.seconds >= whole.seconds:
            return whole
        return dataclasses.replace(other, tried=tried)

    def _whole(
        self,
        rows: Sequence[MemoryRow],
        limit_bytes: float,
        free: Choice | None,
        tried: Sequence[tuple[int, ...]],
    ) -> Choice | None:
        return choose(
            self.costs,
            self.edges,
            rows=rows,
            limit_bytes=limit_bytes,
            free=free,
            classes=self.classes,
            cutoff_s=self.cutoff_s,
            tried=tried,
        )

    @functools.cached_property
    def _ties(self) -> Tied | None:
        """The problem with ties, if it is deep and ties make it much smaller."""
        if len(self.costs) <= DEEP:
            return None
        found = tied(self.costs, self.edges)
        return found if len(found.costs) <= WORTH * len(self.costs) else None

    def _lower_bound(self, found: Choice | None = None) -> float:
        """A bound of the whole problem: to compare with the cutoff if there is one, else with a solution."""
        if not self.is_proven or (found is None) != bool(np.isfinite(self.cutoff_s)):
            return 0.0
        reduced = reduce_problem(self.costs, self.edges, dominance=False)
        start, gap = None, NEAR
        if found is not None:
            start = reduced.restricted(found.numbers)
            gap *= found.seconds / max(found.seconds - reduced.constant, 1e-30)
        cutoff = self.cutoff_s - reduced.constant
        bounded = bound_problem(reduced.costs, reduced.edges, sweeps=SWEEPS, gap=gap, start=start, cutoff=cutoff)
        return bounded.lower + reduced.constant

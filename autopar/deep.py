"""The choice of a deep model: its layers, which look alike, choose alike.

In: a choice problem as `intra_op.choose` takes it. Out: the same `Choice`. A problem of more than `DEEP` nodes is solved with
alike nodes tied together (`symmetry.py`), so that time hardly grows with the depth; the bound is still of the whole problem, by
dual ascent that starts from the tied solution and ends where the two are `NEAR`. If they stay apart by more than `GOOD_ENOUGH`,
or little is alike, the whole problem is solved. What can go wrong: within a memory limit that no choice with ties meets, `None`
does not prove that nothing fits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from autopar.bounds import bound_problem
from autopar.interchange import Classes
from autopar.intra_op import GOOD_ENOUGH, SWEEPS, Choice, Costs, Edges, choose, mixed
from autopar.memory_prices import MemoryRow
from autopar.presolve import reduce_problem
from autopar.symmetry import Tied, tied

DEEP = 2500
"""Problems of up to so many nodes are solved whole."""
WORTH = 0.6
"""Ties are used if they leave at most this part of the nodes."""
NEAR = 1e-3
"""The dual ascent of a deep problem ends when solution and bound are this near (relative)."""


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

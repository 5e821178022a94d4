"""The least time of one family of choices of stages, by bisection over the longest period u; `choose_stages.py` says how.

In: a `Family`, and the best choice of others so far. Out: its best choices, offered to that one. The least sums before and behind
each layer, which ignore places (`LeastSums`), tell on how many devices layers can be in a choice that matters: only those are
looked at where places count. What can go wrong: a sum that is beyond what matters is known as at least that much, no better.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from autopar.inter_op.dynamic_program.best_choice import BestChoice, is_better
from autopar.inter_op.dynamic_program.describe_choice import describe_stages
from autopar.inter_op.dynamic_program.families import Family
from autopar.inter_op.dynamic_program.recursion import (
    TIE,
    LeastSums,
    Limited,
    Stages,
    Window,
    exact,
    quick,
    stages_of,
)

Interval: TypeAlias = tuple[int, int, np.ndarray]
"""The limits of u between two, by their numbers, neither of which is among them, and for each S a bound on F there."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Table:
    """t and u (group of `Family.alike`, k, j, r - 1), infinite where nothing fits, and a t + c."""

    stage_s: np.ndarray
    period_s: np.ndarray
    cost_s: np.ndarray

    @classmethod
    def of(cls, family: Family, in_flight: Sequence[float]) -> _Table:
        """With so many microbatches in flight at each place."""
        stage_s, sent_s = family.least_s(in_flight), family.merged.transfer_s[..., None]
        return cls(stage_s, family.merged.periods(stage_s, sent_s, in_flight), family.fill * stage_s + sent_s)

    @functools.cached_property
    def least_stage_s(self) -> np.ndarray:
        """The least t at any place."""
        return np.asarray(self.stage_s.min(axis=3))

    @functools.cached_property
    def least_period_s(self) -> np.ndarray:
        """The least u at any place."""
        return np.asarray(self.period_s.min(axis=3))


class FamilySearch:
    """The least T of one family; the module's text says how."""

    def __init__(self, family: Family, best: BestChoice) -> None:
        self.best, self.worth_s = best, best.worth_s
        self.family = family = family.within(self.worth_s)
        self.table = _Table.of(family, family.least_in_flight())
        self.once = family.merged.problem.costs.once_s * family.chunks
        self.least_cost_s = family.fill * self.table.least_stage_s + family.merged.transfer_s
        self.devices = family.merged.devices
        self.slowest = np.array(family.slowest)
        self.known: dict[int, list[tuple[float, float]]] = {count: [] for count in family.counts}
        """By S: limits of u, and F under them with the microbatches in flight of that S."""
        self.tried: list[tuple[float, np.ndarray]] = []
        """Limits of u, and for each S a bound on F under them."""
        once_s = np.where(np.isfinite(self.table.least_stage_s), self.once, np.inf)
        self.least_once = quick(once_s, self.devices, np.maximum)

    def run(self) -> None:
        """Offer the best choices of the family to `best`."""
        least = quick(self.table.least_period_s, self.devices, np.maximum)
        if not math.isfinite(least):
            return
        self.times = self._find_times(least)
        once_s = math.inf
        while once_s >= self.least_once and not self.best.ends():
            found = _Round(self, once_s).run()
            if found is None:
                return
            once_s = float(np.nextafter(self.max_once(found), -math.inf))

    def note_bound(self, step_s: float) -> None:
        """Note what the family takes at least, of the stages that are left; with others it takes longer than what mattered."""
        self.best.floor_s = min(self.best.floor_s, step_s, self.worth_s)

    def _find_times(self, least: float) -> np.ndarray:
        """All u from the least that any choice reaches to those that are too long to matter; always the least and the largest."""
        periods, b = self.table.period_s, self.slowest.min()
        times = periods[(periods >= least) & (periods < np.inf)]
        most = (self.best.worth_s - self.least_once) / b * (1 + 1e-9) if b > 0 else math.inf
        return np.unique(np.append(times[times <= most], (times.min(), times.max())))

    def bounds(self, period_s: float) -> np.ndarray:
        """For each S a bound on F under a limit of u: that under limits of u and o which leave no less choice."""
        found = [values for limit, values in self.tried if limit >= period_s]
        return np.max(found, axis=0) if found else np.zeros(len(self.slowest))

    def known_floor(self, count: int, period_s: float) -> float:
        """A bound on F of that S under a limit of u: what is known under a larger limit, which leaves no less choice."""
        return max((value for limit, value in self.known[count] if limit >= period_s), default=0.0)

    def fits(self, stages: Stages) -> bool:
        """Whether all stages fit the memory."""
        return all(
            stage.peak_bytes * self.family.chunks <= self.family.problem.memory_bytes
            for stage in describe_stages(stages, self.family)
        )

    def max_once(self, stages: Stages) -> float:
        """max o."""
        once_s = self.family.problem.costs.once_s * self.family.chunks
        return max(float(once_s[z, i, j]) for i, j, z in stages)

    def pipeline_s(self, stages: Stages) -> float:
        """T without max o."""
        (i, j, z), family = np.array(stages).T, self.family
        stage_s, sent_s = family.problem.costs.seconds[z, i, j], family.transfer_s[z, i, j]
        period_s = family.periods(stage_s[::-1], sent_s[::-1], family.in_flight[len(stages)]).max()
        return float(family.fill * stage_s.sum() + sent_s.sum() + self._b(len(stages)) * period_s)

    def _b(self, count: int) -> float:
        return self.family.slowest[self.family.counts.index(count)]


class _Round:
    """min over x for one y: the choice that attains it, or None if no choice with max o <= y can still matter."""

    def __init__(self, search: FamilySearch, once_s: float) -> None:
        self.search, self.once_s = search, once_s
        self.family = search.family
        self.value = math.inf
        self.stages: Stages | None = None

    @property
    def _worth(self) -> float:
        """Seconds that a sum + b x must not exceed to matter."""
        return min(self.value * (1 + TIE), self.search.best.worth_s - self.search.least_once)

    def run(self) -> Stages | None:
        """The choice that attains it."""
        times, b = self.search.times, self.search.slowest.min()
        self.sums = LeastSums.of(self._least_costs(float(times[-1])), self.search.devices)
        floor = self.sums.least
        if math.isinf(self.once_s):
            self.search.note_bound(floor + b * float(times[0]) + self.search.least_once)
        if b > 0:
            self._bisect(self._try_promising(floor))
        else:
            self._try(float(times[-1]), float(times[-1]))
        return self.stages

    def _try_promising(self, floor: float) -> list[Interval]:
        """Try the limits that promise most by what ignores places, the best one first; returns what is between them.

        `floor`: a bound on F without a limit. A bound on F under a limit is quick, and whatever it leaves is then worth little.
        """
        times, b = self.search.times, self.search.slowest.min()
        floors = self._promising(floor)
        self.search.tried += [(float(times[at]), self._of_each(bound)) for at, bound in floors.items()]
        ends, here = sorted(floors), dict[int, np.ndarray]()
        for at in sorted(floors, key=lambda at: floors[at] + b * times[at]):
            if self.search.best.ends():
                return []
            from_ = max((end + 1 for end in ends if end < at), default=0)
            here[at] = self._try(float(times[at]), float(times[from_]))
        uppers = [*(here[end] for end in ends[1:]), self._of_each(floor)]
        return list(zip(ends, [*ends[1:], len(times)], uppers, strict=True))

    def _promising(self, floor: float) -> dict[int, float]:
        """Bounds on F under limits of u, by their numbers: best first, until no other limit promises more than the best of these.

        The least limit is always among them.
        """
        times, b = self.search.times, float(self.search.slowest.min())
        found = {0: self._floor(float(times[0]), float(times[0]))}
        waiting = [(floor + b * float(times[min(1, len(times) - 1)]), 0, len(times), floor)]
        best_s = min(self._worth, found[0] + b * float(times[0]))
        while waiting and not self.search.best.ends():
            promised_s, low, high, upper = heapq.heappop(waiting)
            if high - low < 2 or promised_s >= best_s * (1 - self.search.best.tolerance):
                continue
            at = (low + high) // 2
            here = found[at] = self._floor(float(times[at]), float(times[low + 1]))
            best_s = min(best_s, here + b * float(times[at]))
            heapq.heappush(waiting, (here + b * float(times[low + 1]), low, at, here))
            if at + 1 < high:
                heapq.heappush(waiting, (upper + b * float(times[at + 1]), at, high, upper))
        return found

    def _bisect(self, waiting: list[Interval]) -> None:
        """Search the intervals between stage times: (number before, number behind, for each S a bound on F within)."""
        times, b = self.search.times, self.search.slowest
        while waiting and not self.search.best.ends():
            low, high, floors = waiting.pop()
            left = np.isfinite(floors)
            if not left.any():
                continue
            most_s = float(((self._worth - floors[left]) / b[left]).max())
            high = min(high, int(np.searchsorted(times, most_s, side="right")))
            if high - low < 2:
                continue
            middle = (low + high) // 2
            here = self._try(float(times[middle]), float(times[low + 1]))
            waiting += [(middle, high, floors), (low, middle, np.maximum(here, floors))]

    def _least_costs(self, period_s: float) -> np.ndarray:
        """The least a t + c (group of `Family.alike`, k, j) at any place, under a limit of u."""
        return np.where(self._is_usable(self.search.table, period_s), self.search.least_cost_s, np.inf)

    def _floor(self, period_s: float, from_s: float) -> float:
        """A bound on F under a limit of u, exact up to what still matters under a limit of `from_s`."""
        most = self._most(from_s)
        return min(most, quick(self._least_costs(period_s), self.search.devices, np.add, self._window(from_s)))

    def _most(self, from_s: float) -> float:
        """A sum that F must not exceed for a choice under limits of u from this one on to matter; a little more than that."""
        return self._worth * (1 + TIE * 10) - float(self.search.slowest.min()) * from_s

    def _window(self, from_s: float) -> Window | None:
        most = self._most(from_s)
        return None if math.isinf(most) else self.sums.within(most)

    def _of_each(self, floor: float) -> np.ndarray:
        return np.full(len(self.search.slowest), floor)

    def _try(self, period_s: float, from_s: float) -> np.ndarray:
        """Offer the best choices under a limit of u; returns for each S a bound on F under it, which is used from `from_s` on."""
        bounds = self.search.bounds(period_s)
        if self._may_matter(bounds, period_s):
            bounds = np.maximum(bounds, self._try_new(period_s, from_s))
            self.search.tried.append((period_s, bounds))
        return bounds

    def _may_matter(self, floors: np.ndarray, period_s: float) -> bool:
        least_s = float((floors + self.search.slowest * period_s).min())
        return math.isfinite(least_s) and least_s <= self._worth

    def _try_new(self, period_s: float, from_s: float) -> np.ndarray:
        floors = self._of_each(self._floor(period_s, from_s))
        if not self._may_matter(floors, period_s):
            return floors
        most, table = self._most(from_s), self._limit(self.search.table, period_s, from_s)
        best = exact(table, self.search.devices, np.add)
        counts, slowest = self.family.counts, self.search.slowest
        sums: np.ndarray = np.minimum(best[0, list(counts), -1], most)
        sums = np.maximum(sums, [self.search.known_floor(count, period_s) for count in counts])
        alone: dict[int, Stages] = {}
        while (values := sums + slowest * period_s).min() <= self._worth and math.isfinite(values.min()):
            at = int(np.argmax(values <= values.min() * (1 + TIE)))
            stages = alone.get(at) or self._stages_of(best, table, counts[at], self.family.least_in_flight())
            if at in alone or self.search.fits(stages):
                self._offer(stages)
                break
            # The table assumed the fewest microbatches in flight of any number of stages: ask again for this number alone.
            sums[at], alone[at] = self._alone(counts[at], period_s, from_s)
        return sums

    def _alone(self, count: int, period_s: float, from_s: float) -> tuple[float, Stages]:
        """F of one S with its own microbatches in flight, or a bound on it, and the stages, if any fit."""
        in_flight, most = self.family.in_flight[count], self._most(from_s)
        strict = _Table.of(self.family, in_flight)
        table = self._limit(strict, period_s, from_s)
        best = exact(table, self.search.devices, np.add)
        value = float(best[0, count, -1])
        known = self.search.known[count]
        if value <= most and math.isfinite(value):
            known.append((period_s, value))
            return value, self._stages_of(best, table, count, in_flight)
        if not known:  # whether slower stages fit is asked once
            first_s = float(self.search.times[0])
            at_all = exact(self._limit(strict, math.inf, first_s), self.search.devices, np.add)[0, count, -1]
            known.append((math.inf, min(float(at_all), self._most(first_s))))
        known.append((period_s, most))
        return most, ()

    def _stages_of(self, best: np.ndarray, table: Limited, count: int, in_flight: Sequence[float]) -> Stages:
        found = stages_of(best, table, devices=self.search.devices, count=count, combine=np.add)
        return self.family.options_of(found, in_flight)

    def _limit(self, table: _Table, period_s: float, from_s: float) -> Limited:
        """a t + c, of stages within the limits, as far as they matter under a limit of `from_s`."""
        usable, window = self._is_usable(table, period_s), self._window(from_s)
        return Limited(
            costs=table.cost_s,
            measured=table.period_s,
            most=period_s,
            usable=usable if window is None else window.leave(usable),
            window=window,
        )

    def _is_usable(self, table: _Table, period_s: float) -> np.ndarray:
        """Booleans (group of `Family.alike`, k, j): whether a stage is within the limits at any place."""
        is_within = (table.least_period_s <= period_s) & (self.search.once <= self.once_s)
        return np.asarray(is_within & np.isfinite(table.least_period_s))

    def _offer(self, stages: Stages) -> None:
        value = self.search.pipeline_s(stages)
        if self.stages is None or is_better(value, stages, than_s=self.value, than=self.stages):
            self.value, self.stages = value, stages
        self.search.best.offer(value + self.search.max_once(stages), stages, self.family)

"""The inter-operator dynamic program: layers to stages, stages to submeshes.

In: a `StageProblem`: what layers i..j-1 cost on each submesh that may be used, the cluster, the microbatches, the schedule.
Out: a `StageChoice`: the stages in order, their submeshes, the predicted seconds of a step. Letters: B microbatches, S stages,
t seconds of a stage per microbatch (forward and backward), c of the transfer to the next stage and back, u from one microbatch
to the next, o its seconds once per step (reduction of gradients, update; all stages do theirs at the same time, so the slowest
counts), n its devices, D all. Then

    T = a sum t + sum c + b(S) max u + max o

              backward is one task     a = 1    b = B - 1       1f1b, gpipe and their like, and inference
              interleaved, v chunks    a = 1/v  b = v B - 1     a "stage" is a chunk, S = p v, all meshes equal, p divides B
              zb-h1                    a = 1/3  b = B - 1/3 + max(0, S - B)/3     the three kinds of task equally long
              one stage                a = 1    b = B - 1       no pipeline: a loop in one executable

which for equal stages gives the bubbles (p - 1)/B, (p - 1)/(v B) and, for zb-h1, a third of the first. u is t, unless a stage
waits for its microbatches to come back. The r-th stage from the end has f in flight, each of which takes as long as it takes
through r stages like this one and back (Little's law; `tests/inter_op/dynamic_program/test_periods.py` simulates schedules):

    u(r) = max(t, (r t + (r - 1) c) / f)               if f < B, and backward is one task
    u(r) = max(t, ((2 r + 1) t / 3 + (r - 1) c) / r)   zb-h1, of whose weight gradients one is between two microbatches

Interleaved schedules and inference are taken to wait for no transfer but the first. A stage fits if weights + f activations +
work <= memory, f the microbatches in flight of its place in the schedule, work what its tasks need. Of v chunks on a mesh
v weights + f activations + work <= memory, f of all chunks, which is exact where they are alike. Under limits max u <= x,
max o <= y

    F(r, k, d; x, y) = min over j > k and submeshes z, u(k, j, z) <= x, o(k, j, z) <= y, which fit as the r-th stage from the end,
                       of a t(k, j, z) + c(k, j, z) + F(r - 1, j, d - n(z); x, y)     F(0, L, 0) = 0
    T = min over y of (y + min over x of min over S of F(S, 0, D; x, y) + b(S) x)

x: bisection over the distinct u, from the least that any choice reaches to the largest that can still pay. An interval is
dropped if for each S a F at its upper end plus b(S) times its lower end is worse than the best known. A bound on F that ignores
r (a stage fits if it fits at any place) is quick; F itself is computed only if that bound allows. y: from infinity down; a
choice that attains the minimum under y beats all others that do not have a smaller max o. What F is at least under limits holds
under smaller ones. `tolerance` also drops intervals that could gain less; `bound_s` is then the time that no choice beats.
Ties: fewer stages, then earlier cuts, then earlier submeshes in the list.

What can go wrong: costs may not add up over layers, so the caller plans the chosen stages as wholes. A stage among unlike ones
waits longer or shorter than among its like; the caller times the schedule.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from autopar.errors import ArgumentError, OutOfMemoryError
from autopar.inter_op.dynamic_program.best_choice import BestChoice, is_better
from autopar.inter_op.dynamic_program.describe_choice import (
    count_ruled_out,
    describe_stages,
    explain_nothing_left,
    explain_out_of_memory,
)
from autopar.inter_op.dynamic_program.families import Family, families_of
from autopar.inter_op.dynamic_program.problem import Manual, SlowerStages, StageChoice, StageProblem
from autopar.inter_op.dynamic_program.recursion import TIE, Limited, Stages, exact, quick, stages_of
from autopar.inter_op.dynamic_program.submeshes import Submesh, kind_of, place, place_in_parts, submeshes, tiles
from autopar.schedules.schedules import SCHEDULES, interleaves
from autopar.solver.budget import Budget


def choose_stages(
    problem: StageProblem, *, manual: Manual | None = None, tolerance: float = 0.0, explain: bool = True
) -> StageChoice:
    """The fastest choice that fits, to within the relative `tolerance`.

    Raises OutOfMemoryError if nothing fits, and ArgumentError if nothing is left to choose. With `explain` the former names the
    tightest stage of the choice that comes closest, which takes a search of its own.
    """
    manual = manual or Manual()
    best = _search(problem, manual, BestChoice(tolerance))
    if best.stages is not None:
        return _describe(problem, best, manual)
    possible = [family for family in families_of(problem, manual) if family.is_possible]
    if possible and not explain:
        raise _does_not_fit(problem)
    if possible:
        raise OutOfMemoryError(explain_out_of_memory(problem, possible))
    raise ArgumentError(explain_nothing_left(problem, manual))


def choose_faster_stages(
    problem: StageProblem,
    below_s: float,
    *,
    manual: Manual | None = None,
    tolerance: float = 0.0,
    budget: Budget | None = None,
) -> StageChoice | SlowerStages:
    """The fastest choice as in `choose_stages`, if it takes less than `below_s`; the best that is known when the budget is over.

    Raises OutOfMemoryError and ArgumentError as `choose_stages`, where no choice fits at any speed.
    """
    manual = manual or Manual()
    best = _search(problem, manual, BestChoice(tolerance, below_s=below_s, budget=budget))
    if best.stages is not None and (best.step_s <= below_s or best.is_cut_short):
        return _describe(problem, best, manual)
    if math.isfinite(below_s) and math.isfinite(best.floor_s):
        return SlowerStages(max(below_s, best.floor_s))
    if any(family.is_possible for family in families_of(problem, manual)):
        raise _does_not_fit(problem)
    raise ArgumentError(explain_nothing_left(problem, manual))


def _search(problem: StageProblem, manual: Manual, best: BestChoice) -> BestChoice:
    _check(problem, manual)
    for family in families_of(problem, manual):
        if family.least_step_s > best.worth_s:
            best.floor_s = min(best.floor_s, family.least_step_s)
        elif math.isfinite(family.least_step_s):
            _FamilySearch(family, best).run()
    return best


def _does_not_fit(problem: StageProblem) -> OutOfMemoryError:
    return OutOfMemoryError(f"No choice of stages fits into {problem.memory_bytes:,.0f} bytes per device.")


def may_fit(problem: StageProblem, manual: Manual) -> bool:
    """False if no choice of stages fits the memory; True says little, but is found quickly."""
    return any(math.isfinite(family.least_step_s) for family in families_of(problem, manual))


def _check(problem: StageProblem, manual: Manual) -> None:
    wrong = []
    if problem.schedule not in SCHEDULES:
        wrong.append(f"schedule {problem.schedule!r} is unknown; there are {', '.join(map(repr, SCHEDULES))}")
    if interleaves(problem.schedule) != (problem.virtual_stages > 1) or problem.virtual_stages < 1:
        wrong.append(
            f"schedule {problem.schedule!r} with virtual_stages={problem.virtual_stages}: 'interleaved' needs two or more, "
            "the others one"
        )
    if problem.microbatches < 1:
        wrong.append(f"num_microbatches={problem.microbatches}: must be at least 1")
    known = _known_submeshes(problem)
    foreign = sorted(set(problem.options) - set(known))
    if foreign and manual.submeshes is None:
        wrong.append(f"submeshes {foreign} are not among {known}, so they may not fill the cluster")
    if manual.submeshes is not None and not tiles(manual.submeshes, problem.cluster[0], problem.cluster[1]):
        wrong.append(f"submeshes {manual.submeshes} do not fill {problem.cluster} (nodes, devices per node)")
    if manual.cuts is not None and list(manual.cuts) != sorted({c for c in manual.cuts if 0 < c < problem.layers}):
        wrong.append(f"cuts {manual.cuts} are not ascending numbers of layers between 1 and {problem.layers - 1}")
    if wrong:
        raise ArgumentError("Stages cannot be chosen like this:\n" + "\n".join(f"  - {line}" for line in wrong))


def _known_submeshes(problem: StageProblem) -> tuple[Submesh, ...]:
    """Those that fill the cluster wherever their sizes add up."""
    if not problem.parts:
        return submeshes(problem.cluster[0], problem.cluster[1])
    return tuple((*one, kind_of(part)) for part in problem.parts for one in submeshes(part[0], part[1]))


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


class _FamilySearch:
    """The least T of one family; the module's text says how."""

    def __init__(self, family: Family, best: BestChoice) -> None:
        self.family, self.best = family, best
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

    def __init__(self, search: _FamilySearch, once_s: float) -> None:
        self.search, self.once_s = search, once_s
        self.family = search.family
        self.value = math.inf
        self.stages: Stages | None = None

    @property
    def _worth(self) -> float:
        """Seconds that a sum + b x must not exceed to matter."""
        return min(self.value * (1 + TIE), self.search.best.worth_s - self.search.least_once)

    def run(self) -> Stages | None:
        times, b = self.search.times, self.search.slowest.min()
        floor = self._floor(float(times[-1]))
        if math.isinf(self.once_s):
            bound_s = floor + b * float(times[0]) + self.search.least_once
            self.search.best.floor_s = min(self.search.best.floor_s, bound_s)
        if b > 0:
            self._try(float(times[0]))
            self._bisect(self._of_each(floor))
        else:
            self._try(float(times[-1]))
        return self.stages

    def _bisect(self, floors: np.ndarray) -> None:
        """Search the intervals between the stage times; `floors`: for each S a bound on F between the first and the last."""
        times, b = self.search.times, self.search.slowest
        waiting = [(0, len(times), floors)]
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
            here = self._try(float(times[middle]))
            waiting += [(middle, high, floors), (low, middle, np.maximum(here, floors))]

    def _floor(self, period_s: float) -> float:
        is_within = self._is_usable(self.search.table, period_s)
        return quick(np.where(is_within, self.search.least_cost_s, np.inf), self.search.devices, np.add)

    def _of_each(self, floor: float) -> np.ndarray:
        return np.full(len(self.search.slowest), floor)

    def _try(self, period_s: float) -> np.ndarray:
        """Offer the best choices under a limit of u; returns for each S a bound on F under it."""
        bounds = self.search.bounds(period_s)
        if self._may_matter(bounds, period_s):
            bounds = np.maximum(bounds, self._try_new(period_s))
            self.search.tried.append((period_s, bounds))
        return bounds

    def _may_matter(self, floors: np.ndarray, period_s: float) -> bool:
        least_s = float((floors + self.search.slowest * period_s).min())
        return math.isfinite(least_s) and least_s <= self._worth

    def _try_new(self, period_s: float) -> np.ndarray:
        floors = self._of_each(self._floor(period_s))
        if not self._may_matter(floors, period_s):
            return floors
        table = self._limit(self.search.table, period_s)
        best = exact(table, self.search.devices, np.add)
        counts, slowest = self.family.counts, self.search.slowest
        sums: np.ndarray = best[0, list(counts), -1]
        sums = np.maximum(sums, [self.search.known_floor(count, period_s) for count in counts])
        alone: dict[int, Stages] = {}
        while (values := sums + slowest * period_s).min() <= self._worth and math.isfinite(values.min()):
            at = int(np.argmax(values <= values.min() * (1 + TIE)))
            stages = alone.get(at) or self._stages_of(best, table, counts[at], self.family.least_in_flight())
            if at in alone or self.search.fits(stages):
                self._offer(stages)
                break
            # The table assumed the fewest microbatches in flight of any number of stages: ask again for this number alone.
            sums[at], alone[at] = self._alone(counts[at], period_s)
        return sums

    def _alone(self, count: int, period_s: float) -> tuple[float, Stages]:
        """F of one S with its own microbatches in flight, and the stages, if any fit."""
        in_flight = self.family.in_flight[count]
        strict = _Table.of(self.family, in_flight)
        table = self._limit(strict, period_s)
        best = exact(table, self.search.devices, np.add)
        value = float(best[0, count, -1])
        known = self.search.known[count]
        if math.isfinite(value):
            known.append((period_s, value))
            return value, self._stages_of(best, table, count, in_flight)
        if not known:  # whether slower stages fit is asked once
            at_all = exact(self._limit(strict, math.inf), self.search.devices, np.add)[0, count, -1]
            known.append((math.inf, float(at_all)))
        known.append((period_s, math.inf))
        return value, ()

    def _stages_of(self, best: np.ndarray, table: Limited, count: int, in_flight: Sequence[float]) -> Stages:
        found = stages_of(best, table, devices=self.search.devices, count=count, combine=np.add)
        return self.family.options_of(found, in_flight)

    def _limit(self, table: _Table, period_s: float) -> Limited:
        """a t + c, of stages within the limits."""
        return Limited(
            costs=table.cost_s, measured=table.period_s, most=period_s, usable=self._is_usable(table, period_s)
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


def _describe(problem: StageProblem, best: BestChoice, manual: Manual) -> StageChoice:
    assert best.stages is not None
    assert best.family is not None
    stages = describe_stages(best.stages, best.family)
    meshes = len(stages) // best.family.chunks
    slowest = max(range(len(stages)), key=lambda s: stages[s].stage_s)
    taken, (nodes, per_node, *_) = [s.submesh for s in stages[:meshes]], problem.cluster
    devices = place_in_parts(taken, problem.parts) if problem.parts else place(taken, nodes, per_node)
    assert devices is not None
    ruled_out = count_ruled_out(tuple(families_of(problem, manual)), stages[slowest].stage_s)
    bound_s = 0.0 if best.is_cut_short else min(best.step_s * (1 - best.tolerance), best.below_s)
    return StageChoice(
        stages=stages,
        step_s=best.step_s,
        bound_s=bound_s,
        bottleneck=slowest,
        ruled_out=ruled_out,
        devices=devices,
    )

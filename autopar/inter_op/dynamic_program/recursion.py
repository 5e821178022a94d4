"""Choices of stages that follow equal rules, and the least sums and maxima over them.

In: a `StageProblem` and what the user has decided. Out: its `Family`s, each with the numbers of stages that are left, what
a stage keeps in flight at each place, and the letters a and b of `choose_stages.py`; and, for tables of what
stages cost, the recursion F of `choose_stages.py`, quickly without places (`quick`) or with them (`exact`). What
can go wrong: `quick` is a bound, which no choice need attain.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from autopar.inter_op.dynamic_program.problem import Manual, StageProblem
from autopar.schedules.schedules import NAMED_SCHEDULES, most_in_flight, most_together

TIE = 1e-12
"""Relative difference up to which two times are the same."""
Stages: TypeAlias = tuple[tuple[int, int, int], ...]
"""(first layer, end layer, option) of each."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Family:
    """Choices of equal rules: `counts` are the S in it, `slowest` their b(S), `fill` is a.

    `in_flight[S][r - 1]`: what the r-th stage from the end keeps. A mesh has `chunks`, each of which may have that part of the
    memory, and counts that part of the microbatches that all have in flight together.
    """

    problem: StageProblem
    manual: Manual
    counts: tuple[int, ...]
    in_flight: Mapping[int, tuple[float, ...]]
    fill: float
    slowest: tuple[float, ...]
    chunks: int = 1

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Devices of each option; where all meshes are equal, 1 per chunk, and options of another size never fit."""
        if self.chunks == 1:
            return self.problem.sizes
        return tuple(1 if size == self._mesh_size else self.total + 1 for size in self.problem.sizes)

    @property
    def _mesh_size(self) -> int:
        return self.problem.devices // (self.counts[0] // self.chunks)

    @property
    def total(self) -> int:
        """D: devices, or chunks where all meshes are equal."""
        return self.problem.devices if self.chunks == 1 else self.counts[0]

    @functools.cached_property
    def reach(self) -> tuple[tuple[int, int], ...]:
        """See `StageProblem.reach`; all of the chunks where meshes are equal."""
        return self.problem.reach if self.chunks == 1 else ((0, self.total),) * len(self.problem.options)

    @property
    def is_possible(self) -> bool:
        """Whether there is a choice, memory aside."""
        return math.isfinite(quick(self.stage_s(self.open_places()).min(axis=3), self, np.add))

    @property
    def may_fit(self) -> bool:
        """False if the layers fit the memory in no stages at all, even if each were at the place that keeps least."""
        costs = self.problem.costs
        kept = costs.weight_bytes + min(self.least_in_flight()) * costs.activation_bytes
        most = kept + costs.working_bytes / self.chunks
        fits = np.isfinite(costs.seconds) & (most * self.chunks <= self.problem.memory_bytes)
        return math.isfinite(quick(np.where(fits, 0.0, np.inf), self, np.add))

    def least_in_flight(self) -> tuple[float, ...]:
        """What a stage keeps at least, r-th from the end of a choice of any S."""
        return tuple(
            min(self.in_flight[count][r] for count in self.counts if count > r) for r in range(max(self.counts))
        )

    def open_places(self) -> np.ndarray:
        """Booleans (option, k, j, r - 1): whether there is a plan, and whether the user's decisions leave it."""
        layers, places = self.problem.layers, max(self.counts)
        spans = np.zeros((layers, layers + 1, places), bool)
        spans[:, layers, 0] = True
        spans[:, 1:layers, 1:] = True
        spans[0, :, [r for r in range(places) if r + 1 not in self.counts]] = False
        spans[1:, :, places - 1] = False
        if self.manual.cuts is not None:
            bounds = [0, *self.manual.cuts, layers]
            wanted = np.zeros((layers, layers + 1, 1), bool)
            wanted[bounds[:-1], bounds[1:]] = True
            spans &= wanted
        allowed = np.ones((len(self.problem.options), places), bool)
        if self.manual.submeshes is not None:
            chosen = self.manual.submeshes * self.chunks
            allowed = np.array([[option == submesh for submesh in chosen[::-1]] for option in self.problem.options])
        has_plan = np.isfinite(self.problem.costs.seconds) & np.triu(np.ones((layers, layers + 1), bool), 1)
        return np.asarray(spans[None] & allowed[:, None, None, :] & has_plan[..., None])

    def bytes(self, in_flight: Sequence[float]) -> np.ndarray:
        """Peak bytes per device (option, k, j, r - 1), as if all chunks of the mesh were like this one."""
        costs = self.problem.costs
        kept = costs.activation_bytes[..., None] * np.array(in_flight)
        working = costs.working_bytes[..., None] / self.chunks
        return np.asarray((costs.weight_bytes[..., None] + kept + working) * self.chunks)

    def stage_s(self, places: np.ndarray) -> np.ndarray:
        """t (option, k, j, r - 1), infinite outside `places`."""
        return np.where(places, self.problem.costs.seconds[..., None], np.inf)

    @property
    def transfer_s(self) -> np.ndarray:
        """c (option, k, j); the last stage sends nothing."""
        return np.where(np.arange(self.problem.layers + 1) < self.problem.layers, self.problem.costs.transfer_s, 0)


def families_of(problem: StageProblem, manual: Manual) -> Iterator[Family]:
    """All families that the user's decisions leave; one stage first. Interleaved meshes are equal: unlike nodes have none."""
    family = functools.partial(Family, problem=problem, manual=manual)
    batches, chunks = problem.microbatches, problem.virtual_stages
    most = min(problem.layers, problem.devices // min(problem.sizes))

    def is_left(meshes: int, stages: int) -> bool:
        return (
            stages <= most * chunks
            and stages <= problem.layers
            and manual.num_stages in (None, meshes)
            and (manual.cuts is None or len(manual.cuts) + 1 == stages)
            and (manual.submeshes is None or len(manual.submeshes) == meshes)
        )

    if is_left(1, 1):
        yield family(counts=(1,), in_flight={1: (1,)}, fill=1.0, slowest=(batches - 1.0,))
    counts = tuple(p for p in range(2, most + 1) if is_left(p, p * chunks))
    schedule = NAMED_SCHEDULES[problem.schedule]

    def in_flight_of(meshes: int) -> tuple[float, ...]:
        sizes = {"num_meshes": meshes, "num_microbatches": batches, "virtual_stages": chunks}
        if chunks == 1:
            return most_in_flight(problem.schedule, **sizes)[::-1]
        return tuple(count / chunks for count in most_together(problem.schedule, **sizes))[::-1] * chunks

    if schedule.interleaves:
        for p in counts if not problem.parts else ():
            if problem.devices % p == 0 and batches % p == 0:
                yield family(
                    counts=(p * chunks,),
                    in_flight={p * chunks: in_flight_of(p)},
                    fill=1 / chunks,
                    slowest=(chunks * batches - 1.0,),
                    chunks=chunks,
                )
    elif counts:
        split = schedule.is_split
        yield family(
            counts=counts,
            in_flight={p: in_flight_of(p) for p in counts},
            fill=1 / 3 if split else 1.0,
            slowest=tuple(batches - 1 / 3 + max(0, p - batches) / 3 if split else batches - 1.0 for p in counts),
        )


@dataclasses.dataclass(frozen=True)
class _Units:
    """Devices in units: of each option, of all, and for each option where those that it may be among begin and end."""

    sizes: tuple[int, ...]
    total: int
    reach: tuple[tuple[int, int], ...]

    def fits(self, option: int, devices: int) -> bool:
        """Whether an option may be the first of stages on so many devices at the end of the pipeline."""
        first, end = self.reach[option]
        return first + self.sizes[option] <= devices <= end


def _count_in_units(table: np.ndarray, family: Family) -> _Units:
    """The largest unit that divides the devices of all options that the table leaves, and those of each kind.

    An option that it does not leave gets more than all. Where parts of a node are too slow, the unit is a node.
    """
    is_left = np.isfinite(table).any(axis=tuple(range(1, table.ndim)))
    left = [size for size, one in zip(family.sizes, is_left, strict=True) if one and size <= family.total]
    borders = {border for ends in family.reach for border in ends}
    unit = math.gcd(family.total, *left, *borders)
    total = family.total // unit
    sizes = tuple(s // unit if one else total + 1 for s, one in zip(family.sizes, is_left, strict=True))
    return _Units(sizes, total, tuple((first // unit, end // unit) for first, end in family.reach))


def _least_by_size(table: np.ndarray, family: Family) -> tuple[np.ndarray, _Units]:
    """The least entries of the options of each size and kind that fit, and these in units."""
    units = _count_in_units(table, family)
    each = [(size, *ends) for size, ends in zip(units.sizes, units.reach, strict=True)]
    left = sorted({one for one in each if one[0] <= units.total})
    least = [table[[one == other for other in each]].min(axis=0) for one in left]
    found = _Units(tuple(size for size, _, _ in left), units.total, tuple((first, end) for _, first, end in left))
    return np.stack(least) if least else np.empty((0, *table.shape[1:])), found


def quick(table: np.ndarray, family: Family, combine: np.ufunc) -> float:
    """F(any, 0, D) of a table (option, k, j): stages may stand at any place. With `np.maximum`: the least largest value."""
    table, units = _least_by_size(table, family)
    options, layers, _ = table.shape
    if not options:
        return math.inf
    total = units.total
    rest = np.full((options, layers + 1, total + 1), np.inf)

    def put(k: int, best: np.ndarray) -> None:
        for z, (size, (first, end)) in enumerate(zip(units.sizes, units.reach, strict=True)):
            if first + size <= end:
                rest[z, k, first + size : end + 1] = best[first : end + 1 - size]

    best = np.where(np.arange(total + 1) == 0, 0.0, np.inf)
    for k in range(layers, 0, -1):
        put(k, best)
        best = combine(table[:, k - 1, k:, None], rest[:, k:, :]).min(axis=(0, 1))
    return float(best[total])


def exact(table: np.ndarray, family: Family, combine: np.ufunc) -> np.ndarray:
    """F[k, r, d] of a table (option, k, j, r - 1); d is in units (`_count_in_units`), so [0, S, -1] is F(S, 0, D)."""
    table, units = _least_by_size(table, family)
    _, layers, ends, places = table.shape
    best = np.full((layers + 1, places + 1, units.total + 1), np.inf)
    best[layers, 0, 0] = 0.0
    usable = np.isfinite(table).any(axis=3)
    for k in range(layers - 1, -1, -1):
        most = min(places, layers - k)
        for z, (size, (first, end)) in enumerate(zip(units.sizes, units.reach, strict=True)):
            if first + size > end or not usable[z, k].any():
                continue
            low, high = int(usable[z, k].argmax()), ends - int(usable[z, k, ::-1].argmax())
            behind = best[low:high, :most, first : end + 1 - size]
            here = best[k, 1 : most + 1, first + size : end + 1]
            np.minimum(here, combine(table[z, k, low:high, :most, None], behind).min(axis=0), out=here)
    return best


def stages_of(best: np.ndarray, table: np.ndarray, *, family: Family, count: int, combine: np.ufunc) -> Stages:
    """The stages that attain F(count, 0, D): the earliest cut at each turn, then the earliest option."""
    units = _count_in_units(table, family)
    sizes, layers, k, d, found = units.sizes, table.shape[1], 0, units.total, []
    for r in range(count, 0, -1):
        options = [z for z in range(len(sizes)) if units.fits(z, d)]
        behind = np.stack([best[:, r - 1, d - sizes[z]] for z in options])
        values = combine(table[options, k, :, r - 1], behind)
        j, place_ = np.argwhere(best[k, r, d] * (1 + TIE) >= values.T)[0]
        found.append((k, int(j), options[place_]))
        k, d = int(j), d - sizes[options[place_]]
    assert (k, d) == (layers, 0)
    return tuple(found)

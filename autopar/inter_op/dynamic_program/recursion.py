"""The least sums and maxima over choices of stages: the recursion F of `choose_stages.py`.

In: tables of what stages cost, and the devices of each option. Out: F, quickly without places (`quick`) or with them (`exact`),
and the stages that attain it. What can go wrong: `quick` is a bound, which no choice need attain. Within a `Window` F is right
for the choices that it leaves; it may be too large for others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

TIE = 1e-12
"""Relative difference up to which two times are the same."""
Stages: TypeAlias = tuple[tuple[int, int, int], ...]
"""(first layer, end layer, option) of each."""


@dataclasses.dataclass(frozen=True)
class Devices:
    """Devices of each option, of all, and for each option where those that it may be among begin and end.

    `each`: where they are counted in units, the devices of one.
    """

    sizes: tuple[int, ...]
    total: int
    reach: tuple[tuple[int, int], ...]
    each: int = 1

    def fits(self, option: int, devices: int) -> bool:
        """Whether an option may be the first of stages on so many devices at the end of the pipeline."""
        first, end = self.reach[option]
        return first + self.sizes[option] <= devices <= end

    def in_units(self, usable: np.ndarray) -> Devices:
        """The same in the largest unit that divides the devices of all options that are left, and those of each kind.

        An option that is not left gets more than all. Where parts of a node are too slow, the unit is a node. `usable`: booleans
        (option, k, j).
        """
        is_left = [one.any() for one in usable]
        left = [size for size, one in zip(self.sizes, is_left, strict=True) if one and size <= self.total]
        borders = {border for ends in self.reach for border in ends}
        unit = math.gcd(self.total, *left, *borders)
        total = self.total // unit
        sizes = tuple(s // unit if one else total + 1 for s, one in zip(self.sizes, is_left, strict=True))
        return Devices(sizes, total, tuple((first // unit, end // unit) for first, end in self.reach), unit)


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """For each k, the fewest and the most devices that layers from k on may have; none where the fewest are more."""

    fewest: np.ndarray
    most: np.ndarray

    def leave(self, usable: np.ndarray) -> np.ndarray:
        """Of booleans (option, k, j), those of stages that begin and end where layers may have devices."""
        is_open = self.fewest <= self.most
        return np.asarray(usable & is_open[:-1, None] & is_open)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Limited:
    """What stages cost that are within a limit; arrays (option, k, j, r - 1), `usable` (option, k, j).

    Attributes:
        costs: of each stage; infinite where it is impossible.
        measured: what the limit is on.
        most: the limit.
        usable: False where no place is within the limit.
        window: the devices on which layers are looked at; None: on any.
    """

    costs: np.ndarray
    measured: np.ndarray
    most: float
    usable: np.ndarray
    window: Window | None = None

    @classmethod
    def at_all(cls, costs: np.ndarray) -> Limited:
        """Without a limit."""
        return cls(costs=costs, measured=costs, most=math.inf, usable=np.isfinite(costs).any(axis=3))

    def of(self, option: int, layer: int, first: int, end: int, places: int) -> np.ndarray:
        """The costs (j, r - 1) of the stages that begin with `layer`, for j from `first` to `end` - 1, at the last `places`.

        Infinite where the limit is exceeded.
        """
        within = self.measured[option, layer, first:end, :places] <= self.most
        within &= self.usable[option, layer, first:end, None]
        return np.where(within, self.costs[option, layer, first:end, :places], np.inf)

    def at(self, options: Sequence[int], layer: int, place: int) -> np.ndarray:
        """The same of all stages (option, j) that begin with a layer at one place, counted from 0 at the end."""
        within = (self.measured[options, layer, :, place] <= self.most) & self.usable[options, layer]
        return np.where(within, self.costs[options, layer, :, place], np.inf)


def _turns(
    usable: np.ndarray, units: Devices, window: Window | None = None, *, is_forward: bool = False
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """All steps of the recursion, the last layers first; the first ones if `is_forward`.

    Each is (k, z, first, end, low, high): the stages of layers k to j - 1 on option z, for j from `first` to `end` - 1. `low` to
    `high` - 1 are the units that such a stage and all stages behind it may have together. `usable`: booleans (option, k, j).
    """
    options, _, ends = usable.shape
    sizes, reach = np.array(units.sizes)[:, None], np.array(units.reach).reshape(options, 2, 1)
    fewest, most = _devices_that_matter(usable, units)
    if window is not None:
        unit = units.each
        fewest, most = np.maximum(fewest, -(-window.fewest // unit)), np.minimum(most, window.most // unit)
    low = np.maximum(reach[:, 0] + sizes, fewest[:-1])
    high = np.minimum(reach[:, 1], most[:-1]) + 1
    is_some, first = usable.any(axis=2) & (low < high), usable.argmax(axis=2)
    last = ends - usable[:, :, ::-1].argmax(axis=2)
    k, z = np.nonzero(is_some.T)
    turns = zip(*(one.tolist() for one in (k, z, first[z, k], last[z, k], low[z, k], high[z, k])), strict=True)
    return turns if is_forward else reversed(list(turns))


def _devices_that_matter(usable: np.ndarray, units: Devices) -> tuple[np.ndarray, np.ndarray]:
    """For each k, the fewest devices on which layers from k on can run, and the most that the layers before k leave them.

    `usable`: booleans (option, k, j). A F of another number of devices is infinite, or leads to no choice on all of them.
    """
    _, layers, ends = usable.shape
    never = units.total + 1
    least = np.where(usable, np.array(units.sizes)[:, None, None], never).min(axis=0, initial=never)
    after, before = (np.full(ends, never) for _ in range(2))
    after[layers] = before[0] = 0
    for k in range(layers - 1, -1, -1):
        after[k] = min(never, (least[k] + after).min())
    for j in range(1, ends):
        before[j] = min(never, (least[:, j] + before[:-1]).min())
    return after, units.total - before


def quick(table: np.ndarray, devices: Devices, combine: np.ufunc, window: Window | None = None) -> float:
    """F(any, 0, D) of a table (option, k, j): stages may stand at any place. With `np.maximum`: the least largest value."""
    table, devices = _least_by_size(table, devices)
    usable = np.isfinite(table)
    units = devices.in_units(usable)
    return float(_behind(table, usable, units, combine, window)[0, units.total])


def _behind(
    table: np.ndarray, usable: np.ndarray, units: Devices, combine: np.ufunc, window: Window | None = None
) -> np.ndarray:
    """F(any, k, d) of a table (option, k, j), d in units."""
    layers = table.shape[1]
    best = np.full((layers + 1, units.total + 1), np.inf)
    best[layers, 0] = 0.0
    for k, z, first, end, low, high in _turns(usable, units, window):
        here, size = best[k, low:high], units.sizes[z]
        behind = best[first:end, low - size : high - size]
        np.minimum(here, np.minimum.reduce(combine(table[z, k, first:end, None], behind)), out=here)
    return best


def _before(table: np.ndarray, usable: np.ndarray, units: Devices) -> np.ndarray:
    """The least sums (k, d) of the stages before layer k, which leave d units to those behind."""
    layers = table.shape[1]
    best = np.full((layers + 1, units.total + 1), np.inf)
    best[0, units.total] = 0.0
    for k, z, first, end, low, high in _turns(usable, units, is_forward=True):
        behind = best[first:end, low - units.sizes[z] : high - units.sizes[z]]
        np.minimum(behind, table[z, k, first:end, None] + best[k, low:high], out=behind)
    return best


@dataclasses.dataclass(frozen=True, eq=False)
class LeastSums:
    """For each (k, d), the least sum of a choice in which the layers from k on are a stage's first and have d devices.

    `sums`: those, d in units of `unit` devices.
    """

    sums: np.ndarray
    unit: int

    @classmethod
    def of(cls, table: np.ndarray, devices: Devices) -> LeastSums:
        """Those of a table (option, k, j): stages may stand at any place."""
        table, devices = _least_by_size(table, devices)
        usable = np.isfinite(table)
        units = devices.in_units(usable)
        return cls(_behind(table, usable, units, np.add) + _before(table, usable, units), units.each)

    @property
    def least(self) -> float:
        """F(any, 0, D)."""
        return float(self.sums[0, -1])

    def within(self, most: float) -> Window:
        """What choices may have whose sum is at most this; the tables may grow meanwhile."""
        is_within = self.sums <= most
        is_some = is_within.any(axis=1)
        last = self.sums.shape[1] - 1 - is_within[:, ::-1].argmax(axis=1)
        fewest, more = is_within.argmax(axis=1), last + 1
        return Window(np.where(is_some, fewest, more) * self.unit, np.where(is_some, last, fewest - 1) * self.unit)


def _least_by_size(table: np.ndarray, devices: Devices) -> tuple[np.ndarray, Devices]:
    """The least entries of the options of each size and kind."""
    each = [(size, *ends) for size, ends in zip(devices.sizes, devices.reach, strict=True)]
    kinds = sorted({*each})
    if len(kinds) == len(each):
        return table, devices
    least = [table[[one == other for other in each]].min(axis=0) for one in kinds]
    reach = tuple((first, end) for _, first, end in kinds)
    return np.stack(least), Devices(tuple(size for size, _, _ in kinds), devices.total, reach)


def exact(table: Limited, devices: Devices, combine: np.ufunc) -> np.ndarray:
    """F[k, r, d]; d is in units (`Devices.in_units`), so [0, S, -1] is F(S, 0, D).

    Infinite for those d that lead to no choice on all devices.
    """
    units = devices.in_units(table.usable)
    _, layers, _, places = table.costs.shape
    best = np.full((layers + 1, places + 1, units.total + 1), np.inf)
    best[layers, 0, 0] = 0.0
    for k, z, first, end, low, high in _turns(table.usable, units, table.window):
        turns, size = min(places, layers - k), units.sizes[z]
        here, seconds = best[k, 1 : turns + 1, low:high], table.of(z, k, first, end, turns)
        behind = best[first:end, :turns, low - size : high - size]
        np.minimum(here, np.minimum.reduce(combine(seconds[..., None], behind)), out=here)
    return best


def stages_of(best: np.ndarray, table: Limited, *, devices: Devices, count: int, combine: np.ufunc) -> Stages:
    """The stages that attain F(count, 0, D): the earliest cut at each turn, then the earliest option."""
    units = devices.in_units(table.usable)
    sizes, layers, k, d, found = units.sizes, table.costs.shape[1], 0, units.total, []
    for r in range(count, 0, -1):
        options = [z for z in range(len(sizes)) if units.fits(z, d)]
        behind = np.stack([best[:, r - 1, d - sizes[z]] for z in options])
        values = combine(table.at(options, k, r - 1), behind)
        j, place_ = np.argwhere(best[k, r, d] * (1 + TIE) >= values.T)[0]
        found.append((k, int(j), options[place_]))
        k, d = int(j), d - sizes[options[place_]]
    assert (k, d) == (layers, 0)
    return tuple(found)

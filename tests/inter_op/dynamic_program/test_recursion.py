"""The least sums before and behind each layer, and what is left of the recursion within the window that they leave."""

import itertools
import math

import numpy as np
import pytest

from autopar.inter_op.dynamic_program.recursion import Devices, LeastSums, Limited, Window, exact, quick

SIZES = (1, 2, 4, 6)
TOTAL = 12


def table_of(seed, layers=4):
    rng = np.random.default_rng(seed)
    table = rng.uniform(0.5, 2.0, (len(SIZES), layers, layers + 1))
    table[rng.random(table.shape) < 0.2] = math.inf
    table[:, ~np.triu(np.ones((layers, layers + 1), bool), 1)] = math.inf
    return table


def choices_of(table):
    """All choices of stages on all devices: (sum, ((first layer, devices from there on), ...))."""
    layers = table.shape[1]
    for count in range(1, layers + 1):
        for cuts in itertools.combinations(range(1, layers), count - 1):
            bounds = list(itertools.pairwise((0, *cuts, layers)))
            for options in itertools.product(range(len(SIZES)), repeat=count):
                if sum(SIZES[z] for z in options) == TOTAL:
                    value = sum(table[z, i, j] for z, (i, j) in zip(options, bounds, strict=True))
                    left = [sum(SIZES[z] for z in options[s:]) for s in range(count)]
                    yield value, tuple((i, d) for (i, _), d in zip(bounds, left, strict=True))


DEVICES = Devices(SIZES, TOTAL, ((0, TOTAL),) * len(SIZES))


@pytest.mark.parametrize("seed", range(12))
def test_the_least_sum_through_each_layer_and_number_of_devices_is_that_of_all_choices(seed):
    table = table_of(seed)
    found = LeastSums.of(table, DEVICES)
    least = {}
    for value, places in choices_of(table):
        for place in places:
            least[place] = min(least.get(place, math.inf), value)
    assert found.least == pytest.approx(least[0, TOTAL])
    assert found.least == pytest.approx(quick(table, DEVICES, np.add))
    for k, d in np.ndindex(table.shape[1], TOTAL // found.unit + 1):
        assert found.sums[k, d] == pytest.approx(least.get((k, d * found.unit), math.inf)), (k, d)


@pytest.mark.parametrize("part", [1.0, 1.05, 1.3, 3.0])
@pytest.mark.parametrize("seed", range(12))
def test_a_window_leaves_every_choice_that_is_short_enough_and_little_else(seed, part):
    table = table_of(seed)
    sums = LeastSums.of(table, DEVICES)
    most = sums.least * part * (1 + 1e-9)
    window = sums.within(most)
    left = {place for value, places in choices_of(table) if value <= most for place in places}
    for k, d in left:
        assert window.fewest[k] <= d <= window.most[k]
    for k in range(table.shape[1]):
        at = [d for layer, d in left if layer == k]
        assert (window.fewest[k], window.most[k]) == (min(at), max(at)) if at else window.fewest[k] > window.most[k]


@pytest.mark.parametrize("seed", range(12))
def test_within_a_window_what_is_short_enough_is_as_without(seed):
    table = table_of(seed)
    sums = LeastSums.of(table, DEVICES)
    costs = np.repeat(table[..., None], table.shape[1], axis=3)
    most, free = 1.2 * sums.least, Limited.at_all(costs)
    window = sums.within(most)
    within = Limited(costs=costs, measured=costs, most=math.inf, usable=window.leave(free.usable), window=window)
    all_, left = (exact(one, DEVICES, np.add)[0, :, -1] for one in (free, within))
    assert np.isfinite(all_).any()
    assert np.all((left == all_) | ((all_ > most) & (left > most)))
    assert min(quick(table, DEVICES, np.add, window), most) == min(quick(table, DEVICES, np.add), most)


def test_a_window_that_leaves_nothing_leaves_no_stage():
    nothing = Window(np.array([1, 1, 0]), np.array([0, 0, 0]))
    assert not nothing.leave(np.ones((2, 2, 3), bool)).any()

"""Where microbatches have fewer examples than devices, these divide weights: what is planned for more examples says little."""

import dataclasses
import math
import types

import numpy as np
import pytest

from autopar.inter_op.best_stages import BestStages, StageRules
from autopar.inter_op.candidates.timetables import Timetable
from autopar.inter_op.candidates.tuning import TUNING
from autopar.inter_op.dynamic_program.problem import CostTable, StageCost
from autopar.inter_op.dynamic_program.submeshes import size_of
from autopar.inter_op.known_layers import KnownLayers
from autopar.inter_op.layer_costs import LayerCosts
from autopar.inter_op.search import _StageSearch
from autopar.solver.budget import Budget

BEST = Timetable(64, "1f1b")


class Costs:
    """Six layers of a second and a byte on one device. On two they take `pair_s` each, and all of the weights are on both, as far
    as is known from fewer microbatches; planned in 64, which have one example each, these are divided."""

    impossible = frozenset()
    counts = frozenset({8, 64})

    def __init__(self, pair_s, *, divides=True):
        self.pair_s, self.divides, self.planned = pair_s, divides, {1}

    def table(self, count, options, *, shares, split):
        def cost_of(first, end, option):
            devices, layers = size_of(options[option]), end - first
            each_s = self.pair_s if devices == 2 else 1.0
            kept = layers / devices if self.divides and devices in self.planned else layers
            return StageCost(seconds_per_microbatch=layers * each_s, weight_bytes=kept)

        return CostTable.of(6, len(options), cost_of)

    def is_divided_otherwise(self, count, submesh):
        return count == BEST.microbatches and size_of(submesh) not in self.planned

    def plan_more(self, count, submeshes):
        new = {size_of(one) for one in submeshes if self.is_divided_otherwise(count, one)}
        self.planned |= new
        return bool(new)

    def of(self, count):
        return types.SimpleNamespace(places=(1, 2, 3, 4, 5), loop=None)


def found_with(costs, monkeypatch):
    """What is chosen on four devices, with room for two layers, or for three whose weights are divided."""
    rules = StageRules(options=((1, 1), (1, 2)), shares=(0.0,), shape=(1, 4), limit_bytes=2.5, num_stages=None)
    stages = BestStages(costs, [BEST], rules, processes=1, budget=Budget(), tuning=TUNING)
    search = _StageSearch(costs=costs, stages=stages, rules=rules, beat_s=math.inf, budget=Budget(), tuning=TUNING)
    monkeypatch.setattr(_StageSearch, "_plan_chosen", lambda *_: False)
    return search._look()


def test_submeshes_whose_weights_were_whole_elsewhere_are_planned_before_the_search_ends(monkeypatch):
    """Two stages of three layers take 1.5 s a microbatch, three of two layers take 2. These come next, should the sums that are
    new not hold."""
    costs = Costs(pair_s=0.5)
    found = found_with(costs, monkeypatch)
    assert costs.planned == {1, 2}
    assert [stage.submesh for stage in found.choice.stages] == [(1, 2), (1, 2)]
    assert found.cuts == (3,)
    (before,) = found.others
    assert before.sizes == (1, 1, 2)
    assert before.choice.step_s > found.choice.step_s


@pytest.mark.parametrize("pair_s", [0.66, 2.0])
def test_submeshes_that_promise_little_even_so_are_not_planned(monkeypatch, pair_s):
    """Three layers of 0.66 s are 1 % faster than two of 1 s, which is less than what sums are off by."""
    costs = Costs(pair_s)
    found = found_with(costs, monkeypatch)
    assert costs.planned == {1}
    assert found.sizes != (2, 2)
    assert found.others == ()


def test_what_was_best_stays_so_where_plans_do_not_divide_the_weights(monkeypatch):
    costs = Costs(pair_s=0.5, divides=False)
    found = found_with(costs, monkeypatch)
    assert costs.planned == {1, 2}
    assert found.sizes == (1, 1, 2)
    assert found.others == (), "it is no choice beside itself"


def test_divided_state_is_that_of_the_smallest_submesh_and_never_more_than_was_known():
    def kept_by(first, end, option):
        each = (8.0, 8.0, 1.0, 6.0)[option]
        return StageCost(seconds_per_microbatch=1.0, weight_bytes=(end - first) * each)

    known = CostTable.of(2, 4, kept_by)
    least = known.with_divided_state([1, 2], [False, True])
    assert np.allclose(least.weight_bytes[:, 0, 2], [16.0, 8.0, 2.0, 1.0])
    assert np.array_equal(known.with_divided_state([1, 2], [False, False]).weight_bytes, known.weight_bytes)
    rest = [field.name for field in dataclasses.fields(CostTable) if field.name != "weight_bytes"]
    assert all(np.array_equal(getattr(least, name), getattr(known, name)) for name in rest)


def test_layers_are_known_to_be_divided_otherwise_where_microbatches_have_fewer_examples():
    """Of 1,024 examples, 128 microbatches have 8 each, which 8 devices divide; 1,024 have one."""
    costs = LayerCosts.__new__(LayerCosts)
    costs._known = KnownLayers(examples=1024, sizes={128: {1, 8}})
    assert costs.is_divided_otherwise(1024, (1, 8))
    assert costs.is_divided_otherwise(256, (1, 8))
    assert not costs.is_divided_otherwise(64, (1, 8))
    assert not costs.is_divided_otherwise(1024, (1, 1))
    assert not costs.is_divided_otherwise(1024, (1, 4)), "nothing is known of four"
    costs._known.sizes[1024] = {8}
    assert not costs.is_divided_otherwise(1024, (1, 8))
    assert not costs.is_divided_otherwise(256, (1, 8)), "1,024 divide no more"

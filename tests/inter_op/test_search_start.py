"""In which number of microbatches the search over layers begins, and what it does when it is asked again."""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest

from autopar.cost_model.hardware import preset
from autopar.inter_op.candidates.timetables import Timetable
from autopar.inter_op.costs_by_kind import ALIKE, costs_on
from autopar.inter_op.dynamic_program.found import NotFaster
from autopar.inter_op.layer_costs import LayerCosts
from autopar.inter_op.plan_stage import plan_program
from autopar.inter_op.search import search_stages
from autopar.solver.budget import Budget
from autopar.stages.split_scans import split_scans
from autopar.stages.time_loops import make_loops
from tests.inter_op.test_search import CountingPlanner, arguments, request_on, searched, traced_step, two_nodes


def test_layers_are_planned_first_in_a_roomier_number_where_others_do_forward_work_again():
    """In 8 microbatches the layers that repeat fit only so; of the numbers in which they keep all, the fewest come first."""

    def search(limit, *counts, shares=(0.0, 0.5, 1.0), larger=(), planner=plan_program):
        traced = traced_step(*arguments(16, layers=8, batch=4096))
        return search_stages(
            make_loops(split_scans(traced, ()), counts[0]),
            request_on(two_nodes(), limit),
            devices=4,
            timetables=[Timetable(count, "1f1b") for count in counts],
            larger=[Timetable(count, "1f1b") for count in larger],
            shares=shares,
            planner=planner,
        )

    need = max(stage.peak_bytes for stage in search(None, 8).choice.stages)
    for part in np.arange(0.8, 0.5, -0.01):
        limit, planner = int(part * need), CountingPlanner()
        alone = search(limit, 8)
        if not any(alone.shares):
            continue
        found = search(limit, 8, larger=(32, 64), planner=planner)
        asked = [(program.cut.loop.plan.microbatches, program.stage) for program, _ in planner.asked]
        before = itertools.takewhile(lambda one: one[0] == 8, asked)
        if len({*before}) == 1 and len(asked) > 2:
            break
    else:
        raise AssertionError("the layer that repeats is not planned alone in 8, to know how much it keeps")
    assert found.choice.step_s <= alone.choice.step_s, "what begins elsewhere comes back where that is faster"


def test_layers_are_planned_first_in_the_number_that_is_likely_and_the_search_goes_on_from_there_if_they_fit():
    """Nothing is planned in the usual number of microbatches before; without a limit the search begins with that."""
    counts = (4, 2, 8, 16)

    def search(limit):
        planner = CountingPlanner()
        found = search_stages(
            make_loops(split_scans(traced_step(*arguments(64, layers=8, batch=4096)), ()), counts[0]),
            request_on(two_nodes(), limit),
            devices=4,
            timetables=[Timetable(count, "1f1b") for count in counts],
            start=8,
            planner=planner,
        )
        return found, [program.cut.loop.plan.microbatches for program, _ in planner.asked]

    found, asked = search(1 << 33)
    assert asked[0] == 8
    assert found.timetable.microbatches in counts
    assert search(None)[1][0] == 4


@pytest.mark.parametrize("is_alike", [True, False])
def test_layers_are_planned_first_in_the_next_number_that_promises_more_if_most_work_is_in_the_one_that_repeats(
    is_alike, monkeypatch
):
    """In two microbatches four stages idle most of the time. Where other layers work as much, nobody knows their share yet."""
    monkeypatch.setattr(LayerCosts, "are_alike", is_alike)
    counts, planner = (2, 4, 1), CountingPlanner()
    traced = traced_step(*arguments(64, layers=8, batch=4096))
    found = search_stages(
        make_loops(split_scans(traced, ()), counts[0]),
        request_on(two_nodes(), 1 << 33),
        devices=4,
        timetables=[Timetable(count, "1f1b") for count in counts],
        num_stages=4,
        planner=planner,
    )
    asked = [(program.cut.loop.plan.microbatches, program.stage) for program, _ in planner.asked]
    before = [stage for _, stage in itertools.takewhile(lambda one: one[0] == 2, asked)]
    assert (len({*before}) == 1) is is_alike
    assert found.timetable.microbatches == 4


def test_most_work_is_in_the_layer_that_repeats_if_it_repeats_often():
    def costs(layers, head):
        weights, batch = arguments(64, layers=layers, batch=64)
        weights = [*weights[:-1], np.zeros((64, head), np.float32)]
        traced = traced_step(weights, batch)
        return LayerCosts(make_loops(split_scans(traced, ()), 4), 4, request_on(two_nodes()), [(1, 1), (1, 2)])

    assert costs(40, 64).are_alike
    assert not costs(40, 4096).are_alike


def test_stages_are_chosen_again_in_less_memory_among_all_timetables_also_when_the_clock_has_ended_the_search():
    """Then only the first schedule was looked at, which is not always the best."""

    def search(budget):
        traced = traced_step(*arguments(16, layers=8, batch=4096))
        return search_stages(
            make_loops(split_scans(traced, ()), 4),
            request_on(two_nodes(), 4_000_000),
            devices=4,
            timetables=[Timetable(4, "1f1b"), Timetable(4, "zb-h1")],
            shares=(0.0, 1.0),
            budget=budget,
        )

    late = [False]
    with_time, without = search(Budget()), search(Budget().limit(until=lambda: late[0]))
    late[0] = True
    again = [found.choose_within(0.9) for found in (with_time, without)]
    assert [one.timetable.schedule for one in again] == ["zb-h1", "zb-h1"]
    assert again[0].choice == again[1].choice


def fast_node():
    """A node of four devices whose links take next to no time."""
    machine = preset("p3.16xlarge")
    link = dataclasses.replace(machine.tiers[-1], devices=4, bytes_per_s=1e13, latency_s=0.0, ports=1)
    return dataclasses.replace(machine, name="fast node", tiers=(link,))


def test_several_stages_are_chosen_from_the_layers_that_were_planned_for_one():
    """They are those of a search in which one stage is no candidate, and next to nothing is planned for them."""
    planner = CountingPlanner()
    found = searched(2048, 4, fast_node(), batch=2048, planner=planner)
    assert len(found.sizes) == 1
    planned = len(planner.asked)
    several = found.choose_several(math.inf)
    assert len(planner.asked) <= 1.5 * planned
    apart = searched(2048, 4, fast_node(), batch=2048, beat_s=math.inf)
    assert len(several.sizes) > 1
    assert (several.sizes, several.cuts, several.timetable) == (apart.sizes, apart.cuts, apart.timetable)
    assert several.choice.step_s == pytest.approx(apart.choice.step_s, rel=1e-9)
    assert several.choice.step_s > found.choice.step_s
    assert isinstance(found.choose_several(found.choice.step_s / 2), NotFaster)


@pytest.mark.parametrize(("number", "sizes"), [(2, {1, 2}), (3, {1, 2}), (4, {1}), (None, {1, 2, 4})])
def test_no_layer_is_planned_on_more_devices_than_a_given_number_of_stages_leaves_for_one(number, sizes):
    """Layers on all eight devices took a third of the time in which a GPT of 12 layers is planned in four stages."""
    planner = CountingPlanner()
    found = searched(64, 4, fast_node(), planner=planner, num_stages=number)
    assert planner.sizes == sizes
    assert number in (None, len(found.sizes))
    assert sum(found.sizes) == 4


def test_links_are_those_of_all_devices_whatever_stages_may_have():
    """Where one stage is no candidate, or leaves others a device, the largest submesh is not the machine."""
    costs, *_ = costs_on(
        (1, 4),
        request_on(fast_node()),
        ALIKE,
        functools.partial(
            LayerCosts, make_loops(split_scans(traced_step(*arguments(64)), ()), 4), 4, smallest_first=True
        ),
        None,
    )
    assert costs._devices == 4

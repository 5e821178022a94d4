"""What layers cost where they are not planned."""

import functools
import math
import types

import pytest

from autopar.cost_model.hardware import preset
from autopar.inter_op.candidates.layer_figures import LayerFigures
from autopar.inter_op.candidates.sizes import first_across_nodes, first_sizes
from autopar.inter_op.known_layers import KnownLayers
from autopar.inter_op.layer_costs import LayerCosts
from autopar.inter_op.plan_stage import plan_program
from autopar.stages.split_scans import split_scans
from autopar.stages.time_loops import make_loops
from tests.inter_op.test_search import arguments, request_on, traced_step, two_nodes


def test_layers_are_planned_at_first_on_submeshes_that_stages_can_have():
    """48 stages on 1,024 devices have 21 each or more, which no node has."""
    sizes = {1, 2, 4, 8, *(8 * nodes for nodes in range(1, 129))}
    first = functools.partial(first_sizes, layers=48, cluster=preset("dgx-a100-80gb"))
    assert first(sizes, devices=1024, smallest_first=False) == {32}
    assert first(sizes, devices=1024, smallest_first=True) == {1}
    assert first({size for size in sizes if size <= 64}, devices=64, smallest_first=False) == {1, 2, 4, 8}
    of_many = {size for size in sizes if size <= 24}  # 1,001 stages or more leave each of them so many at most
    assert first(of_many, devices=1024, smallest_first=False) == {1, 2, 4, 8}


def test_links_between_nodes_are_met_on_the_fewest_of_them_before_more_are_planned():
    cluster, sizes = preset("p3.16xlarge"), {1, 2, 4, 8, 16, 24, 32, 64}
    assert first_across_nodes(64, {1, 2, 4, 8}, sizes, cluster) == 16
    assert first_across_nodes(64, {1, 2, 4, 8, 16}, sizes, cluster) == 64
    assert first_across_nodes(4, {8}, sizes, cluster) == 4
    assert first_across_nodes(64, {32}, sizes, cluster) == 64, "they are known from four nodes"


def test_figures_carry_over_to_numbers_of_microbatches_that_divide_their_examples_no_further():
    """Of 1,024 examples, 512 microbatches have 2 each, which 32 devices divide in two; 256 have 4, which they divide in four."""
    costs = LayerCosts.__new__(LayerCosts)
    costs._known = KnownLayers(examples=1024, sizes={512: {32}})
    assert costs.is_planned(512, (4, 8))
    assert costs.is_planned(1024, (4, 8))
    assert costs.is_planned(512, (4, 8), carried=False)
    assert not costs.is_planned(1024, (4, 8), carried=False)
    assert not costs.is_planned(256, (4, 8))
    assert not costs.is_planned(512, (8, 8))


def test_microbatches_that_devices_divide_less_far_tell_nothing_of_latency():
    """Of 1,520 examples, 20 microbatches have 76 each and 380 have 4, which 8 devices divide in four; 80 have 19."""

    def costs_of(seconds):
        layers = {
            count: types.SimpleNamespace(
                figures=lambda layer, devices, s=s: LayerFigures(forward_s=s, backward_s=2 * s),
                useful_devices=lambda layer, devices: devices,
                first_alike=lambda layer: layer,
                has_common=False,
                common=0,
            )
            for count, s in seconds.items()
        }
        return KnownLayers(examples=1520, layers=layers, sizes={count: {8} for count in seconds})

    uneven, even = costs_of({20: 1.0, 80: 0.9}), costs_of({20: 1.0, 380: 0.1})
    assert uneven._share(0) == 0.0
    assert even._share(0) == pytest.approx([0.05] * 2), "t = 0.05 + 19 / m"
    for costs in (uneven, even):
        carried = costs.figures(152, 0, 8)
        expected_s = 20 / 152 if costs is uneven else 0.05 + 19 / 152
        assert (carried.forward_s, carried.backward_s) == pytest.approx((expected_s, 2 * expected_s))


@pytest.mark.parametrize("width", [64, 1024])
@pytest.mark.parametrize(
    ("count", "planned", "submesh", "batch"),
    [(4, 4, (1, 1), 8), (4, 4, (1, 2), 8), (4, 4, (1, 1), 512), (4, 4, (1, 2), 512), (2, 4, (2, 2), 8)],
)
def test_what_is_planned_on_more_devices_or_for_fewer_examples_is_a_floor_of_what_is_not(
    count, planned, submesh, width, batch
):
    """No time at all would have every search plan it first. Of 8 examples, 4 microbatches have 2 each, 2 have 4."""
    options, place = ((1, 1), (1, 2), (2, 2)), ((1, 1), (1, 2), (2, 2)).index(submesh)
    loop_of = make_loops(split_scans(traced_step(*arguments(width, batch=batch)), ()), 4)

    def costs_planned_on(sizes):
        costs = LayerCosts(loop_of, 4, request_on(two_nodes()), options)
        costs._known.sizes[4].clear()
        costs._known.others[4].clear()
        for m, size in sizes:
            costs.plan_more(m, [(1, size)])
            costs._known.add_others(m, [(layer, size) for layer in range(len(costs.of(m)))])
        return costs

    seconds = costs_planned_on([(planned, 4)]).table(count, options).seconds[place, 0, -1]
    known = costs_planned_on([(count, math.prod(submesh))]).table(count, options).seconds[place, 0, -1]
    assert 0.2 * known < seconds <= known * (1 + 1e-9)


def test_devices_that_divide_no_dimension_are_known_to_do_nothing():
    """No plan divides 64 or 8 by three. What takes as long as on two devices is no reason to plan it on six."""
    options = ((1, 2), (2, 2), (3, 2))
    loop_of = make_loops(split_scans(traced_step(*arguments(64, batch=8)), ()), 4)
    asked = []

    def plan_and_note(program, request):
        asked.extend(mesh.size for mesh in request.meshes)
        return plan_program(program, request)

    costs = LayerCosts(loop_of, 4, request_on(two_nodes()), options, planner=plan_and_note)
    costs._known.begin(4, costs.of(4), {2}, others_on=2)
    seconds = costs.table(4, options).seconds
    assert set(asked) == {2}
    assert (seconds[2] == seconds[0]).all()
    assert (seconds[1, 0, 1:] < seconds[0, 0, 1:]).all(), "four devices are hoped to divide it"

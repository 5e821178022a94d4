"""What a mesh axis sees of the machine: which links, shared with how many, and which algorithm is cheapest there."""

import math

import pytest

from autopar.cost_model.hardware import PRESETS, Cluster, Device, preset
from autopar.cost_model.tiers import Tier
from autopar.cost_model.topology import torus_shape
from tests.even_links import even_links

GB = 1e9


def crossed(cluster, mesh, axes):
    return [(level.tier, level.size) for level in preset(cluster).mesh_costs(mesh).levels(axes)]


def test_an_axis_inside_a_node_crosses_one_tier_and_one_over_nodes_the_next():
    assert crossed("dgx-h100", (4, 8), (1,)) == [("NVSwitch", 8)]
    assert crossed("dgx-h100", (4, 8), (0,)) == [("8 x NDR InfiniBand", 4)]
    assert crossed("dgx-h100", (4, 8), (0, 1)) == [("NVSwitch", 8), ("8 x NDR InfiniBand", 4)]
    assert crossed("dgx-h100", (32,), (0,)) == [("NVSwitch", 8), ("8 x NDR InfiniBand", 4)]
    assert crossed("dgx-h100", (8, 4), (0,)) == [("NVSwitch", 2), ("8 x NDR InfiniBand", 4)]
    assert crossed("dgx-h100", (1, 6), (0,)) == []


def test_neighbouring_axes_cross_what_one_axis_of_their_product_crosses():
    for name in ("dgx-h100", "p3.16xlarge", "tpu-v4", "tpu-v5e"):
        costs, merged = preset(name).mesh_costs((4, 2, 8)), preset(name).mesh_costs((4, 16))
        assert costs.levels((1, 2)) == merged.levels((1,))
        assert costs.levels((0, 1, 2)) == merged.levels((0, 1))


def test_one_network_interface_a_node_is_shared_by_the_groups_that_leave_it():
    p3 = preset("p3.16xlarge")
    alone = p3.mesh_costs((16,)).levels((0,))[-1]
    shared = p3.mesh_costs((2, 8)).levels((0,))[-1]
    assert alone.ring_bytes_per_s == pytest.approx(3.1 * GB * 0.9)
    assert shared.ring_bytes_per_s == pytest.approx(3.1 * GB * 0.9 / 8)
    assert alone.sender_bytes_per_s == pytest.approx(3.1 * GB * 0.9)
    assert shared.sender_bytes_per_s == pytest.approx(3.1 * GB * 0.9 / 8), "each of eight groups has a sender"


@pytest.mark.parametrize("mesh", [(16,), (2, 8), (4, 4), (8, 2), (2, 2, 4), (4, 8), (3, 8), (6, 4), (2, 16), (2, 2, 8)])
def test_no_algorithm_brings_more_through_the_ports_of_a_group_than_they_carry(mesh):
    """Of an all-reduce, a group of f members sends 2 (f-1)/f S out of each, and all groups of the axis do at the same time."""
    for cluster in PRESETS.values():
        if cluster.tiers[-1].devices is not None and math.prod(mesh) > cluster.tiers[-1].devices:
            continue
        costs = cluster.mesh_costs(mesh)
        for axes in (*[(axis,) for axis in range(len(mesh))], tuple(range(len(mesh)))):
            for level in costs.levels(axes):
                least = 2 * (level.size - 1) / level.size / level.ring_bytes_per_s if level.switched else 0.0
                for name, cost in costs.algorithms("all-reduce", axes).items():
                    assert name == "measured" or cost.s_per_byte >= least * (1 - 1e-9), (cluster.name, axes, name)


def test_eight_interfaces_give_a_ring_through_all_eight_devices_all_of_them():
    dgx = preset("dgx-a100")
    assert dgx.mesh_costs((16,)).levels((0,))[-1].ring_bytes_per_s == pytest.approx(200 * GB * 0.9)
    assert dgx.mesh_costs((2, 8)).levels((0,))[-1].ring_bytes_per_s == pytest.approx(25 * GB * 0.9)


@pytest.mark.parametrize(("mesh", "axis", "links"), [((8,), 0, 6), ((2, 4), 1, 4), ((4, 2), 1, 1), ((2, 4), 0, 1)])
def test_a_group_in_a_hybrid_cube_mesh_has_the_links_of_its_least_connected_member(mesh, axis, links):
    (level,) = preset("p3.16xlarge").mesh_costs(mesh).levels((axis,))
    assert level.ring_bytes_per_s == pytest.approx(links * 25 * GB * 0.87)


def test_devices_without_a_link_fall_back_to_the_slow_way():
    counts = ((0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0))
    tier = Tier(
        name="pairs",
        devices=4,
        topology="hybrid-cube-mesh",
        latency_s=1e-6,
        bytes_per_s=25 * GB,
        link_counts=counts,
        fallback_bytes_per_s=5 * GB,
    )
    device = Device(name="d", peak_flops_per_s={"float32": 1.0}, memory_bytes=1.0, memory_bytes_per_s=1.0)
    cluster = Cluster(name="pairs", device=device, tiers=(tier,))
    assert cluster.mesh_costs((2, 2)).levels((0,))[0].ring_bytes_per_s == 5 * GB
    assert cluster.mesh_costs((2, 2)).levels((1,))[0].ring_bytes_per_s == 25 * GB


@pytest.mark.parametrize(
    ("devices", "dimensions", "shape"),
    [
        (64, 3, (4, 4, 4)),
        (32, 3, (2, 4, 4)),
        (256, 2, (16, 16)),
        (128, 2, (8, 16)),
        (7, 2, (1, 7)),
        (512, 3, (8, 8, 8)),
    ],
)
def test_a_torus_is_as_even_as_its_devices_allow(devices, dimensions, shape):
    assert torus_shape(devices, dimensions) == shape


def test_an_axis_of_a_pod_slice_is_a_ring_where_its_ends_are_joined_and_a_line_where_not():
    v5e = preset("tpu-v5e")
    (full,) = v5e.mesh_costs((16, 16)).levels((1,))
    assert (full.size, full.wraps, full.ring_bytes_per_s) == (16, True, 90 * GB)
    (half,) = v5e.mesh_costs((4, 8)).levels((1,))
    assert (half.size, half.wraps, half.ring_bytes_per_s) == (8, False, 45 * GB)
    v4 = preset("tpu-v4").mesh_costs((16, 4)).levels((0,))
    assert [(level.size, level.wraps) for level in v4] == [(4, True), (4, True)]


def test_two_axes_interleaved_in_one_ring_share_its_links():
    outer, inner = (preset("tpu-v5e").mesh_costs((16, 4, 4)).levels((axis,))[0] for axis in (1, 2))
    assert (outer.size, outer.link_bytes_per_s, outer.latency_s) == (4, 45 * GB / 4, 4e-6)
    assert (inner.size, inner.wraps, inner.link_bytes_per_s) == (4, False, 45 * GB)


def test_pods_are_joined_by_the_data_centre_network():
    levels = preset("tpu-v5e").mesh_costs((2, 256)).levels((0,))
    assert [(level.tier, level.size) for level in levels] == [("data-centre network", 2)]
    assert levels[0].rank_bytes_per_s == pytest.approx(25 * GB * 0.9 / 4)


def test_a_mesh_larger_than_the_machine_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"the mesh \(4, 4\) needs 16 devices, cluster 'h200' has at most 8"):
        preset("h200").mesh_costs((4, 4))


@pytest.mark.parametrize(
    ("cluster", "mesh", "axes", "size", "algorithm"),
    [
        ("dgx-h100", (8,), (0,), 1e3, "butterfly"),
        ("dgx-a100", (48, 8), (0,), 1e4, "double tree"),
        ("dgx-a100", (48, 8), (0,), 1e10, "ring"),
        ("p3.16xlarge", (16,), (0,), 1e9, "hierarchical"),
        ("p3.16xlarge", (8,), (0,), 1e9, "ring"),
        ("tpu-v4", (64,), (0,), 1e9, "torus"),
        ("cpu", (8,), (0,), 1e6, "measured"),
    ],
)
def test_the_cheapest_all_reduce_depends_on_size_and_topology(cluster, mesh, axes, size, algorithm):
    costs = preset(cluster).mesh_costs(mesh)
    best = costs.best("all-reduce", size, axes)
    assert best.algorithm == algorithm
    assert best.seconds == min(cost(size) for cost in costs.algorithms("all-reduce", axes).values())


def test_naive_algorithms_are_priced_and_never_chosen():
    costs = preset("dgx-a100").mesh_costs((3, 8))
    found = costs.algorithms("all-reduce", (0,))
    assert found["naive"](10) < min(found["ring"](10), found["double tree"](10))
    assert costs.best("all-reduce", 10, (0,)).algorithm not in ("naive", "parameter server")


def test_a_uniform_cluster_still_costs_its_links_alone():
    costs = Cluster.uniform((2.0, 3.0), (0.5, 0.25)).mesh_costs((2, 4))
    assert costs.all_reduce_s(8, (0,)) == 2 + 2 * 0.5 * 8 / 2
    assert costs.all_reduce_s(8, (0, 1)) == (2 + 0.5 * 8) + (3 + 2 * 0.25 * 8 * 3 / 4)
    assert costs.best("all-gather", 8, (1,)).algorithm == "links"


def test_a_measured_collective_costs_what_was_measured_whatever_the_algorithm():
    """170 us and 1 ns a byte for every kind, of which an all-reduce pays 0.3 of the latency."""
    costs = even_links().mesh_costs((2, 4))
    assert costs.all_reduce_s(1e6, (1,)) == pytest.approx(0.3 * 1.7e-4 + 2 * 1e-3 * 3 / 4)
    assert costs.all_reduce_s(1e6, (0, 1)) == pytest.approx(0.3 * 1.7e-4 + 2 * 1e-3 * 7 / 8)
    assert costs.all_gather_s(1e6, (0, 1)) == pytest.approx(1.7e-4 + 1e-3 * 7 / 8)
    assert costs.reduce_scatter_s(1e6, (0,)) == pytest.approx(1.7e-4 + 1e-3 / 2)
    assert costs.all_to_all_s(1e6, (1,)) == pytest.approx(1.7e-4 + 1e-3 * 3 / 4)
    assert costs.permute_s(1e6, (0,)) == pytest.approx(1.7e-4 + 1e-3)

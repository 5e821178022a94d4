"""The collective formulas of the yardstick paper, each on figures worked out by hand.

Eight ranks, 1 MB, 10 GB/s, 5 us a message, unless a test says otherwise: (n-1)/n S/B is 87.5 us.
"""

import pytest

from autopar.cost_model.hardware import Cluster, Device
from autopar.cost_model.tiers import MeasuredCollective, Tier

MB, US = 1e6, 1e-6


def machine(*tiers: Tier) -> Cluster:
    device = Device(name="device", peak_flops_per_s={"float32": 1e12}, memory_bytes=1e9, memory_bytes_per_s=1e11)
    return Cluster(name="machine", device=device, tiers=tiers)


def inside(devices=None, latency_us=5.0, gb_per_s=10.0) -> Tier:
    figures = {"latency_s": latency_us * US, "bytes_per_s": gb_per_s * 1e9}
    return Tier(name="inside", devices=devices, topology="switch", **figures)


def microseconds(kind, algorithm, *, mesh=(8,), cluster=None, size=MB):
    cluster = cluster or machine(inside())
    found = cluster.mesh_costs(mesh).algorithms(kind, tuple(range(len(mesh))))
    return found[algorithm](size) / US


def test_a_ring_all_reduce_of_1_mb_over_8_ranks_is_14_messages_and_175_us_of_bytes():
    assert microseconds("all-reduce", "ring") == pytest.approx(14 * 5 + 175)


def test_halving_and_doubling_all_reduces_the_same_bytes_in_6_messages():
    assert microseconds("all-reduce", "butterfly") == pytest.approx(6 * 5 + 175)


def test_a_double_tree_all_reduces_in_6_messages_and_twice_the_whole():
    assert microseconds("all-reduce", "double tree") == pytest.approx(6 * 5 + 200)


def test_a_hierarchical_all_reduce_sends_an_eighth_across():
    """2 nodes of 8, 1 GB/s for each rank between nodes at 20 us.

    Inside: reduce-scatter 3 x 5 + 87.5 us, all-gather the same. Across, of 125 kB over 2: 2 x 20 + 125 us.
    """
    between = Tier(name="between", devices=None, topology="switch", latency_s=20 * US, bytes_per_s=8e9, ports=1)
    cluster = machine(inside(8), between)
    assert microseconds("all-reduce", "hierarchical", mesh=(2, 8), cluster=cluster) == pytest.approx(
        2 * (15 + 87.5) + 40 + 125
    )


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_a_gather_and_a_reduce_scatter_are_7_messages_and_seven_eighths(kind):
    assert microseconds(kind, "ring") == pytest.approx(7 * 5 + 87.5)


def test_an_all_to_all_is_7_messages_and_seven_eighths():
    assert microseconds("all-to-all", "pairwise") == pytest.approx(7 * 5 + 87.5)


@pytest.mark.parametrize(
    ("kind", "algorithm", "factor"),
    [
        ("all-reduce", "ring", 1.75),
        ("all-gather", "ring", 0.875),
        ("reduce-scatter", "ring", 0.875),
        ("all-to-all", "pairwise", 0.875),
        ("gather", "tree", 0.875),
        ("scatter", "tree", 0.875),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(kind, algorithm, factor):
    """Bytes on the bus per byte of S, for 8 ranks: 2 x 7/8 for an all-reduce, 7/8 for the others."""
    no_latency = machine(inside(latency_us=0.0))
    assert microseconds(kind, algorithm, cluster=no_latency) == pytest.approx(factor * 100)


def test_a_measured_all_reduce_is_its_latencies_plus_the_bus_factor_times_its_seconds_per_byte():
    """100 us + 8 x 10 us, and 1.75 MB at 1e-10 + 8 x 5e-11 s/byte, 875 us."""
    figures = MeasuredCollective(
        latency_s=100 * US, s_per_byte=1e-10, latency_s_per_rank=10 * US, s_per_byte_per_rank=5e-11
    )
    links = {"topology": "switch", "latency_s": 5 * US, "bytes_per_s": 1e10}
    tier = Tier(name="shared memory", devices=None, measured={"all-reduce": figures}, **links)
    assert microseconds("all-reduce", "measured", cluster=machine(tier)) == pytest.approx(180 + 875)


@pytest.mark.parametrize(
    ("kind", "algorithm", "microseconds_by_hand"),
    [
        ("broadcast", "tree", 3 * (5 + 100)),
        ("broadcast", "butterfly", (3 * 5 + 87.5) * 2),
        ("reduce", "tree", 3 * (5 + 100)),
        ("reduce", "ring", 14 * 5 + 175),
        ("gather", "tree", 3 * 5 + 87.5),
        ("gather", "naive", 7 * 5 + 87.5),
        ("scatter", "ring", 7 * 5 + 87.5),
        ("all-to-all", "Bruck", 3 * 5 + 150),
        ("all-reduce", "tree", 6 * (5 + 100)),
        ("all-reduce", "naive", 7 * (5 + 100)),
        ("all-reduce", "parameter server", 14 * (5 + 100)),
        ("send", "direct", 5 + 100),
        ("collective-permute", "direct", 5 + 100),
        ("barrier", "dissemination", 3 * 5),
        ("barrier", "ring", 14 * 5),
    ],
)
def test_other_collectives_by_hand(kind, algorithm, microseconds_by_hand):
    assert microseconds(kind, algorithm) == pytest.approx(microseconds_by_hand)

"""An oversubscribed network carries a part of what all ports send at once, and nobody else's traffic is slower for it."""

import dataclasses
import typing

import hypothesis
import hypothesis.strategies as st
import pytest

from autopar.cost_model.algorithms import Kind
from autopar.cost_model.cluster_files import cluster_from_json, cluster_to_json
from autopar.cost_model.hardware import preset
from autopar.cost_model.machine import Cluster
from autopar.cost_model.tiers import Tier

POD, PODS, NODE = 64, 4, 8
PORT = 50e9


def pods(oversubscription: float) -> Cluster:
    """Pods of eight nodes of eight devices, each with a port of its own, joined by a narrower network."""
    base = preset("dgx-h100")
    leaf = Tier(name="leaf", devices=POD, topology="switch", latency_s=5e-6, bytes_per_s=PORT, ports=NODE)
    spine = Tier(
        name="spine",
        devices=None,
        topology="switch",
        latency_s=1e-5,
        bytes_per_s=PORT,
        ports=POD,
        oversubscription=oversubscription,
    )
    return dataclasses.replace(base, name="pods", tiers=(base.tiers[0], leaf, spine))


def test_ranks_that_all_send_between_pods_share_what_goes_through():
    """A group with one rank in each pod: every rank has a ring of its own, and all of them send at once."""
    size = 1e10
    for ratio in (1.0, 7.0):
        costs = pods(ratio).mesh_costs((PODS, POD))
        ring = costs.algorithms("all-reduce", (0,))["ring"]
        assert ring.s_per_byte * size == pytest.approx(2 * (PODS - 1) / PODS * size / (PORT / ratio))
        scattered = costs.algorithms("reduce-scatter", (0,))["ring"]
        assert scattered.s_per_byte * size == pytest.approx((PODS - 1) / PODS * size / (PORT / ratio))


def test_one_ring_through_all_ranks_has_all_that_goes_through():
    """The ring leaves each pod once, so that its narrowest link is that between nodes until hardly anything goes through."""
    for ratio, expected in ((1.0, NODE * PORT), (7.0, NODE * PORT), (64.0, PORT)):
        levels = pods(ratio).levels_of((PODS * POD,), (0,))
        assert min(level.ring_bytes_per_s for level in levels[1:]) == pytest.approx(expected)
        assert levels[-1].sender_bytes_per_s == PORT


@hypothesis.given(st.floats(1, 64), st.floats(1, 64), st.floats(1, 1e11), st.sampled_from(typing.get_args(Kind)))
def test_what_stays_in_a_pod_is_as_fast_and_what_leaves_it_is_never_faster_with_less_between_pods(a, b, size, kind):
    wide, narrow = (pods(ratio).mesh_costs((PODS, POD)) for ratio in sorted((a, b)))
    assert wide.best(kind, size, (1,)) == narrow.best(kind, size, (1,))
    for axes in ((0,), (0, 1)):
        assert wide.best(kind, size, axes).seconds <= narrow.best(kind, size, axes).seconds * (1 + 1e-12)


def test_a_cluster_file_states_it():
    cluster = pods(7.0)
    fields = cluster_to_json(cluster, about="pods", sources={})
    assert fields["tiers"][2]["oversubscription"] == 7.0
    assert cluster_from_json(fields, origin="here") == cluster

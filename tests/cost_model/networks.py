"""Networks on which algorithms are played message by message, and what their results are compared with."""

import pytest

from autopar.cost_model.tiers import Dimension, Tier
from tests.cost_model.event_simulation import (
    Message,
    Played,
    Route,
    holding_own_terms,
    play,
)
from tests.cost_model.message_plans import (
    ranks_of,
)

A, B, S = 3e-6, 20e9, 6e6  # seconds a message, bytes a second, bytes


def switch(size, *, latency_s=A, bytes_per_s=B):
    return Dimension(
        tier="switch",
        topology="switch",
        size=size,
        latency_s=latency_s,
        ring_bytes_per_s=bytes_per_s,
        rank_bytes_per_s=bytes_per_s,
        sender_bytes_per_s=bytes_per_s,
    )


def ring_of(size, *, wraps=True, latency_s=A, bytes_per_s=B):
    each = (2 if wraps else 1) * bytes_per_s
    return Dimension(
        tier="ring",
        topology="torus",
        size=size,
        latency_s=latency_s,
        ring_bytes_per_s=each,
        rank_bytes_per_s=each,
        sender_bytes_per_s=bytes_per_s,
        link_bytes_per_s=bytes_per_s,
        wraps=wraps,
    )


def node(*, latency_s):
    """Four devices on a switch."""
    return Tier(name="inside", devices=4, topology="switch", latency_s=latency_s, bytes_per_s=B)


def network(*, latency_s, ports):
    """Any number of nodes, each with so many ports of an eighth of a device's bandwidth."""
    figures = {"latency_s": latency_s, "bytes_per_s": B / 8, "ports": ports}
    return Tier(name="between", devices=None, topology="switch", **figures)


def by_ports(levels):
    """A network of switches: a message holds the sender's port out and the receiver's port in at the level it crosses."""

    def route(message: Message) -> Route:
        level = max(i for i, (a, b) in enumerate(zip(message.source, message.target, strict=True)) if a != b)
        crossed = levels[level]
        resources = (("out", message.source, level), ("in", message.target, level))
        return Route(resources, crossed.latency_s, 1 / crossed.rank_bytes_per_s)

    return route


def by_links(levels):
    """A torus: a message to a neighbour holds one link, of its direction, in its dimension."""

    def route(message: Message) -> Route:
        level = next(i for i, (a, b) in enumerate(zip(message.source, message.target, strict=True)) if a != b)
        crossed = levels[level]
        apart = (message.target[level] - message.source[level]) % crossed.size
        assert apart in (1, crossed.size - 1), "neighbours only"
        turn = message.channel if message.channel is not None else 1 if apart == 1 else -1
        resources = (("link", message.source, level, turn),)
        return Route(resources, crossed.latency_s, 1 / crossed.link_bytes_per_s)

    return route


def pieces_of(messages, size_bytes, *, count=None):
    """The blocks of a plan, each with an equal part of the bytes."""
    blocks = {block for message in messages for block in message.blocks}
    return dict.fromkeys(blocks, size_bytes / (count or len(blocks)))


def played_reduction(messages, levels, network, *, size_bytes=S) -> Played:
    blocks = pieces_of(messages, size_bytes)
    ranks = ranks_of([level.size for level in levels])
    return play(messages, holding_own_terms(ranks, blocks), route=network(levels), block_bytes=blocks)


def everything(levels):
    return frozenset(ranks_of([level.size for level in levels]))


def assert_all_reduced(played, levels):
    for rank, blocks in played.contents.items():
        assert all(terms == everything(levels) for terms in blocks.values()), rank


def assert_equal(played, cost, size_bytes=S):
    assert played.seconds == pytest.approx(cost(size_bytes), rel=1e-9)

"""Closed forms against the same algorithms played message by message, and each algorithm against what its collective means."""

import itertools
import math

import pytest

from autopar.cost_model.algorithms import algorithms_for
from autopar.cost_model.tiers import Dimension, Tier
from autopar.cost_model.topology import levels_of
from tests.cost_model.event_simulation import (
    Message,
    Played,
    Route,
    holding,
    holding_own_terms,
    play,
)
from tests.cost_model.message_plans import (
    all_gather,
    all_reduce,
    bruck_exchange,
    direct_all_gather,
    dissemination,
    double_tree_reduce,
    in_sequence,
    level_exchange,
    line_exchange,
    pairwise_exchange,
    ranks_of,
    reduce_scatter,
    ring_exchange,
    ring_gather,
    star_broadcast,
    star_reduce,
    torus_all_gather,
    torus_reduce_scatter,
    tree_broadcast,
    tree_gather,
    tree_reduce,
    tree_scatter,
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


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_a_ring_all_reduce_takes_2_n_minus_1_latencies_and_2_n_minus_1_over_n_of_the_bytes(n):
    levels = [switch(n)]
    played = played_reduction(all_reduce([n], ["ring"]), levels, by_ports)
    assert_all_reduced(played, levels)
    assert_equal(played, algorithms_for("all-reduce", levels)["ring"])
    assert played.seconds == pytest.approx(2 * (n - 1) * A + 2 * (n - 1) / n * S / B)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_a_butterfly_all_reduce_takes_2_log2_n_latencies_and_the_bytes_of_the_ring(n):
    levels = [switch(n)]
    played = played_reduction(all_reduce([n], ["butterfly"]), levels, by_ports)
    assert_all_reduced(played, levels)
    assert_equal(played, algorithms_for("all-reduce", levels)["butterfly"])
    assert played.seconds == pytest.approx(2 * math.log2(n) * A + 2 * (n - 1) / n * S / B)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("how", ["ring", "butterfly"])
def test_a_reduce_scatter_leaves_each_rank_its_block_of_the_sum_and_nothing_else_is_paid_for(n, how):
    if how == "butterfly" and n & (n - 1):
        assert how not in algorithms_for("reduce-scatter", [switch(n)])
        return
    levels = [switch(n)]
    played = played_reduction(reduce_scatter([n], [how]), levels, by_ports)
    assert all(blocks[rank] == everything(levels) for rank, blocks in played.contents.items())
    assert_equal(played, algorithms_for("reduce-scatter", levels)[how])


def played_gather(messages, levels, network, *, owner=None, size_bytes=S):
    blocks = pieces_of(messages, size_bytes)
    ranks = ranks_of([level.size for level in levels])
    owner = owner or {block: block[-1] if isinstance(block[-1], tuple) else block for block in blocks}
    return play(messages, holding(ranks, owner), route=network(levels), block_bytes=blocks)


@pytest.mark.parametrize(("how", "n"), [("ring", 2), ("ring", 5), ("ring", 8), ("butterfly", 8), ("butterfly", 4)])
def test_an_all_gather_leaves_every_rank_every_block_in_the_time_of_its_closed_form(how, n):
    levels = [switch(n)]
    played = played_gather(all_gather([n], [how]), levels, by_ports)
    assert all(set(blocks) == everything(levels) for blocks in played.contents.values())
    assert_equal(played, algorithms_for("all-gather", levels)[how])


def test_a_direct_all_gather_costs_what_the_naive_closed_form_says():
    levels = [switch(6)]
    played = played_gather(direct_all_gather(6), levels, by_ports)
    assert all(set(blocks) == everything(levels) for blocks in played.contents.values())
    assert_equal(played, algorithms_for("all-gather", levels)["naive"])


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (3, 2), (2, 2, 2), (4, 3)])
def test_a_hierarchical_all_reduce_pays_each_level_for_what_the_levels_inside_have_left(sizes):
    levels = [switch(f, latency_s=A * 3**i, bytes_per_s=B / 5**i) for i, f in enumerate(sizes)]
    how = ["butterfly" if f & (f - 1) == 0 else "ring" for f in sizes]
    played = played_reduction(all_reduce(sizes, how), levels, by_ports)
    assert_all_reduced(played, levels)
    assert_equal(played, algorithms_for("all-reduce", levels)["hierarchical"])


@pytest.mark.parametrize("sizes", [(3, 3), (4, 4), (3, 3, 3)])
@pytest.mark.parametrize("kind", ["all-reduce", "reduce-scatter", "all-gather"])
def test_a_torus_uses_all_links_of_all_dimensions_all_the_time(sizes, kind):
    levels = [ring_of(f) for f in sizes]
    closed = algorithms_for(kind, levels)["torus"]
    d, n = len(sizes), math.prod(sizes)
    passes = 2 if kind == "all-reduce" else 1
    assert closed(S) == pytest.approx(passes * (d * (sizes[0] - 1) * A + (n - 1) / n * S / (2 * d * B)))
    if kind == "all-gather":
        messages = torus_all_gather(sizes)
        played = played_gather(messages, levels, by_links)
        assert all(set(blocks) == set(pieces_of(messages, S)) for blocks in played.contents.values())
    elif kind == "reduce-scatter":
        played = played_reduction(torus_reduce_scatter(sizes), levels, by_links)
        own = ((rank, terms) for rank, blocks in played.contents.items() for b, terms in blocks.items() if b[2] == rank)
        assert all(terms == everything(levels) for _, terms in own)
    else:
        messages = in_sequence(torus_reduce_scatter(sizes), torus_all_gather(sizes))
        played = played_reduction(messages, levels, by_links)
        assert_all_reduced(played, levels)
    assert_equal(played, closed)


@pytest.mark.parametrize("sizes", [(3, 4), (5, 3), (3, 5)])
def test_on_an_uneven_torus_the_closed_form_is_never_too_low_and_at_most_a_third_too_high(sizes):
    levels = [ring_of(f) for f in sizes]
    played = played_reduction(torus_reduce_scatter(sizes), levels, by_links)
    closed = algorithms_for("reduce-scatter", levels)["torus"](S)
    assert played.seconds <= closed * (1 + 1e-9)
    assert closed <= played.seconds * 4 / 3


@pytest.mark.parametrize("f", [2, 3, 4, 7])
def test_on_a_line_a_gather_and_a_reduction_are_as_slow_as_the_one_link_of_its_end(f):
    levels = [ring_of(f, wraps=False)]
    gathered = played_gather(all_gather([f], ["line"]), levels, by_links)
    reduced = played_reduction(reduce_scatter([f], ["line"]), levels, by_links)
    assert all(set(blocks) == everything(levels) for blocks in gathered.contents.values())
    assert all(blocks[rank] == everything(levels) for rank, blocks in reduced.contents.items())
    assert_equal(gathered, algorithms_for("all-gather", levels)["ring"])
    assert_equal(reduced, algorithms_for("reduce-scatter", levels)["ring"])


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8, 13])
def test_trees_broadcast_and_reduce_in_log2_n_steps_of_the_whole(n):
    levels, root = [switch(n)], (0,)
    down = played_gather(tree_broadcast(n, [root]), levels, by_ports, owner={root: root})
    up = played_reduction(tree_reduce(n, [root]), levels, by_ports)
    assert all(root in blocks for blocks in down.contents.values())
    assert up.contents[root][root] == everything(levels)
    assert_equal(down, algorithms_for("broadcast", levels)["tree"])
    assert_equal(up, algorithms_for("reduce", levels)["tree"])
    both = played_reduction(in_sequence(tree_reduce(n, [root]), tree_broadcast(n, [root])), levels, by_ports)
    assert_equal(both, algorithms_for("all-reduce", levels)["tree"])


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8, 13])
def test_trees_gather_and_scatter_in_log2_n_steps_and_the_bytes_of_the_root(n):
    levels = [switch(n)]
    gathered = played_gather(tree_gather(n), levels, by_ports)
    assert set(gathered.contents[0,]) | {(0,)} == everything(levels)
    cost = algorithms_for("gather", levels)["tree"]
    assert gathered.seconds == pytest.approx(cost(S * n / (n - 1)), rel=1e-9)  # the root's own block is in no message
    scattered = played_gather(
        tree_scatter(n), levels, by_ports, owner=dict.fromkeys(pieces_of(tree_scatter(n), S), (0,))
    )
    assert all((rank in blocks) for rank, blocks in scattered.contents.items() if rank != (0,))
    assert scattered.seconds == pytest.approx(gathered.seconds, rel=1e-9)


def test_a_gather_along_a_ring_takes_one_block_after_the_other():
    levels, n = [switch(5)], 5
    played = played_gather(ring_gather(n), levels, by_ports)
    assert len(played.contents[0,]) == n - 1
    assert played.seconds == pytest.approx(algorithms_for("gather", levels)["ring"](S * n / (n - 1)), rel=1e-9)


@pytest.mark.parametrize("n", [2, 5, 8])
def test_a_parameter_server_pays_for_every_worker_in_and_out(n):
    levels, root = [switch(n)], (0,)
    both = played_reduction(in_sequence(star_reduce(n, [root]), star_broadcast(n, [root])), levels, by_ports)
    assert_all_reduced(both, levels)
    assert_equal(both, algorithms_for("all-reduce", levels)["parameter server"])
    assert both.seconds == pytest.approx(2 * (n - 1) * (A + S / B))


def exchanged(messages, levels, network):
    blocks = pieces_of(messages, 1.0)
    n = len(everything(levels))
    doubled = any(len(block) == 3 for block in blocks)

    def part(block):
        halved = doubled and 2 * ((block[1][0] - block[0][0]) % n) == n
        return S / n / (2 if halved else 1)

    sizes = {block: part(block) for block in blocks}
    played = play(
        messages,
        holding(everything(levels), {block: block[0] for block in blocks}),
        route=network(levels),
        block_bytes=sizes,
    )
    arrived = {(b[0], rank) for rank, held in played.contents.items() for b in held if b[1] == rank}
    assert arrived == {pair for pair in itertools.product(everything(levels), repeat=2) if pair[0] != pair[1]}
    return played


@pytest.mark.parametrize("n", [2, 4, 5, 8])
def test_an_all_to_all_in_pairs_takes_n_minus_1_messages_of_one_block(n):
    levels = [switch(n)]
    played = exchanged(pairwise_exchange([n]), levels, by_ports)
    assert_equal(played, algorithms_for("all-to-all", levels)["pairwise"])
    assert played.seconds == pytest.approx((n - 1) * A + (n - 1) / n * S / B)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_bruck_s_all_to_all_takes_log2_n_messages_of_half_the_operand(n):
    levels = [switch(n)]
    assert_equal(exchanged(bruck_exchange(n), levels, by_ports), algorithms_for("all-to-all", levels)["Bruck"])


@pytest.mark.parametrize("sizes", [(2, 3), (4, 2), (2, 2, 2)])
def test_an_all_to_all_over_levels_is_exact_both_in_pairs_and_level_by_level(sizes):
    levels = [switch(f, latency_s=A * 3**i, bytes_per_s=B / 5**i) for i, f in enumerate(sizes)]
    found = algorithms_for("all-to-all", levels)
    assert_equal(exchanged(level_exchange(sizes), levels, by_ports), found["hierarchical"])
    # Ports of different levels can work at the same time, so playing in pairs may only be faster.
    assert exchanged(pairwise_exchange(sizes), levels, by_ports).seconds <= found["pairwise"](S) * (1 + 1e-9)


@pytest.mark.parametrize("f", [3, 4, 5, 6, 8])
def test_an_all_to_all_on_a_ring_passes_an_eighth_of_n_operands_over_each_link(f):
    levels = [ring_of(f)]
    played = exchanged(ring_exchange(f), levels, by_links)
    assert_equal(played, algorithms_for("all-to-all", levels)["ring"])
    if f % 2 == 0:
        assert played.seconds == pytest.approx(f / 2 * A + f / 8 * S / B)


@pytest.mark.parametrize("f", [2, 3, 6])
def test_an_all_to_all_on_a_line_ends_when_the_first_rank_s_blocks_have_come_to_the_last(f):
    levels = [ring_of(f, wraps=False)]
    played = exchanged(line_exchange(f), levels, by_links)
    assert_equal(played, algorithms_for("all-to-all", levels)["ring"])


@pytest.mark.parametrize("n", [2, 3, 8, 11])
def test_a_barrier_is_over_when_every_rank_has_heard_of_every_other_after_log2_n_messages(n):
    levels = [switch(n)]
    messages = dissemination(n)
    blocks = {(i,): 0.0 for i in range(n)}
    played = play(messages, holding(ranks_of([n]), {b: b for b in blocks}), route=by_ports(levels), block_bytes=blocks)
    assert all(set(heard) == set(blocks) for heard in played.contents.values())
    assert played.seconds == pytest.approx(algorithms_for("barrier", levels)["dissemination"](0.0))


@pytest.mark.parametrize("n", [6, 8, 12])
def test_a_double_tree_approaches_its_bandwidth_limit_with_many_chunks(n):
    chunks = 60
    levels = [switch(n, latency_s=0.0)]
    messages = double_tree_reduce(n, chunks)
    blocks = pieces_of(messages, S)
    played = play(messages, holding_own_terms(ranks_of([n]), blocks), route=by_ports(levels), block_bytes=blocks)
    assert all(terms == everything(levels) for terms in played.contents[0,].values())
    limit_s = algorithms_for("all-reduce", levels)["double tree"](S) / 2  # the reduction is half of the all-reduce
    assert limit_s * (1 - 1e-9) <= played.seconds <= 1.25 * limit_s


def test_a_flat_ring_over_nodes_goes_at_the_pace_of_the_ports_between_them():
    """Two nodes of four devices with one port each: eight ranks in a ring, two of whose eight links are ports."""
    tiers = (
        node(latency_s=A),
        network(latency_s=4 * A, ports=1),
    )
    levels = levels_of(tiers, (8,), (0,))

    def route(message: Message) -> Route:
        between = message.source[0] // 4 != message.target[0] // 4
        tier = tiers[1 if between else 0]
        return Route((("out", message.source),), tier.latency_s, 1 / tier.bytes_per_s)

    messages = all_reduce([8], ["ring"])
    blocks = pieces_of(messages, S)
    played = play(messages, holding_own_terms(ranks_of([8]), blocks), route=route, block_bytes=blocks)
    assert_equal(played, algorithms_for("all-reduce", levels)["ring"])


@pytest.mark.parametrize("ports", [1, 2, 4])
def test_ranks_that_all_send_out_of_their_node_share_its_ports(ports):
    """Four devices a node, four rings across two nodes at once: each rank has ports / 4 of a port."""
    tiers = (node(latency_s=0.0), network(latency_s=0.0, ports=ports))
    (level,) = levels_of(tiers, (2, 4), (0,))
    messages = [
        Message(0, (node, device), (1 - node, device), frozenset({(node, device)}))
        for node in (0, 1)
        for device in range(4)
    ]
    blocks = dict.fromkeys(((n, d) for n in (0, 1) for d in range(4)), S)

    def route(message: Message) -> Route:
        node, device = message.source
        return Route((("port", node, device % ports),), 0.0, 8 / B)

    played = play(messages, holding(list(blocks), {b: b for b in blocks}), route=route, block_bytes=blocks)
    assert played.seconds == pytest.approx(algorithms_for("collective-permute", [level])["direct"](S))


def test_adding_a_contribution_twice_is_refused():
    twice = [Message(t, (0,), (1,), frozenset({"b"}), combine=True) for t in (0, 1)]
    with pytest.raises(ValueError, match=r"step 1 adds block 'b' of \[\(0,\)\] at \(1,\) twice"):
        play(twice, holding_own_terms([(0,), (1,)], ["b"]), route=by_ports([switch(2)]), block_bytes={"b": 1.0})

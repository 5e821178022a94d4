"""Closed forms against the same algorithms played message by message, and each algorithm against what its collective means."""

import math

import pytest

from autopar.cost_model.algorithms import algorithms_for
from autopar.cost_model.topology import levels_of
from tests.cost_model.event_simulation import (
    Message,
    Route,
    holding,
    holding_own_terms,
    play,
)
from tests.cost_model.message_plans import (
    all_gather,
    all_reduce,
    direct_all_gather,
    dissemination,
    double_tree_reduce,
    in_sequence,
    ranks_of,
    reduce_scatter,
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
from tests.cost_model.networks import (
    A,
    B,
    S,
    assert_all_reduced,
    assert_equal,
    by_links,
    by_ports,
    everything,
    network,
    node,
    pieces_of,
    played_reduction,
    ring_of,
    switch,
)


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


@pytest.mark.sampled(4)
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


@pytest.mark.parametrize("n", [2, 3, 8, 11])
def test_a_barrier_is_over_when_every_rank_has_heard_of_every_other_after_log2_n_messages(n):
    levels = [switch(n)]
    messages = dissemination(n)
    blocks = {(i,): 0.0 for i in range(n)}
    played = play(messages, holding(ranks_of([n]), {b: b for b in blocks}), route=by_ports(levels), block_bytes=blocks)
    assert all(set(heard) == set(blocks) for heard in played.contents.values())
    assert played.seconds == pytest.approx(algorithms_for("barrier", levels)["dissemination"](0.0))


@pytest.mark.sampled(4)
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

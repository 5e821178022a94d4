"""All-to-alls played message by message: every block arrives, in the seconds of the closed form."""

import itertools

import pytest

from autopar.cost_model.algorithms import algorithms_for
from tests.cost_model.event_simulation import (
    holding,
    play,
)
from tests.cost_model.message_plans import (
    bruck_exchange,
    level_exchange,
    line_exchange,
    pairwise_exchange,
    ring_exchange,
)
from tests.cost_model.networks import (
    A,
    B,
    S,
    assert_equal,
    by_links,
    by_ports,
    everything,
    pieces_of,
    ring_of,
    switch,
)


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

"""Layers are the cheapest cuts that the bound allows, and equal layers are recognised."""

import itertools
import time

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import ArgumentError
from autopar.microbatches.loop import TimeLoop
from autopar.microbatches.phases import plan_time
from autopar.models.registry import build
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.program import Equation
from autopar.program.trace import trace
from autopar.stages.chain import ForwardEquation, forward_chain
from autopar.stages.identical import find_identical
from autopar.stages.layers import cluster, find_layers
from autopar.stages.tuning import TUNING

NO_EQUATION = Equation(primitive=jax.lax.add_p, invars=(), outvars=(), params={}, source_info=None)


def chain_of(flops, cut_bytes):
    return [ForwardEquation(NO_EQUATION, float(f), float(b)) for f, b in zip(flops, cut_bytes, strict=True)]


def spans_of(chain, cuts):
    return list(itertools.pairwise((0, *cuts, len(chain))))


def flops_of_layers(chain, cuts):
    return [sum(e.flops for e in chain[a:b]) for a, b in spans_of(chain, cuts)]


def sent(chain, cuts):
    return sum(chain[c].cut_bytes for c in cuts)


def clusterings(chain, max_layers, boundaries):
    """Every set of at most so many layers with the cuts asked for."""
    for count in range(min(max_layers, len(chain))):
        for cuts in itertools.combinations(range(1, len(chain)), count):
            if set(boundaries) <= set(cuts):
                yield cuts


def largest(chain, cuts):
    """Flops of the largest layer that is not one equation."""
    return max((sum(e.flops for e in chain[a:b]) for a, b in spans_of(chain, cuts) if b - a > 1), default=0.0)


def best_by_force(chain, max_layers, slack, boundaries=()):
    """(bytes, sum of squared flops) of the best clustering under the bound, or under the least that can be met."""
    layers = max(max_layers, len(set(boundaries)) + 1)
    found = list(clusterings(chain, layers, boundaries))
    bound = (1 + slack) * sum(e.flops for e in chain) / layers
    bound = max(bound, min(largest(chain, cuts) for cuts in found))
    allowed = [cuts for cuts in found if largest(chain, cuts) <= bound * (1 + 1e-9)]
    return min((sent(chain, cuts), sum(f**2 for f in flops_of_layers(chain, cuts))) for cuts in allowed)


chains = st.lists(st.tuples(st.sampled_from([1, 2, 3, 5, 20]), st.integers(1, 4)), min_size=1, max_size=9)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(pairs=chains, max_layers=st.integers(1, 5), slack=st.sampled_from([0.0, 0.2, 1.0]), data=st.data())
def test_the_layers_are_the_best_of_all_clusterings(pairs, max_layers, slack, data):
    chain = chain_of(*zip(*pairs, strict=True))
    places = st.sets(st.integers(1, len(chain) - 1), max_size=3) if len(chain) > 1 else st.just(set())
    boundaries = tuple(data.draw(places))
    cuts = cluster(chain, max_layers=max_layers, slack=slack, boundaries=boundaries)
    assert list(cuts) == sorted(set(cuts))
    assert set(boundaries) <= set(cuts)
    assert len(cuts) < max(max_layers, len(boundaries) + 1)
    squares = sum(f**2 for f in flops_of_layers(chain, cuts))
    assert (sent(chain, cuts), squares) == best_by_force(chain, max_layers, slack, boundaries)


def test_cuts_fall_where_few_bytes_cross_although_flops_are_less_even():
    chain = chain_of([1] * 10, [9, 9, 9, 9, 1, 9, 9, 9, 9, 9])
    assert cluster(chain, max_layers=2) == (4,)
    assert cluster(chain, max_layers=2, slack=0.0) == (5,)


def test_among_places_of_equal_bytes_the_most_even_one_is_cut():
    assert cluster(chain_of([1] * 12, [5] * 12), max_layers=3) == (4, 8)


def test_an_equation_above_the_bound_is_a_layer_of_its_own():
    assert cluster(chain_of([1, 1, 90, 1, 1], [0, 2, 2, 2, 2]), max_layers=4) == (2, 3)


@pytest.mark.parametrize("heavy", [25.1, 26.0, 90.0])
def test_what_takes_next_to_nothing_stays_with_an_equation_above_the_bound(heavy):
    """As a loss does with the logits, which are wider than what the blocks send. Of more of it there is a layer."""
    blocks, sent_bytes = [12, 12] * 4, [0, 9] + [2, 9] * 3
    head, sent_head = [heavy, 0.02, 0.02], [2, 40, 40]
    most = (1 + 0.2) * (sum(blocks) + heavy) / 6
    assert sum(head) - heavy < TUNING.same_place * most
    assert cluster(chain_of(blocks + head, sent_bytes + sent_head), max_layers=6) == (2, 4, 6, 8)
    head[2] = 2 * TUNING.same_place * most
    assert not {9, 10}.isdisjoint(cluster(chain_of(blocks + head, sent_bytes + sent_head), max_layers=6))


def test_blocks_that_are_equal_are_cut_alike_though_their_cheapest_bytes_occur_twice():
    block = [(500, 9), (300, 9), (0.5, 2), (0.5, 2)]
    flops, cut_bytes = zip(*(block * 4), strict=True)
    cuts = cluster(chain_of(flops, cut_bytes), max_layers=4, slack=0.3)
    assert cuts == (2, 6, 10), "(3, 7, 11) would be more even by half a flop"


def chain_of_blocks(widths, inner=(4.0, 5.0, 3.0)):
    """A block of four equations for each width: it begins where the width crosses, and inside more does."""
    cut_bytes = [width * factor for width in widths for factor in (1.0, *inner)]
    return chain_of([1] * len(cut_bytes), cut_bytes)


ENDS_OF_16_BLOCKS = tuple(range(4, 64, 4))
COUNTS = (64, 48, 32, 24, 16, 8, 4, 2)


@pytest.mark.parametrize(
    "widths",
    [
        [7] * 16,
        [8, 8, 8, 4, 4, 4, 4, 2, 2, 2, 2, 2, 2, 1, 1, 1],
        [1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4, 4, 4, 8, 8, 8],
        [1, 1, 2, 2, 4, 4, 8, 8, 8, 8, 4, 4, 2, 2, 1, 1],
    ],
    ids=["alike", "narrower", "wider", "wider, then narrower"],
)
def test_every_block_is_a_layer_also_where_blocks_send_unlike_bytes(widths):
    assert find_layers(chain_of_blocks(widths), COUNTS) == ENDS_OF_16_BLOCKS


@pytest.mark.parametrize("blocks", [3, 4, 5, 8])
def test_each_block_of_a_shallow_perceptron_is_a_layer(blocks):
    """Its products are a large part of the work: the ends of the block are further than nearby from the places inside."""
    flops, cut_bytes = [100, 1, 1, 1, 100, 1], [1, 5, 5, 9, 9, 5]
    cuts = find_layers(chain_of(flops * blocks, cut_bytes * blocks), COUNTS)
    assert cuts == tuple(range(6, 6 * blocks, 6))


def test_residual_blocks_of_one_product_are_not_cut_around_their_products_where_layers_are_to_be_divisible():
    """More layers would each be one product, or the cheap operations between two: the products would not fit in with others."""
    flops, cut_bytes = [30, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 2, 2, 2, 2, 2, 2, 3, 2, 1]
    chain = chain_of(flops * 4, cut_bytes * 4)
    assert find_layers(chain, COUNTS, is_divisible=True) == (10, 20, 30)
    assert len(find_layers(chain, COUNTS)) > 3


def test_one_large_equation_leaves_the_blocks_before_it_layers():
    chain = [*chain_of_blocks([7] * 16), *chain_of([40], [7])]
    assert set(find_layers(chain, COUNTS, is_divisible=True)) >= set(ENDS_OF_16_BLOCKS)


def test_blocks_that_send_half_as_much_more_than_others_are_layers_too():
    """As the decoder of a T5 does beside its encoder: the ends of its blocks are no insides of a larger one."""
    ends = tuple(range(4, 4 * 36, 4))
    assert find_layers(chain_of_blocks([2] * 24 + [3] * 12 + [0.01]), COUNTS)[: len(ends)] == ends


@pytest.mark.parametrize("first", [0.0, 0.01])
def test_what_little_crosses_at_the_ends_of_a_model_makes_no_cut_less_natural(first):
    chain = chain_of_blocks([7] * 16)
    ends = chain_of([0.1, 0.1], [first, first])
    cuts = find_layers([*ends, *chain, *ends], COUNTS)
    assert {cut - len(ends) for cut in cuts} >= set(ENDS_OF_16_BLOCKS)


def test_a_cut_inside_a_block_that_is_cheaper_than_a_wider_blocks_end_is_not_taken():
    widths = [100] * 8 + [1] * 8
    cuts = find_layers(chain_of_blocks(widths), COUNTS)
    assert all(cut % 4 == 0 for cut in cuts)
    assert len(cuts) == 15


def test_a_chain_in_which_nothing_crosses_can_be_cut_anywhere():
    assert len(find_layers(chain_of([1] * 65, [0] * 65), COUNTS)) > 30


def test_fewer_layers_than_are_asked_for_are_only_taken_where_there_are_no_more():
    """A Wide-ResNet on 8 nodes had 5 layers, of the most natural cuts, and no 8 stages."""
    chain = chain_of([1] * 32, [sent for block in range(16) for sent in (1 if block % 4 == 0 else 2, 4)])
    few, more = (8, 16, 24), (4, 8, 12, 16, 20, 24, 28)
    assert find_layers(chain, (16, 8)) == few
    assert find_layers(chain, (16, 8), fewest=4) == few
    assert find_layers(chain, (16, 8), fewest=5) == more
    assert find_layers(chain, (8,), fewest=5) == few


def test_a_chain_without_equations_or_work_has_no_cuts_but_those_asked_for():
    assert cluster([], max_layers=3) == ()
    assert cluster(chain_of([0] * 5, [1] * 5), max_layers=3) == ()
    assert cluster(chain_of([0] * 5, [1] * 5), max_layers=3, boundaries=(2,)) == (2,)


def test_wrong_arguments_are_reported_together():
    with pytest.raises(ArgumentError) as error:
        cluster(chain_of([1] * 3, [1] * 3), max_layers=0, slack=-1, boundaries=(0, 2, 3))
    assert "max_layers=0: must be at least 1" in str(error.value)
    assert "slack=-1: must not be negative" in str(error.value)
    assert "boundaries [0, 3] are not between two of the 3 forward equations" in str(error.value)


def test_a_long_chain_is_cut_at_the_cheap_places_of_its_blocks_in_reasonable_time():
    blocks, length = 500, 100
    rng = np.random.default_rng(0)
    flops = np.where(np.arange(length) % 10 == 5, 1000.0, 1.0)
    cut_bytes = np.where(np.arange(length) == 0, 8.0, 16.0 + rng.integers(0, 4, length))
    chain = chain_of(np.tile(flops, blocks), np.tile(cut_bytes, blocks))
    assert len(chain) > 40 * TUNING.exact_places
    start = time.perf_counter()
    cuts = cluster(chain, max_layers=50)
    assert time.perf_counter() - start < 20
    assert all(cut % length == 0 for cut in cuts)
    assert max(flops_of_layers(chain, cuts)) <= 1.2 * sum(e.flops for e in chain) / 50


def loop_of(step, *args):
    signature = CallSignature(step, (1,), (), "auto")
    traced = trace(signature, bind_arguments(signature, args, {}))
    return TimeLoop(traced, plan_time(traced, 2))


def loop_of_blocks(*blocks):
    """A train step whose forward chain is the blocks, each with weights of its own."""

    def loss(weights, x):
        for w, block in zip(weights, blocks, strict=True):
            x = block(x, w)
        return jnp.sum(x * x)

    def step(weights, x):
        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights, x))

    return loop_of(step, [jnp.full((4, 4), 0.5, jnp.float32) for _ in blocks], jnp.ones((8, 4)))


def block(x, w):
    return jnp.tanh(jnp.sin(x) @ w)


def layers_of_blocks(*blocks):
    """For each block the first that is the same; a block begins at its sine, which in the first depends on no weights."""
    loop = loop_of_blocks(*blocks)
    names = [e.equation.primitive.name for e in forward_chain(loop)]
    return find_identical(loop, [i for i, name in enumerate(names) if name == "sin"])


def test_blocks_of_the_same_operations_are_identical_whatever_their_weights():
    assert layers_of_blocks(block, block, block, block) == (0, 1, 1, 1)


@pytest.mark.parametrize(
    "other",
    [
        lambda x, w: jnp.tanh(jnp.einsum("ij,kj->ik", jnp.sin(x), w)),
        lambda x, w: jnp.exp(jnp.sin(x) @ w),
        lambda x, w: jnp.tanh(jnp.sin(x) @ w) * 2,
        lambda x, w: jnp.tanh(jnp.sin(x) @ w.astype(jnp.bfloat16)).astype(jnp.float32),
        lambda x, w: jnp.tanh(jnp.sin(x) @ w + x @ w),
    ],
    ids=["parameters", "primitive", "literal", "type", "wiring"],
)
def test_a_block_that_differs_is_another_layer(other):
    assert layers_of_blocks(block, block, other, block, block) == (0, 1, 2, 1, 1)


def test_parameters_are_compared_by_value():
    def summed(reverse):
        return lambda x, w: jax.lax.cumsum(jnp.sin(x) @ w, axis=1, reverse=reverse)

    assert layers_of_blocks(block, summed(False), summed(True), summed(False)) == (0, 1, 2, 1)


def test_literals_are_compared_by_value():
    def scaled(factor):
        return lambda x, w: jnp.tanh(jnp.sin(x) @ w) * factor

    assert layers_of_blocks(block, scaled(2.0), scaled(3.0), scaled(2.0)) == (0, 1, 2, 1)


def test_loops_are_compared_with_what_is_inside():
    def looped(inner):
        def run(x, w):
            return jax.lax.scan(lambda c, _: (inner(c @ w), None), jnp.sin(x), None, length=3)[0]

        return run

    assert layers_of_blocks(block, looped(jnp.tanh), looped(jnp.sinh), looped(jnp.tanh)) == (0, 1, 2, 1)


@pytest.mark.sweep
def test_all_inner_blocks_of_a_gpt_are_one_layer():
    model = build("gpt", layers=4, hidden=32, heads=4, seq=16, batch=8, vocab=256)
    loop = loop_of(model.train_step, jax.jit(model.create_state)(jax.random.key(0)), next(model.data(0)))
    chain = forward_chain(loop)
    cuts = cluster(chain, max_layers=5)
    assert {chain[c].cut_bytes for c in cuts} == {8 * 16 * 32 * 4}, "only the residual stream crosses"
    assert find_identical(loop, cuts) == (0, 1, 1, 1, 4)

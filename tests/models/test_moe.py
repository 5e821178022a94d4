"""The mixture of experts: routing by hand and against numpy, the layer against a loop over tokens, its parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.models import build
from autopar.models.moe import MixtureOfExperts, MoEGPT, top2_routing
from autopar.models.sizes import MoEConfig

TINY = {"layers": 2, "hidden": 16, "heads": 2, "seq": 8, "batch": 4, "experts": 4, "group": 8}


def random_gates(groups, tokens, experts, seed=0):
    logits = np.random.default_rng(seed).normal(size=(groups, tokens, experts)).astype(np.float32)
    return jax.nn.softmax(logits)


def test_four_tokens_and_three_experts_worked_out_by_hand():
    gates = jnp.array([[[0.6, 0.3, 0.1], [0.5, 0.1, 0.4], [0.2, 0.7, 0.1], [0.1, 0.3, 0.6]]])
    routing = top2_routing(gates, capacity=2)
    expected = np.zeros((1, 4, 3, 2))
    # First choices 0, 0, 1, 2 take places 0, 1, 0, 0. Second choices 1, 2, 0, 1 come after them: tokens 0 and 1 find
    # place 1 of experts 1 and 2; expert 0 is full for token 2, and expert 1 is full for token 3.
    expected[0, 0, 0, 0], expected[0, 0, 1, 1] = 0.6 / 0.9, 0.3 / 0.9
    expected[0, 1, 0, 1], expected[0, 1, 2, 1] = 0.5 / 0.9, 0.4 / 0.9
    expected[0, 2, 1, 0] = 0.7 / 0.9
    expected[0, 3, 2, 0] = 0.6 / 0.9
    np.testing.assert_allclose(routing.combine, expected, rtol=1e-6)
    np.testing.assert_array_equal(routing.dispatch, (expected > 0).astype(np.float32))
    # Shares of first choices (2, 1, 1)/4, mean gates (0.35, 0.35, 0.3): 3 (0.5*0.35 + 0.25*0.35 + 0.25*0.3).
    np.testing.assert_allclose(routing.balance_loss, 1.0125, rtol=1e-6)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("tokens", "experts", "capacity"), [(16, 4, 2), (16, 4, 8), (8, 16, 1), (12, 3, 5)])
def test_no_place_is_taken_twice_and_no_token_counts_more_than_once(tokens, experts, capacity):
    combine, dispatch, _ = map(np.asarray, top2_routing(random_gates(5, tokens, experts), capacity))
    assert combine.shape == dispatch.shape == (5, tokens, experts, capacity)
    assert combine.min() >= 0
    assert dispatch.sum(axis=1).max() <= 1
    assert dispatch.sum(axis=(1, 3)).max() <= capacity
    assert dispatch.sum(axis=(2, 3)).max() <= 2
    assert combine.sum(axis=(2, 3)).max() <= 1 + 1e-6
    # Each expert gives away exactly as many places as it was asked for, up to its capacity.
    best_two = np.argsort(-random_gates(5, tokens, experts), axis=-1)[..., :2]
    asked = np.stack([np.bincount(group.ravel(), minlength=experts) for group in best_two])
    np.testing.assert_array_equal(dispatch.sum(axis=(1, 3)), np.minimum(asked, capacity))


def test_with_room_for_all_every_token_reaches_its_two_best_experts_with_weights_that_sum_to_one():
    gates = random_gates(3, 16, 6)
    combine = np.asarray(top2_routing(gates, capacity=32).combine)
    best_two = np.sort(np.argsort(-np.asarray(gates), axis=-1)[..., :2], axis=-1)
    reached = [np.flatnonzero(weights) for weights in combine.sum(axis=-1).reshape(-1, 6)]
    np.testing.assert_array_equal(np.stack(reached), best_two.reshape(-1, 2))
    np.testing.assert_allclose(combine.sum(axis=(2, 3)), 1, rtol=1e-6)


def test_balance_loss_is_one_when_gates_are_even_and_experts_when_all_choose_the_same():
    even = jnp.eye(4)[None] * 1e-6 + 0.25
    np.testing.assert_allclose(top2_routing(even, 4).balance_loss, 1, rtol=1e-4)
    same = jnp.tile(jnp.array([1.0, 0, 0, 0]), (1, 8, 1))
    np.testing.assert_allclose(top2_routing(same, 8).balance_loss, 4, rtol=1e-6)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("group", [4, 8, 16])
def test_the_layer_equals_a_loop_over_tokens_whatever_the_groups(group):
    config = MoEConfig(**(TINY | {"group": group}), capacity_factor=4.0)
    layer = MixtureOfExperts(config)
    draw = np.random.default_rng(0)
    hidden, wide = config.hidden, config.ffn_factor * config.hidden
    x, gate, up, down = (
        draw.normal(scale=0.4, size=size).astype(np.float32)
        for size in ((4, 8, hidden), (hidden, 4), (4, hidden, wide), (4, wide, hidden))
    )
    actual, _ = jax.jit(layer.apply)({"params": {"gate": {"kernel": gate}, "up": up, "down": down}}, x)
    expected = np.zeros((config.batch * config.seq, hidden), np.float32)
    for number, token in enumerate(x.reshape(-1, hidden)):
        gates = np.exp(token @ gate)
        best, second = np.argsort(-gates)[:2]
        for expert in (best, second):
            computed = gelu(token @ up[expert]) @ down[expert]
            expected[number] += gates[expert] / (gates[best] + gates[second]) * computed
    np.testing.assert_allclose(actual.reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def test_tokens_over_capacity_pass_through_the_block_with_less_than_their_share():
    config = MoEConfig(**TINY, capacity_factor=0.5)
    assert config.capacity == 2
    combine = np.asarray(top2_routing(random_gates(4, config.group, config.experts), config.capacity).combine)
    assert (combine.sum(axis=(2, 3)) < 0.99).any()


def test_parameters_are_those_of_a_gpt_with_gate_and_experts_in_every_second_layer():
    hidden, layers, experts, seq = 32, 5, 6, 12
    model = build("moe", hidden=hidden, layers=layers, heads=4, experts=experts, seq=seq, batch=4, group=12)
    params = jax.eval_shape(model.create_state, jax.random.key(0)).params
    attention_and_norms = 4 * hidden**2 + 4 * hidden + 4 * hidden
    dense = 8 * hidden**2 + 5 * hidden
    mixture = hidden * experts + experts * 8 * hidden**2
    expected = (256 + seq) * hidden + 2 * hidden + layers * attention_and_norms + 3 * dense + 2 * mixture
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == expected


def test_the_balancing_loss_is_part_of_the_loss_and_reported(small):
    one = small("moe")
    batch, weight = next(one.model.data(0)), one.model.config.balance_weight
    metrics = one.eval_step(one.first_state, batch)
    logits, balance_loss = jax.jit(MoEGPT(one.model.config).apply)(
        {"params": one.first_state.params}, batch["tokens"], None
    )
    picked = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), batch["targets"][..., None], axis=-1)
    np.testing.assert_allclose(metrics["balance_loss"], balance_loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], -picked.mean() + weight * balance_loss, rtol=1e-5)
    assert 0.9 < float(balance_loss) < 4


@pytest.mark.sweep
def test_recomputing_layers_changes_nothing(small, jit):
    one = small("moe")
    batch = next(one.model.data(0))
    _, expected = one.train_step(one.state(), batch)
    recomputing = build("moe", **(dataclasses.asdict(one.model.config) | {"remat": True}))
    _, actual = jit(recomputing.train_step)(one.state(), batch)
    np.testing.assert_allclose(actual["loss"], expected["loss"], rtol=1e-6)

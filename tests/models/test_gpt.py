"""The transformer: parameters counted, causality, dropout; scanned and recomputing variants equal the plain one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.models import build
from autopar.models.gpt import GPT
from autopar.models.gpt import objective as gpt_objective
from autopar.models.sizes import GPTConfig
from autopar.models.transformer import stack_blocks

TINY = {"layers": 1, "hidden": 16, "heads": 2, "seq": 8, "batch": 4}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["gpt", "gpt_scan"])
@pytest.mark.parametrize(("hidden", "layers", "seq", "vocab"), [(16, 1, 4, 256), (32, 3, 16, 300), (128, 4, 64, 256)])
def test_parameters_are_v_h_plus_s_h_plus_12_h_squared_plus_13_h_per_layer(
    name, hidden, layers, seq, vocab, parameter_count
):
    expected = (vocab + seq) * hidden + layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden
    assert parameter_count(name, hidden=hidden, layers=layers, seq=seq, vocab=vocab) == expected
    untied = parameter_count(name, hidden=hidden, layers=layers, seq=seq, vocab=vocab, tied_embeddings=False)
    assert untied == expected + vocab * hidden


def test_at_the_size_of_gpt_2_small_there_are_as_many_parameters_as_published(parameter_count):
    assert parameter_count("gpt_scan", hidden=768, layers=12, heads=12, seq=1024, vocab=50257) == 124_439_808


@pytest.mark.sweep
def test_variants_have_the_same_loss_and_gradients_as_the_plain_model_with_dropout(
    small, loss_and_gradients, assert_close_to_scale
):
    plain, params = small("gpt").model, small("gpt").first_state.params
    layers, batch, key = plain.config.layers, next(plain.data(0)), jax.random.PRNGKey(7)
    expected_loss, expected = loss_and_gradients(gpt_objective, plain.config, params, batch, key)
    for variant in ({"remat": True}, {"scan_layers": True, "remat": True}):
        changed = stack_blocks if "scan_layers" in variant else lambda tree, layers: tree
        config = dataclasses.replace(plain.config, **variant)
        loss, gradients = loss_and_gradients(gpt_objective, config, changed(params, layers), batch, key)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
        assert_close_to_scale(gradients, changed(expected, layers))


@pytest.mark.sweep
def test_the_scanned_model_has_the_plain_model_s_loss_in_evaluation(small):
    plain, scanned = small("gpt"), small("gpt_scan")
    batch = next(plain.model.data(0))
    params = stack_blocks(plain.first_state.params, plain.model.config.layers)
    actual = scanned.eval_step(scanned.first_state.replace(params=params), batch)
    expected = plain.eval_step(plain.first_state, batch)
    np.testing.assert_allclose(actual["loss"], expected["loss"], rtol=1e-6)


def test_a_token_changes_no_logit_before_its_place_and_some_from_there_on():
    config = GPTConfig(**TINY)
    model = GPT(config)
    tokens = jnp.arange(4 * 8, dtype=jnp.int32).reshape(4, 8)
    variables = jax.jit(model.init, static_argnums=2)(jax.random.key(0), tokens, None)
    forward = jax.jit(model.apply, static_argnums=2)
    before, after = forward(variables, tokens, None), forward(variables, tokens.at[:, 5].set(200), None)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(axis=(0, 2)).all()


@pytest.mark.parametrize(("tied", "tables"), [(True, [(256, 16)]), (False, [(16, 256), (256, 16)])])
def test_logits_come_from_the_input_table_or_from_one_of_their_own(tied, tables):
    params = jax.eval_shape(build("gpt", **TINY, tied_embeddings=tied).create_state, jax.random.key(0)).params
    assert sorted(leaf.shape for leaf in jax.tree.leaves(params) if 256 in leaf.shape) == tables


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tied", [True, False])
def test_the_row_of_a_byte_that_is_not_read_moves_its_logit_only_if_tied(tied, jit):
    model = build("gpt", **TINY, dropout=0.0, tied_embeddings=tied)
    params = jit(model.create_state)(jax.random.key(0)).params
    tokens = jnp.arange(4 * 8, dtype=jnp.int32).reshape(4, 8)
    forward = jit(lambda params: GPT(model.config).apply({"params": params}, tokens, None))
    before = forward(params)
    params["embedding"]["tokens"]["embedding"] = params["embedding"]["tokens"]["embedding"].at[200].multiply(-1.0)
    moved = np.asarray(forward(params) != before)
    assert moved[..., 200].all() == moved.any() == tied
    assert not np.delete(moved, 200, axis=-1).any()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["gpt", "gpt_scan"])
def test_dropout_is_a_function_of_key_and_step_and_is_off_in_evaluation(small, name):
    one = small(name)
    batch = next(one.model.data(0))

    def varied():
        yield from (one.state(), one.state())
        yield one.state().replace(step=one.first_state.step + 1)
        yield one.state().replace(dropout_key=one.first_state.dropout_key + 1)

    same, again, next_step, other_key = (float(one.train_step(state, batch)[1]["loss"]) for state in varied())
    assert same == again
    assert len({same, next_step, other_key}) == 3
    assert len({float(one.eval_step(state, batch)["loss"]) for state in varied()}) == 1


def test_dropout_masks_differ_between_layers_and_places(small, loss_and_gradients):
    """With zero weights in every layer, equal masks would show as equal gradients of the biases."""
    one = small("gpt_scan")
    params = one.state().params
    params["blocks"] = jax.tree.map(jnp.zeros_like, params["blocks"])
    batch = next(one.model.data(0))
    _, gradients = loss_and_gradients(gpt_objective, one.model.config, params, batch, jax.random.PRNGKey(1))
    attention, ffn = gradients["blocks"]["attention"]["out"]["bias"], gradients["blocks"]["ffn"]["down"]["bias"]
    rows = np.concatenate([attention, ffn])
    assert len(np.unique(rows.round(9), axis=0)) == 2 * one.model.config.layers


def test_keys_may_be_typed_or_raw(jit):
    create_state = jit(build("gpt", **TINY).create_state)
    typed, raw = (create_state(key) for key in (jax.random.key(3), jax.random.PRNGKey(3)))
    jax.tree.map(np.testing.assert_array_equal, typed, raw)


def test_without_dropout_no_random_bits_are_drawn():
    jaxprs = {}
    for rate in (0.0, 0.1):
        model = build("gpt", **TINY, dropout=rate)
        state = jax.eval_shape(model.create_state, jax.random.key(0))
        jaxprs[rate] = str(jax.make_jaxpr(model.train_step)(state, model.batch_shape()))
    assert "random_bits" in jaxprs[0.1]
    assert "random_bits" not in jaxprs[0.0]

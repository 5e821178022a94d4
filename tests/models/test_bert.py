"""The masked-byte encoder: parameters counted, what the loss and the attention ignore, scanned equals written out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.models import build
from autopar.models.bert import Bert
from autopar.models.bert import objective as bert_objective
from autopar.models.data import PAD
from autopar.models.transformer import stack_blocks
from tests.models.conftest import VARIANTS

TINY = {"layers": 1, "hidden": 16, "heads": 2, "seq": 12, "batch": 4}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("hidden", "layers", "seq", "vocab"), [(16, 1, 4, 260), (32, 3, 16, 300), (128, 2, 64, 288)])
@pytest.mark.parametrize("scan_layers", [True, False])
def test_parameters_are_those_of_tables_layers_and_head(hidden, layers, seq, vocab, scan_layers, parameter_count):
    tables = (vocab + seq + 2) * hidden + 2 * hidden + vocab
    head = hidden**2 + 3 * hidden
    expected = tables + layers * (12 * hidden**2 + 13 * hidden) + head
    sizes = {"hidden": hidden, "layers": layers, "seq": seq, "vocab": vocab, "scan_layers": scan_layers}
    assert parameter_count("bert", **sizes) == expected
    assert parameter_count("bert", **sizes, tied_embeddings=False) == expected + vocab * hidden


def test_at_the_size_of_bert_base_there_are_as_many_parameters_as_published(parameter_count):
    sizes = {"hidden": 768, "layers": 12, "heads": 12, "seq": 512, "vocab": 30522, "scan_layers": True}
    assert parameter_count("bert", **sizes) == 109_514_298


@functools.cache
def compiled_forward(config):
    return jax.jit(lambda params, tokens, segments: Bert(config).apply({"params": params}, tokens, segments, None))


def forward(config, params, batch):
    return compiled_forward(config)(params, batch["tokens"], batch["segments"])


@pytest.mark.sweep
def test_the_loss_is_the_mean_over_the_masked_bytes_alone(small):
    one = small("bert")
    batch = next(one.model.data(0))
    masked = batch["weights"] == 1
    logits = np.asarray(forward(one.model.config, one.first_state.params, batch), np.float64)
    right = np.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    losses = np.log(np.exp(logits).sum(axis=-1)) - right
    metrics = one.eval_step(one.first_state, batch)
    np.testing.assert_allclose(metrics["loss"], losses[masked].mean(), rtol=1e-5)
    hits = logits.argmax(axis=-1) == batch["targets"]
    np.testing.assert_allclose(metrics["accuracy"], hits[masked].mean(), rtol=1e-6)


@pytest.mark.sweep
def test_targets_outside_of_the_mask_change_neither_loss_nor_update_and_each_inside_does(small):
    one = small("bert")
    batch = next(one.model.data(0))
    other = (batch["targets"] + 7) % 256
    expected = one.train_step(one.state(), batch)
    ignored = batch | {"targets": np.where(batch["weights"] == 0, other, batch["targets"])}
    jax.tree.map(np.testing.assert_array_equal, one.train_step(one.state(), ignored), expected)
    for place in np.argwhere(batch["weights"] == 1)[:5]:
        targets = batch["targets"].copy()
        targets[tuple(place)] = other[tuple(place)]
        assert float(one.train_step(one.state(), batch | {"targets": targets})[1]["loss"]) != float(expected[1]["loss"])


@pytest.mark.sweep
def test_no_byte_looks_at_padding_and_padding_may_look_at_bytes(small):
    one = small("bert")
    batch = next(one.model.data(0))
    params = one.state().params
    before = np.asarray(forward(one.model.config, params, batch))
    params["embedding"]["tokens"]["embedding"] = params["embedding"]["tokens"]["embedding"].at[PAD].multiply(-1.0)
    moved = forward(one.model.config, params, batch) != before
    real = batch["tokens"] != PAD
    assert not real.all()
    assert not moved[real][:, :PAD].any()
    assert moved[~real].all(axis=-1).all()


def test_the_attention_goes_both_ways(small):
    one = small("bert")
    batch = next(one.model.data(0))
    middle = batch["tokens"].copy()
    middle[:, 3] = (middle[:, 3] + 1) % 256
    params = one.first_state.params
    moved = np.asarray(
        forward(one.model.config, params, batch) != forward(one.model.config, params, batch | {"tokens": middle})
    )
    assert moved[:, 2].any(axis=-1).all()
    assert moved[:, 4].any(axis=-1).all()


def test_segments_positions_and_the_output_bias_matter(small):
    one = small("bert")
    config, params = one.model.config, one.state().params
    batch = next(one.model.data(0))
    before = forward(config, params, batch)
    assert (forward(config, params, batch | {"segments": 1 - batch["segments"]}) != before).any(axis=-1).all()
    same = {"tokens": jnp.zeros((1, config.seq), jnp.int32), "segments": jnp.zeros((1, config.seq), jnp.int32)}
    assert len(np.unique(np.asarray(forward(config, params, same))[0], axis=0)) == config.seq
    params["embedding"]["output_bias"] = params["embedding"]["output_bias"].at[65].add(2.0)
    added = np.broadcast_to(2.0 * (np.arange(config.vocab) == 65), before.shape)
    np.testing.assert_allclose(forward(config, params, batch) - before, added, atol=1e-5)


def test_tied_logits_share_the_input_table():
    tables = {}
    for tied in (True, False):
        params = jax.eval_shape(build("bert", **TINY, tied_embeddings=tied).create_state, jax.random.key(0)).params
        tables[tied] = sorted(leaf.shape for leaf in jax.tree.leaves(params) if 288 in leaf.shape)
    assert tables == {True: [(288,), (288, 16)], False: [(16, 288), (288,), (288, 16)]}


@pytest.mark.sweep
def test_the_shared_table_s_gradient_has_a_part_from_the_logits(loss_and_gradients, jit):
    """Bytes that no example reads get a gradient only through the logits."""
    gradients = {}
    for tied in (True, False):
        model = build("bert", **TINY, tied_embeddings=tied)
        state, batch = jit(model.create_state)(jax.random.key(0)), next(model.data(0))
        _, tree = loss_and_gradients(bert_objective, model.config, state.params, batch, jax.random.PRNGKey(0))
        unread = np.setdiff1d(np.arange(288), batch["tokens"])
        gradients[tied] = np.asarray(tree["embedding"]["tokens"]["embedding"])[unread]
    assert (gradients[True] != 0).any(axis=-1).all()
    assert (gradients[False] == 0).all()


@pytest.mark.sweep
@pytest.mark.parametrize("variants", VARIANTS)
def test_variants_have_the_same_loss_and_gradients_with_dropout(
    variants, small, loss_and_gradients, assert_close_to_scale
):
    one = small("bert")
    config, params = one.model.config, one.first_state.params
    batch, key = next(one.model.data(0)), jax.random.PRNGKey(7)
    expected_loss, expected = loss_and_gradients(bert_objective, config, params, batch, key)
    for variant in variants:
        changed = stack_blocks if "scan_layers" in variant else lambda tree, layers: tree
        varied = dataclasses.replace(config, **variant)
        loss, gradients = loss_and_gradients(bert_objective, varied, changed(params, config.layers), batch, key)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
        assert_close_to_scale(gradients, changed(expected, config.layers))
    other_loss, _ = loss_and_gradients(bert_objective, config, params, batch, jax.random.PRNGKey(8))
    assert float(other_loss) != float(expected_loss)

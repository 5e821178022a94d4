"""The encoder and decoder: parameters counted, relative positions, what is masked, scanned equals written out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.models import build
from autopar.models.data import PAD
from autopar.models.t5 import T5, relative_buckets
from autopar.models.t5 import objective as t5_objective
from autopar.models.transformer import stack_blocks
from tests.models.conftest import VARIANTS


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("hidden", "layers", "heads", "factor", "buckets"), [(16, 1, 2, 4, 8), (32, 3, 4, 2, 32), (64, 2, 8, 3, 16)]
)
@pytest.mark.parametrize("scan_layers", [True, False])
def test_parameters_are_those_of_two_stacks_and_one_bias_table_each(
    hidden, layers, heads, factor, buckets, scan_layers, parameter_count
):
    encoder = (4 + 2 * factor) * hidden**2 + 2 * hidden
    decoder = (8 + 2 * factor) * hidden**2 + 3 * hidden
    expected = 288 * hidden + layers * (encoder + decoder) + 2 * buckets * heads + 2 * hidden
    sizes = {"hidden": hidden, "layers": layers, "heads": heads, "ffn_factor": factor, "buckets": buckets}
    sizes |= {"scan_layers": scan_layers}
    assert parameter_count("t5", **sizes) == expected
    assert parameter_count("t5", **sizes, tied_embeddings=False) == expected + 288 * hidden


def test_at_the_size_of_t5_small_there_are_as_many_parameters_as_published(parameter_count):
    sizes = {"hidden": 512, "layers": 6, "heads": 8, "ffn_factor": 4, "vocab": 32128, "scan_layers": True}
    assert parameter_count("t5", **sizes) == 60_506_624


def test_buckets_are_exact_when_near_logarithmic_when_far_and_told_apart_by_direction():
    both = relative_buckets(64, buckets=16, furthest=32, both_ways=True)
    np.testing.assert_array_equal(both[40, 40:27:-1], [0, 1, 2, 3, 4, 4, 4, 5, 5, 5, 5, 5, 6])
    assert set(both[40, :9]) == {7}
    np.testing.assert_array_equal(both[20, 21:50], both[40, 39:10:-1] + 8)
    causal = relative_buckets(64, buckets=16, furthest=32, both_ways=False)
    np.testing.assert_array_equal(causal[40, 40:30:-1], [0, 1, 2, 3, 4, 5, 6, 7, 8, 8])
    assert set(causal[40, 40:]) == {0}
    assert set(causal[63, :31]) == {15}
    for table in (both, causal):
        np.testing.assert_array_equal(table[1:, 1:], table[:-1, :-1])
        np.testing.assert_array_equal(
            np.unique(table), np.arange(16) if table is causal else np.delete(np.arange(16), 8)
        )


@functools.cache
def compiled_forward(config):
    return jax.jit(lambda params, sources, tokens: T5(config).apply({"params": params}, sources, tokens, None))


def forward(config, params, batch):
    return compiled_forward(config)(params, batch["sources"], batch["tokens"])


def changed_places(small, change):
    """Where logits (B, T) move after change(params, batch)."""
    one = small("t5")
    params, batch = one.state().params, next(one.model.data(0))
    before = forward(one.model.config, params, batch)
    params, batch = change(params, batch)
    return np.asarray(forward(one.model.config, params, batch) != before)


@pytest.mark.sweep
def test_a_token_changes_no_logit_before_its_place_and_a_source_changes_all(small):
    def later_token(params, batch):
        tokens = batch["tokens"].copy()
        tokens[:, 5] = (tokens[:, 5] + 1) % 256
        return params, batch | {"tokens": tokens}

    def last_source(params, batch):
        sources = batch["sources"].copy()
        sources[:, 7] = (sources[:, 7] + 1) % 256
        return params, batch | {"sources": sources}

    moved = changed_places(small, later_token)
    assert not moved[:, :5].any()
    assert moved[:, 5:].any(axis=-1).all()
    assert changed_places(small, last_source).any(axis=-1).all()


def test_no_target_with_weight_looks_at_padding(small):
    """Neither the encoder nor the decoder: where padding is not read, only its own logit moves with its row."""

    def other_row(params, batch):
        params["embedding"]["tokens"]["embedding"] = params["embedding"]["tokens"]["embedding"].at[PAD].add(1.0)
        return params, batch

    batch = next(small("t5").model.data(0))
    assert (batch["sources"] == PAD).any(axis=-1).sum() > 2
    moved = changed_places(small, other_row)
    assert not moved[batch["weights"] == 1][:, :PAD].any()
    assert moved[..., PAD].all()
    assert moved[batch["tokens"] == PAD].any(axis=-1).all()


def test_the_loss_is_the_sum_over_targets_with_weight_over_their_number(small):
    one = small("t5")
    batch = next(one.model.data(0))
    counted = batch["weights"] == 1
    assert not counted.all()
    logits = np.asarray(forward(one.model.config, one.first_state.params, batch), np.float64)
    right = np.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    losses = np.log(np.exp(logits).sum(axis=-1)) - right
    np.testing.assert_allclose(one.eval_step(one.first_state, batch)["loss"], losses[counted].mean(), rtol=1e-5)


@pytest.mark.sweep
def test_targets_without_weight_change_neither_loss_nor_update_and_each_with_weight_does(small):
    one = small("t5")
    batch = next(one.model.data(0))
    other = (batch["targets"] + 7) % 256
    expected = one.train_step(one.state(), batch)
    ignored = batch | {"targets": np.where(batch["weights"] == 0, other, batch["targets"])}
    jax.tree.map(np.testing.assert_array_equal, one.train_step(one.state(), ignored), expected)
    for place in np.argwhere(batch["weights"] == 1)[:5]:
        targets = batch["targets"].copy()
        targets[tuple(place)] = other[tuple(place)]
        assert float(one.train_step(one.state(), batch | {"targets": targets})[1]["loss"]) != float(expected[1]["loss"])


def test_one_table_of_biases_serves_all_layers_of_a_stack(small, loss_and_gradients):
    """With nothing but the last layer able to see a bias, its table still has a gradient: it is not the first's own."""
    one = small("t5")
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(one.first_state.params)]
    assert [name for name in names if "relative_bias" in name] == [
        "['decoder']['relative_bias']['table']",
        "['encoder']['relative_bias']['table']",
    ]
    batch, config = next(one.model.data(0)), one.model.config
    for stack in ("encoder", "decoder"):
        for layer in range(config.layers):
            params = one.state().params
            silent = params[stack][f"block_{1 - layer}"]["attention"]["out"]
            params[stack][f"block_{1 - layer}"]["attention"]["out"] = jax.tree.map(jnp.zeros_like, silent)
            _, gradients = loss_and_gradients(t5_objective, config, params, batch, None)
            assert (gradients[stack]["relative_bias"]["table"] != 0).any(), (stack, layer)


@pytest.mark.sweep
def test_one_table_serves_sources_tokens_and_logits_if_tied(loss_and_gradients, jit):
    """Each of the three alone gives the table a gradient; without tying, unread bytes have none."""
    tiny = {"layers": 1, "hidden": 16, "heads": 2, "seq": 8, "target_seq": 6, "batch": 4}
    for tied in (True, False):
        model = build("t5", **tiny, tied_embeddings=tied)
        state, batch = jit(model.create_state)(jax.random.key(0)), next(model.data(0))
        _, tree = loss_and_gradients(t5_objective, model.config, state.params, batch, None)
        moved = np.asarray(tree["embedding"]["tokens"]["embedding"] != 0).any(axis=-1)
        assert moved[np.setdiff1d(batch["sources"], [*batch["tokens"].flat, PAD])].all()
        # The last target is read at a place without weight, which no loss sees.
        assert moved[np.setdiff1d(batch["tokens"][batch["weights"] == 1], [*batch["sources"].flat, PAD])].all()
        unread = np.setdiff1d(np.arange(288), [*batch["sources"].flat, *batch["tokens"].flat])
        assert moved[unread].all() == moved[unread].any() == tied


def stack_both(params, layers):
    return params | {name: stack_blocks(params[name], layers) for name in ("encoder", "decoder")}


@pytest.mark.sweep
@pytest.mark.parametrize("variants", VARIANTS)
def test_variants_have_the_same_loss_and_gradients_with_dropout(
    variants, small, loss_and_gradients, assert_close_to_scale
):
    one = small("t5")
    config, params = one.model.config, one.first_state.params
    batch, key = next(one.model.data(0)), jax.random.PRNGKey(7)
    expected_loss, expected = loss_and_gradients(t5_objective, config, params, batch, key)
    for variant in variants:
        changed = stack_both if "scan_layers" in variant else lambda tree, layers: tree
        varied = dataclasses.replace(config, **variant)
        loss, gradients = loss_and_gradients(t5_objective, varied, changed(params, config.layers), batch, key)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
        assert_close_to_scale(gradients, changed(expected, config.layers))
    other_loss, _ = loss_and_gradients(t5_objective, config, params, batch, jax.random.PRNGKey(8))
    assert float(other_loss) != float(expected_loss)

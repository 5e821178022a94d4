"""The LLaMA: parameters counted, rotary positions, grouped queries, causality, scanned equals written out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.models import build
from autopar.models.llama import Llama, LlamaAttention, SwiGLU, rotary_angles, rotate
from autopar.models.llama import objective as llama_objective
from autopar.models.sizes import LlamaConfig
from autopar.models.transformer import stack_blocks
from tests.models.conftest import VARIANTS

TINY = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 24, "seq": 8, "batch": 4}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "ffn", "layers"), [(16, 4, 4, 24, 1), (32, 4, 2, 40, 3), (64, 8, 1, 96, 2)]
)
@pytest.mark.parametrize("scan_layers", [True, False])
def test_parameters_are_those_of_grouped_attention_and_swiglu(
    hidden, heads, kv_heads, ffn, layers, scan_layers, parameter_count
):
    attention = 2 * hidden**2 + 2 * hidden * (hidden // heads * kv_heads)
    expected = 256 * hidden + layers * (attention + 3 * hidden * ffn + 2 * hidden) + hidden
    sizes = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "layers": layers}
    sizes |= {"scan_layers": scan_layers}
    assert parameter_count("llama", **sizes, tied_embeddings=True) == expected
    assert parameter_count("llama", **sizes) == expected + 256 * hidden


@pytest.mark.parametrize(
    ("hidden", "layers", "heads", "ffn", "tied", "published"),
    [(4096, 32, 32, 14336, False, 8_030_261_248), (2048, 16, 32, 8192, True, 1_235_814_400)],
)
def test_at_the_sizes_of_llama_3_there_are_as_many_parameters_as_published(
    hidden, layers, heads, ffn, tied, published, parameter_count
):
    sizes = {"hidden": hidden, "layers": layers, "heads": heads, "kv_heads": 8, "ffn": ffn, "vocab": 128_256}
    assert parameter_count("llama", **sizes, tied_embeddings=tied, scan_layers=True, batch=1) == published


def test_scores_of_turned_vectors_depend_on_their_distance_alone_and_lengths_stay():
    query, key = (np.random.default_rng(seed).normal(size=8).astype(np.float32) for seed in (0, 1))
    angles = rotary_angles(12, 8, 100.0)

    def everywhere(vector):
        return rotate(jnp.broadcast_to(vector, (1, 12, 1, 8)), angles)[0, :, 0]

    scores = np.asarray(everywhere(query) @ everywhere(key).T)
    for distance in range(-11, 12):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    assert len({round(float(np.diagonal(scores, distance)[0]), 4) for distance in range(-11, 12)}) == 23
    np.testing.assert_allclose(jnp.linalg.norm(everywhere(key), axis=-1), np.linalg.norm(key), rtol=1e-5)


def test_a_pair_is_turned_by_its_position_times_its_frequency():
    angles = rotary_angles(3, 4, 100.0)
    np.testing.assert_allclose(angles, [[0, 0], [1, 0.1], [2, 0.2]], rtol=1e-6)
    turned = rotate(jnp.ones((1, 3, 1, 4)), angles)[0, 2, 0]
    expected = [np.cos(2) - np.sin(2), np.cos(0.2) - np.sin(0.2), np.cos(2) + np.sin(2), np.cos(0.2) + np.sin(0.2)]
    np.testing.assert_allclose(turned, expected, rtol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fused_attention", [False, True])
def test_attention_is_that_of_a_loop_over_heads_that_share_keys(fused_attention):
    config = LlamaConfig(hidden=16, heads=4, kv_heads=2, seq=5, fused_attention=fused_attention)
    x = jax.random.normal(jax.random.key(0), (2, 5, 16))
    angles = rotary_angles(5, 4, config.theta)
    variables = LlamaAttention(config).init(jax.random.key(1), x, None, angles)
    variables = jax.tree.map(lambda leaf: 20 * leaf, variables)
    params = variables["params"]
    expected = jnp.zeros_like(x)
    for head in range(4):
        query = rotate((x @ params["query"]["kernel"][:, head])[:, :, None], angles)[:, :, 0]
        key = rotate((x @ params["key"]["kernel"][:, head // 2])[:, :, None], angles)[:, :, 0]
        value = x @ params["value"]["kernel"][:, head // 2]
        scores = jnp.where(jnp.tril(jnp.ones((5, 5))) == 1, query @ key.mT / 2, -jnp.inf)
        expected += jax.nn.softmax(scores) @ value @ params["out"]["kernel"][head]
    np.testing.assert_allclose(LlamaAttention(config).apply(variables, x, None, angles), expected, rtol=1e-4, atol=1e-5)


def test_the_feed_forward_is_a_gated_product():
    config = LlamaConfig(**TINY)
    x = jax.random.normal(jax.random.key(0), (2, 3, 16))
    variables = SwiGLU(config).init(jax.random.key(1), x)
    gate, up, down = (variables["params"][name]["kernel"] for name in ("gate", "up", "down"))
    expected = ((x @ gate) / (1 + jnp.exp(-(x @ gate))) * (x @ up)) @ down
    np.testing.assert_allclose(SwiGLU(config).apply(variables, x), expected, rtol=1e-4, atol=1e-7)


def test_a_token_changes_no_logit_before_its_place_and_some_from_there_on():
    config = LlamaConfig(**TINY)
    model = Llama(config)
    tokens = jnp.arange(4 * 8, dtype=jnp.int32).reshape(4, 8)
    variables = jax.jit(model.init, static_argnums=2)(jax.random.key(0), tokens, None)
    forward = jax.jit(model.apply, static_argnums=2)
    before, after = forward(variables, tokens, None), forward(variables, tokens.at[:, 5].set(200), None)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(axis=(0, 2)).all()


@pytest.mark.parametrize("tied", [True, False])
def test_logits_come_from_the_input_table_only_if_tied(tied):
    params = jax.eval_shape(build("llama", **TINY, tied_embeddings=tied).create_state, jax.random.key(0)).params
    tables = sorted(leaf.shape for leaf in jax.tree.leaves(params) if 256 in leaf.shape)
    assert tables == ([(256, 16)] if tied else [(16, 256), (256, 16)])


@pytest.mark.sweep
@pytest.mark.parametrize("rate", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
@pytest.mark.parametrize("variants", VARIANTS)
def test_variants_have_the_same_loss_and_gradients(variants, rate, small, loss_and_gradients, assert_close_to_scale):
    one = small("llama")
    config, params = dataclasses.replace(one.model.config, dropout=rate), one.first_state.params
    batch, key = next(one.model.data(0)), jax.random.PRNGKey(7)
    expected_loss, expected = loss_and_gradients(llama_objective, config, params, batch, key)
    for variant in variants:
        changed = stack_blocks if "scan_layers" in variant else lambda tree, layers: tree
        varied = dataclasses.replace(config, **variant)
        loss, gradients = loss_and_gradients(llama_objective, varied, changed(params, config.layers), batch, key)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
        assert_close_to_scale(gradients, changed(expected, config.layers))
    other_loss, _ = loss_and_gradients(llama_objective, config, params, batch, jax.random.PRNGKey(8))
    assert (float(other_loss) != float(expected_loss)) == (rate > 0)

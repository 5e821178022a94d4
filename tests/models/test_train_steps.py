"""What all models share: the optimisers, clipping, and the metrics that training can report."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar.models import MODELS, build
from autopar.models.config import OPTIMIZERS, ModelConfig
from autopar.models.objective import cross_entropy, squared_error
from tests.models.conftest import SIZES

CONFIG, DETAILED = ModelConfig(), ModelConfig(aux_metrics=True)


def random_labels(*shape, classes=5, seed=0):
    draw = np.random.default_rng(seed)
    return draw.normal(size=(*shape, classes)).astype(np.float32), draw.integers(0, classes, size=shape)


def losses_by_hand(logits, labels):
    logits = logits.astype(np.float64)
    right = np.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return np.log(np.exp(logits).sum(axis=-1)) - right


def test_cross_entropy_divides_by_the_sum_of_weights_and_ignores_what_has_weight_0():
    logits, labels = random_labels(4, 6)
    weights = np.random.default_rng(1).integers(0, 2, size=(4, 6)).astype(np.float32)
    weights[2] = 0
    expected = losses_by_hand(logits, labels)
    loss, metrics = cross_entropy(DETAILED, logits, labels, evaluating=False, weights=weights)
    np.testing.assert_allclose(loss, (expected * weights).sum() / weights.sum(), rtol=1e-6)
    correct = (logits.argmax(axis=-1) == labels) * weights
    np.testing.assert_allclose(metrics["accuracy"], correct.sum() / weights.sum(), rtol=1e-6)
    of_examples = (expected * weights).sum(axis=1) / np.maximum(weights.sum(axis=1), 1)
    np.testing.assert_allclose(metrics["example_loss"], of_examples, rtol=1e-6)
    assert metrics["example_loss"][2] == 0
    elsewhere = np.where(weights == 0, (labels + 1) % 5, labels)
    again, _ = cross_entropy(DETAILED, logits, elsewhere, evaluating=False, weights=weights)
    assert float(again) == float(loss)


def test_without_weights_means_are_over_all_labels():
    logits, labels = random_labels(4, 6)
    expected = losses_by_hand(logits, labels)
    loss, metrics = cross_entropy(DETAILED, logits, labels, evaluating=False)
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["example_loss"], expected.mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(metrics["accuracy"], (logits.argmax(axis=-1) == labels).mean(), rtol=1e-6)


def test_a_batch_without_any_weight_has_loss_0():
    logits, labels = random_labels(2, 3)
    loss, _ = cross_entropy(CONFIG, logits, labels, evaluating=False, weights=jnp.zeros((2, 3)))
    assert float(loss) == 0


def test_squared_error_and_its_metrics():
    outputs, targets = (np.random.default_rng(seed).normal(size=(3, 4, 2)).astype(np.float32) for seed in (0, 1))
    loss, metrics = squared_error(DETAILED, outputs, targets, evaluating=False)
    np.testing.assert_allclose(loss, ((outputs - targets) ** 2).mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["absolute_error"], np.abs(outputs - targets).mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["example_loss"], ((outputs - targets) ** 2).mean(axis=(1, 2)), rtol=1e-6)


QUICK = ("mlp", "moe", "bert", "unet")
"""One of each objective: of numbers, of experts, with weights, of images."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_training_reports_more_only_if_asked_to(name):
    def metrics_of(aux):
        model = build(name, **SIZES[name] | {"batch": 16}, aux_metrics=aux)
        state = jax.eval_shape(model.create_state, jax.random.key(0))
        return jax.eval_shape(model.train_step, state, model.batch_shape())[1]

    quality = "absolute_error" if name == "unet" else "accuracy"
    plain, detailed = metrics_of(False), metrics_of(True)
    assert {*detailed} - {*plain} == {quality, "example_loss"}
    assert (detailed["example_loss"].shape, detailed[quality].shape) == ((16,), ())


RULES = {
    "adamw": optax.adamw(0.5, weight_decay=0.1),
    "adam": optax.adam(0.5),
    "sgd": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.5)),
    "momentum": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.5, momentum=0.9)),
    "adafactor": optax.adafactor(0.5, weight_decay_rate=0.05),
    "lion": optax.lion(0.5, weight_decay=0.1),
    "lamb": optax.lamb(0.5, weight_decay=0.1),
    "rmsprop": optax.rmsprop(0.5),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "--sgd"])
def test_an_update_is_that_of_the_optimiser_after_clipping_by_the_norm_of_all_gradients(optimizer, jit):
    sizes = {"layers": 1, "hidden": 8, "inputs": 4, "outputs": 3, "batch": 6}
    chosen = {"sgd": True} if optimizer == "--sgd" else {"optimizer": optimizer}
    model = build("mlp", **sizes, **chosen, clip_norm=0.01, weight_decay=0.1, learning_rate=0.5)
    state, batch = jit(model.create_state)(jax.random.key(0)), next(model.data(0))
    gradients = jit(jax.grad(lambda params: model.eval_step(state.replace(params=params), batch)["loss"]))(state.params)
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(gradients)))
    assert norm > 0.02
    clipped = jax.tree.map(lambda gradient: gradient * 0.01 / norm, gradients)
    new_state, metrics = jit(model.train_step)(state, batch)
    assert sorted(metrics) == ["loss"]
    if optimizer == "--sgd":
        expected = jax.tree.map(lambda p, g: p - 0.5 * (g + 0.1 * p), state.params, clipped)
    else:
        rule = RULES[optimizer]
        updates, _ = rule.update(clipped, rule.init(state.params), state.params)
        expected = optax.apply_updates(state.params, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), new_state.params, expected)


def test_sgd_keeps_no_moments():
    state = jax.eval_shape(build("mlp", sgd=True).create_state, jax.random.key(0))
    assert jax.tree.leaves(state.opt_state) == []

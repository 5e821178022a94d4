"""The perceptron: parameters counted, the function itself, and both of its tasks."""

import itertools

import jax
import numpy as np
import pytest

from autopar.models import build


def test_parameters_are_those_of_the_layers():
    inputs, hidden, layers, outputs = 12, 20, 5, 3
    model = build("mlp", inputs=inputs, hidden=hidden, layers=layers, outputs=outputs)
    params = jax.eval_shape(model.create_state, jax.random.key(0)).params
    expected = (inputs + 1) * hidden + (layers - 1) * (hidden + 1) * hidden + (hidden + 1) * outputs
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == expected


def test_loss_is_the_mean_squared_error_of_the_written_out_network(jit):
    model = build("mlp", inputs=4, hidden=8, layers=2, outputs=3, batch=5, regression=True)
    state = jit(model.create_state)(jax.random.key(0))
    batch = next(model.data(0))
    x = batch["inputs"]
    for layer in range(3):
        dense = state.params[f"Dense_{layer}"]
        x = x @ np.asarray(dense["kernel"]) + np.asarray(dense["bias"])
        x = np.maximum(x, 0) if layer < 2 else x
    expected = np.mean((x - batch["targets"]) ** 2)
    np.testing.assert_allclose(jit(model.eval_step)(state, batch)["loss"], expected, rtol=1e-5)


def test_regression_learns_its_task():
    model = build("mlp", inputs=8, hidden=64, layers=2, outputs=4, batch=64, regression=True, learning_rate=3e-3)
    state = jax.jit(model.create_state)(jax.random.key(0))
    step = jax.jit(model.train_step)
    losses = []
    for batch in itertools.islice(model.data(0), 150):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-10:]) < 0.3 * losses[0]


@pytest.mark.sweep
def test_dropout_depends_on_the_step_and_is_off_in_evaluation(small):
    one = small("mlp")
    batch = next(one.model.data(0))

    def at_step(number):
        return one.state().replace(step=one.first_state.step + number)

    losses = [float(one.train_step(at_step(number), batch)[1]["loss"]) for number in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    evaluated = [float(one.eval_step(at_step(number), batch)["loss"]) for number in (0, 1)]
    assert evaluated[0] == evaluated[1]

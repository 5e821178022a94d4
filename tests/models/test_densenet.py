"""The dense network: parameters counted, no two layers alike, examples that do not mix, and plans that equal `jax.jit`."""

import collections

import jax
import numpy as np
import pytest

import autopar
from autopar.models import build
from autopar.models.densenet import DenseNet
from autopar.models.densenet import objective as densenet_objective
from tests.oracles import assert_same_as_jit


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("layers", "blocks", "growth", "channels"), [(3, 1, 4, 1), (7, 3, 8, 3), (5, 2, 6, 2)])
def test_parameters_are_those_of_the_layers(layers, blocks, growth, channels, parameter_count):
    expected, width = 9 * channels * 2 * growth, 2 * growth
    for block in range(blocks):
        if block > 0:
            halved = 2 * -(-width // 4)
            expected, width = expected + 2 * width + width * halved, halved
        for _ in range(layers // blocks + (block < layers % blocks)):
            expected, width = expected + 2 * width + 9 * width * growth, width + growth
    expected += 2 * width + 10 * (width + 1)
    sizes = {"layers": layers, "blocks": blocks, "growth": growth, "groups": 2, "channels": channels}
    assert parameter_count("densenet", **sizes) == expected


@pytest.mark.sweep
def test_no_two_of_120_layers_have_the_same_shapes():
    """Of the kernels alone, or of the images where the kernels are alike: blocks differ in the size of their images."""
    model = build("densenet", layers=120)
    params = jax.eval_shape(model.create_state, jax.random.key(0)).params
    kernels = [(name.split("_")[1], params[name]["conv"]["kernel"].shape) for name in params if "_layer_" in name]
    assert len(kernels) == 120
    assert max(collections.Counter(kernels).values()) == 1


def test_examples_do_not_mix(small):
    one = small("densenet")
    images = next(one.model.data(0))["images"]
    network = DenseNet(one.model.config)
    apply = jax.jit(lambda given: network.apply({"params": one.first_state.params}, given, None))
    other = images.copy()
    other[3] = -other[3]
    moved = np.asarray(apply(other) != apply(images)).any(axis=1)
    np.testing.assert_array_equal(moved, np.arange(len(images)) == 3)


def test_every_parameter_has_a_gradient(small, loss_and_gradients):
    one = small("densenet")
    batch = next(one.model.data(0))
    _, gradients = loss_and_gradients(densenet_objective, one.model.config, one.first_state.params, batch, None)
    for path, leaf in jax.tree.leaves_with_path(gradients):
        assert (leaf != 0).any(), jax.tree_util.keystr(path)


@pytest.mark.sweep
def test_dropout_depends_on_the_step_and_is_off_in_evaluation(jit):
    model = build("densenet", image_size=8, layers=2, blocks=1, growth=4, batch=4, dropout=0.2)
    first, batch = jit(model.create_state)(jax.random.key(0)), next(model.data(0))
    step, evaluate = jit(model.train_step), jit(model.eval_step)
    losses = [float(step(first.replace(step=first.step + n), batch)[1]["loss"]) for n in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    assert float(evaluate(first, batch)["loss"]) == float(evaluate(first.replace(step=first.step + 1), batch)["loss"])


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"num_stages": 2, "num_microbatches": 2}]
)
def test_its_plans_give_the_results_of_jit(small, options):
    one = small("densenet")
    batch = next(one.model.data(0))
    step = autopar.parallelize(one.model.train_step, devices=jax.devices()[:4], **options)
    assert_same_as_jit(one.model.train_step, step, one.state(), batch)

"""The U-Net: parameters counted, skips that are joined, examples that do not mix, a gradient for every parameter."""

import functools

import jax
import numpy as np
import pytest

from autopar.models import build
from autopar.models.unet import UNet
from autopar.models.unet import objective as unet_objective


@pytest.mark.parametrize(("base", "levels", "channels"), [(4, 1, 1), (8, 2, 3), (4, 3, 2)])
def test_parameters_are_those_of_the_blocks(base, levels, channels, parameter_count):
    def block(incoming, outgoing):
        return 9 * (incoming + outgoing) * outgoing + 4 * outgoing

    expected, incoming = (base + 1) * channels, channels
    for level in range(levels):
        here, below = base * 2**level, base * 2 ** (level + 1)
        expected += block(incoming, here) + 9 * here * below + below  # down, halve
        expected += 4 * below * here + here + block(2 * here, here)  # double, up
        incoming = below
    expected += block(incoming, incoming)
    sizes = {"base_channels": base, "levels": levels, "channels": channels, "groups": 2, "image_size": 16}
    assert parameter_count("unet", **sizes) == expected


@functools.cache
def compiled_apply(config):
    return jax.jit(lambda params, noisy: UNet(config).apply({"params": params}, noisy, None))


def apply(small, params, noisy):
    return compiled_apply(small("unet").model.config)(params, noisy)


@pytest.mark.sweep
def test_images_keep_their_shape_and_examples_do_not_mix(small):
    one = small("unet")
    noisy = next(one.model.data(0))["noisy"]
    params = one.first_state.params
    cleaned = apply(small, params, noisy)
    assert cleaned.shape == noisy.shape
    other = noisy.copy()
    other[3] = -other[3]
    moved = np.asarray(apply(small, params, other) != cleaned).any(axis=(1, 2, 3))
    np.testing.assert_array_equal(moved, np.arange(len(noisy)) == 3)


def test_what_a_level_made_on_the_way_down_reaches_the_image_without_passing_the_levels_below(small):
    """Without its way through the bottom the network still sees its input; without the skips as well, it does not."""
    one = small("unet")
    noisy = next(one.model.data(0))["noisy"]
    params = one.state().params
    params["double_0"] = jax.tree.map(np.zeros_like, params["double_0"])
    assert (apply(small, params, noisy) != apply(small, params, -noisy)).any()
    channels = one.model.config.base_channels
    first = params["up_0"]["first_conv"]["kernel"]
    assert first.shape[2] == 2 * channels
    params["up_0"]["first_conv"]["kernel"] = first.at[:, :, channels:].set(0)
    np.testing.assert_array_equal(apply(small, params, noisy), apply(small, params, -noisy))


def test_the_loss_is_the_mean_squared_error_of_the_image_without_noise(small):
    one = small("unet")
    batch = next(one.model.data(0))
    cleaned = apply(small, one.first_state.params, batch["noisy"])
    metrics = one.eval_step(one.first_state, batch)
    np.testing.assert_allclose(metrics["loss"], np.mean((cleaned - batch["images"]) ** 2), rtol=1e-5)
    np.testing.assert_allclose(metrics["absolute_error"], np.abs(cleaned - batch["images"]).mean(), rtol=1e-5)


def test_every_parameter_has_a_gradient(small, loss_and_gradients):
    one = small("unet")
    batch = next(one.model.data(0))
    _, gradients = loss_and_gradients(unet_objective, one.model.config, one.first_state.params, batch, None)
    for path, leaf in jax.tree.leaves_with_path(gradients):
        assert (leaf != 0).any(), jax.tree_util.keystr(path)


@pytest.mark.sweep
def test_dropout_depends_on_the_step_and_is_off_in_evaluation(jit):
    model = build("unet", image_size=8, base_channels=4, groups=2, batch=4, levels=1, dropout=0.2)
    first, batch = jit(model.create_state)(jax.random.key(0)), next(model.data(0))
    step, evaluate = jit(model.train_step), jit(model.eval_step)
    states = [first.replace(step=first.step + number) for number in (0, 0, 1)]
    losses = [float(step(state, batch)[1]["loss"]) for state in states]
    assert losses[0] == losses[1] != losses[2]
    assert len({float(evaluate(state, batch)["loss"]) for state in states}) == 1

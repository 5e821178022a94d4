"""Convolutions of the acceptance cases. Letters: B batch, C channels."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from tests.acceptance.models import Problem, create_state, first_variables, noise, regression


class StateWithStatistics(train_state.TrainState):
    """A train state that carries the running statistics of batch normalisation."""

    batch_stats: Any


class ConvNet(nn.Module):
    """`layers` x (3x3 convolution with stride 2, BatchNorm, relu, 2x2 max-pool with stride 1)."""

    layers: int
    channels: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = nn.Conv(self.channels, (3, 3), strides=(2, 2), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
            x = nn.max_pool(x, (2, 2), strides=(1, 1), padding="SAME")
        return x


class DepthwiseNet(nn.Module):
    """C -> 8C channels, depthwise on the 8C, 8C -> C, relu, BatchNorm."""

    channels: int

    @nn.compact
    def __call__(self, x):
        wide = 8 * self.channels
        x = nn.Conv(wide, (3, 3), use_bias=False)(x)
        x = nn.Conv(wide, (3, 3), feature_group_count=wide, use_bias=False)(x)
        x = nn.relu(nn.Conv(self.channels, (3, 3), use_bias=False)(x))
        return nn.BatchNorm(use_running_average=False)(x)


def images(model, x, tx=None):
    """Mean squared error on images, with running statistics; SGD with momentum."""
    variables = first_variables(model, x)
    out = jax.eval_shape(lambda v: model.apply(v, x, mutable=["batch_stats"])[0], variables)
    batch = {"x": x, "y": noise(*out.shape, seed=2)}

    def step(state, batch):
        def loss_of(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            out, updated = state.apply_fn(variables, batch["x"], mutable=["batch_stats"])
            return jnp.mean((out - batch["y"]) ** 2), updated["batch_stats"]

        (loss, batch_stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss

    tx = tx or optax.sgd(0.1, momentum=0.9)
    state = create_state(StateWithStatistics, model, variables["params"], tx, batch_stats=variables["batch_stats"])
    return Problem(step, state, batch)


def conv_net(batch, image, channels, layers):
    """Convolutions with BatchNorm on (B, image, image, C)."""
    return images(ConvNet(layers, channels), noise(batch, image, image, channels))


def depthwise_net(batch, image, channels):
    """A depthwise convolution between two ordinary ones on (B, image, image, C)."""
    return images(DepthwiseNet(channels), noise(batch, image, image, channels))


class AlexNetLike(nn.Module):
    """Five convolutions, then three wide fully connected layers."""

    channels: tuple[int, ...]
    wide: int

    @nn.compact
    def __call__(self, x):
        for i, channels in enumerate(self.channels):
            stride = 2 if i in (0, 2) else 1
            x = nn.relu(nn.Conv(channels, (3, 3), strides=(stride, stride), name=f"conv{i}")(x))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(self.wide, name="fc0")(x))
        x = nn.relu(nn.Dense(self.wide, name="fc1")(x))
        return nn.Dense(self.wide, name="fc2")(x)


def alexnet_like(batch, image, channels, wide, tx=None):
    """Images (B, image, image, 3) to `wide` outputs."""
    return regression(AlexNetLike(channels, wide), (noise(batch, image, image, 3),), (batch, wide), tx)

"""A convolutional U-Net that removes noise from square images, with GroupNorm, so that examples do not mix.

On the way down level i = 0, 1, ... has c = 2^i * base_channels channels and images of half the size of those of the
level before: a block of two 3x3 convolutions, then one with stride 2. On the way up a transposed 2x2 convolution with
stride 2 doubles the size, and what the block of the same level made on the way down is joined to it along the
channels before the next block. A last 1x1 convolution gives the image. Images are (batch, height, width, channels).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from autopar.models.config import ModelConfig
from autopar.models.data import DIGITS_SIZE
from autopar.models.dropout import dropout, subkey
from autopar.models.train_steps import Batch, Objective, Outcome, PyTree, squared_error


@dataclass(frozen=True, kw_only=True)
class UNetConfig(ModelConfig):
    """Sizes of the network; `levels` counts the halvings, `noise` is the deviation of what is added to the images."""

    image_size: int = 16
    channels: int = 1
    base_channels: int = 16
    levels: int = 2
    groups: int = 4
    dropout: float = 0.0
    noise: float = 0.5

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self._not_positive("image_size", "channels", "base_channels", "levels", "groups", "noise")
        yield from self._not_a_rate("dropout")
        if self.image_size % DIGITS_SIZE:
            yield f"image_size is {self.image_size}, but digits are repeated to a multiple of {DIGITS_SIZE}"
        if self.levels > 0 and self.image_size % 2**self.levels:
            yield f"image_size is {self.image_size}, but is halved {self.levels} times: must be a multiple of {2**self.levels}"
        if self.groups > 0 and self.base_channels % self.groups:
            yield f"base_channels is {self.base_channels} and groups is {self.groups}, but groups must divide base_channels"


class ConvBlock(nn.Module):
    """Twice a 3x3 convolution, GroupNorm and silu, with dropout between."""

    config: UNetConfig
    channels: int

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """Map (B, h, w, any) to (B, h, w, channels)."""
        x = dropout(self._layer(x, "first"), self.config.dropout, key)
        return self._layer(x, "second")

    def _layer(self, x: jax.Array, name: str) -> jax.Array:
        x = nn.Conv(self.channels, (3, 3), use_bias=False, name=f"{name}_conv")(x)
        return nn.silu(nn.GroupNorm(self.config.groups, name=f"{name}_norm")(x))


class UNet(nn.Module):
    """Down, bottom, up, image."""

    config: UNetConfig

    @nn.compact
    def __call__(self, images: jax.Array, key: jax.Array | None) -> jax.Array:
        """Map images (B, image_size, image_size, channels) to images of the same shape."""
        config = self.config
        levels = range(config.levels)
        x, joined = images, []
        for level in levels:
            x = self._block(f"down_{level}", level)(x, subkey(key, level))
            joined.append(x)
            x = nn.Conv(self._channels(level + 1), (3, 3), strides=2, name=f"halve_{level}")(x)
        x = self._block("bottom", config.levels)(x, subkey(key, config.levels))
        for level in reversed(levels):
            x = nn.ConvTranspose(self._channels(level), (2, 2), strides=(2, 2), name=f"double_{level}")(x)
            x = jnp.concatenate([x, joined[level]], axis=-1)
            x = self._block(f"up_{level}", level)(x, subkey(key, config.levels + 1 + level))
        return nn.Conv(config.channels, (1, 1), name="image")(x)

    def _channels(self, level: int) -> int:
        return self.config.base_channels << level

    def _block(self, name: str, level: int) -> ConvBlock:
        return ConvBlock(self.config, self._channels(level), name=name)


def batch_shape(config: UNetConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of one batch of `data.noisy_image_batches`."""
    shape = (config.batch, config.image_size, config.image_size, config.channels)
    return dict.fromkeys(("noisy", "images"), jax.ShapeDtypeStruct(shape, jnp.float32))


def objective(config: UNetConfig) -> Objective:
    """Mean squared error of the images."""
    model = UNet(config)

    def loss(
        params: PyTree, batch_stats: PyTree, batch: Batch, *, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, Outcome]:
        key = dropout_key if config.dropout else None
        cleaned: Any = model.apply({"params": params}, batch["noisy"], key)
        mean_loss, metrics = squared_error(config, cleaned, batch["images"], evaluating=dropout_key is None)
        return mean_loss, Outcome(metrics, batch_stats)

    shape = batch_shape(config)["noisy"]
    return Objective(init=lambda key: model.init(key, jnp.zeros(shape.shape, shape.dtype), None), loss=loss)

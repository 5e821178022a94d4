"""A convolutional U-Net that removes noise from square images, with GroupNorm, so that examples do not mix.

On the way down level i = 0, 1, ... has c = 2^i * base_channels channels and images of half the size of those of the
level before: a block of two 3x3 convolutions, then one with stride 2. On the way up a transposed 2x2 convolution with
stride 2 doubles the size, and what the block of the same level made on the way down is joined to it along the
channels before the next block. A last 1x1 convolution gives the image. Images are (batch, height, width, channels).
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from autopar.models.dropout import dropout, subkey
from autopar.models.objective import Objective, squared_error, supervised
from autopar.models.sizes import UNetConfig


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
    shapes = batch_shape(config)
    return supervised(UNet(config), config, shapes, inputs=("noisy",), targets="images", measure=squared_error)

"""A dense convolutional network (Huang et al., 2017) for square images, with GroupNorm, so that examples do not mix.

Layer n of a block maps all channels that the stem and the layers before it made to `growth` more, GroupNorm, relu and a 3x3
convolution, and joins these to them: no two layers of the network have the same shapes, which makes it the opposite of a stack of
equal layers. Between two blocks a 1x1 convolution halves the channels, and means over 2x2 pixels halve the size. The `layers`
are divided evenly over the `blocks`, the first ones take what is left. Images are (batch, height, width, channels).
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from autopar.models.dropout import dropout, subkey
from autopar.models.objective import Objective, supervised
from autopar.models.sizes import DenseNetConfig


class DenseLayer(nn.Module):
    """GroupNorm, relu, a 3x3 convolution and dropout, joined to the input."""

    config: DenseNetConfig

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """Map (B, h, w, c) to (B, h, w, c + growth)."""
        y = nn.relu(nn.GroupNorm(self.config.groups, name="norm")(x))
        y = nn.Conv(self.config.growth, (3, 3), use_bias=False, name="conv")(y)
        return jnp.concatenate([x, dropout(y, self.config.dropout, key)], axis=-1)


class DenseNet(nn.Module):
    """Stem, blocks of layers with transitions between them, mean over the image, linear head."""

    config: DenseNetConfig

    @nn.compact
    def __call__(self, images: jax.Array, key: jax.Array | None) -> jax.Array:
        """Map images (B, image_size, image_size, channels) to logits (B, classes)."""
        config = self.config
        x = nn.Conv(2 * config.growth, (3, 3), use_bias=False, name="stem")(images)
        number = 0
        for block, layers in enumerate(config.layers_per_block):
            x = x if block == 0 else self._transition(x, block)
            for layer in range(layers):
                x = DenseLayer(config, name=f"block_{block}_layer_{layer}")(x, subkey(key, number))
                number += 1
        x = nn.relu(nn.GroupNorm(config.groups, name="norm")(x))
        return nn.Dense(config.classes, name="head")(x.mean(axis=(1, 2)))

    def _transition(self, x: jax.Array, block: int) -> jax.Array:
        """Half of the channels, rounded up to a multiple of `groups`, and of the size."""
        groups = self.config.groups
        channels = groups * -(-x.shape[-1] // (2 * groups))
        x = nn.relu(nn.GroupNorm(groups, name=f"transition_{block}_norm")(x))
        x = nn.Conv(channels, (1, 1), use_bias=False, name=f"transition_{block}_conv")(x)
        pooled: jax.Array = nn.avg_pool(x, (2, 2), strides=(2, 2))
        return pooled


def batch_shape(config: DenseNetConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of one batch of `data.image_batches`."""
    shape = (config.batch, config.image_size, config.image_size, config.channels)
    return {
        "images": jax.ShapeDtypeStruct(shape, jnp.float32),
        "labels": jax.ShapeDtypeStruct((config.batch,), jnp.int32),
    }


def objective(config: DenseNetConfig) -> Objective:
    """Mean cross-entropy of the class."""
    return supervised(DenseNet(config), config, batch_shape(config), inputs=("images",), targets="labels")

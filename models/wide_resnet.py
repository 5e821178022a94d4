"""A residual network of bottleneck blocks whose inner convolutions are widened, with BatchNorm, for square images.

Stage i = 0, 1, ... has channels c = 2^i * base_channels: a block is 1x1 to width_factor * c, 3x3 (the first one of a
later stage with stride 2), 1x1 to 4 c, each followed by BatchNorm, plus the input (projected 1x1 where the shape
changes). This is the widening of Zagoruyko and Komodakis (2016) for bottlenecks; with `narrow_entry` the first 1x1 gives c.
BatchNorm normalises over the whole batch and keeps running means and variances, which evaluation uses. Images are (batch,
height, width, channels).
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from autopar.models.objective import Batch, Objective, Outcome, PyTree, cross_entropy
from autopar.models.sizes import BLOCKS_PER_STAGE, WideResNetConfig

EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with BatchNorm, added to the input; `entry`: results of the first one, `width` if None."""

    channels: int
    width: int
    stride: int
    entry: int | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Map (B, h, w, any) to (B, h/stride, w/stride, 4 * channels)."""
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        conv = partial(nn.Conv, use_bias=False)
        y = nn.relu(norm(name="norm_in")(conv(self.entry or self.width, (1, 1), name="conv_in")(x)))
        y = conv(self.width, (3, 3), strides=self.stride, name="conv_mid")(y)
        y = nn.relu(norm(name="norm_mid")(y))
        y = norm(name="norm_out")(conv(EXPANSION * self.channels, (1, 1), name="conv_out")(y))
        if x.shape != y.shape:
            x = conv(EXPANSION * self.channels, (1, 1), strides=self.stride, name="conv_skip")(x)
            x = norm(name="norm_skip")(x)
        return nn.relu(x + y)


class WideResNet(nn.Module):
    """Stem, stages of bottlenecks, mean over the image, linear head."""

    config: WideResNetConfig

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Map images (B, image_size, image_size, channels) to logits (B, classes)."""
        x = self._stem(images, train)
        for stage, blocks in enumerate(BLOCKS_PER_STAGE[self.config.depth]):
            channels = self.config.base_channels * 2**stage
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                name = f"stage_{stage}_block_{block}"
                entry = channels if self.config.narrow_entry else None
                x = Bottleneck(channels, self.config.width_factor * channels, stride, entry, name=name)(x, train)
        return nn.Dense(self.config.classes, name="head")(x.mean(axis=(1, 2)))

    def _stem(self, images: jax.Array, train: bool) -> jax.Array:
        size, stride = (7, 2) if self.config.imagenet_stem else (3, 1)
        x = nn.Conv(self.config.base_channels, (size, size), strides=stride, use_bias=False, name="stem")(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, name="stem_norm")(x))
        return nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME") if self.config.imagenet_stem else x


def batch_shape(config: WideResNetConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of one batch of `data.image_batches`."""
    shape = (config.batch, config.image_size, config.image_size, config.channels)
    return {
        "images": jax.ShapeDtypeStruct(shape, jnp.float32),
        "labels": jax.ShapeDtypeStruct((config.batch,), jnp.int32),
    }


def objective(config: WideResNetConfig) -> Objective:
    """Mean cross-entropy of the class; training updates the running statistics."""
    model = WideResNet(config)

    def loss(
        params: PyTree, batch_stats: PyTree, batch: Batch, *, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, Outcome]:
        variables = {"params": params, "batch_stats": batch_stats}
        evaluating, images = dropout_key is None, batch["images"].astype(config.dtype)
        if evaluating:
            logits: Any = model.apply(variables, images, False)
        else:
            logits, changed = model.apply(variables, images, True, mutable=["batch_stats"])
            batch_stats = changed["batch_stats"]
        mean_loss, metrics = cross_entropy(config, logits, batch["labels"], evaluating=evaluating)
        return mean_loss, Outcome(metrics, batch_stats)

    shape = batch_shape(config)["images"]
    return Objective(init=lambda key: model.init(key, jnp.zeros(shape.shape, shape.dtype), False), loss=loss)

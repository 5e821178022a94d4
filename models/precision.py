"""Mixed precision: a model computes in `dtype`, its weights and the optimizer's statistics are kept in `param_dtype`.

A step casts the weights and the inputs once, so products and activations are of `dtype`. What sums over many values is float32 in
every type: softmax, the statistics of norms, losses and their means. Gradients leave the step's backward pass in `param_dtype`.

float16 has no numbers under 6e-8, where most gradients are, so its loss is multiplied by a factor before the backward
pass and the gradients are divided by it after. The factor is dynamic: an update whose gradients are not all finite is
left out and halves the factor, and `GROWTH_STEPS` good ones in a row double it. It is a power of two, which rounds
nothing. bfloat16 has the range of float32 and needs none.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import flax.struct
import jax
import jax.numpy as jnp

from autopar.models.config import ModelConfig

FIRST_FACTOR = 2.0**15
GROWTH_STEPS = 2000

PyTree: TypeAlias = Any
Tree = TypeVar("Tree")


class LossScale(flax.struct.PyTreeNode):
    """The factor of a float16 loss.

    Attributes:
        factor: float32 scalar, a power of two from 1 to 2^24.
        good_steps: int32 scalar, the updates made since the factor last changed.
    """

    factor: jax.Array
    good_steps: jax.Array


def first_loss_scale(config: ModelConfig) -> LossScale | None:
    """The factor that float16 starts with; None in a type that needs none."""
    if config.dtype != "float16":
        return None
    return LossScale(factor=jnp.asarray(FIRST_FACTOR, jnp.float32), good_steps=jnp.zeros((), jnp.int32))


def cast_floats(tree: Tree, dtype: str) -> Tree:
    """The leaves with a fraction in another type; the others as they are."""
    cast: Tree = jax.tree.map(
        lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
    )
    return cast


def scale_loss(loss: jax.Array, scale: LossScale | None) -> jax.Array:
    """The loss to differentiate."""
    return loss if scale is None else loss * scale.factor


def unscale(gradients: PyTree, scale: LossScale) -> PyTree:
    """The gradients of the loss, of those of the scaled one."""
    return jax.tree.map(lambda gradient: gradient / scale.factor.astype(gradient.dtype), gradients)


def all_finite(tree: PyTree) -> jax.Array:
    """Whether no leaf has an infinity or a NaN: a bool scalar."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def next_loss_scale(scale: LossScale, finite: jax.Array) -> LossScale:
    """The factor of the next step: half of this one after infinities, twice after `GROWTH_STEPS` good steps in a row."""
    good = scale.good_steps + 1
    grows = good >= GROWTH_STEPS
    grown = jnp.where(grows, jnp.minimum(scale.factor * 2, 2.0**24), scale.factor)
    return LossScale(
        factor=jnp.where(finite, grown, jnp.maximum(scale.factor / 2, 1.0)),
        good_steps=jnp.where(finite & ~grows, good, 0),
    )


def keep_if(finite: jax.Array, new: Tree, old: Tree) -> Tree:
    """The new leaves where the gradients were finite, else the old ones."""
    kept: Tree = jax.tree.map(lambda one, other: jnp.where(finite, one, other), new, old)
    return kept

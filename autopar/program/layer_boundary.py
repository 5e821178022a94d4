"""`layer_boundary`: where a user wants a step to be cut into pipeline stages.

In: an array, or a tree of arrays, between two layers. Out: the same. Without autopar it costs nothing; with it, if a step has
any, stages begin at boundaries and nowhere else. What can go wrong: a boundary in a branch that the loss does not depend on marks
nothing; fewer boundaries than stages need is an error that says how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

T = TypeVar("T")

layer_boundary_p = Primitive("layer_boundary")
layer_boundary_p.def_impl(lambda x: x)
layer_boundary_p.def_abstract_eval(lambda x: x)


def _jvp(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The mark stays on the forward value; its derivative is the identity."""
    return layer_boundary_p.bind(*primals), tangents[0]


def _batch(values: Sequence[jax.Array], dims: Sequence[int | None]) -> tuple[jax.Array, int | None]:
    return layer_boundary_p.bind(*values), dims[0]


ad.primitive_jvps[layer_boundary_p] = _jvp
batching.primitive_batchers[layer_boundary_p] = _batch
mlir.register_lowering(layer_boundary_p, lambda ctx, x: [x])


def layer_boundary(x: T) -> T:
    """Mark the place where a layer ends and a pipeline stage may begin.

    In a step with such marks stages begin at marks and nowhere else. Outside of a parallelized step it does nothing.

    Args:
        x: an array, or a tree of arrays, on its way from one layer to the next.

    Returns:
        `x`; use it in place of the argument.
    """
    marked: T = jax.tree.map(layer_boundary_p.bind, x)
    return marked

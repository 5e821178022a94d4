"""Values of the forward pass that the user named with `jax.ad_checkpoint.checkpoint_name`.

In: a program's equations. Out: the variables that hold such a value, also where it fans out to several readers. What can go
wrong: a name inside of `jax.checkpoint`, whose own policy decides what is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

from autopar.compat import Var
from autopar.program.program import Equation, fan_out_p, operands_of


def is_checkpoint_name(eqn: Equation) -> bool:
    """Whether an operation names a value."""
    return eqn.primitive is _naming_p()


@functools.cache
def _naming_p() -> Primitive:
    """The primitive that names values, for which JAX has no public name."""
    (naming,) = jax.make_jaxpr(lambda x: checkpoint_name(x, "name"))(jnp.float32(0)).eqns
    return cast(Primitive, naming.primitive)


def find_named(equations: Iterable[Equation]) -> frozenset[Var]:
    """The variables with a named value."""
    found: set[Var] = set()
    for eqn in equations:
        if is_checkpoint_name(eqn) or (eqn.primitive is fan_out_p and found.issuperset(operands_of(eqn))):
            found.update(eqn.outvars)
    return frozenset(found)

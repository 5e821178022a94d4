"""Values of the forward pass that the user named with `jax.ad_checkpoint.checkpoint_name`.

In: a program's equations. Out: the variables that hold such a value, also where it fans out to several readers; and the values
as leaves, whose paths are `value/NAME`. What can go wrong: a name inside of `jax.checkpoint`, whose own policy decides what is
kept.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

from autopar.avals import is_opaque
from autopar.compat import Var
from autopar.program.program import Equation, Program, fan_out_p, operands_of
from autopar.program.step import Leaf


def is_checkpoint_name(eqn: Equation) -> bool:
    """Whether an operation names a value."""
    return eqn.primitive is _naming_p()


@functools.cache
def _naming_p() -> Primitive:
    """The primitive that names values, for which JAX has no public name."""
    (naming,) = jax.make_jaxpr(lambda x: checkpoint_name(x, "name"))(jnp.float32(0)).eqns
    return cast(Primitive, naming.primitive)


def named_values(program: Program) -> Iterator[tuple[Equation, Leaf]]:
    """The equations that name values, each with the value as a leaf."""
    for eqn in program.walk():
        if is_checkpoint_name(eqn) and not is_opaque(eqn.outvars[0].aval):
            aval = eqn.outvars[0].aval
            yield eqn, Leaf(path=f"value/{eqn.params['name']}", role="value", shape=tuple(aval.shape), dtype=aval.dtype)


def find_named(equations: Iterable[Equation]) -> frozenset[Var]:
    """The variables with a named value."""
    found: set[Var] = set()
    for eqn in equations:
        if is_checkpoint_name(eqn) or (eqn.primitive is fan_out_p and found.issuperset(operands_of(eqn))):
            found.update(eqn.outvars)
    return frozenset(found)

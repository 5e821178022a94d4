"""Programs as JAX runs them: one equation on values.

`bind_equation` takes an equation and its operands, arrays or tracers, and returns its results; nothing is split or moved. What
an equation waits for without reading it is the caller's to keep (`wait_for`). What can go wrong: a `Program` gives equations with
nested programs more operands than their primitives take, the constants that those close over.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from autopar.program.loops import LoopEquation
from autopar.program.program import Equation, fan_out_p


def bind_equation(eqn: Equation, operands: Sequence[jax.Array], **changed: object) -> Sequence[jax.Array]:
    """The results of an equation on the values of its operands, with some parameters changed.

    A nested program takes what it closes over from the equation's own parameters.
    """
    if eqn.primitive is fan_out_p:
        return operands
    own = eqn.own_operands(operands) if isinstance(eqn, LoopEquation) else operands
    results = eqn.primitive.bind(*own, **{**eqn.params, **changed})
    return results if eqn.primitive.multiple_results else (results,)


def wait_for(late: jax.Array, array: jax.Array) -> jax.Array:
    """The array once `late` is there, as the program that is traced from this says too (`Equation.after`)."""
    waiting: jax.Array = jax.lax.optimization_barrier((array, late))[0]
    return waiting


def bind_scan(eqn: LoopEquation, operands: Sequence[jax.Array], *, length: int) -> Sequence[jax.Array]:
    """A scan over stacks of another length."""
    return bind_equation(eqn, operands, length=length, unroll=min(eqn.loop.unroll, length))

"""Programs as JAX runs them: one equation on values, and a whole step traced again as another function.

`bind_equation` takes an equation and its operands, arrays or tracers, and returns its results; nothing is split or moved. What
an equation waits for without reading it is the caller's to keep (`wait_for`).
`retrace` is the one place where a pass has a rewritten step traced again. What can go wrong: a `Program` gives equations with
nested programs more operands than their primitives take, the constants that those close over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax

from autopar.program.call import PyTree
from autopar.program.fingerprint import fingerprint_of
from autopar.program.from_jaxpr import program_of
from autopar.program.loops import LoopEquation
from autopar.program.program import Equation, fan_out_p
from autopar.program.step import Leaf, TracedStep


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


def retrace(traced: TracedStep, leaves: Sequence[Leaf], run: Callable[..., PyTree]) -> TracedStep:
    """Trace a step again as another function of its leaves and constants, which may have other shapes.

    Constants that the function closes over become leaves of their own.
    """
    avals = [
        jax.ShapeDtypeStruct(leaf.shape, var.aval.dtype, weak_type=bool(getattr(var.aval, "weak_type", False)))
        for leaf, var in zip(leaves, traced.program.invars, strict=True)
    ]
    program, constants = program_of(jax.make_jaxpr(run)(*avals))
    added = tuple(
        Leaf(path=f"constant/{len(traced.constants) + i}", role="const", shape=tuple(v.aval.shape), dtype=v.aval.dtype)
        for i, v in enumerate(program.invars[len(leaves) :])
    )
    return dataclasses.replace(
        traced,
        program=program,
        constants=(*traced.constants, *constants),
        inputs=(*leaves, *added),
        fingerprint=fingerprint_of(program),
    )

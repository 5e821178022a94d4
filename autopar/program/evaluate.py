"""One equation of a `Program` on values, as JAX would run it.

In: an equation and its operands, arrays or tracers. Out: its results. Nothing is split or moved. What can go wrong: a `Program`
gives equations with nested programs more operands than their primitives take, the constants that those close over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.compat import open_jaxpr, scan_counts
from autopar.program.program import Equation, fan_out_p


def bind_equation(eqn: Equation, operands: Sequence[Any], **changed: Any) -> Sequence[Any]:
    """The results of an equation on the values of its operands, with some parameters changed.

    A nested program takes what it closes over from the equation's own parameters.
    """
    if eqn.primitive is fan_out_p:
        return operands
    results = eqn.primitive.bind(*_without_captured(eqn, operands), **{**eqn.params, **changed})
    return results if eqn.primitive.multiple_results else (results,)


def _without_captured(eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """The operands that the primitive itself takes: a `Program` has the constants of nested programs as operands too."""
    loop = eqn.loop
    if loop is None:
        return operands
    if loop.kind == "scan":
        return operands[loop.consts - scan_counts(eqn.params)[0] :]
    if loop.kind == "while":
        of_condition = operands[loop.condition_consts - eqn.params["cond_nconsts"] : loop.condition_consts]
        of_body = operands[loop.condition_consts :][loop.consts - eqn.params["body_nconsts"] :]
        return [*of_condition, *of_body]
    (taken,) = {len(open_jaxpr(branch).invars) for branch in eqn.params["branches"]}
    return [operands[0], *operands[len(operands) - taken :]]

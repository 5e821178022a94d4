"""`observe`: a value, and what Python is shown once it is there: how `jax.debug.print` and `jax.debug.callback` run in a program.

In: an equation of theirs, and the results of the program that it is in. Out: an equation with a result, in the place of one of
those, so that nothing takes it for dead code. A branch that returns nothing is made to return something, and an `io_callback` to
return a number to wait for. What can go wrong: a program without a result to wait for, as a loop over rows that does nothing but
print; it is refused by its line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive, jaxpr_as_fun, jaxprs_in_params
from jax.interpreters import mlir

from autopar.avals import bytes_of, is_opaque
from autopar.callbacks import as_callback
from autopar.compat import JaxprEqn, Var, open_jaxpr, source_line
from autopar.errors import UnsupportedProgramError
from autopar.program.program import Atom, Equation

observe_p = Primitive("observe")
"""The first operand; the others are shown by the primitive that is the parameter `shown_by`, with its own parameters.

Without one they are only waited for.
`guarded`: the second operand says whether they are shown, so that of many devices and microbatches one shows them.
"""
observe_p.def_impl(lambda value, *_, **__: value)
observe_p.def_abstract_eval(lambda value, *_, **__: value)


def _compute(
    value: jax.Array, *shown: jax.Array, shown_by: Primitive | None, guarded: bool, **params: object
) -> jax.Array:
    """What `observe` compiles to."""
    if shown_by is None:
        return value
    called = params.get("callback")
    if callable(called):
        params["callback"] = as_callback(called)

    def show(*values: jax.Array) -> tuple[()]:
        shown_by.bind(*values, **params)
        return ()

    if guarded:
        jax.lax.cond(shown[0], show, lambda *_: (), *shown[1:])
    else:
        show(*shown)
    return value


mlir.register_lowering(observe_p, mlir.lower_fun(_compute, multiple_results=False))

OBSERVERS = ("debug_print", "debug_callback")


def is_observer(eqn: JaxprEqn) -> bool:
    """Whether an equation shows values to Python, in no particular order, and returns nothing."""
    is_ordered = eqn.params.get("ordered", False) or "Ordered" in type(eqn.params.get("effect")).__name__
    return eqn.primitive.name in OBSERVERS and not is_ordered


@dataclasses.dataclass(frozen=True)
class Answering:
    """A callback of Python that answers, after its results, with a number to wait for."""

    callback: Callable[..., Sequence[jax.typing.ArrayLike]]

    def __call__(self, *values: jax.Array) -> tuple[jax.typing.ArrayLike, ...]:
        """The results, and the number."""
        return (*self.callback(*values), np.uint8(0))


def is_call(eqn: JaxprEqn) -> bool:
    """Whether an equation calls Python once, in no particular order, for what it does or returns."""
    return eqn.primitive.name == "io_callback" and not eqn.params["ordered"]


def answering(eqn: JaxprEqn, operands: Sequence[Atom]) -> Equation | None:
    """The call of Python with one more result, a number which the program may wait for; None if it has that already."""
    if isinstance(eqn.params["callback"], Answering):
        return None
    number = Var(jax.core.ShapedArray((), np.dtype(np.uint8)))
    own = {
        "callback": Answering(eqn.params["callback"]),
        "result_avals": (*eqn.params["result_avals"], number.aval),
        "sharding": None,
    }
    return Equation(
        primitive=eqn.primitive,
        invars=tuple(operands),
        outvars=(*(Var(v.aval) for v in eqn.outvars), number),
        params={**eqn.params, **own},
        source_info=eqn.source_info,
    )


def refuse_side_effects(jaxpr: Any) -> None:
    """Raise UnsupportedProgramError naming the operation and the user's line if the program has side effects."""
    if not jaxpr.effects:
        return
    for eqn in jaxpr.eqns:
        inside = [open_jaxpr(inner) for inner in jaxprs_in_params(eqn.params)] if eqn.effects else []
        for inner in inside:
            refuse_side_effects(inner)
        if eqn.effects and not inside and not is_observer(eqn) and not is_call(eqn):
            raise UnsupportedProgramError(
                f"the step has a Python side effect: {eqn.primitive.name} at {source_line(eqn)}. A parallel step runs "
                "on many devices and may run operations twice or not at all, so ordered prints, ordered callbacks and writes "
                "to references have no defined meaning. Return the value as an output and print it outside the step."
            )


def observe(
    eqn: JaxprEqn, shown: Sequence[Atom], results: Sequence[Atom], read: Sequence[bool] = ()
) -> tuple[Equation, list[Atom]]:
    """(equation that shows the values, results of the program with one of them in its place): the smallest waits for it.

    `read`: of a nested program, the results that are read outside of it, one of which waits if there are any.
    """
    able = [i for i, v in enumerate(results) if isinstance(v, Var) and not is_opaque(v.aval)]
    able = [i for i in able if any(read) and len(read) == len(results) and read[i]] or able
    if not able:
        raise UnsupportedProgramError(
            f"{eqn.primitive.name} at {source_line(eqn)} is in a function or a loop that returns nothing else. In a parallel "
            "step a value is shown when a result is there: return one from the loop, or print outside of it."
        )
    own = {**eqn.params, "shown_by": eqn.primitive} if is_observer(eqn) else {"shown_by": None}
    place = min(able, key=lambda i: bytes_of(results[i]))
    out = Var(results[place].aval)
    made = Equation(
        primitive=observe_p,
        invars=(results[place], *shown),
        outvars=(out,),
        params={**own, "guarded": False},
        source_info=eqn.source_info,
    )
    return made, [out if i == place else v for i, v in enumerate(results)]


def branch_that_returns(eqn: JaxprEqn) -> Any:
    """A jaxpr of the operands of a `cond` that returns nothing: the same `cond`, which returns a number.

    It is no operand, which JAX would return without asking the branch.
    """

    def run(number: jax.Array, *operands: jax.Array) -> jax.Array:
        def branch(closed: Any) -> Callable[..., jax.Array]:
            return lambda number, *given: (jaxpr_as_fun(closed)(*given), number + 1)[1]

        chosen: jax.Array = jax.lax.switch(
            number, [branch(closed) for closed in eqn.params["branches"]], number, *operands
        )
        return chosen

    return jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars))

"""Layers that compute the same: equal operations on operands of equal shapes, wired up alike.

In: a `TimeLoop` and the numbers of equations at which its layers end. Out: for each layer the first one that it equals. What can
go wrong: nothing is lost where two equal layers are told apart; they are planned twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence

from autopar.compat import Literal as JaxLiteral
from autopar.compat import Var
from autopar.microbatches.loop import TimeLoop
from autopar.program.fingerprint import aval_key, signature
from autopar.program.program import Equation
from autopar.stages.dependence import Dependence


def find_identical(loop: TimeLoop, layers: Sequence[int]) -> tuple[int, ...]:
    """For each layer, as `cluster` cuts them, the number of the first layer that is the same.

    The same: a renaming of variables turns one list of equations into the other, with equal primitives, parameters,
    literals, shapes and types; what comes from outside is of the same kind (a leaf of the same role, a value made before the
    loop, or in it with or without weights), and the same results are read outside. Exact: signatures are compared, not digests.
    """
    kinds = Dependence.of(loop)
    equations = kinds.forward()
    bounds = [0, *layers, len(equations)]
    origin = _origins(loop, kinds)
    readers = _readers(loop)
    first: dict[Hashable, int] = {}
    return tuple(
        first.setdefault(_signature_of(equations[begin:end], origin, readers), number)
        for number, (begin, end) in enumerate(itertools.pairwise(bounds))
    )


def _origins(loop: TimeLoop, kinds: Dependence) -> dict[Var, str]:
    """The kind of every value of the step; what the body makes without weights has no gradient, and is a kind of its own."""
    leaves = {v: leaf.role for v, leaf in zip(loop.program.invars, loop.traced.inputs, strict=True)}
    before = {v: "prologue" for eqn in loop.plan.of_phase("prologue") for v in eqn.outvars}
    within = {
        v: "body" if kinds.is_anchored(eqn) else "aside" for eqn in loop.plan.of_phase("body") for v in eqn.outvars
    }
    return {**leaves, **before, **within}


def _readers(loop: TimeLoop) -> dict[Var, set[Equation | None]]:
    """Which equations read a value; None stands for the step's outputs."""
    readers: dict[Var, set[Equation | None]] = {}
    for eqn in loop.program.equations:
        for v in eqn.invars:
            if not isinstance(v, JaxLiteral):
                readers.setdefault(v, set()).add(eqn)
    for v in loop.program.outvars:
        if not isinstance(v, JaxLiteral):
            readers.setdefault(v, set()).add(None)
    return readers


def _signature_of(
    equations: Sequence[Equation], origin: Mapping[Var, str], readers: Mapping[Var, set[Equation | None]]
) -> Hashable:
    numbers: dict[Var, int] = {}
    body = signature(equations, numbers)
    inside = set(equations)
    made = {v for eqn in equations for v in eqn.outvars}
    outside = tuple((numbers[v], aval_key(v), origin.get(v, "")) for v in numbers if v not in made)
    results = tuple(numbers[v] for v in numbers if v in made and not readers.get(v, set()) <= inside)
    return body, outside, results

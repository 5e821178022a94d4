"""What a step does with each leaf of its state, by data flow: which leaves it trains, and what its optimizer keeps of gradients.

In: a program, and the output that takes each state leaf's place. Out: for these leaves, by number

    parameter    the loss reads it, and its new value is computed from a gradient
    optimizer    the loss does not read it, and its new value is computed from a gradient, such as Adam's moments

A gradient is what JAX computed by transposing. The loss is what JAX differentiated: whatever such an operation is computed from,
without gradients, is read by it. Other leaves, such as counters, keys and running averages of activations, have no use here. What
can go wrong: gradients that are written out by hand, without `jax.grad`, are not known for such.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from autopar.compat import RECOMPUTED, transformations
from autopar.compat import Literal as JaxLiteral
from autopar.program.loops import Entry, Exit, LoopEquation
from autopar.program.program import Equation, Program, fan_out_p
from autopar.program.walk import Scope, StaticDomain

Use: TypeAlias = Literal["parameter", "optimizer"]

_Sources: TypeAlias = int
"""What a value is computed from, as bits: bit 0 stands for a gradient, bit k + 1 for input k of the program."""
_GRADIENT: _Sources = 1


def find_uses(program: Program, sources: Sequence[int | None]) -> dict[int, Use]:
    """The use of each input that has one; `sources` are, for every output, the input whose place it takes."""
    marks = _Marks()
    scope = Scope(marks, {v: 2 << k for k, v in enumerate(program.invars)})
    scope.run(program.equations)
    updated = {
        source
        for v, source in zip(program.outvars, sources, strict=True)
        if source is not None and scope.value(v) & _GRADIENT
    }
    return {source: "parameter" if marks.read & 2 << source else "optimizer" for source in sorted(updated)}


class _Marks(StaticDomain[_Sources]):
    """A value is what it is computed from; `read` gathers what the differentiated operations are computed from."""

    def __init__(self) -> None:
        self.read: _Sources = 0

    def literal(self, atom: JaxLiteral, scope: Scope[_Sources]) -> _Sources:
        return 0

    def operation(self, eqn: Equation, scope: Scope[_Sources]) -> Sequence[_Sources]:
        found = _union(map(scope.value, eqn.invars))
        return [found | self._mark(eqn, scope)] * len(eqn.outvars)

    def _mark(self, eqn: Equation, scope: Scope[_Sources]) -> _Sources:
        """Note what an operation reads, if it is differentiated; returns whether it makes a gradient."""
        made_by = transformations(eqn)
        if eqn.primitive is fan_out_p or made_by.isdisjoint(("jvp", "transpose", RECOMPUTED)):
            return 0
        self.read |= _union(found for found in map(scope.value, eqn.invars) if not found & _GRADIENT)
        return _GRADIENT if "transpose" in made_by else 0

    def enter(self, entry: Entry, scope: Scope[_Sources], inner: Scope[_Sources]) -> _Sources:
        return scope.value(entry.atom)

    def leave(self, exit_: Exit, inner: Scope[_Sources]) -> _Sources:
        return inner.value(exit_.atom)

    def finish(self, eqn: LoopEquation, ends: Mapping[Exit, _Sources], scope: Scope[_Sources]) -> Sequence[_Sources]:
        gradient = self._mark(eqn, scope)
        return [_union(ends[exit_] for exit_ in exits) | gradient for exits in eqn.results]


def _union(found: Iterable[_Sources]) -> _Sources:
    return functools.reduce(operator.or_, found, 0)

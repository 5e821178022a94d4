"""Which values of a microbatch are estimates: made of statistics that it takes from its own examples.

In: a program, and which of its equations are in the loop's body. Out: the variables that depend there on a statistic that is
marked (`statistics.py`). Every microbatch has its own estimate, so that after the loop they are averaged, and slices of several
make no whole. All else that each microbatch has whole is the same in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autopar.compat import Literal, Var
from autopar.program.loops import Entry, Exit, LoopEquation, Nested
from autopar.program.opened.statistic import batch_statistic_p
from autopar.program.program import Equation, Program
from autopar.program.walk import Scope, StaticDomain


def find_estimates(program: Program, body: Iterable[Equation]) -> frozenset[Var]:
    """The variables that are estimates if the body has these of the outermost equations."""
    if not any(eqn.primitive is batch_statistic_p for eqn in program.walk()):
        return frozenset()
    domain, in_body = _Estimates(), frozenset(body)
    scope = Scope(domain, dict.fromkeys(program.invars, False))
    for eqn in program.equations:
        domain.is_in_body = eqn in in_body
        scope.run([eqn])
    return frozenset(domain.found)


class _Estimates(StaticDomain[bool]):
    """A value is whether it is an estimate."""

    def __init__(self) -> None:
        self.found: set[Var] = set()
        self.is_in_body = False

    def literal(self, atom: Literal, scope: Scope[bool]) -> bool:
        return False

    def operation(self, eqn: Equation, scope: Scope[bool]) -> Sequence[bool]:
        marked = self.is_in_body and eqn.primitive is batch_statistic_p
        is_estimate = marked or (self.is_in_body and any(map(scope.value, eqn.invars)))
        self.found.update(eqn.outvars if is_estimate else ())
        return [is_estimate] * len(eqn.outvars)

    def enter(self, entry: Entry, scope: Scope[bool], inner: Scope[bool]) -> bool:
        is_estimate = self.is_in_body and scope.value(entry.atom)
        self.found.update((entry.var,) if is_estimate else ())
        return is_estimate

    def carries_change(self, nested: Nested, inner: Scope[bool]) -> bool:
        grown = {e.carry.var for e in nested.exits if e.carry is not None and inner.value(e.atom)} - self.found
        self.found.update(grown)
        inner.values.update(dict.fromkeys(grown, True))
        return bool(grown)

    def leave(self, exit_: Exit, inner: Scope[bool]) -> bool:
        return inner.value(exit_.atom)

    def finish(self, eqn: LoopEquation, ends: Mapping[Exit, bool], scope: Scope[bool]) -> Sequence[bool]:
        results = [any(ends[exit_] for exit_ in exits) for exits in eqn.results]
        self.found.update(v for v, is_estimate in zip(eqn.outvars, results, strict=True) if is_estimate)
        return results

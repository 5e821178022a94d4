"""The one walk over a `Program`: what it computes with is a domain's business.

In: a `Domain` and values of the program's inputs. Out: a `Scope` with a value for every variable. A value is whatever the
domain says: an array on one device, a layout, a node of a graph, a buffer, the dimensions that count examples. The walk
knows what is the same for all of them: the order of equations, which values live in which program, how often a program
runs, and how values get into nested programs and out of them (`loops.py`).

    run       scope.values[out] = domain.operation(eqn, scope)     for every ordinary equation
              scope.values[out] = domain.loop(eqn, scope)          for control flow

A domain that computes (the lowering) does control flow with JAX's own loops. A `StaticDomain` only finds out something: it
goes through each nested program once, or until its carries no longer change. What can go wrong: a domain that asks for a
variable of another program; values cross only by entries and exits, and a KeyError says so.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from autopar.compat import Literal, Var
from autopar.program.loops import Entry, Exit, Goes, LoopEquation, Nested
from autopar.program.program import Atom, Equation, Program, can_be_awaited, operands_of

V = TypeVar("V")


class Scope(Generic[V]):
    """The values of one program, or of some of its equations, while the walk goes through it.

    `position`: number of the equation that the walk is at. `asking`: that equation, or before and after all of them the loop that
    the program is nested in. `trips`: how often the program runs per step. `latest`: the last value so far that something else
    can wait for. `copies`: values in other forms, with the position of their last use (`copies.py`).
    """

    def __init__(
        self,
        domain: Domain[V],
        values: Mapping[Var, V] | None = None,
        *,
        around: LoopEquation | None = None,
        trips: float = 1.0,
    ) -> None:
        self.domain, self.values = domain, dict(values or {})
        self.around, self.trips = around, trips
        self.asking: Equation | None = around
        self.position = 0
        self.latest: V | None = None
        self.copies: dict[tuple[Var, Hashable], tuple[V, int]] = {}

    def run(self, equations: Sequence[Equation]) -> None:
        """Go through equations in order; what they read is in the scope, and so are their results afterwards."""
        for position, eqn in enumerate(equations):
            self.position, self.asking = position, eqn
            results = self.domain.loop(eqn, self) if isinstance(eqn, LoopEquation) else self.domain.operation(eqn, self)
            self.values.update(zip(eqn.outvars, results, strict=True))
            if eqn.outvars and can_be_awaited(eqn.outvars[-1]):
                self.latest = results[-1]
        self.asking = self.around

    def value(self, atom: Atom) -> V:
        """The value of an operand or a result."""
        return self.domain.literal(atom, self) if isinstance(atom, Literal) else self.values[atom]

    def inside(self, loop: LoopEquation) -> Scope[V]:
        """A scope for a program nested in an equation of this one."""
        return Scope(self.domain, around=loop, trips=self.trips * max(loop.loop.trips, 1))


class Domain(abc.ABC, Generic[V]):
    """What a walk computes with."""

    @abc.abstractmethod
    def literal(self, atom: Literal, scope: Scope[V]) -> V:
        """The value of a literal."""

    @abc.abstractmethod
    def operation(self, eqn: Equation, scope: Scope[V]) -> Sequence[V]:
        """The values of an ordinary equation's results."""

    @abc.abstractmethod
    def loop(self, eqn: LoopEquation, scope: Scope[V]) -> Sequence[V]:
        """The values of the results of control flow."""


class StaticDomain(Domain[V]):
    """A domain that finds out something about a program without running it: it goes through each nested program."""

    def loop(self, eqn: LoopEquation, scope: Scope[V]) -> Sequence[V]:
        """Enter each nested program, go through it until its carries are settled, leave it; then finish."""
        self.begin(eqn, scope)
        ends: dict[Exit, V] = {}
        for nested in eqn.nested:
            inner = scope.inside(eqn)
            for entry in nested.entries:
                if entry.passed is None:
                    inner.values[entry.var] = self.enter(entry, scope, inner)
                else:
                    inner.values[entry.var] = self.pass_on(entry, ends[entry.passed], inner)
            inner.run(nested.program.equations)
            while self.carries_change(nested, inner):
                inner.run(nested.program.equations)
            for exit_ in nested.exits:
                ends[exit_] = self.leave(exit_, inner)
        return self.finish(eqn, ends, scope)

    def begin(self, eqn: LoopEquation, scope: Scope[V]) -> None:
        """Before the nested programs: what is to be done once, such as asking for the number of the branch."""

    @abc.abstractmethod
    def enter(self, entry: Entry, scope: Scope[V], inner: Scope[V]) -> V:
        """The value of an input that an operand in `scope` fills."""

    def pass_on(self, entry: Entry, value: V, inner: Scope[V]) -> V:
        """The value of a condition's input, from what became of the body's exit."""
        return value

    def carries_change(self, nested: Nested, inner: Scope[V]) -> bool:
        """Join what the body returns with what it took; whether it took less, so that it has to be gone through again."""
        return False

    @abc.abstractmethod
    def leave(self, exit_: Exit, inner: Scope[V]) -> V:
        """What becomes of a result, such as a carry brought to where the next iteration expects it."""

    @abc.abstractmethod
    def finish(self, eqn: LoopEquation, ends: Mapping[Exit, V], scope: Scope[V]) -> Sequence[V]:
        """The values of the loop's results, from what became of the exits."""


def dependents_of(program: Program, variables: Collection[Var]) -> set[Var]:
    """The values of a program, and of those nested in it, that depend on some of its inputs; and these themselves."""
    domain = _Dependents(variables)
    Scope(domain, {v: v in domain.found for v in program.invars}).run(program.equations)
    return domain.found


class _Dependents(StaticDomain[bool]):
    """A value is whether it depends on one of some variables; `found`: the variables that do, and these."""

    def __init__(self, variables: Collection[Var]) -> None:
        self.found = set(variables)

    def literal(self, atom: Literal, scope: Scope[bool]) -> bool:
        return False

    def operation(self, eqn: Equation, scope: Scope[bool]) -> Sequence[bool]:
        return self._results(eqn, [any(v in self.found for v in operands_of(eqn))] * len(eqn.outvars))

    def enter(self, entry: Entry, scope: Scope[bool], inner: Scope[bool]) -> bool:
        return self._note(entry.var, depends=scope.value(entry.atom))

    def pass_on(self, entry: Entry, value: bool, inner: Scope[bool]) -> bool:
        return self._note(entry.var, depends=value)

    def carries_change(self, nested: Nested, inner: Scope[bool]) -> bool:
        grown = [e.carry.var for e in nested.exits if e.carry is not None and inner.value(e.atom)]
        grown = [var for var in grown if not inner.values[var]]
        for var in grown:
            inner.values[var] = self._note(var, depends=True)
        return bool(grown)

    def leave(self, exit_: Exit, inner: Scope[bool]) -> bool:
        return inner.value(exit_.atom)

    def finish(self, eqn: LoopEquation, ends: Mapping[Exit, bool], scope: Scope[bool]) -> Sequence[bool]:
        decided = any(depends for exit_, depends in ends.items() if exit_.goes is Goes.DECISION)
        decided |= eqn.branch_number is not None and scope.value(eqn.branch_number)
        return self._results(eqn, [decided or any(ends[exit_] for exit_ in exits) for exits in eqn.results])

    def _results(self, eqn: Equation, depend: Sequence[bool]) -> Sequence[bool]:
        return [self._note(v, depends=depends) for v, depends in zip(eqn.outvars, depend, strict=True)]

    def _note(self, var: Var, *, depends: bool) -> bool:
        if depends:
            self.found.add(var)
        return depends

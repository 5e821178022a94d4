"""Which module an operation belongs to that names none: that of the nearest operation which does.

In: a program. Out: for an equation the one whose module and line tell where it comes from: itself, or what reads its results,
or what makes its operands, at a few steps' distance. Random bits of a dropout have no module, and what multiplies by the mask
has one. What can go wrong: an operation that several modules read; it is told by the first in the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.compat import Var, module_path
from autopar.program.loops import LoopEquation
from autopar.program.program import Atom, Equation, Program, operands_of

_FARTHEST = 8
"""So many equations on, the module of another says nothing of this one."""


class Origins:
    """The nearest equations with a module, by data flow within each program."""

    def __init__(self, program: Program) -> None:
        self._readers: dict[Var, list[Equation]] = {}
        self._makers: dict[Var, Equation] = {}
        self._taking: dict[LoopEquation, dict[int, Equation]] = {}
        for eqn in program.walk():
            for var in operands_of(eqn):
                self._readers.setdefault(var, []).append(eqn)
            self._makers.update((var, eqn) for var in eqn.outvars)

    def of(self, eqn: Equation, operand: Atom | None = None) -> Equation:
        """The equation that names a module for this one; itself if it does, or if none near it does.

        A loop, such as that over microbatches, is of many modules: for an `operand` of it, what reads that within tells.
        """
        inside = self._inside(eqn).get(id(operand)) if isinstance(eqn, LoopEquation) else None
        named = None if inside is None else self._nearest(inside, forward=True)
        if named is not None:
            return named
        if module_path(eqn):
            return eqn
        return self._nearest(eqn, forward=True) or self._nearest(eqn, forward=False) or eqn

    def _inside(self, loop: LoopEquation) -> dict[int, Equation]:
        """For each operand of a loop, by its identity, what takes it within; the first place of several."""
        if loop not in self._taking:
            entries = [entry for nested in loop.nested for entry in nested.entries]
            self._taking[loop] = {id(entry.atom): entry.head for entry in reversed(entries)}
        return self._taking[loop]

    def _nearest(self, eqn: Equation, *, forward: bool) -> Equation | None:
        """The first that has a module among those at equal distance."""
        edge, seen = [eqn], {eqn}
        for _ in range(_FARTHEST):
            edge = [one for one in dict.fromkeys(self._beside(edge, forward=forward)) if one not in seen]
            named = next((one for one in edge if module_path(one)), None)
            if named is not None:
                return named
            seen.update(edge)
        return None

    def _beside(self, edge: Sequence[Equation], *, forward: bool) -> Iterable[Equation]:
        for eqn in edge:
            if forward:
                yield from (reader for var in eqn.outvars for reader in self._readers.get(var, ()))
            else:
                yield from (self._makers[var] for var in operands_of(eqn) if var in self._makers)

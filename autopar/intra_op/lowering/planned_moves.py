"""Every move that a lowered program performs, listed without running it.

In: an `Assignment`. Out: `PlannedMove`s, each with the variable that it moves, how often per step it runs, and the equation
that asks for it. It is the walk that the lowering goes (`per_device.py`), with layouts in place of arrays, so that a plan
promises the collectives that run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from autopar.avals import Aval
from autopar.compat import Literal
from autopar.intra_op.lowering.assignment import Assignment
from autopar.intra_op.lowering.layout_domain import LayoutDomain
from autopar.layouts.mesh import Layout
from autopar.layouts.moves import Move
from autopar.program.loops import Entry, Exit, LoopEquation
from autopar.program.program import Atom, Equation
from autopar.program.walk import Scope, StaticDomain


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedMove:
    """One move of the lowered program: what it moves, how often per step, and the equation that asks for it."""

    move: Move
    atom: Atom
    aval: Aval
    trips: float
    equation: Equation | None


def planned_moves(assignment: Assignment) -> list[PlannedMove]:
    """Every move that `local_function` performs, without running it."""
    census, program = _Census(assignment), assignment.program
    scope = Scope(census, dict(zip(program.invars, assignment.inputs, strict=True)))
    scope.run(program.equations)
    for atom, layout in zip(program.outvars, assignment.outputs, strict=True):
        census.bring_atom(atom, layout, scope)
    return census.moves


class _Census(LayoutDomain[Layout], StaticDomain[Layout]):
    """A value is the layout in which it lies."""

    def __init__(self, assignment: Assignment) -> None:
        super().__init__(assignment)
        self.moves: list[PlannedMove] = []
        self._moved: Atom | None = None

    def layout_of(self, value: Layout) -> Layout:
        return value

    def literal(self, atom: Literal, scope: Scope[Layout]) -> Layout:
        return Layout.replicated(len(atom.aval.shape))

    def bring(
        self, value: Layout, form: Layout, aval: Aval, scope: Scope[Layout], *, late: Layout | None = None
    ) -> Layout:
        assert self._moved is not None
        for move in self.path(value, form, aval):
            self.moves.append(
                PlannedMove(move=move, atom=self._moved, aval=aval, trips=scope.trips, equation=scope.asking)
            )
        return form

    def bring_atom(self, atom: Atom, form: Layout, scope: Scope[Layout]) -> Layout:
        """A variable's value in a form."""
        self._moved = atom
        return self.bring(scope.value(atom), form, atom.aval, scope)

    def need(self, atom: Atom, form: Layout, scope: Scope[Layout]) -> Layout:
        self._moved = atom
        return super().need(atom, form, scope)

    def operation(self, eqn: Equation, scope: Scope[Layout]) -> Sequence[Layout]:
        for atom, layout in zip(eqn.invars, self.layouts.operand_layouts(eqn), strict=True):
            self.need(atom, layout, scope)
        return self.layouts.result_layouts(eqn)

    def begin(self, eqn: LoopEquation, scope: Scope[Layout]) -> None:
        if eqn.branch_number is not None:
            self.need(eqn.branch_number, Layout.replicated(0), scope)

    def enter(self, entry: Entry, scope: Scope[Layout], inner: Scope[Layout]) -> Layout:
        self.need(entry.atom, self.layouts.operand_layout(entry), scope)
        return self.layouts.entry_layout(entry)

    def pass_on(self, entry: Entry, value: Layout, inner: Scope[Layout]) -> Layout:
        self._moved = entry.var
        return self.bring(value, self.layouts.entry_layout(entry), entry.var.aval, inner)

    def leave(self, exit_: Exit, inner: Scope[Layout]) -> Layout:
        return self.bring_atom(exit_.atom, self.layouts.exit_layout(exit_), inner)

    def finish(self, eqn: LoopEquation, ends: Mapping[Exit, Layout], scope: Scope[Layout]) -> Sequence[Layout]:
        return self.layouts.result_layouts(eqn)

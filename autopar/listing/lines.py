"""A program with its strategies as lines: every operation on one device, and every move between layouts in its place.

In: an `Assignment`, through the walk that the lowering goes (`per_device.py`), with names in place of arrays. Out: lines. An
operation has a line with the name of its result, its type and layout, what it reads, and the user's line. A collective begins
with `>>`. Lines stand under the module that they come from. What can go wrong: a domain that forgets a move; the tests
compare the collectives listed with those of the traced program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from autopar.avals import Aval, itemsize_of
from autopar.compat import RECOMPUTED, Literal, module_path, source_line, transformations
from autopar.explain.paths import source_text
from autopar.explain.units import bytes_text
from autopar.intra_op.lowering.assignment import Assignment
from autopar.intra_op.lowering.layout_domain import LayoutDomain
from autopar.layouts.mesh import Layout
from autopar.layouts.moves import LOCAL_KINDS, Move
from autopar.program.loops import Entry, Exit, Goes, LoopEquation
from autopar.program.program import Equation, fan_out_p
from autopar.program.walk import Scope, StaticDomain
from autopar.rules.table import entry_for

_LEFT, _LONGEST_LITERAL = 76, 12


@dataclasses.dataclass(frozen=True)
class Named:
    """A value: what the lines call it, and the layout in which it lies."""

    name: str
    layout: Layout


class Lines(LayoutDomain[Named], StaticDomain[Named]):
    """Writes down what runs while the walk goes through it."""

    def __init__(self, assignment: Assignment, *, depth: int = 0) -> None:
        super().__init__(assignment)
        self.assignment, self.mesh = assignment, assignment.mesh
        self.lines: list[str] = []
        self._depth = depth
        self._depths: dict[Scope[Named], int] = {}
        self._begun: dict[LoopEquation, tuple[int, int]] = {}
        self._module = ""
        self._count = 0

    def new_name(self) -> str:
        """A name that no other value has."""
        self._count += 1
        return f"v{self._count}"

    def write(self, text: str, scope: Scope[Named] | None = None, *, source: str = "") -> None:
        """Add a line, indented as deep as the program is nested; `source` stands at its right."""
        depth = self._depth if scope is None else self._depths.get(scope, self._depth)
        line = f"{'  ' * depth}{text}"
        self.lines.append(f"{line:<{_LEFT}}  {source}" if source else line)

    def type_text(self, aval: Aval, layout: Layout) -> str:
        """Element type and shape on one device, and the layout."""
        shape = ",".join(map(str, layout.local_shape(tuple(aval.shape), self.mesh)))
        return f"{aval.dtype}[{shape}] {layout.show(self.mesh)}"

    def layout_of(self, value: Named) -> Layout:
        """The layout in which a value lies."""
        return value.layout

    def literal(self, atom: Literal, scope: Scope[Named]) -> Named:
        """The literal itself, if it is short."""
        text = str(atom.val)
        shown = text if len(text) <= _LONGEST_LITERAL else "constant"
        return Named(shown, Layout.replicated(len(atom.aval.shape)))

    def bring(self, value: Named, form: Layout, aval: Aval, scope: Scope[Named], *, late: Named | None = None) -> Named:
        """The value in another layout, with a line for each move."""
        name = value.name
        for move in self.path(value, form, aval):
            made = self.new_name()
            wait = "" if late is None else f", once {late.name} is there"
            self.write(f"{self._move_text(move, aval, made, name)}{wait}", scope)
            name = made
        return Named(name, form)

    def _move_text(self, move: Move, aval: Aval, made: str, given: str) -> str:
        typed = f"{made}: {self.type_text(aval, move.target)}"
        axes = " and ".join(self.mesh.names(move.axes))
        how = f" ({move.monoid})" if move.monoid and move.kind != "reduce-scatter" else ""
        if move.kind in LOCAL_KINDS:
            return f"   {typed} = {move.kind} over {axes}{how} of {given}"
        size = bytes_text(move.payload(tuple(aval.shape), self.mesh) * itemsize_of(aval))
        return f">> {typed} = {move.kind} over {axes}{how} of {given}, {size}"

    def operation(self, eqn: Equation, scope: Scope[Named]) -> Sequence[Named]:
        """The line of an equation that is not a loop, after those of the moves that it asks for."""
        wanted = zip(eqn.invars, self.layouts.operand_layouts(eqn), strict=True)
        before = len(self.lines)
        operands = [self.need(atom, layout, scope).name for atom, layout in wanted]
        moves, self.lines[before:] = self.lines[before:], []
        layouts = self.layouts.result_layouts(eqn)
        if eqn.primitive is fan_out_p:
            self.lines += moves
            return [Named(operands[0], layout) for layout in layouts]
        self._enter_module(eqn, scope)
        self.lines += moves
        names = [self.new_name() for _ in eqn.outvars]
        typed = [
            f"{name}: {self.type_text(v.aval, layout)}"
            for name, v, layout in zip(names, eqn.outvars, layouts, strict=True)
        ]
        text = f"   {', '.join(typed)} = {eqn.primitive.name}({', '.join(operands)})"
        self.write(text, scope, source=_place(eqn))
        self._write_exchanges(eqn, scope)
        return [Named(name, layout) for name, layout in zip(names, layouts, strict=True)]

    def _enter_module(self, eqn: Equation, scope: Scope[Named]) -> None:
        path, how = module_path(eqn), transformations(eqn)
        phase = ", made again" if RECOMPUTED in how else ", backward" if "transpose" in how else ""
        module = f"{path}{phase}"
        if path and module != self._module:
            self._module = module
            self.write(f"# {module}", scope)

    def _write_exchanges(self, eqn: Equation, scope: Scope[Named]) -> None:
        """The collectives that an operation performs by itself."""
        divided = entry_for(eqn).divided
        if divided is None:
            return
        axes = dict(self.assignment.strategies[eqn].factor_axes)
        for one in divided(eqn, self.assignment.rules[eqn], axes, self.mesh).exchanges:
            names = " and ".join(self.mesh.names(one.axes))
            when = "beside its work" if one.is_beside_work else "before its work"
            self.write(
                f">>    in it: {one.count} collective-permute over {names}, {bytes_text(one.bytes)} each, {when}", scope
            )

    def begin(self, eqn: LoopEquation, scope: Scope[Named]) -> None:
        """The moves of a loop's operands, and its heading."""
        if eqn.branch_number is not None:
            self.need(eqn.branch_number, Layout.replicated(0), scope)
        for nested in eqn.nested:
            for entry in nested.entries:
                if entry.passed is None:
                    self.need(entry.atom, self.layouts.operand_layout(entry), scope)
        self._module = ""
        self._begun[eqn] = self._depths.get(scope, self._depth), 0
        times = f", {eqn.loop.trips} times" if eqn.loop.kind == "scan" else ""
        self.write(f"{eqn.loop.kind}{times}:", scope, source=_place(eqn))

    def enter(self, entry: Entry, scope: Scope[Named], inner: Scope[Named]) -> Named:
        """The line of an input of a nested program."""
        self._begin_nested(entry, inner)
        outer = self.need(entry.atom, self.layouts.operand_layout(entry), scope)
        layout = self.layouts.entry_layout(entry)
        if layout == outer.layout and entry.filled.name == "CONSTANT":
            return Named(outer.name, layout)
        named = Named(self.new_name(), layout)
        what = {"CARRY": "at first", "ROW": "row of", "CONSTANT": "is"}[entry.filled.name]
        self.write(f"   {named.name}: {self.type_text(entry.var.aval, layout)} {what} {outer.name}", inner)
        return named

    def pass_on(self, entry: Entry, value: Named, inner: Scope[Named]) -> Named:
        """The input of a condition."""
        self._begin_nested(entry, inner)
        return self.bring(value, self.layouts.entry_layout(entry), entry.var.aval, inner)

    def _begin_nested(self, entry: Entry, inner: Scope[Named]) -> None:
        """The heading of a nested program, when its first input is asked for."""
        if inner in self._depths:
            return
        loop, (depth, number) = entry.loop, self._begun[entry.loop]
        self._begun[loop] = depth, number + 1
        self._depths[inner] = depth + 1
        if len(loop.nested) > 1:
            word = f"branch {number}" if loop.branch_number is not None else ("body", "condition")[number]
            self.lines.append(f"{'  ' * (depth + 1)}{word}:")

    def leave(self, exit_: Exit, inner: Scope[Named]) -> Named:
        """The line of a result of a nested program."""
        named = self.bring(inner.value(exit_.atom), self.layouts.exit_layout(exit_), exit_.atom.aval, inner)
        if exit_.goes is not Goes.BRANCH:
            word = {Goes.CARRY: "next", Goes.ROW: "row", Goes.DECISION: "again if"}[exit_.goes]
            self.write(f"   {word} {named.name}", inner)
        return named

    def finish(self, eqn: LoopEquation, ends: Mapping[Exit, Named], scope: Scope[Named]) -> Sequence[Named]:
        """The lines of a loop's results."""
        self._module = ""
        layouts = self.layouts.result_layouts(eqn)
        results = [Named(self.new_name(), layout) for layout in layouts]
        for named, exits, v in zip(results, eqn.results, eqn.outvars, strict=True):
            ended = " or ".join(dict.fromkeys(ends[exit_].name for exit_ in exits))
            whole = "rows" if exits[0].goes is Goes.ROW else "last"
            what = ended if exits[0].goes is Goes.BRANCH else f"{whole} {ended}"
            self.write(f"   {named.name}: {self.type_text(v.aval, named.layout)} = {what}", scope)
        return results


def _place(eqn: Equation) -> str:
    """The user's line without column and function."""
    line = source_text(source_line(eqn)).partition(" ")[0]
    return ":".join(line.split(":")[:2])

"""The strategies of a program's operations by name, as a plan keeps them, and back.

In: an `Assignment`. Out: a table of layouts, a table of strategies, and the name of a strategy for each equation of
`Program.walk`. Back: the tables of a plan, and the graph of its program; out comes a choice for each node. Or, of tables that are
known to be of this program, the assignment at once, without a graph. What can go wrong: the plan asks for what the program does
not offer; PlanError names the equation and its source line.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Protocol

from autopar.compat import source_line
from autopar.content import digest_of
from autopar.errors import PlanError
from autopar.intra_op.choices.catalogue import Catalogue
from autopar.intra_op.choices.graph import Node, StrategyGraph
from autopar.intra_op.choices.strategies import ShardingStrategy
from autopar.intra_op.lowering.assignment import Assignment
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.plan import NamedLayout, NamedStrategy, Plan
from autopar.program.loops import LoopEquation
from autopar.program.program import Equation, Program
from autopar.rules.factor_rule import FactorRule

_Sides = tuple[tuple[Layout, ...], tuple[Layout, ...]]
"""The layouts of the operands and of the results."""


@dataclasses.dataclass(frozen=True)
class NamedStrategies:
    """What a plan holds of its program's operations; see `Plan`."""

    layouts: tuple[NamedLayout, ...]
    strategies: tuple[NamedStrategy, ...]
    equations: tuple[str, ...]


class Named(Protocol):
    """The tables of a program's strategies; a plan has them."""

    @property
    def layouts(self) -> Sequence[NamedLayout]:
        """The layouts, once each."""

    @property
    def strategies(self) -> Sequence[NamedStrategy]:
        """The strategies, once each."""

    @property
    def equations(self) -> Sequence[str]:
        """The name of each equation's strategy, in the order of `Program.walk`."""


def name_strategies(assignment: Assignment) -> NamedStrategies:
    """The tables of an assignment, in order of appearance."""
    tables = _Tables(assignment.mesh)
    equations = tuple(tables.name(eqn, *_sides(assignment, eqn)) for eqn in assignment.program.walk())
    return NamedStrategies(tuple(tables.layouts.values()), tuple(tables.strategies.values()), equations)


def _sides(assignment: Assignment, eqn: Equation) -> _Sides:
    strategy = assignment.strategies.get(eqn)
    return ((), assignment.joins.get(eqn, ())) if strategy is None else (strategy.inputs, strategy.outputs)


class _Tables:
    def __init__(self, mesh: LogicalMesh) -> None:
        self.mesh = mesh
        self.layouts: dict[Layout, NamedLayout] = {}
        self.strategies: dict[tuple[str, _Sides], NamedStrategy] = {}
        self._names: set[str] = set()

    def name(self, eqn: Equation, takes: tuple[Layout, ...], gives: tuple[Layout, ...]) -> str:
        """The name of the strategy of an equation: its primitive, and a few digits of a digest of the layouts."""
        primitive = f"{eqn.primitive.name}"
        key = primitive, (takes, gives)
        if key not in self.strategies:
            sides = tuple(tuple(self._layout(one) for one in side) for side in (takes, gives))
            digest = digest_of(sides)
            names = (f"{primitive}-{digest[:length]}" for length in range(4, len(digest)))
            self.strategies[key] = NamedStrategy(self._new_name(names), *sides)
        return self.strategies[key].name

    def _layout(self, layout: Layout) -> str:
        if layout not in self.layouts:
            shown = layout.show(self.mesh)
            name = self._new_name(f"{shown}{chr(39) * count}" for count in range(len(self.layouts) + 1))
            partial = tuple((self.mesh.axis_names[axis], monoid) for axis, monoid in layout.partial)
            self.layouts[layout] = NamedLayout(name, layout.spec(self.mesh), partial)
        return self.layouts[layout].name

    def _new_name(self, names: Iterable[str]) -> str:
        """The first of these names that is free."""
        name = next(name for name in names if name not in self._names)
        self._names.add(name)
        return name


def choose_by_name(graph: StrategyGraph, plan: Plan) -> list[int]:
    """For each node of a program's graph the number of the choice that a plan names. Raises PlanError.

    The nodes of inputs, of outputs and of conditions have one choice.
    """
    plans = _Asked(graph, plan)
    numbers = [0] * len(graph.nodes)
    for number, node in enumerate(graph.nodes):
        if node.equation is not None:
            numbers[number] = plans.choice(node.equation, node, plans.sides(node.equation))
    for eqn, joins in graph.joins.items():
        _, gives = plans.sides(eqn)
        if len(gives) != len(joins):
            raise plans.not_offered(eqn)
        for number, layout in zip(joins, gives, strict=True):
            numbers[number] = plans.choice(eqn, graph.nodes[number], ((layout,), (layout,)))
    _check_moves(graph, numbers, plans)
    return numbers


def assign_by_name(
    program: Program,
    named: Named,
    catalogue: Catalogue,
    *,
    inputs: Sequence[Layout],
    outputs: Sequence[Layout],
    copy_span: int | None = None,
) -> Assignment:
    """The assignment whose tables `name_strategies` made, of this very program; without seconds, and without a graph.

    Args:
        program: the program that is assigned.
        named: the tables.
        catalogue: what its operations may choose on the mesh.
        inputs, outputs: the layouts of the program's inputs, and of its outputs.
        copy_span: see `Assignment`.

    Raises:
        PlanError: the tables are those of another program. Layouts that an operation does not offer are found, moves between
            layouts that are not allowed are not.
    """
    rows, equations = _rows(named, catalogue.mesh), list(program.walk())
    rules: dict[Equation, FactorRule] = {}
    strategies: dict[Equation, ShardingStrategy] = {}
    joins: dict[Equation, tuple[Layout, ...]] = {}
    known: dict[Hashable, ShardingStrategy | None] = {}
    for eqn, name in _pair(equations, named, rows):
        if isinstance(eqn, LoopEquation):
            joins |= {eqn: rows[name][1]} if eqn.branch_number is not None else {}
            continue
        rules[eqn] = rule = catalogue.rule(eqn)
        key = catalogue.rules.likeness(eqn, rule), name
        if key not in known:
            known[key] = _find(catalogue, eqn, rule, rows[name])
        if (found := known[key]) is None:
            raise _not_offered(equations, eqn, rows[name], catalogue.mesh)
        strategies[eqn] = found
    return Assignment(
        program=program,
        mesh=catalogue.mesh,
        spaces=catalogue.spaces,
        rules=rules,
        strategies=strategies,
        joins=joins,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        copy_span=copy_span,
    )


def _find(catalogue: Catalogue, eqn: Equation, rule: FactorRule, sides: _Sides) -> ShardingStrategy | None:
    """The first strategy of an equation with these layouts; None if it offers none."""
    carried = frozenset(monoid for side in sides for layout in side for _, monoid in layout.partial)
    offered = catalogue.offered(eqn, rule, carried)
    return next((one for one in offered if (one.inputs, one.outputs) == sides), None)


def _rows(named: Named, mesh: LogicalMesh) -> dict[str, _Sides]:
    """The layouts of each strategy, by its name."""
    axis = {name: number for number, name in enumerate(mesh.axis_names)}
    layouts = {one.name: _layout_of(one, axis) for one in named.layouts}
    return {
        one.name: (tuple([layouts[name] for name in one.takes]), tuple([layouts[name] for name in one.gives]))
        for one in named.strategies
    }


def _pair(equations: Sequence[Equation], named: Named, rows: Mapping[str, _Sides]) -> Iterable[tuple[Equation, str]]:
    """Each equation with the name of its strategy. Raises PlanError unless each has one."""
    if len(named.equations) != len(equations) or not rows.keys() >= set(named.equations):
        raise PlanError(
            f"the plan names no strategy of its own for each of the {len(equations)} equations of the step: plan again"
        )
    return zip(equations, named.equations, strict=True)


def _not_offered(equations: Sequence[Equation], eqn: Equation, sides: _Sides, mesh: LogicalMesh) -> PlanError:
    """The error of an equation that cannot be done as the plan says."""
    takes, gives = (", ".join(layout.show(mesh) for layout in side) for side in sides)
    return PlanError(f"{_called(equations, eqn)} cannot be done as {takes} -> {gives}, as the plan says: plan again")


def _called(equations: Sequence[Equation], eqn: Equation) -> str:
    """An equation for an error."""
    return f"equation {equations.index(eqn)}, `{eqn.primitive.name}` at {source_line(eqn)},"


class _Asked:
    """What a plan asks of each equation of a program."""

    def __init__(self, graph: StrategyGraph, plan: Plan) -> None:
        self.mesh, self.equations = graph.mesh, list(graph.program.walk())
        rows = _rows(plan, graph.mesh)
        self.asked = {eqn: rows[name] for eqn, name in _pair(self.equations, plan, rows)}
        self._offered: dict[int, Mapping[_Sides, int]] = {}

    def sides(self, eqn: Equation) -> _Sides:
        """The layouts that an equation is to take and give."""
        return self.asked[eqn]

    def choice(self, eqn: Equation, node: Node, sides: _Sides) -> int:
        """The number of these layouts among the choices of a node, which belongs to the equation."""
        key = id(node.choices)
        if key not in self._offered:
            strategies = node.choices.strategies
            self._offered[key] = {(s.inputs, s.outputs): n for n, s in reversed([*enumerate(strategies)])}
        if sides not in self._offered[key]:
            raise self.not_offered(eqn)
        return self._offered[key][sides]

    def not_offered(self, eqn: Equation) -> PlanError:
        """The error of an equation that cannot be done as the plan says."""
        return _not_offered(self.equations, eqn, self.asked[eqn], self.mesh)

    def name(self, eqn: Equation) -> str:
        """An equation for an error."""
        return _called(self.equations, eqn)


def _layout_of(named: NamedLayout, axis: Mapping[str, int]) -> Layout:
    return Layout(
        tuple(tuple(axis[name] for name in axes) for axes in named.spec),
        tuple((axis[name], monoid) for name, monoid in named.partial),
    )


def _check_moves(graph: StrategyGraph, numbers: Sequence[int], asked: _Asked) -> None:
    """Raise PlanError if a value cannot get from the layout in which it is made to one in which it is taken."""
    for (one, other), seconds in graph.edges.items():
        if math.isinf(seconds[numbers[one], numbers[other]]):
            found = [graph.nodes[number].equation for number in (other, one)]
            names = [asked.name(eqn) for eqn in found if eqn is not None]
            raise PlanError(
                f"{names[0] if names else 'an output'} takes a value in a layout to which the collectives allowed cannot bring "
                "it: allow all kinds of collectives, or plan again"
            )
    for number, node in enumerate(graph.nodes):
        if node.equation is not None and math.isinf(graph.costs[number][numbers[number]]):
            raise asked.not_offered(node.equation)

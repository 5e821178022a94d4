"""The strategies that a choice picks: what the lowering runs, what memory and moves are counted from.

In: a `StrategyGraph` and a choice number for each of its nodes. Out: an `Assignment`, which knows the layout in which every
operand is taken and every result is given. Nothing can go wrong here that the graph has not refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from autopar.intra_op.choices.catalogue import Spaces
from autopar.intra_op.choices.graph import Source, StrategyGraph
from autopar.intra_op.choices.strategies import ShardingStrategy
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.layouts.moves import Move
from autopar.program.loops import Entry, Exit, Filled, Goes, LoopEquation
from autopar.program.program import Atom, Equation, Program
from autopar.rules.factor_rule import FactorRule


class Layouts(Protocol):
    """The layouts in which a program's values are taken and given; see `Assignment`."""

    @property
    def mesh(self) -> LogicalMesh:
        """The mesh that they are layouts on."""

    @property
    def spaces(self) -> Spaces:
        """The moves between them."""

    @property
    def inputs(self) -> tuple[Layout, ...]:
        """Those of the program's inputs."""

    @property
    def outputs(self) -> tuple[Layout, ...]:
        """Those of its outputs."""

    @property
    def copy_span(self) -> int | None:
        """For how many equations an unused gathered copy is kept; None: until its last use."""

    def operand_layouts(self, eqn: Equation) -> tuple[Layout, ...]:
        """Those in which an equation takes its operands."""

    def result_layouts(self, eqn: Equation) -> tuple[Layout, ...]:
        """Those of its results."""

    def entry_layout(self, entry: Entry) -> Layout:
        """That in which a nested program takes an input."""

    def operand_layout(self, entry: Entry) -> Layout:
        """That in which the operand for it is needed."""

    def exit_layout(self, exit_: Exit) -> Layout:
        """That to which a result of a nested program is brought."""


@dataclasses.dataclass(frozen=True, eq=False)
class WholeLayouts:
    """The layouts of a program of which every device has the whole: nothing is ever moved."""

    program: Program
    mesh: LogicalMesh
    spaces: Spaces
    copy_span: None = None

    @property
    def inputs(self) -> tuple[Layout, ...]:
        """Those of the program's inputs."""
        return _whole(self.program.invars)

    @property
    def outputs(self) -> tuple[Layout, ...]:
        """Those of its outputs."""
        return _whole(self.program.outvars)

    def operand_layouts(self, eqn: Equation) -> tuple[Layout, ...]:
        """Those in which an equation takes its operands."""
        return _whole(eqn.invars)

    def result_layouts(self, eqn: Equation) -> tuple[Layout, ...]:
        """Those of its results."""
        return _whole(eqn.outvars)

    def entry_layout(self, entry: Entry) -> Layout:
        """That in which a nested program takes an input."""
        return Layout.replicated(len(entry.var.aval.shape))

    def operand_layout(self, entry: Entry) -> Layout:
        """That in which the operand for it is needed."""
        return Layout.replicated(len(entry.atom.aval.shape))

    def exit_layout(self, exit_: Exit) -> Layout:
        """That to which a result of a nested program is brought."""
        return Layout.replicated(len(exit_.atom.aval.shape))


def _whole(atoms: Sequence[Atom]) -> tuple[Layout, ...]:
    return tuple(Layout.replicated(len(atom.aval.shape)) for atom in atoms)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Assignment:
    """One choice for a whole program: a rule and a strategy per equation, and the layouts where control flow joins.

    `seconds`: for each equation its predicted seconds and how often it runs, without moves.
    """

    program: Program
    mesh: LogicalMesh
    spaces: Spaces
    rules: Mapping[Equation, FactorRule]
    strategies: Mapping[Equation, ShardingStrategy]
    joins: Mapping[Equation, tuple[Layout, ...]]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    copy_span: int | None = None
    seconds: tuple[tuple[Equation, float, float], ...] = ()

    def operand_layouts(self, eqn: Equation) -> tuple[Layout, ...]:
        """The layouts in which an equation takes its operands; of a cond, in which its first branch does."""
        if not isinstance(eqn, LoopEquation):
            return self.strategies[eqn].inputs
        entries = [entry for nested in reversed(eqn.nested) for entry in nested.entries if entry.passed is None]
        by_place = {entry.place: self.operand_layout(entry) for entry in entries}
        return tuple(by_place.get(place, Layout.replicated(0)) for place in range(len(eqn.invars)))

    def result_layouts(self, eqn: Equation) -> tuple[Layout, ...]:
        """The layouts of an equation's results."""
        if not isinstance(eqn, LoopEquation):
            return self.strategies[eqn].outputs
        ends = [(exits[0], self.exit_layout(exits[0])) for exits in eqn.results]
        return tuple(layout.prepend() if exit_.goes is Goes.ROW else layout for exit_, layout in ends)

    def entry_layout(self, entry: Entry) -> Layout:
        """The layout in which a nested program takes an input: that of the fan_out which is its only user."""
        return self.strategies[entry.head].inputs[0]

    def operand_layout(self, entry: Entry) -> Layout:
        """The layout that the operand must have of which a nested program takes an input."""
        layout = self.entry_layout(entry)
        return layout.prepend() if entry.filled is Filled.ROW else layout

    def exit_layout(self, exit_: Exit) -> Layout:
        """The layout to which a result of a nested program is brought; rows stay in that in which they are made."""
        if exit_.carry is not None:
            return self.entry_layout(exit_.carry)
        if exit_.goes is Goes.BRANCH:
            return self.joins[exit_.loop][exit_.place]
        if exit_.goes is Goes.ROW and exit_.maker is not None:
            return self.strategies[exit_.maker].outputs[0]
        return Layout.replicated(len(exit_.atom.aval.shape))


def copy_span_of(program: Program) -> int:
    """After how many equations without a use a gathered copy is dropped, when memory is short: an eighth of the step."""
    return max(8, len(program.equations) // 8)


def is_gathered(path: Sequence[Move]) -> bool:
    """Whether a copy is made by gathering alone, so that it can be dropped and made again."""
    return bool(path) and all(move.kind == "all-gather" for move in path)


def assign(graph: StrategyGraph, choice: Sequence[int], *, copy_span: int | None = None) -> Assignment:
    """The strategies that `choice`, one number per node, picks from a graph.

    `copy_span`: a gathered copy that no equation has used for so many equations is gathered again; None keeps copies until
    their last use.
    """

    def picked(number: int) -> ShardingStrategy:
        return graph.nodes[number].choices.strategies[choice[number]]

    inputs: dict[int, Layout] = {}
    rules: dict[Equation, FactorRule] = {}
    strategies: dict[Equation, ShardingStrategy] = {}
    for number, node in enumerate(graph.nodes):
        if node.equation is not None and node.rule is not None:
            rules[node.equation] = node.rule
            strategies[node.equation] = picked(number)
        elif node.input_number is not None:
            inputs[node.input_number] = picked(number).outputs[0]
    joins = {eqn: tuple(picked(n).outputs[0] for n in numbers) for eqn, numbers in graph.joins.items()}

    def output(atom: Atom, source: Source | None) -> Layout:
        return Layout.replicated(len(atom.aval.shape)) if source is None else picked(source.node).outputs[0]

    return Assignment(
        program=graph.program,
        mesh=graph.mesh,
        spaces=graph.spaces,
        rules=rules,
        strategies=strategies,
        joins=joins,
        inputs=tuple(inputs[i] for i in range(len(graph.program.invars))),
        outputs=tuple(output(a, s) for a, s in zip(graph.program.outvars, graph.outputs, strict=True)),
        copy_span=copy_span,
        seconds=tuple(
            (node.equation, float(node.choices.seconds[choice[number]]), node.trips)
            for number, node in enumerate(graph.nodes)
            if node.equation is not None
        ),
    )

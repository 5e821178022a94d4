"""The strategies that a choice picks: what the lowering runs, what memory and moves are counted from.

In: a `StrategyGraph` and a choice number for each of its nodes. Out: an `Assignment`. Nothing can go wrong here that the graph
has not refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from autopar.intra_op.choices.catalogue import Spaces
from autopar.intra_op.choices.graph import Source, StrategyGraph
from autopar.intra_op.choices.strategies import ShardingStrategy
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.layouts.moves import Move
from autopar.program.program import Atom, Equation, Program
from autopar.rules.factor_rule import FactorRule


@dataclasses.dataclass(frozen=True, eq=False)
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
        graph.program,
        graph.mesh,
        graph.spaces,
        rules,
        strategies,
        joins,
        tuple(inputs[i] for i in range(len(graph.program.invars))),
        tuple(output(a, s) for a, s in zip(graph.program.outvars, graph.outputs, strict=True)),
        copy_span,
        tuple(
            (node.equation, float(node.choices.seconds[choice[number]]), node.trips)
            for number, node in enumerate(graph.nodes)
            if node.equation is not None
        ),
    )

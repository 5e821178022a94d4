"""The strategies of a step on a mesh of microbatches, as a graph, and what its nodes and edges say of phases.

In: a traced step, its rules and a number of microbatches. Out: a `StrategyGraph` on which every input and output of the step is
whole. Its prices are bytes moved, as no operation has a time of its own here. What can go wrong: as in `build_graph`.
"""

from __future__ import annotations

import numpy as np

from autopar.compat import Literal as JaxLiteral
from autopar.cost_model.hardware import Cluster
from autopar.disjoint_sets import DisjointSets
from autopar.intra_op.choices.catalogue import Catalogue
from autopar.intra_op.choices.graph import StrategyGraph, Use, build_graph
from autopar.intra_op.choices.known_equations import RuleBook
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.choices.strategies import ShardingStrategy
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.microbatches.tuning import Tuning
from autopar.program.program import Equation
from autopar.program.step import TracedStep

_OPTIONS = PlannerOptions(allow_redundant_compute=True, kinds=frozenset())


def graph_over_time(traced: TracedStep, microbatches: int, rules: RuleBook, tuning: Tuning) -> StrategyGraph:
    """The strategies of the step on a mesh of microbatches, on which every input and output of the step is whole."""
    program, catalogue = traced.program, catalogue_over_time(microbatches, rules, tuning)
    return build_graph(
        program,
        catalogue.mesh,
        catalogue.cluster,
        _OPTIONS,
        input_layouts=[(Layout.replicated(len(v.aval.shape)),) for v in program.invars],
        output_layouts=[(Layout.replicated(len(v.aval.shape)),) for v in program.outvars],
        catalogue=catalogue,
    )


def _machine(tuning: Tuning) -> Cluster:
    return Cluster.uniform((0.0,), (0.0,), flops_per_s=tuning.flops_per_byte, memory_bytes_per_s=1.0)


def catalogue_over_time(microbatches: int, rules: RuleBook, tuning: Tuning) -> Catalogue:
    """What operations may choose on a mesh of so many microbatches, and the moves between layouts on it."""
    return Catalogue(LogicalMesh((microbatches,), ("time",)), _machine(tuning), _OPTIONS, rules)


def adds_terms(eqn: Equation, strategy: ShardingStrategy) -> bool:
    """Whether an equation joins several values that are all partial over time."""
    partial = [
        bool(layout.partial)
        for atom, layout in zip(eqn.invars, strategy.inputs, strict=True)
        if not isinstance(atom, JaxLiteral)
    ]
    return len(partial) > 1 and all(partial)


def uses_between(graph: StrategyGraph) -> dict[tuple[int, int], Use]:
    """For each pair of connected nodes the largest value that passes."""
    found: dict[tuple[int, int], Use] = {}
    for use in graph.uses:
        u, v = use.source.node, use.target
        pair = (u, v) if u < v else (v, u)
        held = found.get(pair)
        if held is None or np.prod(use.aval.shape) > np.prod(held.aval.shape):
            found[pair] = use
    return found


def unconnected(graph: StrategyGraph) -> list[tuple[int, int]]:
    """Pairs of nodes that link the parts of each loop that no value links, so that they share a phase."""
    parts = DisjointSets(range(len(graph.nodes)))
    for u, v in graph.edges:
        if graph.nodes[u].loop is not None and graph.nodes[u].loop is graph.nodes[v].loop:
            parts.join((u, v))
    pairs, first = [], dict[Equation, int]()
    for number, node in enumerate(graph.nodes):
        if node.loop is not None:
            anchor = first.setdefault(node.loop, number)
            if parts.find(anchor) != parts.find(number):
                pairs.append((anchor, number))
                parts.join((anchor, number))
    return pairs

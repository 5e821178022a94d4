"""Choices that differ only in which of several equal mesh axes does what, merged into classes.

Along axes of equal size and equal links, a strategy costs the same whichever of them shards what; only neighbours that must
agree tell the axes apart. Merged, the choices of a mesh of three or more axes are about as few as those of a mesh of two:

    cost of a class         the least of its members
    edge of two classes     the least over pairs of members

In: a problem and the classes of its choices. Out: the merged problem, whose optimum is a lower bound of the real one, with
memory or without, and the choices that its bound leaves open. What can go wrong: the bound is loose where neighbours disagree on
which axis is which; then less is ruled out, never too much.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from autopar.solver.dual_ascent import bound_costs
from autopar.solver.presolve import reduce_costs
from autopar.solver.problem import ChoiceProblem, Classes, Costs, Edges, MemoryRow


def merge_classes(problem: ChoiceProblem, classes: Classes) -> ChoiceProblem:
    """The problem with one choice per class: a relaxation."""
    nodes = {v: take_least(cost, classes[v]) for v, cost in problem.costs.nodes.items()}
    costs = Costs(nodes, merge_edges(problem.costs.edges, classes))
    rows = [_merge_row(row, classes) for row in problem.rows]
    return dataclasses.replace(problem, costs=costs, rows=rows, classes=None, ties=None)


def _merge_row(row: MemoryRow, classes: Classes) -> MemoryRow:
    return dataclasses.replace(row, bytes_of={v: take_least(b, classes[v]) for v, b in row.bytes_of.items()})


def take_least(values: np.ndarray, classes: np.ndarray, axis: int = 0) -> np.ndarray:
    """The least value of each class along `axis`, whose length becomes the number of classes."""
    order = np.argsort(classes, kind="stable")
    starts = np.flatnonzero(np.diff(classes[order], prepend=-1))
    least: np.ndarray = np.minimum.reduceat(np.take(values, order, axis=axis), starts, axis=axis)
    return least


def merge_edges(edges: Edges, classes: Classes) -> dict[tuple[int, int], np.ndarray]:
    """The edges between classes (classes of u, classes of v); edges that share a matrix and classes share the result."""
    shared: dict[tuple[int, int, int], np.ndarray] = {}
    merged = {}
    for (u, v), matrix in edges.items():
        key = (id(matrix), id(classes[u]), id(classes[v]))
        if key not in shared:
            shared[key] = take_least(take_least(matrix, classes[u]), classes[v], axis=1)
        merged[u, v] = shared[key]
    return merged


def find_open_choices(merged: ChoiceProblem, classes: Classes, upper_s: float) -> list[np.ndarray] | None:
    """The choices whose class may be part of a merged choice of at most `upper_s` seconds; None if there is no such choice.

    Dominance is left out: what is dominated in the relaxation may be needed in the problem.

    Returns:
        An ascending int array (choices open,) per node.
    """
    left = [np.arange(len(number)) for number in classes]
    if not np.isfinite(upper_s):
        return left
    reduced = reduce_costs(merged.costs, dominance=False, budget=merged.budget)
    bounded = bound_costs(reduced.costs, tuning=merged.tuning, budget=merged.budget)
    alive = bounded.below(upper_s - reduced.constant)
    for v, keep in alive.items():
        left[v] = np.flatnonzero(np.isin(classes[v], reduced.open_choices[v][keep]))
    return left if all(len(choices) for choices in left) else None

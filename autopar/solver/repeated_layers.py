"""Deep models: layers that look alike choose alike.

In: a choice problem. Out: the same with `Ties` if it has more than `Tuning.deep` nodes and ties leave much fewer, so that
the time to solve it hardly grows with the depth. Nodes are alike if they and all nodes within `Tuning.radius` edges have the same
costs and are joined by the same matrices (colour refinement). What can go wrong: neighbours that are alike had better differ; the
bound of the whole problem then shows a gap, and the whole problem is solved (`solve.py`).

Lifting. A reparametrisation with any messages is a bound (`dual_ascent.py`), so messages may be shared: dual ascent runs on the
tied problem, which does not grow with the depth, and each edge of the whole problem gets the messages of the edge that it was
added to, divided by the number of edges there. The bound of the whole is then

    sum_v min_p (c_v[p] + sum_e x_e[p]) + sum_e min_pq (R_e[p, q] - x_e[p] - y_e[q])

where nodes whose costs and messages agree, and edges whose matrices and messages agree, are looked at once (Mladenov, Ahmadi
and Kersting, "Lifted linear programming", 2012: on an equitable partition nothing is lost). Nodes near the ends of the stack
have other messages than their class, so the bound is below what dual ascent on the whole problem reaches, and further sweeps
may lower it; a few are the best (`Tuning.lifted_sweeps`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.solver.classes import merge_classes
from autopar.solver.dual_ascent import bound_costs, pass_messages
from autopar.solver.outcomes import Chosen
from autopar.solver.presolve import reduce_costs
from autopar.solver.problem import ChoiceProblem, Costs, MemoryRow, Ties
from autopar.solver.within_memory import mix_choices

Pair = tuple[int, int]
"""Two classes of nodes, the lower number first."""
Shares = Mapping[Pair, tuple[np.ndarray, np.ndarray]]
"""The messages that each edge between two classes gets at its ends: seconds, arrays (choices,)."""


def tie_layers(problem: ChoiceProblem) -> ChoiceProblem:
    """The problem with ties between alike nodes if it is deep and they make it much smaller; else as it is."""
    count, tuning = len(problem.costs.nodes), problem.tuning
    if count <= tuning.deep:
        return problem
    ties = tie_nodes(problem.costs, radius=tuning.radius)
    return dataclasses.replace(problem, ties=ties) if len(ties.costs.nodes) <= tuning.worth * count else problem


def tie_nodes(costs: Costs, *, radius: int) -> Ties:
    """The objective in which nodes that are alike up to `radius` edges away choose alike."""
    classes = number_alike(costs, radius=radius)
    nodes: dict[int, np.ndarray] = {}
    for v, cost in costs.nodes.items():
        c = int(classes[v])
        nodes[c] = nodes[c] + cost if c in nodes else np.asarray(cost, dtype=float)
    edges: dict[tuple[int, int], np.ndarray] = {}
    for (a, b), whole in _sum_edges(costs, classes):
        if a == b:
            nodes[a] = nodes[a] + np.diagonal(whole)
        else:
            edges[a, b] = edges[a, b] + whole if (a, b) in edges else whole
    return Ties(classes, Costs(nodes, edges))


def _sum_edges(costs: Costs, classes: np.ndarray) -> list[tuple[tuple[int, int], np.ndarray]]:
    """The edges between classes a <= b, those of one matrix added up; a pair of classes may come several times."""
    repeated: dict[tuple[int, int, int, bool], int] = {}
    matrices: dict[int, np.ndarray] = {}
    for (u, v), matrix in costs.edges.items():
        a, b = int(classes[u]), int(classes[v])
        key = (min(a, b), max(a, b), id(matrix), a > b)
        repeated[key] = repeated.get(key, 0) + 1
        matrices[id(matrix)] = matrix
    summed = []
    for (a, b, number, is_flipped), times in repeated.items():
        matrix = matrices[number].T if is_flipped else matrices[number]
        summed.append(((a, b), times * matrix if times > 1 else matrix))
    return summed


def number_alike(costs: Costs, *, radius: int) -> np.ndarray:
    """The class of each node 0, 1, ..., numbered in order of first appearance: an int array (nodes,)."""
    count, edges = len(costs.nodes), costs.edges
    if not count:
        return np.zeros(0, dtype=np.int64)
    pairs = np.array(list(edges), dtype=np.int64).reshape(-1, 2)
    matrix = _number([id(m) for m in edges.values()])
    one_way = np.concatenate([pairs[:, 0], pairs[:, 1]])
    other = np.concatenate([pairs[:, 1], pairs[:, 0]])
    label = np.concatenate([2 * matrix, 2 * matrix + 1])
    colour = _number([cost.tobytes() for cost in costs.nodes.values()])
    order = np.argsort(one_way, kind="stable")
    one_way, other, label = one_way[order], other[order], label[order]
    ends = np.searchsorted(one_way, np.arange(count + 1)) * np.dtype(np.int64).itemsize
    places = list(itertools.pairwise(ends.tolist()))
    for _ in range(radius):
        seen = _number(list(zip(label.tolist(), colour[other].tolist(), strict=True)))
        arranged = np.lexsort((seen, one_way))
        around = seen[arranged].tobytes()
        refined = _number([(c, around[a:b]) for c, (a, b) in zip(colour.tolist(), places, strict=True)])
        if refined.max(initial=-1) == colour.max(initial=-1):
            break
        colour = refined
    return colour


def _number(keys: Sequence[object]) -> np.ndarray:
    """Equal keys get equal numbers, in order of first appearance."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def restrict_to_ties(problem: ChoiceProblem, ties: Ties) -> ChoiceProblem:
    """The problem over classes of nodes: a restriction."""
    rows: list[MemoryRow] = [ties.sum_row(row) for row in problem.rows]
    classes = None if problem.classes is None else ties.take_first(problem.classes)
    return dataclasses.replace(problem, costs=ties.costs, rows=rows, classes=classes, ties=None)


def untie(problem: ChoiceProblem, ties: Ties, found: Chosen, lower_bound_s: float) -> Chosen:
    """A choice with ties as one of the whole problem; where memory is short, alike layers take turns in using it.

    Two choices are mixed: the one found, and the fastest that was tried, which is too large.

    Args:
        problem: the whole problem.
        ties: its ties.
        found: the choice, a number per class of nodes.
        lower_bound_s: a bound of the whole problem.
    """
    tried = tuple(map(ties.extend, found.tried))
    whole = dataclasses.replace(found, numbers=ties.extend(found.numbers), tried=tried)
    lower = max(lower_bound_s, found.lower_bound_s)
    if not tried or found.seconds - lower <= problem.tuning.good_enough * found.seconds:
        return whole
    mixed = mix_choices(problem, (whole.numbers, tried[0]))
    if not isinstance(mixed, Chosen) or mixed.seconds >= whole.seconds:
        return whole
    return dataclasses.replace(mixed, tried=tried)


def bound_whole(problem: ChoiceProblem, found: Chosen | None = None) -> float:
    """A lower bound of the whole problem without memory, in seconds.

    Args:
        problem: its bound is only looked for if it `is_proven`; with a cutoff only before a choice is known, to be compared with
            the cutoff; without one only after, to be compared with the choice. Otherwise the bound is 0.
        found: a choice of the whole problem.
    """
    if not problem.is_proven or (found is None) != bool(np.isfinite(problem.cutoff_s)):
        return 0.0
    reduced = reduce_costs(problem.costs, dominance=False, budget=problem.budget)
    start, gap = None, problem.tuning.near
    if found is not None:
        start = reduced.restrict(found.numbers)
        gap *= found.seconds / max(found.seconds - reduced.constant, 1e-30)
    cutoff = problem.cutoff_s - reduced.constant
    bounded = bound_costs(
        reduced.costs, gap=gap, start=start, cutoff=cutoff, tuning=problem.tuning, budget=problem.budget
    )
    return bounded.lower + reduced.constant


def lift_bound(problem: ChoiceProblem) -> float:
    """Seconds that no choice of the whole problem goes below, memory left out."""
    ties = problem.ties
    if problem.classes is not None:
        problem, ties = merge_classes(problem, problem.classes), None
    if ties is None:
        ties = tie_nodes(problem.costs, radius=problem.tuning.radius)
    counts = Counter(_pair(ties, edge) for edge in problem.costs.edges)
    best = -np.inf
    for messages in pass_messages(ties.costs, counts, sweeps=problem.tuning.lifted_sweeps, budget=problem.budget):
        shares = {pair: (x / counts[pair], y / counts[pair]) for pair, (x, y) in messages.items()}
        best = max(best, _evaluate(problem.costs, ties, shares))
    return float(best)


def _pair(ties: Ties, edge: Pair) -> Pair:
    a, b = int(ties.class_of[edge[0]]), int(ties.class_of[edge[1]])
    return (a, b) if a < b else (b, a)


@dataclasses.dataclass(frozen=True, eq=False)
class _Edge:
    """An edge of the whole problem after messages: what its ends take over (choices,), and the least that is left."""

    messages: tuple[np.ndarray, np.ndarray]
    least: float


def _evaluate(costs: Costs, ties: Ties, shares: Shares) -> float:
    """The bound of the whole problem with these messages."""
    edges: dict[tuple[int, int, int], _Edge] = {}
    around: dict[int, list[tuple[tuple[int, int, int], int]]] = {v: [] for v in costs.nodes}
    total, big = 0.0, _more_than_any(costs)
    class_of = ties.class_of.tolist()
    for (u, v), matrix in costs.edges.items():
        key = (class_of[u], class_of[v], id(matrix))
        if key not in edges:
            edges[key] = _reparametrise(np.where(np.isfinite(matrix), matrix, big), key[0], key[1], shares)
        total += edges[key].least
        around[u].append((key, 0))
        around[v].append((key, 1))
    nodes: dict[object, float] = {}
    for v, cost in costs.nodes.items():
        alike = (class_of[v], tuple(sorted(around[v])))
        if alike not in nodes:
            parts = [edges[key].messages[end] for key, end in around[v]]
            nodes[alike] = float(np.min(sum(parts, np.where(np.isfinite(cost), cost, big))))
        total += nodes[alike]
    return total


def _reparametrise(matrix: np.ndarray, a: int, b: int, shares: Shares) -> _Edge:
    """An edge between a node of class a and one of class b."""
    if a == b:  # the tied problem holds such an edge as costs of its node
        x = y = np.diagonal(matrix) / 2
    elif a < b:
        x, y = shares[a, b]
    else:
        y, x = shares[b, a]
    return _Edge((x, y), float((matrix - x[:, None] - y[None, :]).min()))


def _more_than_any(costs: Costs) -> float:
    """Seconds above those of every finite choice, to take the place of infinity."""
    arrays = (*costs.nodes.values(), *costs.edges.values())
    most = {id(a): float(np.max(a[np.isfinite(a)], initial=0.0)) for a in arrays}
    return 4.0 * sum(most[id(a)] for a in arrays) + 1.0

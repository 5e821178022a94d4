"""Costs of a strategy graph of which no plan takes less: what several readers share counts once.

The graph pays D(s, t) for every reader that takes a value lying in layout s in layout t. The program pays once for all
readers of t (`lowering/copies.py`). So a choice may take less than it costs, and a bound of costs need not be one of the step.
Out come costs R with R(x*) <= step(x*) for some best choice x*, so that a bound of R is one of every step. Elsewhere R may be
above it. For a value of n readers and k uses:

    of one reader     it pays once for the operands that it takes in one layout. That is exact.
    in general        each reader pays D / n.
    of a free fan-out, which has one operand and could as well lie in any layout t that a reader takes:
        k = 2         both pay D. If both take t, let the fan-out lie in t: by the triangle inequality of shortest paths
                      D(a, t) <= D(a, s) + D(s, t), so nothing is dearer, and nothing is shared.
        k > 2         let D' be D with slices and masks for nothing. If several take t, and D'(t, s) = 0, let the fan-out
                      lie in t: who takes u pays D'(t, u) <= D'(t, s) + D'(s, u), no more than before. They pay D'.
                      If D'(t, s) > 0, at most min(k - 1, n) of them take t, as else all do: each pays D' over that.

Of all best choices x* is one with the least R. Each exchange above lowers R, so x* needs none. That holds where the operand of
the fan-out is not itself shared: it has no other reader, or one, of a free fan-out, which is then exchanged first. Layouts t in
which the fan-out cannot lie (a term of a sum that it is not) cost D / n. What can go wrong: a reader that the program serves by a
copy of its own counts as one that shares. That makes the bound lower, never wrong.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np

from autopar.avals import is_opaque, itemsize_of
from autopar.intra_op.choices.catalogue import Catalogue
from autopar.intra_op.choices.graph import StrategyGraph
from autopar.intra_op.choices.uses import Use
from autopar.layouts.mesh import Layout
from autopar.solver.problem import Costs

_NOTHING_S = 1e-11
"""More than the local moves of one change of layout take where slices and masks are free."""


def least_costs(graph: StrategyGraph, catalogue: Catalogue) -> Costs | None:
    """Costs with a least value that no plan takes less than; None if those of the graph are such.

    Args:
        graph: the graph, whose costs and edges pay each reader.
        catalogue: the one that it was built from.
    """
    sharing = _Sharing(graph)
    changed = {use: how for use in graph.uses if (how := sharing.of(use)) is not None}
    prices = _Prices(graph, catalogue)
    parts: dict[tuple[int, int], list[tuple[float, np.ndarray]]] = defaultdict(list)
    pairs = {_pair(use) for use in changed}
    is_other = False
    for use in graph.uses:
        if use.source.node != use.target and _pair(use) in pairs:
            matrix, is_changed = prices.of(use, changed.get(use))
            is_other |= is_changed
            parts[_pair(use)].append((use.trips * use.exposed, matrix))
    if not is_other:
        return None
    edges = dict(graph.edges)
    edges.update((pair, prices.add_up(each)) for pair, each in parts.items())
    return Costs.of(graph.costs, edges)


def _pair(use: Use) -> tuple[int, int]:
    return (use.source.node, use.target) if use.source.node < use.target else (use.target, use.source.node)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shared:
    """How a use is paid.

    Attributes:
        readers: among so many where nothing better is known.
        most: at most so many take a layout; 1 where it is paid in full.
        homes: the choices of the giver by which it may lie in any layout; None if it is not free.
        is_free: whether slices and masks count nothing.
        before: operands of the same reader that take the same value.
    """

    readers: int
    most: int
    homes: tuple[int, ...] | None
    is_free: bool
    before: tuple[int, ...]


class _Sharing:
    """Which uses of a graph share copies, and how these are paid."""

    def __init__(self, graph: StrategyGraph) -> None:
        self.graph = graph
        self.givers: dict[int, list[Use]] = defaultdict(list)
        self.takers: dict[Hashable, list[Use]] = defaultdict(list)
        self.groups: dict[int, set[Hashable]] = defaultdict(set)
        for use in graph.uses:
            self.givers[use.target].append(use)
            if use.source.node != use.target:
                self.takers[_group(use)].append(use)
                self.groups[use.source.node].add(_group(use))
        self._homes: dict[int, tuple[int, ...] | None] = {}

    def of(self, use: Use) -> _Shared | None:
        """How a use is paid; None if it is paid in full."""
        if use.held or is_opaque(use.aval) or use.source.node == use.target:
            return None
        uses = self.takers[_group(use)]
        readers = len({one.target for one in uses})
        before = tuple(one.operand for one in uses if one.target == use.target and one.operand < use.operand)
        is_free = self._is_split(use.target) or (readers > 1 and self._is_split(use.source.node))
        homes = self.homes(use.source.node) if readers > 1 else None
        most = readers if homes is None else 1 if len(uses) == 2 else min(len(uses) - 1, readers)
        if readers == 1 and not before and not is_free:
            return None
        return _Shared(readers=readers, most=most, homes=homes, is_free=is_free, before=before)

    def homes(self, node: int) -> tuple[int, ...] | None:
        """The choices of a fan-out that is free to lie in the layout of each; None if the node is none."""
        if node not in self._homes:
            self._homes[node] = None  # a loop of fan-outs is not free
            self._homes[node] = self._find_homes(node)
        return self._homes[node]

    def _is_split(self, node: int) -> bool:
        """Whether a node is a free fan-out with more than two uses."""
        return self.homes(node) is not None and sum(len(self.takers[group]) for group in self.groups[node]) > 2

    def _find_homes(self, node: int) -> tuple[int, ...] | None:
        if not self.graph.nodes[node].is_fan_out:
            return None
        if len(self.givers[node]) != 1 or len(self.groups[node]) != 1:
            return None
        (given,), (group,) = self.givers[node], self.groups[node]
        weights = [use.trips * use.exposed for use in self.takers[group]]
        if given.held or given.stacked or given.source.stacked or given.trips * given.exposed > min(weights):
            return None
        homes = self._open_choices(node)
        return homes if homes and self._is_apart(given, node, homes) else None

    def _open_choices(self, node: int) -> tuple[int, ...]:
        """The choices of a node that are possible, if all cost the same and give what they take; else none."""
        cost, strategies = self.graph.costs[node], self.graph.nodes[node].choices.strategies
        homes = tuple(np.flatnonzero(np.isfinite(cost)).tolist())
        is_even = len({float(cost[p]) for p in homes}) == 1
        return homes if is_even and all(strategies[p].inputs == strategies[p].outputs for p in homes) else ()

    def _is_apart(self, given: Use, node: int, homes: tuple[int, ...]) -> bool:
        """Whether a fan-out's operand is its own, or one of two uses of a free fan-out that can lie wherever this one can."""
        beside = self.takers[_group(given)]
        if len(beside) == 1:
            return True
        above = self.homes(given.source.node) if len(beside) == 2 else None
        if above is None:
            return False
        return set(self._layouts(node, homes)) <= set(self._layouts(given.source.node, above))

    def _layouts(self, node: int, choices: Sequence[int]) -> list[Layout]:
        strategies = self.graph.nodes[node].choices.strategies
        return [strategies[p].outputs[0] for p in choices]


def _group(use: Use) -> Hashable:
    """What uses have in common that may share a copy."""
    return use.source, use.trips


class _Prices:
    """Matrices of seconds by how a use is paid; equal uses share one."""

    def __init__(self, graph: StrategyGraph, catalogue: Catalogue) -> None:
        self.graph, self.catalogue = graph, catalogue
        self._known: dict[Hashable, tuple[np.ndarray, bool]] = {}
        self._sums: dict[Hashable, np.ndarray] = {}

    def of(self, use: Use, how: _Shared | None) -> tuple[np.ndarray, bool]:
        """Seconds for each pair of choices, the lower node's first, and whether they differ from those of the graph."""
        giver, taker = self.graph.nodes[use.source.node].choices, self.graph.nodes[use.target].choices
        flipped = use.source.node > use.target
        stacked = (use.source.stacked, use.stacked)
        size = (tuple(use.aval.shape), itemsize_of(use.aval))
        key = (id(giver), use.source.output, id(taker), use.operand, stacked, size, flipped, use.held, how)
        if key not in self._known:
            matrix = self.catalogue.relayout_between(
                use.aval, giver, use.source.output, taker, use.operand, stacked=stacked, held=use.held
            )
            least = matrix if how is None else np.minimum(matrix, self._share(use, matrix, how))
            is_other = not np.array_equal(least, matrix)
            least = least if is_other else matrix
            self._known[key] = least.T if flipped else least, is_other
        return self._known[key]

    def add_up(self, parts: Sequence[tuple[float, np.ndarray]]) -> np.ndarray:
        """The sum of seconds times matrices of `of`."""
        key = tuple((times, id(matrix)) for times, matrix in parts)
        if key not in self._sums:
            self._sums[key] = np.asarray(sum(times * matrix for times, matrix in parts))
        return self._sums[key]

    def _share(self, use: Use, matrix: np.ndarray, how: _Shared) -> np.ndarray:
        """What a reader pays of a use: a row for each choice of the giver, a column for each of the reader."""
        gives = self._layouts(use.source.node, use.source.output, given=True, stacked=use.source.stacked)
        needs = self._layouts(use.target, use.operand, given=False, stacked=use.stacked)
        paid = matrix
        if how.is_free:
            free = self.catalogue.relayout(use.aval, gives, needs, is_local_free=True)
            paid = np.maximum(free - _NOTHING_S, 0.0)
        part = np.full(paid.shape, 1.0 / how.readers)
        if how.homes is not None:
            homes = {gives[p] for p in how.homes}
            can_lie = [need in homes for need in needs]
            part[:, can_lie] = 1.0
            if how.most > 1:
                back = self.catalogue.relayout(use.aval, needs, gives, is_local_free=True).T > _NOTHING_S
                part[back & np.array(can_lie)] = 1.0 / how.most
        paid = np.where(np.isfinite(paid), paid * part, np.inf)
        again = [self._layouts(use.target, operand, given=False, stacked=use.stacked) for operand in how.before]
        paid[:, [need in earlier for need, *earlier in zip(needs, *again, strict=True)]] = 0.0
        return np.where(np.isfinite(matrix), paid, np.inf)

    def _layouts(self, node: int, place: int, *, given: bool, stacked: bool) -> list[Layout]:
        strategies = self.graph.nodes[node].choices.strategies
        layouts = [(s.outputs if given else s.inputs)[place] for s in strategies]
        return [la.prepend() for la in layouts] if stacked else layouts

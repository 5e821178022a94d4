"""Values that are handed on twice: as they lie, and gathered.

In: a strategy graph, which pays a change of layout once for each reader. Out: `SharedCopies`, the same objective with more
choices for some fan_outs. A fan_out hands a value on in one layout. If some readers want shards and others the whole, the graph
pays either a gathering for each of the latter or a slice for each of the former, where the program gathers once and has the
shard already (`lowering/copies.py`). A choice more, for a layout L and one F that is gathered from it, says so:

    takes L, costs what gathering F from L takes, and hands on F to who wants that, L to all others

It stands for the fan_out that keeps L, which is what the program runs: it gathers where the first reader wants F, once for all.
So a choice of the wider objective is one of the graph, and costs at least what the program does. What can go wrong: a problem
that takes longer to solve; fan_outs of two readers, which share nothing, and values too small to matter get no such choice.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np

from autopar.avals import Aval, is_opaque
from autopar.intra_op.choices.graph import StrategyGraph
from autopar.intra_op.choices.uses import Use
from autopar.layouts.mesh import Layout
from autopar.solver.outcomes import Chosen
from autopar.solver.problem import Costs


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _More:
    """The choices that a fan_out gets beside those of its strategies.

    Attributes:
        kept: the strategy that keeps L, ints (more,).
        layouts: F.
        seconds: of gathering F from L once, floats (more,).
    """

    kept: np.ndarray
    layouts: tuple[Layout, ...]
    seconds: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class SharedCopies:
    """An objective in which fan_outs may hand on two layouts.

    Attributes:
        costs: the objective: nodes and edges as in the graph, their first choices too.
        more: the choices that come after a fan_out's strategies, by node.
        strategies: how many strategies each of these nodes has.
    """

    costs: Costs
    more: Mapping[int, _More]
    strategies: Mapping[int, int]

    def strategies_of(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The strategy of each node that a choice stands for."""
        found = list(numbers)
        for node, more in self.more.items():
            beyond = found[node] - self.strategies[node]
            if beyond >= 0:
                found[node] = int(more.kept[beyond])
        return tuple(found)

    def choose_strategies(self, choice: Chosen) -> Chosen:
        """The same choice, of strategies."""
        return dataclasses.replace(choice, numbers=self.strategies_of(choice.numbers))


def share_copies(graph: StrategyGraph, *, least_s: float) -> SharedCopies:
    """The objective of a graph with fan_outs that hand on two layouts, where that may save so much.

    Args:
        graph: the strategies of each node.
        least_s: seconds; only values of which a slice takes more are looked at.
    """
    uses: dict[int, list[Use]] = collections.defaultdict(list)
    givers: dict[int, list[Use]] = collections.defaultdict(list)
    for use in graph.uses:
        uses[use.source.node].append(use)
        givers[use.target].append(use)
    known: dict[Hashable, _More | None] = {}
    more: dict[int, _More] = {}
    for number, readers in uses.items():
        node = graph.nodes[number]
        if not node.is_fan_out or not _can_share(number, readers, givers[number]):
            continue
        aval, times = readers[0].aval, readers[0].trips * readers[0].exposed
        is_open = np.isfinite(graph.costs[number]).tobytes()
        key = (id(node.choices), is_open, tuple(aval.shape), aval.dtype, times)
        if key not in known:
            known[key] = _find_more(graph, number, aval, times, least_s=least_s)
        found = known[key]
        if found is not None:
            more[number] = found
    return SharedCopies(_widen(graph, more), more, {v: len(graph.costs[v]) for v in more})


def _can_share(node: int, readers: Sequence[Use], given: Sequence[Use]) -> bool:
    """Whether more than two read one value alike, and none of them, nor who gives it, is tied to the fan_out otherwise."""
    if len(readers) < 3 or is_opaque(readers[0].aval):
        return False
    if len({(use.source, use.trips, use.exposed) for use in readers}) > 1:
        return False
    around = {use.source.node for use in given}
    return not any(use.held for use in (*readers, *given)) and not any(
        use.target in around or use.target == node for use in readers
    )


def _find_more(graph: StrategyGraph, number: int, aval: Aval, times: float, *, least_s: float) -> _More | None:
    cost, strategies = graph.costs[number], graph.nodes[number].choices.strategies
    places = {s.outputs[0]: i for i, s in enumerate(strategies) if np.isfinite(cost[i]) and s.inputs == s.outputs}
    found = []
    for kept, i in places.items():
        for gathered in _gathered(kept) if not kept.partial else ():
            space = graph.spaces.between(aval, kept, gathered)
            here, there = space.index[kept], space.index[gathered]
            if times * space.seconds[there, here] > least_s and np.isfinite(space.seconds[here, there]):
                found.append((i, gathered, times * float(space.seconds[here, there])))
    if not found:
        return None
    kept_of, layouts, seconds_of = zip(*found, strict=True)
    return _More(kept=np.array(kept_of), layouts=layouts, seconds=np.array(seconds_of))


def _gathered(layout: Layout) -> Iterator[Layout]:
    """The layouts that gathering along one axis, and along all, makes of one."""
    axes = layout.sharded_axes
    for gone in ({frozenset({axis}) for axis in axes} | {frozenset(axes)}) if axes else ():
        yield Layout(tuple(tuple(a for a in dim if a not in gone) for dim in layout.dims))


def _widen(graph: StrategyGraph, more: Mapping[int, _More]) -> Costs:
    """The objective with these choices more."""
    nodes = list(graph.costs)
    for node, extra in more.items():
        nodes[node] = np.concatenate([nodes[node], nodes[node][extra.kept] + extra.seconds])
    uses: dict[tuple[int, int], list[Use]] = collections.defaultdict(list)
    for use in graph.uses:
        uses[use.source.node, use.target].append(use)
    known: dict[Hashable, np.ndarray] = {}
    edges = {}
    for (u, v), matrix in graph.edges.items():
        first, second = more.get(u), more.get(v)
        if first is None and second is None:
            edges[u, v] = matrix
            continue
        ways = _reads(graph, uses[u, v]), _reads(graph, uses[v, u])
        key = (id(matrix), id(first), id(second), *ways)
        if key not in known:
            wide = matrix if first is None else _with_rows(graph, matrix, first, v, uses[u, v])
            known[key] = wide if second is None else _with_rows(graph, wide.T, second, u, uses[v, u]).T
        edges[u, v] = known[key]
    return Costs.of(nodes, edges)


def _reads(graph: StrategyGraph, uses: Sequence[Use]) -> Hashable:
    """Equal for uses whose readers want the same layouts."""
    return tuple((id(graph.nodes[use.target].choices), use.operand, use.stacked) for use in uses)


def _with_rows(graph: StrategyGraph, matrix: np.ndarray, more: _More, other: int, uses: Sequence[Use]) -> np.ndarray:
    """Seconds for each choice of a fan_out, and of another node, which reads it by `uses`, or gives it the value."""
    rows = matrix[more.kept]
    for use in uses:
        needs = [s.inputs[use.operand] for s in graph.nodes[other].choices.strategies]
        needs = [la.prepend() for la in needs] if use.stacked else needs
        wants = np.array([[need == layout for need in needs] for layout in more.layouts])
        columns = wants.shape[1]  # choices beyond the strategies of the other node come after both are widened
        rows[:, :columns] = np.where(
            wants, np.maximum(rows[:, :columns] - more.seconds[:, None], 0.0), rows[:, :columns]
        )
    return np.concatenate([matrix, rows])

"""Leaves of the state that lie where the moves to all their readers, and from their new values, cost least.

In: a choice for a strategy graph. Out: the choice with other layouts for some inputs that the step gives back, and other
strategies for their fan_outs. The search prices the edges of a graph one by one. A weight that is whole between steps, of which
each device updates a shard, costs it the same as one that lies in shards: it is gathered once a step, at the end or at the
beginning, and its update takes a shard of the gathered copy. The program gathers as well, but who has the shard already need not
cut it out, and holds less between steps. So what surrounds a leaf stays as it is chosen, and the leaf goes where the program pays
least:

    moves from the new value to layout L  +  least over F of: the move from L to F, those from F to each layout that readers want

where F is the layout of the fan_out, if the leaf has several readers. What can go wrong: a leaf may be read later than its
fan_out is, so its gathered copy lives longer; who has a limit asks again.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

from autopar.avals import Aval, is_opaque
from autopar.intra_op.choices.graph import StrategyGraph
from autopar.intra_op.choices.uses import Use
from autopar.intra_op.lowering.late_gathers import wanted_layout
from autopar.layouts.mesh import Layout
from autopar.layouts.moves import LayoutSpace
from autopar.solver.outcomes import Numbers

_LEAST_GAIN = 1e-9
"""Relative gain for which a leaf is moved."""


def settle_leaves(graph: StrategyGraph, numbers: Numbers) -> Numbers:
    """The choice in which each leaf that the step gives back lies where its moves cost least.

    No leaf takes more bytes of a device than before.

    Args:
        graph: the strategies of each node.
        numbers: the strategy that is chosen for each of them.
    """
    readers: Mapping[int, list[Use]] = collections.defaultdict(list)
    givers: Mapping[int, list[Use]] = collections.defaultdict(list)
    for use in graph.uses:
        readers[use.source.node].append(use)
        if graph.nodes[use.target].input_number is not None:
            givers[use.target].append(use)
    found, known = list(numbers), dict[Hashable, tuple[int, int | None]]()
    for leaf, given in givers.items():
        uses = readers[leaf]
        if not uses or any(use.held or use.source.stacked for use in (*uses, *given)) or is_opaque(uses[0].aval):
            continue
        names = {leaf, *(use.target for use in uses if graph.nodes[use.target].is_fan_out)}
        if any(use.source.node in names for use in given):
            continue  # the step gives it back as it is
        surroundings = _Surroundings.of(graph, numbers, leaf, given, uses, readers)
        key = surroundings.key
        if key not in known:
            known[key] = surroundings.settle()
        found[leaf], spread = known[key]
        if spread is not None:
            found[uses[0].target] = spread
    return tuple(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Surroundings:
    """What is chosen around a leaf.

    Attributes:
        aval: the leaf's shape and type.
        graph: the graph.
        choices: the layouts that it may have; `chosen`: the number of the one that it has.
        new: the layouts of the new value, each with how many seconds of a move count; other readers' copies do not help it.
        to_spread: how many seconds of the move to the fan_out count; None if the leaf has no fan_out.
        spreads: the layouts in which the fan_out gives it, None where it changes them; `spread`: the number of the chosen one.
        wanted: the layouts in which it is read, each with how many seconds of a move count.
    """

    aval: Aval
    graph: StrategyGraph
    choices: tuple[Layout, ...]
    chosen: int
    new: tuple[tuple[Layout, float], ...]
    to_spread: float | None
    spreads: tuple[Layout | None, ...]
    spread: int
    wanted: Mapping[Layout, float]

    @classmethod
    def of(
        cls,
        graph: StrategyGraph,
        numbers: Numbers,
        leaf: int,
        given: Sequence[Use],
        uses: Sequence[Use],
        readers: Mapping[int, Sequence[Use]],
    ) -> _Surroundings:
        """Those of an input, which gets its new value by `given` and is read by `uses`."""
        choices = graph.nodes[leaf].choices.strategies
        target = graph.nodes[uses[0].target]
        is_spread = len(uses) == 1 and target.is_fan_out
        last = readers[uses[0].target] if is_spread else uses

        def made(use: Use) -> Layout:
            node = graph.nodes[use.source.node]
            return node.choices.strategies[numbers[use.source.node]].outputs[use.source.output]

        spreads = [s.outputs[0] if s.inputs[0] == s.outputs[0] else None for s in target.choices.strategies]
        return cls(
            aval=uses[0].aval,
            graph=graph,
            choices=tuple(one.outputs[0] for one in choices),
            chosen=numbers[leaf],
            new=tuple((made(use), use.trips * use.exposed) for use in given),
            to_spread=uses[0].trips * uses[0].exposed if is_spread else None,
            spreads=tuple(spreads) if is_spread else (),
            spread=numbers[uses[0].target] if is_spread else 0,
            wanted=_most((wanted_layout(graph, numbers, use), use) for use in last),
        )

    @property
    def key(self) -> Hashable:
        """Equal for leaves that are settled alike."""
        wanted = tuple(sorted(self.wanted.items(), key=repr))
        return self.aval, self.choices, self.chosen, self.new, wanted, self.to_spread, self.spreads, self.spread

    def settle(self) -> tuple[int, int | None]:
        """(the number of the leaf's layout, that of the fan_out's strategy or None if there is no fan_out)."""
        space = self._space()
        here = [space.index[layout] for layout in self.choices]
        given_s = sum(
            (weight * space.seconds[space.index[made], here] for made, weight in self.new), np.zeros(len(here))
        )
        wanted = [space.index[layout] for layout in self.wanted]
        wanted_s = space.seconds[:, wanted] @ np.array([*self.wanted.values()])
        if self.to_spread is None:
            totals, spread_of = given_s + wanted_s[here], None
            now_s = totals[self.chosen]
        else:
            places = np.array([-1 if one is None else space.index[one] for one in self.spreads])
            read_s = np.where(places < 0, np.inf, wanted_s[places])
            read_s = self.to_spread * space.seconds[np.ix_(here, np.maximum(places, 0))] + read_s
            totals, spread_of = given_s + read_s.min(axis=1), read_s.argmin(axis=1)
            now_s = given_s[self.chosen] + read_s[self.chosen, self.spread]
        held = np.array([one.local_bytes(self.aval.shape, 1, self.graph.mesh) for one in self.choices])
        totals = np.where(held <= held[self.chosen], totals, np.inf)
        best = int(totals.argmin())
        if not totals[best] < now_s * (1 - _LEAST_GAIN):
            return self.chosen, None if spread_of is None else self.spread
        return best, None if spread_of is None else int(spread_of[best])

    def _space(self) -> LayoutSpace:
        """The moves between all layouts that may be of concern."""
        made = [layout for layout, *_ in self.new]
        layouts = (*self.choices, *made, *self.wanted, *(one for one in self.spreads if one is not None))
        monoids = {monoid for layout in layouts for _, monoid in layout.partial}
        return self.graph.spaces.of(self.aval, tuple(sorted(monoids)))


def _most(pairs: Iterable[tuple[Layout, Use]]) -> dict[Layout, float]:
    """For each layout the most that a second of a move to it, or from it, counts: it is made once for all who want it."""
    found: dict[Layout, float] = {}
    for layout, use in pairs:
        found[layout] = max(found.get(layout, 0.0), use.trips * use.exposed)
    return found

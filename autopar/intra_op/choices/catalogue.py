"""What operations may choose on a mesh, what each choice costs, and what relayout between choices costs: looked up once.

In: a mesh, a machine, the planner's options; then one equation at a time. Out: its `StrategySet`, and matrices of seconds
between the layouts that one operation gives and another needs. Equal equations share a set and equal pairs a matrix, across
all graphs that are built from one catalogue: the layers and stages of one search differ little. Frozen but for what it has
looked up already. What can go wrong: a catalogue used for a machine whose prices have changed; make another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

from autopar.avals import Aval, dtype_name, is_opaque, itemsize_of
from autopar.cost_model.compute import roofline_s
from autopar.cost_model.hardware import Cluster
from autopar.errors import ArgumentError
from autopar.intra_op.choices.kernels import Traffic
from autopar.intra_op.choices.known_equations import RuleBook
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.choices.strategies import ShardingStrategy, most_divided, strategies_key, strategies_of
from autopar.intra_op.choices.within import Within, waited_s
from autopar.intra_op.xla_cpu.table import orders_of
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.layouts.moves import LayoutSpace, MoveTable, Network, size_key
from autopar.program.program import Equation
from autopar.rules.by_shape import everything_whole
from autopar.rules.factor_rule import FactorRule
from autopar.rules.flops import number_format
from autopar.rules.primitive_rule import PrimitiveRule
from autopar.rules.table import entry_for


@dataclasses.dataclass(frozen=True, eq=False)
class StrategySet:
    """Strategies shared by all equations that look alike, with the seconds and the output bytes per device of each.

    Attributes:
        strategies: the strategies.
        seconds: floats (strategies,).
        out_bytes: floats (strategies,).
        within: what devices exchange within the operation, whose waiting `seconds` count; None if they never do.
    """

    strategies: tuple[ShardingStrategy, ...]
    seconds: np.ndarray
    out_bytes: np.ndarray
    within: Within | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class _Offer:
    """Strategies of all rules that a mesh divides alike.

    Attributes:
        strategies: the strategies.
        kinds: one of each group that divides the work, every operand and every result in as many parts; contractions that copy
            an operand in another order apart, an operation takes equally long by all of a group.
        kind_of: the place of each strategy's in `kinds`, ints (strategies,).
    """

    strategies: tuple[ShardingStrategy, ...]
    kinds: tuple[ShardingStrategy, ...]
    kind_of: np.ndarray

    @classmethod
    def of(cls, strategies: tuple[ShardingStrategy, ...], mesh: LogicalMesh) -> _Offer:
        """Group strategies on a mesh."""
        numbers: dict[Hashable, int] = {}
        kinds: list[ShardingStrategy] = []
        kind_of = []
        for strategy in strategies:
            parts = tuple([mesh.ways(la.sharded_axes) for la in (*strategy.inputs, *strategy.outputs)])
            number = numbers.setdefault((strategy.ways, parts), len(kinds))
            if number == len(kinds):
                kinds.append(strategy)
            kind_of.append(number)
        return cls(strategies, tuple(kinds), np.array(kind_of, dtype=np.int64))


class Spaces:
    """Layout spaces by shape, made when first needed."""

    def __init__(self, network: Network, tables: dict[Hashable, MoveTable] | None = None) -> None:
        """`tables`: the moves of shapes that the mesh divides alike, which networks of one mesh and the same kinds share."""
        self.network = network
        self._tables = {} if tables is None else tables
        self._spaces: dict[tuple[tuple[int, ...], int, tuple[str, ...]], LayoutSpace] = {}

    def of(self, aval: Aval, monoids: tuple[str, ...]) -> LayoutSpace:
        """The space of values like `aval` that may be partial under `monoids`."""
        key = (tuple(aval.shape), itemsize_of(aval), monoids)
        if key not in self._spaces:
            like = (size_key(key[0], self.network.mesh), monoids)
            if like not in self._tables:
                self._tables[like] = MoveTable(key[0], self.network, monoids)
            self._spaces[key] = LayoutSpace(key[0], key[1], self.network, monoids, table=self._tables[like])
        return self._spaces[key]

    def between(self, aval: Aval, source: Layout, target: Layout) -> LayoutSpace:
        """A space that holds both layouts."""
        monoids = {m for layout in (source, target) for _, m in layout.partial}
        return self.of(aval, tuple(sorted(monoids)))


def network_of(cluster: Cluster, mesh: LogicalMesh, options: PlannerOptions) -> Network:
    """Collective costs of a cluster on a logical mesh."""
    try:
        costs = cluster.mesh_costs(mesh.shape)
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    device = cluster.device
    return Network(
        mesh=mesh,
        costs=costs,
        copy_s_per_byte=1.0 / device.sustained_bytes_per_s,
        kinds=options.kinds,
        transpose_s_per_byte=device.transpose_s_per_byte,
    )


class Catalogue:
    """Strategies and prices on one mesh of one machine."""

    def __init__(self, mesh: LogicalMesh, cluster: Cluster, options: PlannerOptions, rules: RuleBook) -> None:
        self.mesh, self.cluster, self.options, self.rules = mesh, cluster, options, rules
        network = network_of(cluster, mesh, options)
        tables: dict[Hashable, MoveTable] = {}
        self.spaces = Spaces(network, tables)
        self._free_spaces = Spaces(dataclasses.replace(network, copy_s_per_byte=0.0), tables)
        self._sets: dict[Hashable, StrategySet] = {}
        self._matrices: dict[Hashable, np.ndarray] = {}
        self._sums: dict[Hashable, np.ndarray] = {}
        self._offers: dict[Hashable, _Offer] = {}

    def fixed(self, layouts: tuple[Layout, ...]) -> StrategySet:
        """The choices of an input or output: one strategy per layout, at no cost."""
        key = ("input", layouts)
        if key not in self._sets:
            strategies = tuple(ShardingStrategy((), (la,), (la,), 1) for la in layouts)
            self._sets[key] = StrategySet(strategies, np.zeros(len(layouts)), np.zeros(len(layouts)))
        return self._sets[key]

    def plain(self, aval: Aval) -> tuple[Layout, ...]:
        """All layouts of a value that are not partial."""
        if is_opaque(aval):
            return (Layout.replicated(len(aval.shape)),)
        return tuple(la for la in self.spaces.of(aval, ()).layouts if la.is_ascending)

    def joined(self, aval: Aval) -> tuple[Layout, ...]:
        """All layouts in which branches may hand over a result, those of terms of a sum too: a gradient stays in terms."""
        monoids = () if is_opaque(aval) or aval.dtype == bool else ("sum",)
        return tuple(la for la in self.spaces.of(aval, monoids).layouts if la.is_ascending)

    def rule(self, eqn: Equation) -> FactorRule:
        """The rule of an equation, under which arrays of random keys are whole."""
        if any(is_opaque(v.aval) and v.aval.shape for v in (*eqn.invars, *eqn.outvars)):
            return everything_whole(eqn)
        return self.rules.rule(eqn)

    def offered(self, eqn: Equation, rule: FactorRule, carried: frozenset[str]) -> tuple[ShardingStrategy, ...]:
        """The strategies of `choices`, without what they cost."""
        is_divided = entry_for(eqn).heavy and not self.options.allow_redundant_compute
        return self._offer(rule, carried, is_divided=is_divided).strategies

    def choices(
        self, eqn: Equation, rule: FactorRule, carried: frozenset[str], *, traffic: Traffic | None = None
    ) -> StrategySet:
        """What an equation may choose; `carried`: monoids under which its linear operands may be partial.

        `traffic`: what it reads and writes as a part of its kernel; None where each equation is priced by itself.
        """
        key = (self.rules.likeness(eqn, rule), carried, traffic)
        if key not in self._sets:
            entry, flops = entry_for(eqn), self.rules.flops(eqn)
            offered = self._offer(rule, carried, is_divided=entry.heavy and not self.options.allow_redundant_compute)
            kinds, kind_of = offered.kinds, offered.kind_of
            if self.cluster.device.reorder_s_per_byte and orders_of(eqn) is not None:
                kinds, kind_of = offered.strategies, np.arange(len(offered.strategies))
            seconds = np.array([self._seconds(eqn, entry, flops, s, traffic=traffic) for s in kinds])
            out_bytes = np.array([self._out_bytes(eqn, s) for s in kinds], dtype=float)
            found = StrategySet(offered.strategies, seconds[kind_of], out_bytes[kind_of])
            self._sets[key] = self._with_exchanges(eqn, rule, entry, found)
        return self._sets[key]

    def _with_exchanges(self, eqn: Equation, rule: FactorRule, entry: PrimitiveRule, found: StrategySet) -> StrategySet:
        """The same choices, with what devices exchange within the operation and the work of the slowest of them."""
        if entry.divided is None:
            return found
        of_each = [entry.divided(eqn, rule, dict(s.factor_axes), self.mesh) for s in found.strategies]
        work_s = found.seconds * np.array([division.slowest for division in of_each])
        network = self.spaces.network
        waits = np.array([waited_s(d, network, float(s)) for d, s in zip(of_each, work_s, strict=True)])
        return dataclasses.replace(found, seconds=work_s + waits, within=Within(tuple(of_each), waits))

    def _offer(self, rule: FactorRule, carried: frozenset[str], *, is_divided: bool) -> _Offer:
        """The strategies of a rule; of those that divide the work the most ways alone, if `is_divided`."""
        key = (strategies_key(rule, self.mesh), carried, is_divided)
        if key not in self._offers:
            exchanges = "collective-permute" in self.options.kinds
            every, monoids = self.options.every_strategy, tuple(sorted(carried))
            strategies = strategies_of(rule, self.mesh, monoids=monoids, exchanges=exchanges, every_order=every)
            if not every:
                strategies = most_divided(strategies) if is_divided else strategies
                strategies = tuple(s for s in strategies if all(la.is_ascending for la in (*s.inputs, *s.outputs)))
            self._offers[key] = _Offer.of(strategies, self.mesh)
        return self._offers[key]

    def relayout(
        self, aval: Aval, gives: Sequence[Layout], needs: Sequence[Layout], *, is_local_free: bool = False
    ) -> np.ndarray:
        """Seconds from each layout of the first to each of the second; `is_local_free`: slices and masks take next to none."""
        if is_opaque(aval):
            return np.zeros((len(gives), len(needs)))
        monoids = {m for layout in (*gives, *needs) for _, m in layout.partial}
        spaces = self._free_spaces if is_local_free else self.spaces
        space = spaces.of(aval, tuple(sorted(monoids)))
        rows = [space.index[layout] for layout in gives]
        columns = [space.index[layout] for layout in needs]
        return space.seconds[np.ix_(rows, columns)]

    def relayout_between(
        self,
        aval: Aval,
        giver: StrategySet,
        output: int,
        taker: StrategySet,
        operand: int,
        *,
        stacked: tuple[bool, bool] = (False, False),
        flipped: bool = False,
        held: bool = False,
    ) -> np.ndarray:
        """Seconds of relayout for every pair of choices of who gives a value and who takes it; `flipped`: transposed.

        stacked: whether what is given, and what is taken, are the parts of a stack like `aval`. held: only equal layouts go
        together.
        """
        key = (id(giver), output, id(taker), operand, stacked, tuple(aval.shape), itemsize_of(aval), flipped, held)
        if key not in self._matrices:
            if flipped:
                matrix = self.relayout_between(aval, giver, output, taker, operand, stacked=stacked, held=held).T
            else:
                gives = [s.outputs[output] for s in giver.strategies]
                needs = [s.inputs[operand] for s in taker.strategies]
                matrix = self.relayout(
                    aval,
                    [la.prepend() for la in gives] if stacked[0] else gives,
                    [la.prepend() for la in needs] if stacked[1] else needs,
                )
                if held:
                    matrix = np.where([[give == need for need in needs] for give in gives], matrix, np.inf)
            self._matrices[key] = matrix
        return self._matrices[key]

    def add_up(self, parts: Sequence[tuple[float, np.ndarray]]) -> np.ndarray:
        """The sum of trips times matrices of `relayout_between`."""
        key = tuple((trips, id(matrix)) for trips, matrix in parts)
        if key not in self._sums:
            self._sums[key] = np.asarray(sum(trips * matrix for trips, matrix in parts))
        return self._sums[key]

    def whole_seconds(self, eqn: Equation, *, traffic: Traffic | None) -> tuple[float, float]:
        """Seconds of an equation that one device does alone: (arithmetic and what it moves, what it costs to start).

        Without copies of operands in another order, which other layouts may not need, and without tiles, which parts may fill.
        """
        inputs, outputs = (
            tuple(Layout.replicated(len(v.aval.shape)) for v in side) for side in (eqn.invars, eqn.outvars)
        )
        whole, entry, device = ShardingStrategy((), inputs, outputs, 1), entry_for(eqn), self.cluster.device
        seconds = self._seconds(eqn, entry, self.rules.flops(eqn), whole, traffic=traffic, has_tiles=False)
        if traffic is not None and not entry.heavy:
            launch_s = traffic.kernels * device.launch_s
            return seconds - launch_s, launch_s
        if entry.free:
            return 0.0, 0.0
        launch_s = 0.0 if entry.fused else device.launch_s
        return seconds - launch_s - self._reordered_bytes(eqn, whole) * device.reorder_s_per_byte, launch_s

    def _seconds(
        self,
        eqn: Equation,
        entry: PrimitiveRule,
        flops: float,
        strategy: ShardingStrategy,
        *,
        traffic: Traffic | None,
        has_tiles: bool = True,
    ) -> float:
        if traffic is not None and not entry.heavy:
            return self._kernel_s(eqn, entry, strategy, traffic)
        if entry.free:
            return 0.0
        made = self._out_bytes(eqn, strategy)
        read = [] if entry.fused else self._in_bytes(eqn, strategy)
        if entry.picks and read:
            read[0] = min(read[0], made)
        moved = made * (1.0 if traffic is None else traffic.writes[0]) + sum(read)
        flops = self._multiplied(eqn, entry, flops) / strategy.ways if entry.heavy else 0.0
        return self._between_s(eqn, entry, strategy) + roofline_s(
            self.cluster.device if has_tiles else dataclasses.replace(self.cluster.device, thread_blocks=None),
            flops=flops,
            moved_bytes=moved,
            dtype=number_format(eqn) if entry.heavy else dtype_name(eqn.outvars[0].aval.dtype),
            launched=not entry.fused,
            sizes=self._product_sizes(eqn, strategy) if entry.heavy else None,
            convolves=entry.convolves,
            reordered_bytes=self._reordered_bytes(eqn, strategy),
            random_bytes=self._drawn_bytes(eqn, strategy) if entry.random else 0.0,
        )

    def _multiplied(self, eqn: Equation, entry: PrimitiveRule, flops: float) -> float:
        """The operations that the device does, with those on zeros that a compiler without libraries multiplies, and those on
        rows that one without a kernel for groups masks."""
        device = self.cluster.device
        flops *= 1.0 if entry.holes is None or device.fuses else entry.holes(eqn)
        return flops if entry.masks is None or device.is_one_core else flops * entry.masks(eqn)

    def _between_s(self, eqn: Equation, entry: PrimitiveRule, strategy: ShardingStrategy) -> float:
        """Seconds in which an operation's own kernels hand values to each other, where memory and not arithmetic is the limit."""
        device = self.cluster.device
        if entry.between is None or not device.fuses:
            return 0.0
        return entry.between(eqn) / strategy.ways / device.kernel_bytes_per_s

    def _kernel_s(self, eqn: Equation, entry: PrimitiveRule, strategy: ShardingStrategy, traffic: Traffic) -> float:
        """Seconds of an equation's part of a kernel, which moves bytes and draws bits; of equals the least work is best."""
        made = [part * size for part, size in zip(traffic.writes, self._each_out_bytes(eqn, strategy), strict=True)]
        read = [part * size for part, size in zip(traffic.reads, self._in_bytes(eqn, strategy), strict=True)]
        if entry.picks and read:
            read[0] = min(read[0], float(self._out_bytes(eqn, strategy)))
        computed = 0.0 if entry.free else self.rules.tuning.tie * self._out_bytes(eqn, strategy)
        device = self.cluster.device
        drawn_s = device.random_s_per_byte * self._drawn_bytes(eqn, strategy) if entry.random else 0.0
        moved_s = (sum(made) + sum(read) + computed) / device.kernel_bytes_per_s
        return moved_s + drawn_s + traffic.kernels * device.launch_s

    def _reordered_bytes(self, eqn: Equation, strategy: ShardingStrategy) -> int:
        """Bytes per device of a contraction's operands that are copied with their dimensions in another order."""
        orders = orders_of(eqn) if self.cluster.device.reorder_s_per_byte else None
        if orders is None:
            return 0
        operands = zip(eqn.invars, strategy.inputs, strict=True)
        return sum(
            layout.local_bytes(v.aval.shape, itemsize_of(v.aval), self.mesh)
            for place, (v, layout) in enumerate(operands)
            if orders.copy_order(place, layout.local_shape(v.aval.shape, self.mesh)) is not None
        )

    def _product_sizes(self, eqn: Equation, strategy: ShardingStrategy) -> tuple[float, float, float] | None:
        """Elements per device of the two operands and the result of a contraction; None if it is not one of two operands."""
        if len(eqn.invars) != 2 or len(eqn.outvars) != 1:
            return None
        layouts = (*strategy.inputs, *strategy.outputs)
        left, right, result = (
            float(layout.local_bytes(v.aval.shape, 1, self.mesh))
            for v, layout in zip((*eqn.invars, *eqn.outvars), layouts, strict=True)
        )
        return left, right, result

    def _in_bytes(self, eqn: Equation, strategy: ShardingStrategy) -> list[int]:
        return [
            layout.local_bytes(v.aval.shape, itemsize_of(v.aval), self.mesh)
            for v, layout in zip(eqn.invars, strategy.inputs, strict=True)
        ]

    def _out_bytes(self, eqn: Equation, strategy: ShardingStrategy) -> int:
        return sum(self._each_out_bytes(eqn, strategy))

    def _drawn_bytes(self, eqn: Equation, strategy: ShardingStrategy) -> int:
        """Bytes per device of the random bits that an equation draws.

        Threefry makes two words for each number, which are joined into one. A draw costs as much in one equation as in two.
        """
        return max(self._each_out_bytes(eqn, strategy), default=0)

    def _each_out_bytes(self, eqn: Equation, strategy: ShardingStrategy) -> list[int]:
        return [
            layout.local_bytes(v.aval.shape, itemsize_of(v.aval), self.mesh)
            for v, layout in zip(eqn.outvars, strategy.outputs, strict=True)
        ]


class Catalogues:
    """The catalogues of one search, a mesh each, made when first needed."""

    def __init__(self) -> None:
        self.rules = RuleBook()
        self._made: dict[Hashable, Catalogue] = {}

    def of(self, mesh: LogicalMesh, cluster: Cluster, options: PlannerOptions) -> Catalogue:
        """The catalogue of a mesh."""
        key = (mesh, id(cluster), options)
        if key not in self._made:
            self._made[key] = Catalogue(mesh, cluster, options, self.rules)
        return self._made[key]

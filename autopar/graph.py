"""The strategy graph: what can be chosen, and what each choice costs.

In: a `Program`, a mesh and its costs, the layouts allowed for inputs and outputs. Out: a `StrategyGraph`. One node for
each equation and each input; a node's choices are its strategies, priced by the roofline. One edge for each pair of
nodes that pass values; its matrix holds, for every pair of choices, the seconds of relayout between what one produces
and the other needs. Nested programs are nodes of the same graph: their prices count once for every trip of the loop,
and the edges that cross a loop's boundary connect a value with its stack, or a carry with itself.

What can go wrong: a graph too large to build; equal equations share their strategies and equal edges their matrices, so
it grows with what differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autopar.compat import Literal, Var
from autopar.cost_model.compute import roofline_s
from autopar.cost_model.hardware import Cluster
from autopar.errors import ArgumentError
from autopar.factors import FactorRule
from autopar.mesh import Axes, Layout, LogicalMesh
from autopar.operators import everything_whole
from autopar.program import Equation, Program
from autopar.relayout import KINDS, LayoutSpace, Network
from autopar.rules import entry_for, flops_of, rule_for
from autopar.strategies import ShardingStrategy, strategies_of, undivided_dropped


@dataclasses.dataclass(frozen=True)
class PlannerOptions:
    """What the search may do. `every_strategy` keeps even those that never pay: for tests."""

    allow_redundant_compute: bool = False
    kinds: frozenset[str] = frozenset(KINDS)
    every_strategy: bool = False


@dataclasses.dataclass(frozen=True)
class BatchSplit:
    """Examples must be split over `axes` and no others wherever they are: `dims` says which dimension of which input has them."""

    dims: Mapping[int, int]
    axes: Axes


@dataclasses.dataclass(frozen=True, eq=False)
class StrategySet:
    """Strategies shared by all equations that look alike, with the seconds and the output bytes per device of each."""

    strategies: tuple[ShardingStrategy, ...]
    seconds: np.ndarray
    out_bytes: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One equation, or one input of the program (`equation` is None); `loop`: the outermost loop that it is inside."""

    choices: StrategySet
    trips: float
    label: str
    equation: Equation | None = None
    rule: FactorRule | None = None
    input_number: int | None = None
    loop: Equation | None = None


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a value comes from: an output of a node; `stacked` if the value is a stack of such outputs."""

    node: int
    output: int
    stacked: bool = False


@dataclasses.dataclass(frozen=True)
class Use:
    """A value passed from a node to an operand of another; `aval` is what changes layout, `trips` how often."""

    source: Source
    target: int
    operand: int
    stacked: bool
    aval: Any
    trips: float


@dataclasses.dataclass(frozen=True, eq=False)
class StrategyGraph:
    """See the module's text. `edges[u, v]` with u < v has one row per choice of u and one column per choice of v."""

    program: Program
    mesh: LogicalMesh
    nodes: tuple[Node, ...]
    costs: tuple[np.ndarray, ...]
    edges: Mapping[tuple[int, int], np.ndarray]
    uses: tuple[Use, ...]
    outputs: tuple[Source | None, ...]
    joins: Mapping[Equation, tuple[int, ...]]
    sources: Mapping[Var, Source]
    spaces: Spaces

    def objective(self, choice: Sequence[int]) -> float:
        """Seconds of one complete choice."""
        total = sum(float(cost[i]) for cost, i in zip(self.costs, choice, strict=True))
        return total + sum(float(matrix[choice[u], choice[v]]) for (u, v), matrix in self.edges.items())


def itemsize_of(aval: Any) -> int:
    """Bytes of one element."""
    return int(aval.dtype.itemsize)


def is_opaque(aval: Any) -> bool:
    """Whether elements are not plain numbers (random keys): such values are never split or combined."""
    return not isinstance(aval.dtype, np.dtype)


class Spaces:
    """Layout spaces by shape, made when first needed."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._spaces: dict[tuple[Any, ...], LayoutSpace] = {}

    def of(self, aval: Any, monoids: tuple[str, ...]) -> LayoutSpace:
        """The space of values like `aval` that may be partial under `monoids`."""
        key = (tuple(aval.shape), itemsize_of(aval), monoids)
        if key not in self._spaces:
            self._spaces[key] = LayoutSpace(key[0], key[1], self.network, monoids)
        return self._spaces[key]

    def between(self, aval: Any, source: Layout, target: Layout) -> LayoutSpace:
        """A space that holds both layouts."""
        monoids = {m for layout in (source, target) for _, m in layout.partial}
        return self.of(aval, tuple(sorted(monoids)))


def network_of(cluster: Cluster, mesh: LogicalMesh, options: PlannerOptions) -> Network:
    """Collective costs of a cluster on a logical mesh."""
    try:
        costs = cluster.mesh_costs(mesh.shape)
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    return Network(mesh, costs, 1.0 / cluster.device.sustained_bytes_per_s, options.kinds)


def build_graph(
    program: Program,
    mesh: LogicalMesh,
    cluster: Cluster,
    options: PlannerOptions,
    *,
    input_layouts: Sequence[Sequence[Layout] | None],
    output_layouts: Sequence[Sequence[Layout] | int | None],
    batch: BatchSplit | None = None,
) -> StrategyGraph:
    """The graph of a program.

    `input_layouts[i]`: the layouts input i may have, None for all. `output_layouts[i]`: those output i may have, None for
    all that are not partial, or the number of the input whose layout it must share. `batch`: the choices that split examples
    otherwise cost infinitely much; where an operation has no other, as a sort of the examples, all remain.
    """
    return _Builder(mesh, cluster, options, batch).build(program, input_layouts, output_layouts)


class _Builder:
    def __init__(
        self, mesh: LogicalMesh, cluster: Cluster, options: PlannerOptions, batch: BatchSplit | None = None
    ) -> None:
        self.mesh, self.cluster, self.options, self.batch = mesh, cluster, options, batch
        self.examples: dict[Var, frozenset[int]] = {}
        self.spaces = Spaces(network_of(cluster, mesh, options))
        self.nodes: list[Node] = []
        self.costs: list[np.ndarray] = []
        self.edges: dict[tuple[int, int], np.ndarray] = {}
        self.uses: list[Use] = []
        self.monoids: dict[Var, frozenset[str]] = {}
        self.joins: dict[Equation, tuple[int, ...]] = {}
        self.sources: dict[Var, Source] = {}
        self._sets: dict[Any, StrategySet] = {}
        self._matrices: dict[Any, np.ndarray] = {}
        self._pair_edges: dict[tuple[int, int], list[tuple[float, np.ndarray]]] = {}
        self._loop: Equation | None = None

    def build(self, program: Program, input_layouts: Sequence[Any], output_layouts: Sequence[Any]) -> StrategyGraph:
        sources: list[Source | None] = []
        for number, (var, allowed) in enumerate(zip(program.invars, input_layouts, strict=True)):
            layouts = tuple(allowed) if allowed is not None else self._plain_layouts(var.aval)
            self.monoids[var] = frozenset()
            if self.batch is not None and number in self.batch.dims:
                self.examples[var] = frozenset({self.batch.dims[number]})
            sources.append(Source(self._add_input(layouts, f"input {number}", number), 0))
        outputs = self._region(program, sources, 1.0)
        final: list[Source | None] = []
        for number, (atom, source, wanted) in enumerate(zip(program.outvars, outputs, output_layouts, strict=True)):
            if source is None:
                final.append(None)
                continue
            if isinstance(wanted, int):
                target = self._require(atom.aval, source, program.invars[wanted], sources[wanted])
            else:
                layouts = tuple(wanted) if wanted is not None else self._plain_layouts(atom.aval)
                target = self._add_input(layouts, f"output {number}", None)
                self._use(source, target, 0, atom.aval, 1.0)
            final.append(Source(target, 0))
        self._finish_edges()
        return StrategyGraph(
            program,
            self.mesh,
            tuple(self.nodes),
            tuple(self.costs),
            self.edges,
            tuple(self.uses),
            tuple(final),
            self.joins,
            self.sources,
            self.spaces,
        )

    def _require(self, aval: Any, source: Source, var: Var, wanted: Source | None) -> int:
        assert wanted is not None
        assert tuple(var.aval.shape) == tuple(aval.shape)
        self._use(source, wanted.node, 0, aval, 1.0)
        return wanted.node

    def _plain_layouts(self, aval: Any) -> tuple[Layout, ...]:
        if is_opaque(aval):
            return (Layout.replicated(len(aval.shape)),)
        return tuple(la for la in self.spaces.of(aval, ()).layouts if _ascending(la))

    def _add(self, node: Node) -> int:
        self.nodes.append(dataclasses.replace(node, loop=self._loop))
        self.costs.append(node.choices.seconds * node.trips)
        return len(self.nodes) - 1

    def _add_input(self, layouts: tuple[Layout, ...], label: str, number: int | None) -> int:
        key = ("input", layouts)
        if key not in self._sets:
            strategies = tuple(ShardingStrategy((), (la,), (la,), 1) for la in layouts)
            self._sets[key] = StrategySet(strategies, np.zeros(len(layouts)), np.zeros(len(layouts)))
        return self._add(Node(self._sets[key], 1.0, label, input_number=number))

    def _region(self, program: Program, sources: Sequence[Source | None], trips: float) -> list[Source | None]:
        """Add a program's nodes and edges; `sources` are where its inputs come from, given per input."""
        env: dict[Var, Source | None] = dict(zip(program.invars, sources, strict=True))
        for eqn in program.equations:
            operands = [None if isinstance(v, Literal) else env[v] for v in eqn.invars]
            if eqn.loop is None:
                number = self._equation(eqn, trips)
                for place, (var, source) in enumerate(zip(eqn.invars, operands, strict=True)):
                    if source is not None:
                        self._use(source, number, place, var.aval, trips)
                env.update((v, Source(number, i)) for i, v in enumerate(eqn.outvars))
            else:
                outermost = self._loop is None
                self._loop = eqn if outermost else self._loop
                env.update(zip(eqn.outvars, _LOOPS[eqn.loop.kind](self, eqn, operands, trips), strict=True))
                self._loop = None if outermost else self._loop
        self.sources.update((v, source) for v, source in env.items() if source is not None)
        return [None if isinstance(v, Literal) else env[v] for v in program.outvars]

    # Nested programs. Every input of one has exactly one user, a fan_out whose node stands for the input.

    def _inputs_of(self, region: Program, trips: float) -> list[int]:
        """Nodes that stand for the region's inputs, in order."""
        users = {eqn.invars[0]: eqn for eqn in region.equations[: len(region.invars)]}
        numbers = []
        for var in region.invars:
            self.monoids[var] = frozenset() if is_opaque(var.aval) or var.aval.dtype == bool else frozenset({"sum"})
            numbers.append(self._equation(users[var], trips))
        return numbers

    def _body(self, region: Program, heads: Sequence[int], trips: float) -> list[Source | None]:
        """Add the rest of a region whose inputs' nodes are there already."""
        inner = Program(
            tuple(eqn.outvars[0] for eqn in region.equations[: len(heads)]),
            region.equations[len(heads) :],
            region.outvars,
        )
        return self._region(inner, [Source(number, 0) for number in heads], trips)

    def _scan(self, eqn: Equation, operands: Sequence[Source | None], trips: float) -> list[Source | None]:
        loop, (region,) = eqn.loop, eqn.regions
        assert loop is not None
        inside = trips * max(loop.trips, 1)
        first_stack = loop.consts + loop.carries
        self._same_examples(eqn.invars[:first_stack], region.invars[:first_stack])
        self._same_examples(eqn.invars[first_stack:], region.invars[first_stack:], moved=-1)
        heads = self._inputs_of(region, inside)
        for place, (var, source, head) in enumerate(zip(eqn.invars, operands, heads, strict=True)):
            self._use(source, head, 0, var.aval, trips, stacked=place >= first_stack)
        outs = self._body(region, heads, inside)
        carried = heads[loop.consts : first_stack]
        for head, source, atom in zip(carried, outs, region.outvars, strict=False):
            self._use(source, head, 0, atom.aval, inside)
        self._same_examples(region.outvars[: loop.carries], eqn.outvars[: loop.carries])
        self._same_examples(region.outvars[loop.carries :], eqn.outvars[loop.carries :], moved=1)
        stacks = [None if s is None else Source(s.node, s.output, stacked=True) for s in outs[loop.carries :]]
        for var in eqn.outvars:
            self.monoids[var] = frozenset() if is_opaque(var.aval) or var.aval.dtype == bool else frozenset({"sum"})
        return [*(Source(head, 0) for head in carried), *stacks]

    def _while(self, eqn: Equation, operands: Sequence[Source | None], trips: float) -> list[Source | None]:
        loop, (condition, body) = eqn.loop, eqn.regions
        assert loop is not None
        inside = trips * loop.trips
        start = loop.condition_consts
        self._same_examples(eqn.invars[start:], body.invars)
        heads = self._inputs_of(body, inside)
        for var, source, head in zip(eqn.invars[start:], operands[start:], heads, strict=True):
            self._use(source, head, 0, var.aval, trips)
        carried = heads[loop.consts :]
        for head, source, atom in zip(carried, self._body(body, heads, inside), body.outvars, strict=True):
            self._use(source, head, 0, atom.aval, inside)
        self._same_examples(eqn.invars[:start], condition.invars[:start])
        self._same_examples(body.outvars, condition.invars[start:])
        self._same_examples(body.outvars, eqn.outvars)
        checks = self._inputs_of(condition, inside)
        for var, source, head in zip(eqn.invars[:start], operands[:start], checks, strict=False):
            self._use(source, head, 0, var.aval, trips)
        for var, carry, head in zip(condition.invars[start:], carried, checks[start:], strict=True):
            self._use(Source(carry, 0), head, 0, var.aval, inside)
        (decision,) = self._body(condition, checks, inside)
        self._must_be_whole(decision, condition.outvars[0], inside)
        for var in eqn.outvars:
            self.monoids[var] = frozenset() if is_opaque(var.aval) or var.aval.dtype == bool else frozenset({"sum"})
        return [Source(head, 0) for head in carried]

    def _cond(self, eqn: Equation, operands: Sequence[Source | None], trips: float) -> list[Source | None]:
        self._must_be_whole(operands[0], eqn.invars[0], trips)
        results = []
        for region in eqn.regions:
            self._same_examples(eqn.invars[1:], region.invars)
            heads = self._inputs_of(region, trips)
            for var, source, head in zip(eqn.invars[1:], operands[1:], heads, strict=True):
                self._use(source, head, 0, var.aval, trips)
            results.append(self._body(region, heads, trips))
        self._same_examples(eqn.regions[0].outvars, eqn.outvars)
        joins = []
        for place, var in enumerate(eqn.outvars):
            layouts = self._plain_layouts(var.aval)
            join = self._add_input(layouts, f"cond output {place}", None)
            self.monoids[var] = frozenset()
            for outs in results:
                self._use(outs[place], join, 0, var.aval, trips)
            joins.append(join)
        self.joins[eqn] = tuple(joins)
        return [Source(join, 0) for join in joins]

    def _must_be_whole(self, source: Source | None, atom: Any, trips: float) -> None:
        target = self._add_input((Layout.replicated(len(atom.aval.shape)),), "condition", None)
        self._use(source, target, 0, atom.aval, trips)

    # Nodes and edges.

    def _equation(self, eqn: Equation, trips: float) -> int:
        rule = rule_for(eqn)
        if any(is_opaque(v.aval) and v.aval.shape for v in (*eqn.invars, *eqn.outvars)):
            rule = everything_whole(eqn)
        carried = self._carried(eqn, rule)
        choices = self._choices(eqn, rule, carried)
        label = f"{eqn.primitive.name}"
        number = self._add(Node(choices, trips, label, equation=eqn, rule=rule))
        if self.batch is not None:
            self._keep_batch(eqn, rule, number, self.batch.axes)
        return number

    def _keep_batch(self, eqn: Equation, rule: FactorRule, number: int, axes: Axes) -> None:
        """Forbid choices that do not split exactly `axes` over the factor that is major where an operand has examples."""
        batch = {
            operand[d][0]
            for var, operand in zip(eqn.invars, rule.inputs, strict=True)
            if not isinstance(var, Literal)
            for d in self.examples.get(var, ())
            if operand[d]
        }
        for var, operand in zip(eqn.outvars, rule.outputs, strict=True):
            self.examples[var] = frozenset(d for d, dim in enumerate(operand) if dim and dim[0] in batch)
        on_batch = [
            tuple(sorted(axis for factor, cut in strategy.factor_axes if factor in batch for axis in cut))
            for strategy in self.nodes[number].choices.strategies
        ]
        if batch and axes in on_batch:
            self.costs[number] = np.where([cut == axes for cut in on_batch], self.costs[number], np.inf)

    def _same_examples(self, values: Sequence[Any], others: Sequence[Var], *, moved: int = 0) -> None:
        """Note that the others have the examples of the values, their dimensions moved by so many places."""
        for value, other in zip(values, others, strict=True):
            known = frozenset() if isinstance(value, Literal) else self.examples.get(value, frozenset())
            self.examples[other] = frozenset(d + moved for d in known if d + moved >= 0)

    def _carried(self, eqn: Equation, rule: FactorRule) -> frozenset[str]:
        """Monoids under which this equation's linear groups may be partial; also noted for its outputs."""
        have: set[str] = set()
        for group in rule.linear:
            for place in group:
                var = eqn.invars[place]
                have |= self.monoids.get(var, frozenset())
                if self.options.every_strategy and not is_opaque(var.aval) and var.aval.dtype != bool:
                    have.add("sum")
        carried = frozenset(have) if rule.any_monoid else frozenset(have & {"sum"})
        made = frozenset(monoid for factor, monoid in rule.reduced if factor not in rule.whole)
        for var in eqn.outvars:
            self.monoids[var] = carried | made
        return carried

    def _choices(self, eqn: Equation, rule: FactorRule, carried: frozenset[str]) -> StrategySet:
        entry = entry_for(eqn)
        avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
        flops = flops_of(eqn, rule)
        key = (rule, carried, entry.heavy, entry.fused, entry.free, flops, tuple(str(a.dtype) for a in avals))
        if key not in self._sets:
            strategies = strategies_of(rule, self.mesh, monoids=tuple(sorted(carried)))
            if entry.heavy and not self.options.allow_redundant_compute and not self.options.every_strategy:
                strategies = undivided_dropped(strategies)
            if not self.options.every_strategy:
                strategies = tuple(s for s in strategies if all(_ascending(la) for la in (*s.inputs, *s.outputs)))
            seconds = np.array([self._seconds(eqn, entry, flops, s) for s in strategies])
            out_bytes = np.array([self._out_bytes(eqn, s) for s in strategies], dtype=float)
            self._sets[key] = StrategySet(strategies, seconds, out_bytes)
        return self._sets[key]

    def _seconds(self, eqn: Equation, entry: Any, flops: float, strategy: ShardingStrategy) -> float:
        if entry.free:
            return 0.0
        moved = self._out_bytes(eqn, strategy)
        if not entry.fused:
            moved += sum(
                layout.local_bytes(v.aval.shape, itemsize_of(v.aval), self.mesh)
                for v, layout in zip(eqn.invars, strategy.inputs, strict=True)
            )
        dtype = str(eqn.outvars[0].aval.dtype)
        flops = flops / strategy.ways if entry.heavy else 0.0
        return roofline_s(
            self.cluster,
            flops=flops,
            moved_bytes=moved,
            dtype=dtype,
            launched=not entry.fused,
            sizes=self._product_sizes(eqn, strategy) if entry.heavy else None,
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

    def _out_bytes(self, eqn: Equation, strategy: ShardingStrategy) -> int:
        return sum(
            layout.local_bytes(v.aval.shape, itemsize_of(v.aval), self.mesh)
            for v, layout in zip(eqn.outvars, strategy.outputs, strict=True)
        )

    def _use(
        self,
        source: Source | None,
        target: int,
        operand: int,
        aval: Any,
        trips: float,
        *,
        stacked: bool = False,
    ) -> None:
        """Connect a value to an operand; a value without a source is a literal, replicated."""
        if source is None:
            replicated = Layout.replicated(len(aval.shape))
            row = self._matrix_of(aval, (replicated,), self._needs(target, operand, stacked))[0]
            self.costs[target] = self.costs[target] + trips * row
            return
        self.uses.append(Use(source, target, operand, stacked, aval, trips))
        key = (
            id(self.nodes[source.node].choices), source.output, source.stacked,
            id(self.nodes[target].choices), operand, stacked, tuple(aval.shape), itemsize_of(aval),
        )  # fmt: skip
        if key not in self._matrices:
            self._matrices[key] = self._matrix_of(aval, self._gives(source), self._needs(target, operand, stacked))
        matrix = self._matrices[key]
        if source.node == target:
            self.costs[target] = self.costs[target] + trips * np.diag(matrix)
            return
        pair = (source.node, target) if source.node < target else (target, source.node)
        oriented = matrix if source.node < target else matrix.T
        self._pair_edges.setdefault(pair, []).append((trips, oriented))

    def _gives(self, source: Source) -> tuple[Layout, ...]:
        layouts = tuple(s.outputs[source.output] for s in self.nodes[source.node].choices.strategies)
        return tuple(la.prepend() for la in layouts) if source.stacked else layouts

    def _needs(self, target: int, operand: int, stacked: bool) -> tuple[Layout, ...]:
        layouts = tuple(s.inputs[operand] for s in self.nodes[target].choices.strategies)
        return tuple(la.prepend() for la in layouts) if stacked else layouts

    def _matrix_of(self, aval: Any, gives: Sequence[Layout], needs: Sequence[Layout]) -> np.ndarray:
        if is_opaque(aval):
            return np.zeros((len(gives), len(needs)))
        monoids = {m for layout in (*gives, *needs) for _, m in layout.partial}
        space = self.spaces.of(aval, tuple(sorted(monoids)))
        rows = [space.index[layout] for layout in gives]
        columns = [space.index[layout] for layout in needs]
        return space.seconds[np.ix_(rows, columns)]

    def _finish_edges(self) -> None:
        shared: dict[Any, np.ndarray] = {}
        for pair, parts in self._pair_edges.items():
            key = tuple((trips, id(matrix)) for trips, matrix in parts)
            if key not in shared:
                shared[key] = sum(trips * matrix for trips, matrix in parts)  # type: ignore[assignment]
            self.edges[pair] = shared[key]


def _ascending(layout: Layout) -> bool:
    return all(list(axes) == sorted(axes) for axes in layout.dims)


_LOOPS = {"scan": _Builder._scan, "while": _Builder._while, "cond": _Builder._cond}

"""The strategy graph: what can be chosen, and what each choice costs.

In: a `Program`, a mesh and its costs, the layouts allowed for inputs and outputs. Out: a `StrategyGraph`. One node for
each equation and each input; a node's choices are its strategies, priced by the roofline. One edge for each pair of
nodes that pass values; its matrix holds, for every pair of choices, the seconds of relayout between what one produces
and the other needs. Nested programs are nodes of the same graph: their prices count once for every trip of the loop,
and the edges that cross a loop's boundary connect a value with its stack, or a carry with itself.

What can go wrong: a graph too large to build; equal equations share their strategies and equal edges their matrices
(`intra_op/catalogue.py`), so it grows with what differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autopar.avals import is_opaque
from autopar.compat import Literal, Var
from autopar.cost_model.hardware import Cluster
from autopar.intra_op.choices.catalogue import Catalogue, Spaces, StrategySet
from autopar.intra_op.choices.kernels import Traffic
from autopar.intra_op.choices.known_equations import RuleBook
from autopar.intra_op.choices.options import PlannerOptions
from autopar.layouts.mesh import Axes, Layout, LogicalMesh
from autopar.program.loops import LoopEquation
from autopar.program.program import Equation, Program, fan_out_p
from autopar.rules.by_shape import everything_whole
from autopar.rules.factor_rule import FactorRule
from autopar.rules.table import entry_for


@dataclasses.dataclass(frozen=True)
class BatchSplit:
    """Examples must be split over `axes` and no others wherever they are: `dims` says which dimension of which input has them."""

    dims: Mapping[int, int]
    axes: Axes


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


def build_graph(
    program: Program,
    mesh: LogicalMesh,
    cluster: Cluster,
    options: PlannerOptions,
    *,
    input_layouts: Sequence[Sequence[Layout] | None],
    output_layouts: Sequence[Sequence[Layout] | int | None],
    batch: BatchSplit | None = None,
    catalogue: Catalogue | None = None,
) -> StrategyGraph:
    """The graph of a program, with the strategies of a catalogue of this mesh, machine and options, if there is one.

    `input_layouts[i]`: the layouts input i may have, None for all. `output_layouts[i]`: those output i may have, None for
    all that are not partial, or the number of the input whose layout it must share. `batch`: the choices that split examples
    otherwise cost infinitely much; where an operation has no other, as a sort of the examples, all remain.
    """
    known = catalogue if catalogue is not None else Catalogue(mesh, cluster, options, RuleBook())
    return _Builder(known, batch).build(program, input_layouts, output_layouts)


class _Builder:
    def __init__(self, catalogue: Catalogue, batch: BatchSplit | None = None) -> None:
        self.catalogue, self.batch = catalogue, batch
        self.examples: dict[Var, frozenset[int]] = {}
        self.nodes: list[Node] = []
        self.costs: list[np.ndarray] = []
        self.edges: dict[tuple[int, int], np.ndarray] = {}
        self.uses: list[Use] = []
        self.monoids: dict[Var, frozenset[str]] = {}
        self.joins: dict[Equation, tuple[int, ...]] = {}
        self.sources: dict[Var, Source] = {}
        self._pair_edges: dict[tuple[int, int], list[tuple[float, np.ndarray]]] = {}
        self._loop: Equation | None = None
        self._traffic: Mapping[Equation, Traffic] = {}
        self._held: set[int] = set()

    def build(self, program: Program, input_layouts: Sequence[Any], output_layouts: Sequence[Any]) -> StrategyGraph:
        if self.catalogue.cluster.device.fuses:
            self._traffic = self.catalogue.rules.traffic(program)
        sources: list[Source | None] = []
        for number, (var, allowed) in enumerate(zip(program.invars, input_layouts, strict=True)):
            layouts = tuple(allowed) if allowed is not None else self.catalogue.plain(var.aval)
            self.monoids[var] = frozenset()
            if self.batch is not None and number in self.batch.dims:
                self.examples[var] = frozenset({self.batch.dims[number]})
            sources.append(Source(self._add_input(layouts, f"input {number}", number), 0))
            if number in self.catalogue.options.held:
                self._held.add(len(self.nodes) - 1)
        outputs = self._region(program, sources, 1.0)
        final: list[Source | None] = []
        for number, (atom, source, wanted) in enumerate(zip(program.outvars, outputs, output_layouts, strict=True)):
            if source is None:
                final.append(None)
                continue
            if isinstance(wanted, int):
                target = self._require(atom.aval, source, program.invars[wanted], sources[wanted])
            else:
                layouts = tuple(wanted) if wanted is not None else self.catalogue.plain(atom.aval)
                target = self._add_input(layouts, f"output {number}", None)
                self._use(source, target, 0, atom.aval, 1.0)
            final.append(Source(target, 0))
        self._finish_edges()
        return StrategyGraph(
            program,
            self.catalogue.mesh,
            tuple(self.nodes),
            tuple(self.costs),
            self.edges,
            tuple(self.uses),
            tuple(final),
            self.joins,
            self.sources,
            self.catalogue.spaces,
        )

    def _require(self, aval: Any, source: Source, var: Var, wanted: Source | None) -> int:
        assert wanted is not None
        assert tuple(var.aval.shape) == tuple(aval.shape)
        self._use(source, wanted.node, 0, aval, 1.0)
        return wanted.node

    def _add(self, node: Node) -> int:
        self.nodes.append(node)
        self.costs.append(node.choices.seconds * node.trips)
        return len(self.nodes) - 1

    def _add_input(self, layouts: tuple[Layout, ...], label: str, number: int | None) -> int:
        return self._add(Node(self.catalogue.fixed(layouts), 1.0, label, input_number=number, loop=self._loop))

    def _region(self, program: Program, sources: Sequence[Source | None], trips: float) -> list[Source | None]:
        """Add a program's nodes and edges; `sources` are where its inputs come from, given per input."""
        env: dict[Var, Source | None] = dict(zip(program.invars, sources, strict=True))
        for eqn in program.equations:
            operands = [None if isinstance(v, Literal) else env[v] for v in eqn.invars]
            if not isinstance(eqn, LoopEquation):
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

    def _scan(self, eqn: LoopEquation, operands: Sequence[Source | None], trips: float) -> list[Source | None]:
        loop, (region,) = eqn.loop, eqn.regions
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
        for var, atom in zip(eqn.outvars[loop.carries :], region.outvars[loop.carries :], strict=True):
            self.monoids[var] |= frozenset() if isinstance(atom, Literal) else self.monoids[atom]
        return [*(Source(head, 0) for head in carried), *stacks]

    def _while(self, eqn: LoopEquation, operands: Sequence[Source | None], trips: float) -> list[Source | None]:
        loop, (condition, body) = eqn.loop, eqn.regions
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

    def _cond(self, eqn: LoopEquation, operands: Sequence[Source | None], trips: float) -> list[Source | None]:
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
            join = self._add_input(self.catalogue.joined(var.aval), f"cond output {place}", None)
            self.monoids[var] = frozenset() if is_opaque(var.aval) or var.aval.dtype == bool else frozenset({"sum"})
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
        rule = self.catalogue.rules.rule(eqn)
        if any(is_opaque(v.aval) and v.aval.shape for v in (*eqn.invars, *eqn.outvars)):
            rule = everything_whole(eqn)
        carried = self._carried(eqn, rule)
        choices = self.catalogue.choices(eqn, rule, carried, traffic=self._traffic.get(eqn))
        label = f"{eqn.primitive.name}"
        number = self._add(Node(choices, trips, label, equation=eqn, rule=rule, loop=self._loop))
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
                if self.catalogue.options.every_strategy and not is_opaque(var.aval) and var.aval.dtype != bool:
                    have.add("sum")
        carried = frozenset(have) if rule.any_monoid else frozenset(have & {"sum"})
        made = frozenset(monoid for factor, monoid in rule.reduced if factor not in rule.whole)
        for var in eqn.outvars:
            self.monoids[var] = carried | made
        return carried

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
            needs = [strategy.inputs[operand] for strategy in self.nodes[target].choices.strategies]
            needs = [la.prepend() for la in needs] if stacked else needs
            self.costs[target] = self.costs[target] + trips * self.catalogue.relayout(aval, (replicated,), needs)[0]
            return
        self.uses.append(Use(source, target, operand, stacked, aval, trips))
        matrix = self.catalogue.passed(
            aval,
            self.nodes[source.node].choices,
            source.output,
            self.nodes[target].choices,
            operand,
            stacked=(source.stacked, stacked),
            flipped=source.node > target,
            held=source.node in self._held,
        )
        self._hold(source, target)
        if source.node == target:
            self.costs[target] = self.costs[target] + trips * np.diag(matrix)
            return
        pair = (source.node, target) if source.node < target else (target, source.node)
        self._pair_edges.setdefault(pair, []).append((trips, matrix))

    def _hold(self, source: Source, target: int) -> None:
        """Note that a node gives what is held: such an input, or one of these under another name."""
        equation = self.nodes[target].equation
        renamed = equation is not None and (equation.primitive is fan_out_p or entry_for(equation).barrier)
        if renamed and source.node in self._held:
            self._held.add(target)

    def _finish_edges(self) -> None:
        self.edges = {pair: self.catalogue.summed(parts) for pair, parts in self._pair_edges.items()}


_LOOPS = {"scan": _Builder._scan, "while": _Builder._while, "cond": _Builder._cond}

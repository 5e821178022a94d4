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

import numpy as np

from autopar.avals import Aval, is_opaque
from autopar.compat import Literal, Var
from autopar.cost_model.hardware import Cluster
from autopar.intra_op.choices.catalogue import Catalogue, Spaces, StrategySet
from autopar.intra_op.choices.kernels import Traffic
from autopar.intra_op.choices.known_equations import RuleBook
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.choices.overlap import Exposure
from autopar.intra_op.choices.uses import Source as Source
from autopar.intra_op.choices.uses import Use as Use
from autopar.layouts.mesh import Axes, Layout, LogicalMesh
from autopar.program.loops import Entry, Exit, Filled, Goes, LoopEquation
from autopar.program.program import Atom, Equation, Program, fan_out_p
from autopar.program.walk import Scope, StaticDomain
from autopar.rules.factor_rule import FactorRule
from autopar.rules.table import entry_for
from autopar.solver.budget import Budget


@dataclasses.dataclass(frozen=True)
class BatchSplit:
    """Examples must be split over `axes` and no others wherever they are: `dims` says which dimension of which input has them."""

    dims: Mapping[int, int]
    axes: Axes


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Node:
    """One equation, or one input of the program (`equation` is None); `loop`: the outermost loop that it is inside."""

    choices: StrategySet
    trips: float
    label: str
    equation: Equation | None = None
    rule: FactorRule | None = None
    input_number: int | None = None
    loop: Equation | None = None

    @property
    def is_fan_out(self) -> bool:
        """Whether it hands a value on to several readers."""
        return self.equation is not None and self.equation.primitive is fan_out_p


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
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


def build_graph(
    program: Program,
    mesh: LogicalMesh,
    cluster: Cluster,
    options: PlannerOptions,
    *,
    input_layouts: Sequence[Sequence[Layout] | None],
    output_layouts: Sequence[Sequence[Layout] | int | None],
    batch: BatchSplit | None = None,
    asked: Mapping[Equation, Sequence[Layout]] | None = None,
    exposure: Exposure | None = None,
    catalogue: Catalogue | None = None,
    budget: Budget | None = None,
) -> StrategyGraph:
    """The graph of a program, with the strategies of a catalogue of this mesh, machine and options, if there is one.

    `input_layouts[i]`: the layouts input i may have, None for all. `output_layouts[i]`: those output i may have, None for
    all that are not partial, or the number of the input whose layout it must share. `batch`: the choices that split examples
    otherwise cost infinitely much; where an operation has no other, as a sort of the examples, all remain. `asked`: the layouts
    that the results of some copies must have, whatever splits the examples; choices that give others cost infinitely much.
    `exposure`: the part of a change of layout that a step waits for, as the rest hides behind compute; None: all of it.
    `budget`: LateError is raised when its clock has ended it.
    """
    known = catalogue if catalogue is not None else Catalogue(mesh, cluster, options, RuleBook())
    return _Builder(known, batch, asked or {}, exposure, budget).build(program, input_layouts, output_layouts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Value:
    """A value as its readers get it: where it comes from (None: a literal, replicated), what changes layout, and how often.

    `is_row`: the reader gets a row of it. `exposed`: the part of the seconds of changing its layout that a step waits for.
    """

    source: Source | None
    aval: Aval
    trips: float
    is_row: bool = False
    exposed: float = 1.0


class _Builder(StaticDomain[_Value]):
    """Adds nodes and edges while it walks a program."""

    def __init__(
        self,
        catalogue: Catalogue,
        batch: BatchSplit | None,
        asked: Mapping[Equation, Sequence[Layout]],
        exposure: Exposure | None,
        budget: Budget | None,
    ) -> None:
        self.catalogue, self.batch, self.asked, self.exposure = catalogue, batch, asked, exposure
        self.budget = budget or Budget()
        self.examples: dict[Var, frozenset[int]] = {}
        self.nodes: list[Node] = []
        self.costs: list[np.ndarray] = []
        self.uses: list[Use] = []
        self.monoids: dict[Var, frozenset[str]] = {}
        self.joins: dict[Equation, tuple[int, ...]] = {}
        self.sources: dict[Var, Source] = {}
        self._edges: dict[tuple[int, int], list[tuple[float, np.ndarray]]] = {}
        self._priced: dict[tuple[int, float], np.ndarray] = {}
        self._outermost: Equation | None = None
        self._traffic: Mapping[Equation, Traffic] = {}
        self._held: set[int] = set()

    def build(
        self,
        program: Program,
        input_layouts: Sequence[Sequence[Layout] | None],
        output_layouts: Sequence[Sequence[Layout] | int | None],
    ) -> StrategyGraph:
        if self.catalogue.cluster.device.fuses:
            self._traffic = self.catalogue.rules.traffic(program)
        inputs = [
            self._input(number, var, allowed)
            for number, (var, allowed) in enumerate(zip(program.invars, input_layouts, strict=True))
        ]
        scope = Scope(self, dict(zip(program.invars, inputs, strict=True)))
        scope.run(program.equations)
        outputs = [
            self._output(f"output {number}", scope.value(atom), inputs[wanted] if isinstance(wanted, int) else wanted)
            for number, (atom, wanted) in enumerate(zip(program.outvars, output_layouts, strict=True))
        ]
        return StrategyGraph(
            program=program,
            mesh=self.catalogue.mesh,
            nodes=tuple(self.nodes),
            costs=tuple(self.costs),
            edges={pair: self.catalogue.add_up(parts) for pair, parts in self._edges.items()},
            uses=tuple(self.uses),
            outputs=tuple(outputs),
            joins=self.joins,
            sources=self.sources,
            spaces=self.catalogue.spaces,
        )

    def _input(self, number: int, var: Var, allowed: Sequence[Layout] | None) -> _Value:
        """The node of an input of the whole program."""
        self.monoids[var] = frozenset()
        if self.batch is not None and number in self.batch.dims:
            self.examples[var] = frozenset({self.batch.dims[number]})
        layouts = tuple(allowed) if allowed is not None else self.catalogue.plain(var.aval)
        source = self.sources[var] = Source(self._add_fixed(layouts, f"input {number}", number), 0)
        if number in self.catalogue.options.held:
            self._held.add(source.node)
        return _Value(source=source, aval=var.aval, trips=1.0, exposed=self._exposed(var))

    def _exposed(self, var: Var) -> float:
        """The part of a move of this value that nothing hides."""
        return 1.0 if self.exposure is None else self.exposure.of(var)

    def _output(self, label: str, value: _Value, wanted: _Value | Sequence[Layout] | None) -> Source | None:
        """The node of an output, which is that of an input if it must share its layout."""
        if value.source is None:
            return None
        if isinstance(wanted, _Value):
            assert wanted.source is not None
            assert tuple(wanted.aval.shape) == tuple(value.aval.shape)
            target = wanted.source.node
        else:
            layouts = tuple(wanted) if wanted is not None else self.catalogue.plain(value.aval)
            target = self._add_fixed(layouts, label, None)
        self._use(value, target, 0)
        return Source(target, 0)

    # The walk.

    def literal(self, atom: Literal, scope: Scope[_Value]) -> _Value:
        return _Value(source=None, aval=atom.aval, trips=scope.trips)

    def operation(self, eqn: Equation, scope: Scope[_Value]) -> Sequence[_Value]:
        node = self._add_equation(eqn, scope.trips)
        for place, atom in enumerate(eqn.invars):
            if isinstance(atom, Var):  # of a literal each device cuts out its shard for next to nothing
                self._use(scope.values[atom], node, place)
        return self._results(eqn, [Source(node, i) for i in range(len(eqn.outvars))], scope)

    def begin(self, eqn: LoopEquation, scope: Scope[_Value]) -> None:
        if scope.around is None:
            self._outermost = eqn
        if eqn.branch_number is not None:
            self._must_be_whole(scope.value(eqn.branch_number))

    def enter(self, entry: Entry, scope: Scope[_Value], inner: Scope[_Value]) -> _Value:
        value, is_row = scope.value(entry.atom), entry.filled is Filled.ROW
        self._note(entry.var, entry.atom, moved=-1 if is_row else 0)
        return dataclasses.replace(value, is_row=is_row)

    def pass_on(self, entry: Entry, value: _Value, inner: Scope[_Value]) -> _Value:
        self._note(entry.var, entry.atom)
        return value

    def leave(self, exit_: Exit, inner: Scope[_Value]) -> _Value:
        value = inner.value(exit_.atom)
        if exit_.goes is Goes.DECISION:
            self._must_be_whole(value)
        if exit_.carry is None:
            return value
        head = inner.values[exit_.carry.head.outvars[0]]
        assert head.source is not None
        self._use(value, head.source.node, 0)
        return head

    def finish(self, eqn: LoopEquation, ends: Mapping[Exit, _Value], scope: Scope[_Value]) -> Sequence[_Value]:
        sources = [self._join_exits(eqn, place, ends) for place in range(len(eqn.outvars))]
        if eqn.branch_number is not None:
            self.joins[eqn] = tuple(source.node for source in sources if source is not None)
        if scope.around is None:
            self._outermost = None
        return self._results(eqn, sources, scope)

    def _join_exits(self, eqn: LoopEquation, place: int, ends: Mapping[Exit, _Value]) -> Source | None:
        """Where a result of a loop comes from: a carry, a stack of rows, or a node at which branches meet."""
        var, exits = eqn.outvars[place], eqn.results[place]
        (first, *_), source = exits, ends[exits[0]].source
        self._note(var, first.atom, moved=1 if first.goes is Goes.ROW else 0)
        if first.goes is Goes.ROW:
            self.monoids[var] |= self.monoids[first.atom] if isinstance(first.atom, Var) else frozenset()
            return None if source is None else dataclasses.replace(source, stacked=True)
        if first.goes is Goes.CARRY:
            return source
        node = self._add_fixed(self.catalogue.joined(var.aval), f"cond output {place}", None)
        for exit_ in exits:
            self._use(ends[exit_], node, 0)
        return Source(node, 0)

    def _results(self, eqn: Equation, sources: Sequence[Source | None], scope: Scope[_Value]) -> Sequence[_Value]:
        """The results of an equation, made by these nodes as often as the scope's program runs."""
        pairs = list(zip(eqn.outvars, sources, strict=True))
        self.sources.update((v, source) for v, source in pairs if source is not None)
        return [_Value(source=source, aval=v.aval, trips=scope.trips, exposed=self._exposed(v)) for v, source in pairs]

    def _note(self, var: Var, given: Atom, *, moved: int = 0) -> None:
        """What is known of a value that enters or leaves a nested program.

        It may be partial, and has the examples of the one that it is made of, their dimensions moved by so many places.
        """
        self.monoids[var] = frozenset() if is_opaque(var.aval) or var.aval.dtype == bool else frozenset({"sum"})
        known = self.examples.get(given, frozenset()) if isinstance(given, Var) else frozenset[int]()
        self.examples[var] = frozenset(d + moved for d in known if d + moved >= 0)

    def _must_be_whole(self, value: _Value) -> None:
        layout = Layout.replicated(len(value.aval.shape))
        self._use(value, self._add_fixed((layout,), "condition", None), 0)

    # Nodes and edges.

    def _add(self, node: Node) -> int:
        self.nodes.append(node)
        self.costs.append(self._seconds(node))
        return len(self.nodes) - 1

    def _seconds(self, node: Node) -> np.ndarray:
        """Of each choice in all trips; one array for all nodes of the same, which later passes price once."""
        key = id(node.choices), node.trips
        if key not in self._priced:
            self._priced[key] = node.choices.seconds * node.trips
        return self._priced[key]

    def _add_fixed(self, layouts: tuple[Layout, ...], label: str, number: int | None) -> int:
        """A node whose choices are layouts."""
        choices = self.catalogue.fixed(layouts)
        return self._add(Node(choices=choices, trips=1.0, label=label, input_number=number, loop=self._outermost))

    def _add_equation(self, eqn: Equation, trips: float) -> int:
        self.budget.require_time()
        rule = self.catalogue.rule(eqn)
        carried = self._find_carried(eqn, rule)
        choices = self.catalogue.choices(eqn, rule, carried, traffic=self._traffic.get(eqn))
        label = f"{eqn.primitive.name}"
        number = self._add(
            Node(choices=choices, trips=trips, label=label, equation=eqn, rule=rule, loop=self._outermost)
        )
        if self.batch is not None:
            self._keep_batch(eqn, rule, number, self.batch.axes)
        if eqn in self.asked:
            gives = [strategy.outputs[0] in self.asked[eqn] for strategy in choices.strategies]
            self.costs[number] = np.where(gives, choices.seconds * trips, np.inf)
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

    def _find_carried(self, eqn: Equation, rule: FactorRule) -> frozenset[str]:
        """Monoids under which this equation's linear groups may be partial; also noted for its outputs."""
        have: set[str] = set()
        for group in rule.linear:
            for place in group:
                var = eqn.invars[place]
                have |= frozenset() if isinstance(var, Literal) else self.monoids.get(var, frozenset())
                if self.catalogue.options.every_strategy and not is_opaque(var.aval) and var.aval.dtype != bool:
                    have.add("sum")
        carried = frozenset(have) if rule.any_monoid else frozenset(have & {"sum"})
        made = frozenset(monoid for factor, monoid in rule.reduced if factor not in rule.whole)
        for var in eqn.outvars:
            self.monoids[var] = carried | made
        return carried

    def _use(self, value: _Value, target: int, operand: int) -> None:
        """Connect a value to an operand of a node."""
        source, stacked = value.source, value.is_row
        if source is None:
            replicated = Layout.replicated(len(value.aval.shape))
            needs = [strategy.inputs[operand] for strategy in self.nodes[target].choices.strategies]
            needs = [la.prepend() for la in needs] if stacked else needs
            relayout = self.catalogue.relayout(value.aval, (replicated,), needs)[0]
            self.costs[target] = self.costs[target] + value.trips * relayout
            return
        use = Use(
            source=source,
            target=target,
            operand=operand,
            stacked=stacked,
            aval=value.aval,
            trips=value.trips,
            exposed=value.exposed,
            held=source.node in self._held,
        )
        self.uses.append(use)
        matrix = self.catalogue.relayout_between(
            value.aval,
            self.nodes[source.node].choices,
            source.output,
            self.nodes[target].choices,
            operand,
            stacked=(source.stacked, stacked),
            flipped=source.node > target,
            held=use.held,
        )
        self._hold(source, target)
        times = value.trips * value.exposed
        if source.node == target:
            self.costs[target] = self.costs[target] + times * np.diag(matrix)
            return
        pair = (source.node, target) if source.node < target else (target, source.node)
        self._edges.setdefault(pair, []).append((times, matrix))

    def _hold(self, source: Source, target: int) -> None:
        """Note that a node gives what is held: such an input, or one of these under another name."""
        equation = self.nodes[target].equation
        renamed = equation is not None and (equation.primitive is fan_out_p or entry_for(equation).barrier)
        if renamed and source.node in self._held:
            self._held.add(target)

"""Which part of a step runs once per microbatch: the batch as a mesh axis laid out in time.

In: a traced step and a number of microbatches m. Out: a `TimePlan`: for every equation its phase, and its strategy on a mesh of
one axis of size m, whose devices are the microbatches one after the other. The phases:

    prologue   before the loop, whole: what needs no finished result, such as casts of parameters or the count of a mask
    body       once per microbatch: on a slice of the batch, or on terms that are summed over the microbatches (partial)
    epilogue   after the loop, whole: what needs a finished sum or all slices, such as the update

It is one problem of the intra-operator kind: each equation chooses a phase and, in the body, a strategy, under

    prologue -> body       a slice, or the value in the first microbatch and a neutral element in the others
    body -> epilogue       finish: combine the terms, or join the slices
    body -> body           only what needs no communication: no microbatch sees another; but a statistic that is marked
                           (`statistics.py`) may be estimated from the microbatch alone
    body -> prologue, epilogue -> body, epilogue -> prologue      impossible

It minimises the bytes moved and operations executed, plus a cost for each byte of examples that stays in memory. Heavy work on
examples stays in the body at any cost, except for a small part of it that mixes examples. The weights are in `tuning.py`. All
nodes of a loop that the user wrote share a phase. What can go wrong: a step mixes examples, as batch normalisation does. Its
heavy operations then do not fit into the body, and `MixedExamples` names the operation that mixes them and its line.

Inside of loops and branches nothing can be finished. As a last resort a product there takes terms of a sum though the other
factor is not known to be finite. Where that is finite, the results are those of the sum, up to rounding. Where it is infinite,
they may be NaN in place of an infinity (`rules/if_finite.py`). Such a plan is sought if no other has all heavy work in the body,
and it has as few of these products as can be.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from autopar.avals import is_opaque, itemsize_of
from autopar.compat import Literal
from autopar.intra_op.choices.graph import Node, StrategyGraph, Use
from autopar.intra_op.choices.known_equations import RuleBook
from autopar.intra_op.choices.strategies import ShardingStrategy
from autopar.intra_op.lowering.assignment import assign
from autopar.layouts.mesh import LogicalMesh
from autopar.microbatches.estimates import find_estimates
from autopar.microbatches.examples import find_example_factors
from autopar.microbatches.graph_over_time import (
    adds_terms,
    catalogue_over_time,
    graph_over_time,
    unconnected,
    uses_between,
)
from autopar.microbatches.mixing import MixedExamples, find_mixing
from autopar.microbatches.time_plan import Phase, TimePlan, needs_finite
from autopar.microbatches.tuning import TUNING, Tuning
from autopar.program.opened.statistic import batch_statistic_p
from autopar.program.program import Equation
from autopar.program.step import TracedStep
from autopar.progress import Progress, report
from autopar.rules.factor_rule import FactorRule
from autopar.rules.table import entry_for, flops_of
from autopar.solver.outcomes import Chosen
from autopar.solver.problem import ChoiceProblem, Costs
from autopar.solver.repeated_layers import tie_layers
from autopar.solver.solve import choose


def plan_time(
    traced: TracedStep,
    microbatches: int,
    *,
    late_sums: bool = False,
    known: Mapping[Equation, Phase] | None = None,
    like: TimePlan | None = None,
    finite: bool = False,
    tuning: Tuning = TUNING,
) -> TimePlan | MixedExamples:
    """The phases of a step, or why it has none; see the module on what is sought as a last resort.

    Args:
        late_sums: terms are added up only after the loop, each in an accumulator of its own. Pipeline stages need this, because
            they may hold different terms of one sum, such as the gradient of a tied weight.
        known: phases of outermost equations that are not to be searched.
        like: a plan of the same step with the same `late_sums`, taken over if this number can divide what it divides.
        finite: the last resort is taken at once, as in the plan that `known` is of; so it is if `like` is such a plan.
    """
    report(Progress(at=f"the cut into {microbatches} microbatches"))
    finite = finite or (like is not None and like.is_of_finite)
    seek = functools.partial(_plan_by_rules, traced, microbatches, late_sums=late_sums, known=known, tuning=tuning)
    found = seek(like=like, finite=finite)
    if finite or not (isinstance(found, MixedExamples) and found.certainty == "finite" and not _has_estimates(traced)):
        return found
    last = seek(like=None, finite=True)
    return found if isinstance(last, MixedExamples) else last


def _has_estimates(traced: TracedStep) -> bool:
    """Whether statistics of a microbatch stand for those of the batch: no sum of terms is known to be what is meant then."""
    return any(eqn.primitive is batch_statistic_p for eqn in traced.program.walk())


def _plan_by_rules(
    traced: TracedStep,
    microbatches: int,
    *,
    late_sums: bool,
    known: Mapping[Equation, Phase] | None,
    like: TimePlan | None,
    finite: bool,
    tuning: Tuning,
) -> TimePlan | MixedExamples:
    """As `plan_time`, under the rules of products of any numbers, or under those of finite ones alone."""
    step = _facts_of(traced)
    plan = None if like is None else in_another_number(like, microbatches, step.rules_of(finite), tuning)
    if plan is None:
        plan = phases_of(traced, microbatches, late_sums=late_sums, known=known, finite=finite, tuning=tuning)
    mixed = find_mixing(traced, plan, step.examples, allowed=tuning.little)
    if microbatches > 1 and (mixed is None or mixed.certainty == "vague"):
        loosely = find_mixing(traced, plan, step.loosely, allowed=tuning.few)
        mixed = loosely if mixed is None or (loosely is not None and loosely.certainty != "vague") else mixed
    return mixed or plan


def phases_of(
    traced: TracedStep,
    microbatches: int,
    *,
    late_sums: bool = False,
    known: Mapping[Equation, Phase] | None = None,
    finite: bool = False,
    tuning: Tuning = TUNING,
) -> TimePlan:
    """The phases of a step, as `plan_time`, even if all of its work is outside of the loop."""
    step = _facts_of(traced)
    graph = graph_over_time(traced, microbatches, step.rules_of(finite), tuning)
    problem = _PhaseProblem(
        graph,
        microbatches,
        step.examples,
        loosely=step.loosely,
        late_sums=late_sums,
        known=known or {},
        finite=finite,
        tuning=tuning,
    )
    found = choose(tie_layers(ChoiceProblem(costs=Costs.of(problem.costs(), problem.edges()), is_proven=False)))
    if not isinstance(found, Chosen) and known:
        return phases_of(traced, microbatches, late_sums=late_sums, finite=finite, tuning=tuning)
    if not isinstance(found, Chosen):
        raise AssertionError("a step can always run whole, before the loop")
    phases = {n.equation: problem.phase(v, found.numbers[v]) for v, n in enumerate(graph.nodes) if n.equation}
    phases |= {n.loop: problem.phase(v, found.numbers[v]) for v, n in enumerate(graph.nodes) if n.loop}
    return TimePlan(
        microbatches=microbatches,
        phases={eqn: phases.get(eqn, "epilogue") for eqn in traced.program.equations},
        assignment=assign(graph, [problem.strategy(v, p) for v, p in enumerate(found.numbers)]),
        is_of_finite=finite,
    )


def in_another_number(plan: TimePlan, microbatches: int, rules: RuleBook, tuning: Tuning = TUNING) -> TimePlan | None:
    """A plan with the same phases and layouts for another number of microbatches, if that divides all that the plan divides.

    The phases weigh what is moved per microbatch against what stays in memory, which a number hardly changes.
    """
    if 1 in (plan.microbatches, microbatches):  # one microbatch divides nothing
        return None
    made, mesh = plan.assignment, LogicalMesh((microbatches,), ("time",))
    strategies: dict[Equation, ShardingStrategy] = {}
    known: dict[tuple[int, int], ShardingStrategy | None] = {}
    for eqn, strategy in made.strategies.items():
        key = id(strategy), id(made.rules[eqn])
        if key not in known:
            known[key] = _divided_among(strategy, made.rules[eqn], plan.microbatches, microbatches)
        found = known[key]
        if found is None:
            return None
        strategies[eqn] = found
    spaces = catalogue_over_time(microbatches, rules, tuning).spaces
    assignment = dataclasses.replace(made, mesh=mesh, spaces=spaces, strategies=strategies, seconds=())
    return dataclasses.replace(plan, microbatches=microbatches, assignment=assignment)


def _divided_among(strategy: ShardingStrategy, rule: FactorRule, before: int, now: int) -> ShardingStrategy | None:
    """A strategy for another number of microbatches; None if that does not divide its factors."""
    if any(size % now for factor, axes in strategy.factor_axes if axes and (size := dict(rule.sizes).get(factor))):
        return None
    return dataclasses.replace(strategy, ways=now) if strategy.ways == before else strategy


@dataclasses.dataclass(frozen=True, eq=False)
class _StepFacts:
    """What holds of a step in any number of microbatches: its rules, and the factors that count examples, see `examples.py`."""

    rules: RuleBook
    examples: Mapping[Equation, frozenset[str]]
    loosely: Mapping[Equation, frozenset[str]]

    @functools.cached_property
    def of_finite(self) -> RuleBook:
        """The rules of finite numbers."""
        return RuleBook(finite=True)

    def rules_of(self, finite: bool) -> RuleBook:
        """The rules, or those of finite numbers."""
        return self.of_finite if finite else self.rules


_FACTS: weakref.WeakKeyDictionary[TracedStep, _StepFacts] = weakref.WeakKeyDictionary()


def _facts_of(traced: TracedStep) -> _StepFacts:
    """Found once for each step."""
    if traced not in _FACTS:
        rules = RuleBook()
        examples, loosely = (find_example_factors(traced, rules, loosely=loosely) for loosely in (False, True))
        _FACTS[traced] = _StepFacts(rules, examples, loosely)
    return _FACTS[traced]


class _PhaseProblem:
    """The strategy graph of the time mesh with two more choices per node: whole in the prologue, whole in the epilogue."""

    def __init__(
        self,
        graph: StrategyGraph,
        microbatches: int,
        examples: Mapping[Equation, frozenset[str]],
        *,
        loosely: Mapping[Equation, frozenset[str]],
        late_sums: bool,
        known: Mapping[Equation, Phase],
        finite: bool,
        tuning: Tuning,
    ) -> None:
        self.tuning, self.finite = tuning, finite
        self.graph, self.microbatches, self.late_sums, self._known = graph, microbatches, late_sums, known
        self._on_examples = {eqn for eqn, factors in examples.items() if factors}
        self._loosely = {eqn for eqn, factors in loosely.items() if factors}
        self._little = self._of_little_work()
        self._extended: dict[tuple[int, ...], np.ndarray] = {}
        self._estimates: dict[tuple[int, ...], np.ndarray] = {}
        self._may_be_estimates = find_estimates(graph.program, graph.program.equations)
        self._largest_uses = uses_between(graph)

    def _of_little_work(self) -> set[Equation]:
        """Heavy operations on examples of so little work that one of them may stay outside the body."""
        work = {
            node.equation: node.trips * flops_of(node.equation, node.rule)
            for node in self.graph.nodes
            if node.equation is not None and node.rule is not None
            if node.equation in self._loosely and entry_for(node.equation).heavy
        }
        return {eqn for eqn, flops in work.items() if flops <= self.tuning.little * sum(work.values())}

    def _count(self, node: int) -> int:
        return len(self.graph.nodes[node].choices.strategies)

    def _only(self, node: Node) -> Phase | None:
        """The one phase of a node that stands for an input or an output of the step."""
        if node.equation is not None or node.loop is not None:
            return None
        return "prologue" if node.input_number is not None else "epilogue"

    def phase(self, node: int, choice: int) -> Phase:
        """The phase of a choice."""
        only = self._only(self.graph.nodes[node])
        if only is not None:
            return only
        extra = choice - self._count(node)
        return "body" if extra < 0 else "prologue" if extra == 0 else "epilogue"

    def strategy(self, node: int, choice: int) -> int:
        """The strategy of a choice: outside the body the replicated one, which comes first."""
        return choice if choice < self._count(node) else 0

    def costs(self) -> list[np.ndarray]:
        """Bytes per choice: moved, and staying. Work on examples outside the body costs more; heavy work, more than all else."""
        forbidding = 4 * self.microbatches * self.tuning.resident * sum(float(c.max()) for c in self.graph.costs)
        costs, found = list[np.ndarray](), dict[Hashable, np.ndarray]()
        for node, base in zip(self.graph.nodes, self.graph.costs, strict=True):
            if (key := self._what_counts(node, base)) not in found:
                found[key] = self._cost(node, base, forbidding)
            costs.append(found[key])
        return costs

    def _what_counts(self, node: Node, base: np.ndarray) -> Hashable:
        """Equal for nodes of equal costs."""
        if (eqn := node.equation) is None or self.finite:
            return node
        literals = tuple(isinstance(atom, Literal) for atom in eqn.invars) if self.late_sums else ()
        sets = [eqn in one for one in (self._on_examples, self._loosely, self._little)]
        whether = node.loop is None, *literals, *sets
        return id(base), id(node.choices), id(entry_for(eqn)), self._phase_of(node), whether

    def _cost(self, node: Node, base: np.ndarray, forbidding: float) -> np.ndarray:
        if self._only(node) is not None:
            return np.zeros(1)
        inside, whole = self.microbatches * base, base[0]
        if node.equation in self._on_examples:
            inside = inside + self.tuning.resident * node.choices.out_bytes
            whole = self.tuning.on_examples * (whole + self.tuning.resident * node.choices.out_bytes[0])
        if node.equation in self._loosely and entry_for(node.equation).heavy:
            undivided = np.array([s.ways < self.microbatches for s in node.choices.strategies])
            penalty = forbidding if node.equation in self._on_examples else forbidding / self.tuning.strictly
            penalty *= 1.0 if node.equation in self._little else self.tuning.less_for_little
            inside, whole = inside + penalty * undivided, whole + penalty
        if self.finite and node.equation is not None:
            taken = np.array([needs_finite(node.equation, s) for s in node.choices.strategies])
            inside = inside + self.tuning.if_finite * forbidding / len(self.graph.nodes) * taken
        if self.late_sums and node.equation is not None and node.loop is None:
            inside = inside + forbidding * np.array([adds_terms(node.equation, s) for s in node.choices.strategies])
        before = whole + self.tuning.prologue_bytes
        if node.equation is not None and entry_for(node.equation).once:
            inside = inside + np.inf
            before = before + forbidding * self.late_sums  # each stage does what comes before the loop
        return np.asarray(np.array([*inside, before, whole]) + self._exclude(node, len(inside)))

    def _phase_of(self, node: Node) -> Phase | None:
        anchor = node.loop if node.loop is not None else node.equation
        return None if anchor is None else self._known.get(anchor)

    def _exclude(self, node: Node, inside: int) -> np.ndarray:
        """Infinity for the phases that a node with a known one cannot have."""
        phase, phases = self._phase_of(node), [*["body"] * inside, "prologue", "epilogue"]
        return np.array([0.0 if phase in (None, p) else np.inf for p in phases])

    def edges(self) -> dict[tuple[int, int], np.ndarray]:
        """Bytes per pair of choices; infinite where the first cannot feed the second."""
        edges = {pair: self._between(pair, self._with_estimates(pair, base)) for pair, base in self.graph.edges.items()}
        for pair in unconnected(self.graph):
            u, v = pair
            edges[pair] = self._inside_a_loop(np.zeros((self._count(u), self._count(v))))
        return edges

    def _with_estimates(self, pair: tuple[int, int], base: np.ndarray) -> np.ndarray:
        """The matrix of a pair. A marked statistic of the microbatch, times their number, may stand for that of the batch.

        Of what is made of it, no microbatch takes a slice.
        """
        (u, v), use = (self.graph.nodes[i] for i in pair), self._largest_uses[pair]
        is_marked = v.equation is not None and v.equation.primitive is batch_statistic_p
        is_estimate = u.equation is not None and u.equation.outvars[use.source.output] in self._may_be_estimates
        if pair != (use.source.node, use.target) or not (is_marked or is_estimate):
            return base
        key = (id(base), id(u.choices), id(v.choices), int(is_marked), use.source.output, use.operand)
        if key not in self._estimates:
            given = [s.outputs[use.source.output] for s in u.choices.strategies]
            taken = [s.inputs[use.operand] for s in v.choices.strategies]
            allowed = [[not (b.sharded_axes and not (a.sharded_axes or a.partial)) for b in taken] for a in given]
            estimated = [
                [is_marked and bool(a.partial) and not (b.partial or b.sharded_axes) for b in taken] for a in given
            ]
            price = self.tuning.resident * self.microbatches * math.prod(use.aval.shape) * itemsize_of(use.aval)
            self._estimates[key] = np.where(estimated, price, np.where(allowed, base, np.inf))
        return self._estimates[key]

    def _between(self, pair: tuple[int, int], base: np.ndarray) -> np.ndarray:
        u, v = (self.graph.nodes[i] for i in pair)
        key = (id(base), id(u.choices), id(v.choices), *(self._kind(n) for n in (u, v)), int(self._same_loop(u, v)))
        use = self._largest_uses[pair]
        key = (*key, use.source.output, int(use.source.stacked), int(is_opaque(use.aval)))
        if key not in self._extended:
            self._extended[key] = self._inside_a_loop(base) if self._same_loop(u, v) else self._across(pair, base, use)
        return self._extended[key]

    def _kind(self, node: Node) -> int:
        only = self._only(node)
        return 0 if only is None else 1 if only == "prologue" else 2

    def _same_loop(self, u: Node, v: Node) -> bool:
        return u.loop is not None and u.loop is v.loop

    def _inside_a_loop(self, base: np.ndarray) -> np.ndarray:
        """Both ends in one phase; outside the body both are whole, and nothing moves."""
        rows, columns = base.shape
        full = np.full((rows + 2, columns + 2), np.inf)
        full[:rows, :columns] = base
        full[rows, columns] = full[rows + 1, columns + 1] = 0.0
        return full

    def _across(self, pair: tuple[int, int], base: np.ndarray, use: Use) -> np.ndarray:
        u, v = (self.graph.nodes[i] for i in pair)
        (rows, columns), full = base.shape, self._inside_a_loop(base)
        full[:rows, columns + 1] = self._finishing(u.choices.strategies, use)
        full[rows, :columns] = base[0]
        full[rows, columns + 1] = 0.0
        kept_rows = [rows] if self._only(u) == "prologue" else range(rows + 2)
        kept_columns = [columns + 1] if self._only(v) == "epilogue" else range(columns + 2)
        return full[np.ix_(list(kept_rows), list(kept_columns))]

    def _finishing(self, strategies: Sequence[ShardingStrategy], use: Use) -> np.ndarray:
        """Bytes to combine terms in every microbatch, or to join slices once; and the whole result stays."""
        size = float(np.prod(use.aval.shape, dtype=np.int64)) * itemsize_of(use.aval)
        joined = (2.0 + self.tuning.resident) * size
        combined = (3.0 * self.microbatches + self.tuning.resident) * size
        return np.array([joined if s.outputs[use.source.output].sharded_axes else combined for s in strategies])

"""Why a step cannot be cut into microbatches: the operation that mixes examples, found and named.

In: a `TimePlan` whose heavy operations did not all fit into the body. Out: `MixedExamples` with the operation, the user's
line and the reason, or None where what stays outside is too little to matter. What can go wrong: the first operation that
mixes is named, which need not be the one that the user has in mind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Literal

from autopar.compat import Literal as JaxLiteral
from autopar.compat import Var, functions_around
from autopar.microbatches.examples import ONE_BY_ONE
from autopar.microbatches.time_plan import TimePlan
from autopar.program.loops import Filled, LoopEquation
from autopar.program.program import Atom, Equation, hands_on, variables_of
from autopar.program.step import TracedStep
from autopar.rules.factor_rule import FactorRule
from autopar.rules.table import entry_for, flops_of, has_rule, linear_if_finite

Certainty = Literal["certain", "vague", "finite"]


@dataclasses.dataclass(frozen=True)
class MixedExamples:
    """Why a step cannot be cut into microbatches: the operation that mixes examples, and its line.

    `certainty`: "vague" if no operation was found that mixes, and the one that is named is heavy work that is not divided;
    "finite" if a product in a loop or a branch needs a whole sum, and would take terms of it if its other factor were finite.
    """

    operation: str
    source: str
    reason: str
    certainty: Certainty = "certain"

    def __str__(self) -> str:
        return f"{self.operation} at {self.source} {self.reason}"


def find_mixing(
    traced: TracedStep, plan: TimePlan, examples: Mapping[Equation, frozenset[str]], *, allowed: float
) -> MixedExamples | None:
    """Why heavy work on examples stayed outside the body, None if no more of it did than is allowed."""
    rules = plan.assignment.rules
    outside, all_flops = list[tuple[float, Equation, Equation]](), 0.0
    for eqn in plan.assignment.program.equations:
        for inner, trips in walk_with_trips(eqn):
            if inner in rules and entry_for(inner).heavy and examples.get(inner):
                work = trips * flops_of(inner, rules[inner])
                all_flops += work
                if plan.phases[eqn] != "body" or plan.assignment.strategies[inner].ways < plan.microbatches:
                    outside.append((work, inner, eqn))
    if not outside or sum(work for work, _, _ in outside) <= allowed * all_flops:
        return None
    too_much = [(inner, eqn) for work, inner, eqn in outside if work > allowed * all_flops / len(outside)]
    sizes = {rules[e].size_of(f) for e, _ in too_much for f in examples[e] if f in dict(rules[e].sizes)}
    behind = _made_with(plan, {eqn for _, eqn in too_much})
    return (
        _first_mixing(traced, plan, examples, among=behind)
        or _first_mixing(traced, plan, examples, among=set(plan.assignment.program.equations))
        or _undivided(traced, plan, too_much[0][0], sizes)
    )


def _made_with(plan: TimePlan, equations: set[Equation]) -> set[Equation]:
    """Outermost equations and those whose results they need, near and far."""
    found, needed = set(equations), set[Var]()
    for eqn in reversed(plan.assignment.program.equations):
        if eqn in found or any(v in needed for v in eqn.outvars):
            found.add(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, JaxLiteral))
    return found


def walk_with_trips(eqn: Equation, trips: float = 1.0) -> Iterator[tuple[Equation, float]]:
    """An equation and those inside it, with how often each runs."""
    yield eqn, trips
    inside = trips * max(eqn.loop.trips, 1) if isinstance(eqn, LoopEquation) else trips
    for region in eqn.regions:
        for inner in region.equations:
            yield from walk_with_trips(inner, inside)


def _undivided(traced: TracedStep, plan: TimePlan, eqn: Equation, sizes: set[int]) -> MixedExamples:
    uneven = [
        leaf for leaf in traced.inputs if leaf.role == "batch" and leaf.shape and leaf.shape[0] % plan.microbatches
    ]
    if uneven:
        listed = ", ".join(f"{leaf.path} has {leaf.shape[0]}" for leaf in uneven[:3])
        reason = f"works on a batch that {plan.microbatches} microbatches do not divide: {listed} examples"
    else:
        reason = f"works on all examples at once (sizes {sorted(sizes)})"
    return MixedExamples(eqn.primitive.name, plan.line_of(eqn), reason, "certain" if uneven else "vague")


def _first_mixing(
    traced: TracedStep, plan: TimePlan, examples: Mapping[Equation, frozenset[str]], *, among: set[Equation]
) -> MixedExamples | None:
    """The first of these operations, going forward from the batch, that no strategy lets work on one microbatch alone."""
    only_batch = {v for v, leaf in zip(traced.program.invars, traced.inputs, strict=True) if leaf.role == "batch"}
    search = _Search(plan, examples, only_batch)
    found = search.first([eqn for eqn in plan.assignment.program.equations if eqn in among])
    if found is not None:
        eqn, reason = found
        return MixedExamples(eqn.primitive.name, plan.line_of(eqn), reason)
    if search.waits_in_loop is None:
        return None
    eqn, where = search.waits_in_loop
    reason = f"needs a value that is reduced over all examples, {where}"
    certainty: Certainty = "finite" if search.may_take_terms else "certain"
    return MixedExamples(eqn.primitive.name, plan.line_of(eqn), reason, certainty)


_IN_LOOP, _WITHIN = "in each iteration of a loop", {"cond": "in a branch"}
_CALLS = "calls Python once in a step, which no microbatch can do for all"


class _Search:
    """Goes through operations, and those of loops, with the values that are reduced over examples and what is made of them.

    `waits_in_loop`: the first operation of a loop or a branch that takes such a value and that no single terms of it would do
    for, and where it is. `may_take_terms`: whether single terms would do for one of these if its other operands were finite.
    """

    def __init__(self, plan: TimePlan, examples: Mapping[Equation, frozenset[str]], only_batch: set[Var]) -> None:
        self.rules, self.examples = plan.assignment.rules, examples
        self.only_batch, self.pending = only_batch, set[Var]()
        self.waits_in_loop: tuple[Equation, str] | None = None
        self.may_take_terms = False

    def first(self, equations: Iterable[Equation], *, within: str = "") -> tuple[Equation, str] | None:
        """(operation, why): the first that mixes examples."""
        for eqn in equations:
            reason = self._reason(eqn)
            if reason:
                return eqn, reason
            operands = variables_of(eqn.invars)
            if all(v in self.only_batch for v in operands):
                self.only_batch.update(eqn.outvars)
            elif isinstance(eqn, LoopEquation):
                if found := self._first_inside(eqn, within or _WITHIN.get(eqn.loop.kind, _IN_LOOP)):
                    return found
            else:
                self._follow(eqn, within)
        return None

    def _first_inside(self, loop: LoopEquation, within: str) -> tuple[Equation, str] | None:
        inside = [eqn for eqn, _ in walk_with_trips(loop)]
        calling = next((eqn for eqn in inside if entry_for(eqn).once), None)
        if calling is not None and any(self.examples.get(eqn) for eqn in inside):
            return calling, _CALLS
        for nested in loop.nested:
            for entry in (entry for entry in nested.entries if isinstance(entry.atom, Var)):
                if entry.atom in self.pending:
                    self.pending.add(entry.var)
                if entry.atom in self.only_batch and entry.filled in (Filled.CONSTANT, Filled.ROW):
                    self.only_batch.add(entry.var)
            is_settled = False
            while not is_settled:  # what an iteration hands to the next one may be pending there for the first time
                if found := self.first(nested.program.equations, within=within):
                    return found
                carried = {e.carry.var for e in nested.exits if e.carry is not None and self._is_pending(e.atom)}
                is_settled = carried <= self.pending
                self.pending |= carried
        for v, exits in zip(loop.outvars, loop.results, strict=True):
            if any(self._is_pending(exit_.atom) for exit_ in exits):
                self.pending.add(v)
        return None

    def _is_pending(self, atom: Atom) -> bool:
        return isinstance(atom, Var) and atom in self.pending

    def _follow(self, eqn: Equation, within: str) -> None:
        """Note whether an operation's results are reduced over examples, or made of such."""
        marked, rule = self.examples.get(eqn, frozenset()), self.rules[eqn]
        waits = self._waits(eqn)
        if within and waits and not any(waits <= set(group) for group in rule.linear):
            self.waits_in_loop = self.waits_in_loop or (eqn, within)
            self.may_take_terms |= any(waits <= set(group) for group in linear_if_finite(eqn, rule))
        if waits or (marked and not _holds(rule, marked)):
            self.pending.update(eqn.outvars)

    def _waits(self, eqn: Equation) -> set[int]:
        """The places of operands that are reduced over examples."""
        return {place for place, v in enumerate(eqn.invars) if self._is_pending(v)}

    def _reason(self, eqn: Equation) -> str | None:
        """Why an operation mixes examples, None if it does not."""
        marked = self.examples.get(eqn, frozenset())
        if marked and entry_for(eqn).once:
            return _CALLS
        if not isinstance(eqn, LoopEquation) and marked & _behind(self.rules[eqn]):
            return "puts the examples behind another dimension, instead of before it"
        if all(v in self.only_batch for v in variables_of(eqn.invars)):
            return None
        if ONE_BY_ONE in marked:
            return (
                "goes through the examples one after another; compute all of them at once and leave their parts to "
                "num_microbatches"
            )
        if isinstance(eqn, LoopEquation) or not marked:
            return None
        rule = self.rules[eqn]
        if not has_rule(eqn):
            return "has no factor rule, so that it takes all examples at once; autopar.register_rule teaches it"
        if marked & rule.whole or len(marked) > 1:
            return "relates examples of the batch to each other"
        if self._waits(eqn) and _holds(rule, marked) and not hands_on(eqn):
            return "needs a value that is reduced over all examples, on every example" + _in_batch_norm(eqn)
        return None


def _holds(rule: FactorRule, marked: Set[str]) -> bool:
    """Whether a result still has an index per example."""
    return any(set(factors[:1]) & marked for operand in rule.outputs for factors in operand)


def _in_batch_norm(eqn: Equation) -> str:
    """What to say of an operation inside a library's batch normalisation, whose line alone would not tell."""
    if not any(name.startswith("BatchNorm.") for name in functions_around(eqn)):
        return ""
    return " (BatchNorm, whose statistics are of the whole batch; LayerNorm and GroupNorm have those of one example)"


def _behind(rule: FactorRule) -> set[str]:
    """Factors that another one comes before in a dimension of a result: their slices do not lie together there."""
    first = {f for operand in rule.outputs for dim in operand for f in dim[:1]}
    return {f for operand in rule.outputs for dim in operand for f in dim[1:]} - first

"""Why a step cannot be cut into microbatches: the operation that mixes examples, found and named.

In: a `TimePlan` whose heavy operations did not all fit into the body. Out: `MixedExamples` with the operation, the user's
line and the reason, or None where what stays outside is too little to matter. What can go wrong: the first operation that
mixes is named, which need not be the one that the user has in mind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from autopar.compat import Literal as JaxLiteral
from autopar.compat import Var, functions_around, source_line
from autopar.microbatches.examples import ONE_BY_ONE
from autopar.microbatches.time_plan import TimePlan
from autopar.program.loops import LoopEquation
from autopar.program.program import Equation
from autopar.program.step import TracedStep
from autopar.rules.factor_rule import FactorRule
from autopar.rules.table import entry_for, flops_of, has_rule


@dataclasses.dataclass(frozen=True)
class MixedExamples:
    """Why a step cannot be cut into microbatches: the operation that mixes examples, and its line.

    `is_vague`: no operation was found that mixes, and the one that is named is heavy work that is not divided.
    """

    operation: str
    source: str
    reason: str
    is_vague: bool = False

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
    return MixedExamples(eqn.primitive.name, _line(plan, eqn), reason, is_vague=not uneven)


def _line(plan: TimePlan, eqn: Equation) -> str:
    """The user's line of an equation; where JAX keeps none inside a function of its own, of the nearest after it, or before."""
    program = list(plan.assignment.program.walk())
    place = program.index(eqn)
    lines = (source_line(e) for e in (*program[place:], *reversed(program[:place])))
    return next((line for line in lines if line), "an unknown line")


def _first_mixing(
    traced: TracedStep, plan: TimePlan, examples: Mapping[Equation, frozenset[str]], *, among: set[Equation]
) -> MixedExamples | None:
    """The first of these operations, going forward from the batch, that no strategy lets work on one microbatch alone."""
    rules, pending = plan.assignment.rules, set[Var]()
    only_batch = {v for v, leaf in zip(traced.program.invars, traced.inputs, strict=True) if leaf.role == "batch"}
    for eqn in (eqn for eqn in plan.assignment.program.equations if eqn in among):
        operands = [v for v in eqn.invars if not isinstance(v, JaxLiteral)]
        marked = examples.get(eqn, frozenset())
        if marked and any(entry_for(inner).once for inner, _ in walk_with_trips(eqn)):
            return MixedExamples(
                eqn.primitive.name, _line(plan, eqn), "calls Python once in a step, which no microbatch can do for all"
            )
        if not isinstance(eqn, LoopEquation) and marked & _behind(rules[eqn]):
            return MixedExamples(
                eqn.primitive.name, _line(plan, eqn), "puts the examples behind another dimension, instead of before it"
            )
        if all(v in only_batch for v in operands):
            only_batch.update(eqn.outvars)
            continue
        if ONE_BY_ONE in marked:
            return MixedExamples(
                eqn.primitive.name,
                _line(plan, eqn),
                "goes through the examples one after another; compute all of them at once and leave their parts to "
                "num_microbatches",
            )
        if isinstance(eqn, LoopEquation):
            continue
        rule = rules[eqn]
        waits = [place for place, v in enumerate(eqn.invars) if not isinstance(v, JaxLiteral) and v in pending]
        if marked and not has_rule(eqn):
            return MixedExamples(
                eqn.primitive.name,
                _line(plan, eqn),
                "has no factor rule, so that it takes all examples at once; autopar.register_rule teaches it",
            )
        if marked & rule.whole or len(marked) > 1:
            return MixedExamples(eqn.primitive.name, _line(plan, eqn), "relates examples of the batch to each other")
        held = any(set(factors[:1]) & marked for operand in rule.outputs for factors in operand)
        if waits and marked and held:
            return MixedExamples(
                eqn.primitive.name,
                _line(plan, eqn),
                "needs a value that is reduced over all examples, on every example" + _in_batch_norm(eqn),
            )
        reduces = bool(marked) and not held
        if reduces or waits:
            pending.update(eqn.outvars)
    return None


def _in_batch_norm(eqn: Equation) -> str:
    """What to say of an operation inside a library's batch normalisation, whose line alone would not tell."""
    if not any(name.startswith("BatchNorm.") for name in functions_around(eqn)):
        return ""
    return " (BatchNorm, whose statistics are of the whole batch; LayerNorm and GroupNorm have those of one example)"


def _behind(rule: FactorRule) -> set[str]:
    """Factors that another one comes before in a dimension of a result: their slices do not lie together there."""
    first = {f for operand in rule.outputs for dim in operand for f in dim[:1]}
    return {f for operand in rule.outputs for dim in operand for f in dim[1:]} - first

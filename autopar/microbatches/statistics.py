"""Statistics of a batch that are taken per microbatch, if the user asks for that: those of batch normalisation.

In: a traced step. Out: the same step, in which each value is marked (`batch_statistic`) that is reduced over examples, that every
example needs afterwards, and that the state has a part in; what the batch alone gives, such as the sum of a mask, is known before
the loop and stays exact. In a microbatch a marked sum is that of its own examples times the number of microbatches: a mean over
the batch becomes one over the microbatch, and so do the sums of its gradient. After the loop such values are averaged. What can
go wrong: a step that computes with weights which it has just updated; values reach no examples through the new state. And a step
that divides a sum by one less than its terms, as `var(ddof=1)` does, still divides by one less than all terms; a warning says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Set

import jax
import numpy as np

from autopar.compat import Literal, Var, attributed_to, source_line
from autopar.errors import warn
from autopar.intra_op.choices.known_equations import RuleBook
from autopar.intra_op.lowering.per_device import Placed
from autopar.layouts.mesh import Layout
from autopar.microbatches.examples import find_example_factors
from autopar.microbatches.loop import StepLowering
from autopar.microbatches.phases import phases_of
from autopar.microbatches.time_plan import TimePlan
from autopar.program.opened.statistic import batch_statistic_p
from autopar.program.program import Atom, Equation, Program, divides, hands_on, operands_of, subtracts
from autopar.program.step import TracedStep
from autopar.program.trace import retrace
from autopar.program.walk import Scope
from autopar.rules.table import entry_for


def mark_statistics(traced: TracedStep) -> TracedStep:
    """The step with its statistics marked; itself if it has none. See the module's text."""
    found = frozenset(find_statistics(traced))
    if not found:
        return traced
    marking = _Marking(phases_of(traced, 1), found)

    def run(*inputs: jax.Array) -> list[jax.Array]:
        given = zip(traced.program.invars, inputs, strict=True)
        scope = Scope(marking, {v: marking.place(v, x, Layout.replicated(len(v.aval.shape))) for v, x in given})
        scope.run(traced.program.equations)
        return [scope.value(atom).array for atom in traced.program.outvars]

    return retrace(traced, traced.inputs, run)


def find_statistics(traced: TracedStep) -> Iterator[Equation]:
    """The equations whose results are statistics."""
    rules, program = RuleBook(), traced.program
    examples = find_example_factors(traced, rules)
    new_state = {v for v, state in zip(program.outvars, traced.state_of_output, strict=True) if state is not None}
    of_state = {v for v, leaf in zip(program.invars, traced.inputs, strict=True) if leaf.role == "state"}
    yield from _find_in(program, examples, rules, of_state=of_state, new_state=new_state)


def _find_in(
    program: Program,
    examples: Mapping[Equation, frozenset[str]],
    rules: RuleBook,
    *,
    of_state: set[Var],
    new_state: Set[Atom],
) -> Iterator[Equation]:
    for eqn in program.equations:
        if of_state & set(operands_of(eqn)):
            of_state.update(eqn.outvars)
    awaited = _awaited_by_examples(program, examples, new_state)
    for eqn in program.equations:
        given = of_state & set(operands_of(eqn))
        for region in eqn.regions if given else ():
            yield from _find_in(region, examples, rules, of_state=set(region.invars), new_state=set())
        if given and not eqn.regions and awaited & set(eqn.outvars) and not entry_for(eqn).heavy:
            marked = examples.get(eqn, frozenset())
            if marked & {factor for factor, _ in rules.rule(eqn).reduced}:
                yield eqn


def _awaited_by_examples(
    program: Program, examples: Mapping[Equation, frozenset[str]], new_state: Set[Atom]
) -> set[Var]:
    """Values that operations on examples need, near and far, other than through the new state."""
    awaited = set[Var]()
    for eqn in reversed(program.equations):
        works_on_examples = any(examples.get(inner) for inner in Program((), (eqn,), ()).walk())
        if works_on_examples or (awaited & set(eqn.outvars) and not new_state & set(eqn.outvars)):
            awaited.update(operands_of(eqn))
    return awaited


def warn_of_corrections(traced: TracedStep) -> None:
    """Warn if a step that is cut into microbatches divides a statistic by fewer terms than it sums, as `var(ddof=1)` does."""
    found = next(find_corrections(traced), None)
    if found is not None:
        eqn, terms, divisor = found
        warn(
            f"batch_statistics='microbatch': {source_line(eqn) or 'the step'} divides a sum of {terms} terms by {divisor:g}, as "
            "var(ddof=1) does. A microbatch has fewer terms, and its sum is scaled to all of them: the correction is that of the "
            "whole batch. Use ddof=0, as batch normalisation does, or num_microbatches=1"
        )


def find_corrections(traced: TracedStep) -> Iterator[tuple[Equation, int, float]]:
    """The equations that divide a statistic by somewhat fewer than its terms, with both numbers."""
    found = frozenset(find_statistics(traced))
    terms: dict[Var, int] = {}
    numbers: dict[Var, float] = {}

    def number(atom: Atom) -> float | None:
        if not isinstance(atom, Literal):
            return numbers.get(atom)
        value = np.asarray(atom.val)
        return float(value) if value.shape == () and value.dtype.kind in "iuf" else None

    for eqn in traced.program.walk() if found else ():
        given = [number(atom) for atom in eqn.invars]
        operand, result = (eqn.invars[0], eqn.outvars[0]) if eqn.invars and eqn.outvars else (None, None)
        if operand is None or result is None or eqn.regions:
            continue
        summed, value = 0 if isinstance(operand, Literal) else terms.get(operand, 0), given[0]
        if eqn in found:
            terms[result] = operand.aval.size // result.aval.size
        elif divides(eqn) and given[1] is not None and summed / 2 < given[1] < summed:
            yield eqn, summed, given[1]
        elif subtracts(eqn) and value is not None and given[1] is not None:
            numbers[result] = value - given[1]
        elif len(given) == 1 and value is not None and hands_on(eqn):
            numbers[result] = value
        elif len(given) == 1 and summed and operand.aval.size == result.aval.size:  # it gets another shape
            terms[result] = summed


class _Marking(StepLowering):
    """Runs a step in one microbatch, and marks what some of its equations give."""

    def __init__(self, plan: TimePlan, found: frozenset[Equation]) -> None:
        super().__init__(plan, 0)
        self._found = found

    def operation(self, eqn: Equation, scope: Scope[Placed]) -> list[Placed]:
        """One equation, and the marks of its results."""
        results = super().operation(eqn, scope)
        if eqn not in self._found:
            return results
        with attributed_to(eqn):
            return [dataclasses.replace(one, array=batch_statistic_p.bind(one.array)) for one in results]

"""Which equations of a step are its backward pass, by data flow.

In: a traced step. Out: the equations of its backward pass, and of everything that is computed from these, such as the update.

Number the weights in the order in which the step first combines them with examples. For an equation e let

    past(e)     the weights that e is computed from
    ahead(e)    the weights whose new values are computed from e

both through arrays, not through scalars: a norm of all gradients would relate every weight to every other one. Along the forward
pass past(e) grows. On the way back ahead(e) shrinks, because a cotangent that has passed a layer no longer feeds its gradient.
So e returns if

    some weight in past(e) - ahead(e) comes after some weight in ahead(e)

where only trained weights count, and e is not an elementwise derivative that is kept for the way back. A weight is trained if its
new value combines it with an array that is computed from it, and if that array also depends on a later weight, unless there is
none. The second condition tells gradients from statistics of the forward pass, such as the load of experts that moves their
biases. A gradient is what reaches the new value of a trained weight element by element. Four rules complete the definition:

    1. A loss is an output that is no state and is computed neither from an equation that returns nor from a gradient.
       What losses need is forward.
    2. Anything else that returns or makes a gradient is backward.
    3. What is computed from backward, or waits for it, as recomputation does, is backward.
    4. What is left could run on either side, such as derivatives at the end of the forward pass, before the first weight is
       passed on the way back. It is backward if JAX transposed or recomputed it, and forward otherwise.

A pass through weights that this loss does not train, as of a generator's examples through the discriminator, returns by this
definition. In rule 1 it does not count as returning where JAX linearized it without transposing it.

A step that updates no weight may return gradients: outputs with the shapes of all its weights, in their order. If there are none
of these either, JAX's transpositions alone tell its backward pass, as of a derivative with respect to the examples.

What can go wrong: a derivative inside the loss is forward, because the loss needs it, and reads its weights again.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from autopar.compat import RECOMPUTED, Literal, Var, transformations
from autopar.program.program import Equation, operands_of, variables_of
from autopar.program.step import TracedStep
from autopar.program.walk import dependents_of
from autopar.stages.segments import is_costly

Weights = int
"""A set of weights: bit k stands for the one that is met as number k."""


Reads = Mapping[Equation, Sequence[Var]]
"""The equations in program order, with those operands of each that are no literals."""


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardPass:
    """The equations of the outermost level that belong to backward, and for each gradient the weight that it is for."""

    equations: frozenset[Equation]
    gradients: Mapping[Var, Var]


_FOUND: weakref.WeakKeyDictionary[TracedStep, BackwardPass] = weakref.WeakKeyDictionary()
"""By step: each search for stages asks for it many times. It holds equations and values, which do not hold the step."""


def find_backward(traced: TracedStep) -> BackwardPass:
    """The backward pass of a step; see the module's text. It is found once for each step."""
    if traced not in _FOUND:
        _FOUND[traced] = _find(traced)
    return _FOUND[traced]


def _find(traced: TracedStep) -> BackwardPass:
    reads = {eqn: operands_of(eqn) for eqn in traced.program.equations}
    returning, gradients = _going_back(traced, reads)
    making = {eqn for eqn in reads if not gradients.keys().isdisjoint(eqn.outvars)}
    starts = returning | making
    no_loss = making | {eqn for eqn in returning if not _is_linearized(eqn)} or set(filter(_is_transposed, reads))
    behind = {v for eqn in _with_followers(reads, no_loss) for v in eqn.outvars}
    pairs = zip(traced.program.outvars, traced.state_of_output, strict=True)
    losses = [v for v, source in pairs if source is None and not isinstance(v, Literal) and v not in behind]
    needed = _needed_for(reads, losses)
    free = (eqn for eqn in reads if eqn not in needed and eqn not in starts)
    going_back = (starts - needed).union(filter(_is_transposed, free))
    return BackwardPass(frozenset(_with_followers(reads, going_back)), gradients)


def _is_transposed(eqn: Equation) -> bool:
    """Whether JAX made it going back, as part of a transposition or of recomputation."""
    return not transformations(eqn).isdisjoint(("transpose", RECOMPUTED))


def _is_linearized(eqn: Equation) -> bool:
    """Whether JAX made it going forward, as part of a derivative that is known before any cotangent."""
    return "jvp" in transformations(eqn) and not _is_transposed(eqn)


def _with_followers(reads: Reads, starts: Set[Equation]) -> Iterator[Equation]:
    """These equations and all that are computed from them or wait for them, in order."""
    behind: set[Var | None] = set()
    for eqn, operands in reads.items():
        if eqn in starts or eqn.after in behind or not behind.isdisjoint(operands):
            behind.update(eqn.outvars)
            yield eqn


def _needed_for(reads: Reads, values: Iterable[Var]) -> set[Equation]:
    needed, found = set(values), set[Equation]()
    for eqn, operands in reversed(list(reads.items())):
        if not needed.isdisjoint(eqn.outvars):
            found.add(eqn)
            needed.update(operands)
    return found


def _going_back(traced: TracedStep, reads: Reads) -> tuple[set[Equation], dict[Var, Var]]:
    """(the equations that return, the gradients) with respect to new weights, or to returned gradients if there are none."""
    flow = _Flow.of(traced, reads)
    updates = _updates(traced, flow.weights)
    ahead = flow.ahead(updates)
    if trained := flow.trained(ahead):
        return flow.returning(ahead, trained), flow.gradients(updates, ahead, trained)
    returned = _returned_gradients(traced, flow, ahead)
    ahead, trained = flow.ahead(returned), functools.reduce(operator.or_, returned.values(), 0)
    found = flow.returning(ahead, trained)
    return found, flow.gradients(returned, ahead, trained) if found else {}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Flow:
    """Where the values of a step come from.

    `arrays`: the array operands of each equation, in program order. `examples`: the values that depend on examples. `weights`:
    those that are combined with examples, in that order. `past`: past(v) of every value. `meetings`: the equations that combine
    weights with examples, these weights, and those that the examples have met before.
    """

    arrays: Reads
    examples: Set[Var]
    weights: Sequence[Var]
    past: Mapping[Var, Weights]
    meetings: Sequence[tuple[Equation, Weights, Weights]]

    @classmethod
    def of(cls, traced: TracedStep, reads: Reads) -> _Flow:
        """Of a step."""
        leaves = list(zip(traced.program.invars, traced.inputs, strict=True))
        arrays = {eqn: [v for v in operands if v.aval.shape] for eqn, operands in reads.items()}
        examples = dependents_of(traced.program, [v for v, leaf in leaves if leaf.role == "batch"])
        weights = [v for v, leaf in leaves if leaf.role != "batch" and v.aval.shape]
        past = _past(arrays, weights)
        order = list(
            dict.fromkeys(weights[k] for _, own, _ in _meetings(arrays, examples, past) for k in _numbers(own))
        )
        past = _past(arrays, order)
        meetings = _meetings(arrays, examples, past)
        return cls(arrays=arrays, examples=examples, weights=order, past=past, meetings=meetings)

    def ahead(self, updates: Mapping[Var, Weights]) -> dict[Var, Weights]:
        """ahead(v) of every array, where `updates` are the values that replace weights."""
        ahead = dict(updates)
        for eqn, arrays in reversed(list(self.arrays.items())):
            if found := _union(ahead, eqn.outvars):
                for v in arrays:
                    ahead[v] = ahead.get(v, 0) | found
        return ahead

    def trained(self, ahead: Mapping[Var, Weights]) -> Weights:
        """The weights that gradients are added to; see the module's text."""
        before_update: dict[int, Weights] = {}
        for eqn, own, before in self.meetings:
            for k in _numbers(own & before & _union(ahead, eqn.outvars)):
                before_update[k] = before_update.get(k, 0) | before
        updated = _set_of(before_update)
        met: dict[Weights, Weights] = {}
        for _, own, before in self.meetings:
            met[own & updated] = met.get(own & updated, 0) | before
        later: dict[int, Weights] = {}
        for own, before in met.items():
            for k in _numbers(before & updated if own else 0):
                later[k] = later.get(k, 0) | own >> (k + 1) << (k + 1)
        return updated & ~_set_of(k for k, found in later.items() if found and not found & before_update[k])

    def returning(self, ahead: Mapping[Var, Weights], trained: Weights) -> set[Equation]:
        """The equations that have left a weight behind and feed the gradient of an earlier one."""
        found = set()
        for eqn in self.arrays:
            feeds = _union(ahead, eqn.outvars) & trained
            left = self.past[eqn.outvars[0]] & trained & ~feeds
            if left > feeds & -feeds > 0 and not self._stays(eqn):
                found.add(eqn)
        return found

    def _stays(self, eqn: Equation) -> bool:
        """Whether it is elementwise in examples of one place, as is a derivative that is kept for the way back."""
        (out, *_), operands = eqn.outvars, [v for v in self.arrays[eqn] if v in self.examples]
        alike = (self.past.get(v, 0) == self.past[out] and v.aval.size == out.aval.size for v in operands)
        return bool(operands) and not is_costly(eqn) and all(alike)

    def gradients(
        self, updates: Mapping[Var, Weights], ahead: Mapping[Var, Weights], trained: Weights
    ) -> dict[Var, Var]:
        """What reaches the new values of trained weights element by element and feeds no other weight, with the weight."""
        found: dict[Var, Var] = {}

        def add(v: Var) -> None:
            feeds = ahead[v] & trained
            if v in self.examples and feeds.bit_count() == 1:
                found[v] = self.weights[feeds.bit_length() - 1]

        for v in updates:
            add(v)
        for eqn, arrays in reversed(list(self.arrays.items())):
            if not found.keys().isdisjoint(eqn.outvars) and not is_costly(eqn):
                for v in arrays:
                    if v.aval.size == eqn.outvars[0].aval.size:
                        add(v)
        return found


def _past(arrays: Reads, weights: Sequence[Var]) -> dict[Var, Weights]:
    past = {v: 1 << k for k, v in enumerate(weights)}
    for eqn, operands in arrays.items():
        past.update(dict.fromkeys(eqn.outvars, _union(past, operands)))
    return past


def _meetings(
    arrays: Reads, examples: Set[Var], past: Mapping[Var, Weights]
) -> list[tuple[Equation, Weights, Weights]]:
    found = []
    for eqn, operands in arrays.items():
        if eqn.outvars[0] in examples and (own := _union(past, (v for v in operands if v not in examples))):
            found.append((eqn, own, _union(past, (v for v in operands if v in examples))))
    return found


def _updates(traced: TracedStep, weights: Sequence[Var]) -> dict[Var, Weights]:
    """The outputs that are new values of weights."""
    number = {v: k for k, v in enumerate(weights)}
    found: dict[Var, Weights] = {}
    for v, source in zip(traced.program.outvars, traced.state_of_output, strict=True):
        if source is not None and not isinstance(v, Literal) and traced.program.invars[source] in number:
            found[v] = found.get(v, 0) | 1 << number[traced.program.invars[source]]
    return found


def _returned_gradients(traced: TracedStep, flow: _Flow, ahead: Mapping[Var, Weights]) -> dict[Var, Weights]:
    """Outputs with the shapes of all weights, in their order; none if a weight has none.

    A leaf that only its own new value needs, such as the sum of gradients over several steps, is no weight here.
    """
    used = functools.reduce(
        operator.or_, (own for eqn, own, _ in flow.meetings if own != _union(ahead, eqn.outvars)), 0
    )
    number = {v: k for k, v in enumerate(flow.weights) if used >> k & 1}
    waiting = [v for v in traced.program.invars if v in number]
    found: dict[Var, Weights] = {}
    for v in variables_of(traced.program.outvars):
        if waiting and v in flow.examples and v.aval.shape == waiting[0].aval.shape:
            found[v] = found.get(v, 0) | 1 << number[waiting.pop(0)]
    return {} if waiting else found


def _union(of: Mapping[Var, Weights], values: Iterable[Var]) -> Weights:
    found = 0
    for v in values:
        found |= of.get(v, 0)
    return found


def _set_of(numbers: Iterable[int]) -> Weights:
    return functools.reduce(operator.or_, (1 << k for k in numbers), 0)


def _numbers(weights: Weights) -> Iterator[int]:
    while weights:
        lowest = weights & -weights
        yield lowest.bit_length() - 1
        weights ^= lowest

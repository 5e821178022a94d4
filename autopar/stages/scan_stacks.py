"""Which dimensions of a step's values count the layers that a `lax.scan` runs over.

In: a traced step. Out: its `Stack`s. The loop of a scan is a factor like those of the rule table: it indexes the leading
dimension of every stacked operand and result. Two dimensions belong together if some operation indexes both by one factor.
The casts before a forward scan, its residuals, the scan that goes back, the gradients and the optimizer therefore lie in one
class of dimensions. Such a class is a `Stack`: it holds everything that is stacked layer by layer. A longer dimension belongs to
it too if the layers are its major factor.

What can go wrong: a class that also counts something else. One that holds a dimension of the batch, as of a scan over time, or
scans of different lengths is no stack; a value with two dimensions in it is left whole.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TypeGuard

import numpy as np

from autopar.compat import Literal as JaxLiteral
from autopar.compat import Var
from autopar.disjoint_sets import DisjointSets
from autopar.program.layer_boundary import layer_boundary_p
from autopar.program.loops import Filled, Goes, LoopEquation
from autopar.program.program import Equation
from autopar.program.step import TracedStep
from autopar.rules.factor_rule import FactorRule, Operand
from autopar.rules.table import flops_of, rule_for
from autopar.stages.dependence import Dependence
from autopar.stages.tuning import TUNING, Tuning

Node = tuple[Var, int] | Equation
"""A dimension of a value, or the loop of a scan."""
ScanCuts = tuple[tuple[int, ...], ...]
"""For each stack the layers, ascending, at which it is cut; none leave it whole."""


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """`length` layers, the scans over them, which of these go back, and the dimension of every stacked value that counts them."""

    length: int
    scans: tuple[LoopEquation, ...]
    backward: frozenset[Equation]
    dims: Mapping[Var, int]


@dataclasses.dataclass(frozen=True)
class ForwardWork:
    """An operation of the forward pass in the full batch, and the stack that it scans over, if any."""

    equation: Equation
    flops: float
    stack: int | None


def find_stacks(traced: TracedStep) -> tuple[Stack, ...]:
    """The stacks whose layers can be divided, in the order of their forward scans."""
    whole = Dependence.of_whole(traced)
    forward = [eqn for eqn in whole.forward() if is_scan(eqn)]
    if not forward:
        return ()
    groups = _dimensions_together(traced).groups()
    stacks = [stack for nodes in groups if (stack := _stack(traced, nodes, whole.backward)) is not None]
    first = {id(stack): next((i for i, eqn in enumerate(forward) if eqn in stack.scans), None) for stack in stacks}
    usable = [stack for stack in stacks if first[id(stack)] is not None]
    return tuple(sorted(usable, key=lambda stack: first[id(stack)] or 0))


def forward_work(traced: TracedStep, stacks: Sequence[Stack]) -> tuple[ForwardWork, ...]:
    """The forward pass in order, as the stages' chain has it, without planning its microbatches."""
    number: dict[Equation, int] = {eqn: i for i, stack in enumerate(stacks) for eqn in stack.scans}
    return tuple(ForwardWork(eqn, _flops(eqn), number.get(eqn)) for eqn in Dependence.of_whole(traced).forward())


def cuts_for_stages(traced: TracedStep, num_stages: int) -> ScanCuts:
    """The layers at which stages of equal work begin; none if the user has marked where layers begin."""
    stacks = find_stacks(traced) if num_stages > 1 else ()
    work = forward_work(traced, stacks)
    if any(place.equation.primitive is layer_boundary_p for place in work):
        return tuple(() for _ in stacks)
    cuts: list[list[int]] = [[] for _ in stacks]
    done = list(itertools.accumulate((place.flops for place in work), initial=0.0))
    for k in range(1, num_stages):
        target = k * done[-1] / num_stages
        place = bisect.bisect_right(done, target) - 1
        number = work[place].stack if place < len(work) else None
        if number is not None:
            length, found = stacks[number].length, cuts[number]
            layer = max(round((target - done[place]) / work[place].flops * length), found[-1] + 1 if found else 0)
            found += [layer] if 0 < layer < length else []
    return tuple(tuple(sorted(found)) for found in cuts)


def every_layer(traced: TracedStep, *, tuning: Tuning = TUNING) -> ScanCuts:
    """All stacks cut into single layers, long ones into at most `tuning.most_pieces` equal groups: where a search may cut."""
    lengths = [stack.length for stack in find_stacks(traced)]
    return tuple(tuple(range(step, length, step)) for length in lengths for step in (-(-length // tuning.most_pieces),))


def is_scan(eqn: Equation) -> TypeGuard[LoopEquation]:
    """Whether it is a scan with at least two iterations, so that its range can be divided."""
    return isinstance(eqn, LoopEquation) and eqn.loop.kind == "scan" and eqn.loop.trips > 1


def factor_dims(operand: Operand, factor: str) -> list[int]:
    """Dimensions of which a factor is the major one."""
    return [d for d, dim in enumerate(operand) if dim[:1] == (factor,)]


def _flops(eqn: Equation) -> float:
    if not isinstance(eqn, LoopEquation):
        return flops_of(eqn, rule_for(eqn))
    return max(eqn.loop.trips, 1) * sum(_flops(inner) for region in eqn.regions for inner in region.equations)


def _dimensions_together(traced: TracedStep) -> DisjointSets[Node]:
    """Dimensions, and loops, that some operation indexes by one factor."""
    classes = DisjointSets[Node]()
    for eqn in traced.program.equations:
        if not isinstance(eqn, LoopEquation):
            rule = rule_for(eqn)
            for factor, _ in rule.sizes:
                if factor not in rule.whole:
                    classes.join(_indexed_by(eqn, rule, factor))
        elif is_scan(eqn):
            stacked = (*eqn.operands_to(Filled.ROW), *eqn.results_from(Goes.ROW))
            classes.join([eqn, *((v, 0) for v in stacked if not isinstance(v, JaxLiteral))])
    return classes


def _indexed_by(eqn: Equation, rule: FactorRule, factor: str) -> list[Node]:
    pairs = zip((*eqn.invars, *eqn.outvars), (*rule.inputs, *rule.outputs), strict=True)
    return [(v, d) for v, dims in pairs if not isinstance(v, JaxLiteral) for d in factor_dims(dims, factor)]


def _stack(traced: TracedStep, nodes: Sequence[Node], backward: frozenset[Equation]) -> Stack | None:
    scans = tuple(node for node in nodes if isinstance(node, LoopEquation))
    lengths = {eqn.loop.trips for eqn in scans}
    if len(lengths) != 1:
        return None
    (length,) = lengths
    roles = {v: leaf.role for v, leaf in zip(traced.program.invars, traced.inputs, strict=True)}
    found: dict[Var, list[int]] = {}
    for node in nodes:
        if not isinstance(node, Equation):
            found.setdefault(node[0], []).append(node[1])
    if any(roles.get(v) == "batch" for v in found) or not any(_is_weight(v, roles) for v in found):
        return None
    dims = {v: ds[0] for v, ds in found.items() if len(ds) == 1 and v.aval.shape[ds[0]] % length == 0}
    return Stack(length, scans, backward.intersection(scans), dims)


def _is_weight(v: Var, roles: Mapping[Var, str]) -> bool:
    return v in roles and isinstance(v.aval.dtype, np.dtype)

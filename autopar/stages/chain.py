"""The forward equations of a step in order, each with its work and the bytes that a cut after it would send.

In: a `TimeLoop`. Out: `ForwardEquation`s, the chain that layers and stages are cut from.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

from autopar.avals import bytes_of
from autopar.compat import Var
from autopar.microbatches.loop import TimeLoop
from autopar.program.loops import LoopEquation
from autopar.program.program import Equation, operands_of
from autopar.rules.table import flops_of
from autopar.stages.dependence import Dependence


@dataclasses.dataclass(frozen=True)
class ForwardEquation:
    """One place of the forward chain: the work up to the next place, and the bytes that a cut before it would send."""

    equation: Equation
    flops: float
    cut_bytes: float


def forward_chain(loop: TimeLoop) -> tuple[ForwardEquation, ...]:
    """The forward equations of the step in order, with the work of each and what a cut before it sends per microbatch."""
    return chain_of(Dependence.of(loop), lambda eqn: _work(loop, eqn))


def chain_of(kinds: Dependence, work: Callable[[Equation], float]) -> tuple[ForwardEquation, ...]:
    """The forward equations of a step whose operations are of these kinds."""
    chain = kinds.forward()
    place = {eqn: i for i, eqn in enumerate(chain)}
    last: dict[Var, int] = {}
    for eqn in chain:
        for v in operands_of(eqn):
            last[v] = place[eqn]
    change = [0.0] * (len(chain) + 2)
    for eqn in chain:
        for v in eqn.outvars:
            change[place[eqn] + 1] += bytes_of(v)
            change[last.get(v, place[eqn]) + 1] -= bytes_of(v)
    crossing = list(itertools.accumulate(change))
    return tuple(ForwardEquation(eqn, work(eqn), crossing[i]) for i, eqn in enumerate(chain))


def _work(loop: TimeLoop, eqn: Equation) -> float:
    rules = loop.plan.assignment.rules
    if not isinstance(eqn, LoopEquation):
        return flops_of(eqn, rules[eqn])
    inside = sum(_work(loop, e) for region in eqn.regions for e in region.equations)
    return inside * max(eqn.loop.trips, 1)

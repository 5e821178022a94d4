"""Every way to run one equation on a mesh.

A strategy gives each mesh axis one job: shard a factor, or several that go together, carry partial results of a linear
operation, or repeat the work.
Layouts follow:

    dimension        the axes of its factors, major to minor
    output           partial(m) over an axis that shards a reduced factor the output lacks; seeds likewise
    linear group g   inputs of g and all outputs partial over the axis, other inputs replicated

In: a factor rule and a mesh. Out: `ShardingStrategy` values in a fixed order, the replicated one first. Legal are only
shards of equal size, and a minor factor of a compound dimension is sharded only if every factor before it is cut to
single elements (else the shard would not be one block), and no value is partial under two monoids. What can go wrong: too
many; the caller sees at most
(factors + groups + 1) ^ axes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

from autopar.layouts.mesh import Axes, Layout, LogicalMesh
from autopar.rules.factor_rule import FactorRule, Operand


@dataclasses.dataclass(frozen=True)
class ShardingStrategy:
    """Axes that shard each factor, the layouts that follow, and the number of ways in which the work is divided."""

    factor_axes: tuple[tuple[str, Axes], ...]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    ways: int

    def show(self, mesh: LogicalMesh) -> str:
        """The layouts as text."""
        inputs, outputs = ([layout.show(mesh) for layout in side] for side in (self.inputs, self.outputs))
        return f"{', '.join(inputs)} -> {', '.join(outputs)}"


@dataclasses.dataclass(frozen=True)
class _Job:
    """What one mesh axis does: shard `factors`, or carry `monoid` partials of `group`, or nothing."""

    factors: tuple[str, ...] = ()
    group: tuple[int, ...] = ()
    monoid: str = ""


def strategies_key(rule: FactorRule, mesh: LogicalMesh) -> Hashable:
    """What the strategies of a rule depend on, besides the mesh: equal for rules whose sizes the mesh's axes divide alike.

    A size counts by its greatest common divisor with that of the mesh, and as itself where axes may cut it to single elements.
    """
    parts = [(f, size, math.gcd(size, mesh.size) if size else 0) for f, size in rule.sizes]
    sizes = tuple([(f, part, part == size) for f, size, part in parts])
    clauses = rule.reduced, rule.whole, rule.together, rule.seeds, rule.linear, rule.any_monoid
    return rule.inputs, rule.outputs, sizes, clauses


def strategies_of(
    rule: FactorRule,
    mesh: LogicalMesh,
    *,
    monoids: Sequence[str] = ("sum",),
    exchanges: bool = True,
    every_order: bool = True,
) -> tuple[ShardingStrategy, ...]:
    """All legal strategies.

    `monoids` are those that an operation which only moves data may carry. `exchanges`: whether devices may exchange something
    within the operation. `every_order`: whether the axes that share a factor come in every order, or in the mesh's alone.
    """
    layouts, sizes = _Layouts(rule, mesh), dict(rule.sizes)
    jobs: list[list[_Job]] = []
    for axis, size in enumerate(mesh.shape):
        parts = [(f,) for f in rule.shardable()] + [*(rule.together if exchanges else ())] if size > 1 else []
        factors = [part for part in parts if all(mesh.divides((axis,), sizes[f]) for f in part)]
        carried = monoids if rule.any_monoid else ("sum",) if "sum" in monoids else ()
        groups = [(g, m) for g in rule.linear for m in carried] if size > 1 else []
        jobs.append([_Job(), *(_Job(part) for part in factors), *(_Job((), g, m) for g, m in groups)])
    found: dict[ShardingStrategy, None] = {}
    for choice in itertools.product(*jobs):
        for factor_axes in _orders(choice, rule, every_order=every_order):
            strategy = layouts.strategy(choice, factor_axes)
            if strategy is not None:
                found[strategy] = None
    return tuple(found)


def _orders(choice: Sequence[_Job], rule: FactorRule, *, every_order: bool) -> Iterator[dict[str, Axes]]:
    """Axes per factor; axes that share a factor come in every order, if asked, the same for factors that go together."""
    members: dict[str, list[int]] = {}
    for axis, job in enumerate(choice):
        for factor in job.factors:
            members.setdefault(factor, []).append(axis)
    if not every_order:
        yield {factor: tuple(axes) for factor, axes in members.items()}
        return
    for orders in itertools.product(*(itertools.permutations(axes) for axes in members.values())):
        factor_axes = dict(zip(members, orders, strict=True))
        if all(_in_one_order([factor_axes.get(f, ()) for f in group]) for group in rule.together):
            yield factor_axes


def _in_one_order(several: Sequence[Axes]) -> bool:
    """Whether the axes that all of these have come in the same order in each."""
    common = set(several[0]).intersection(*several[1:])
    return len({tuple(axis for axis in axes if axis in common) for axes in several}) == 1


class _Layouts:
    """What follows from the jobs of a mesh's axes under one rule, with all that is the same for every choice looked up once."""

    def __init__(self, rule: FactorRule, mesh: LogicalMesh) -> None:
        self.rule, self.mesh, self.sizes, self.reduced = rule, mesh, dict(rule.sizes), dict(rule.reduced)
        operands = (*rule.inputs, *rule.outputs)
        self.present = [frozenset(factor for dim in operand for factor in dim) for operand in operands]
        numbers = (*range(len(rule.inputs)), *[None] * len(rule.outputs))
        self.operands = list(zip(operands, self.present, numbers, strict=True))
        self.compound = {pair for operand in operands for dim in operand for pair in itertools.pairwise(dim)}

    def strategy(self, jobs: Sequence[_Job], factor_axes: Mapping[str, Axes]) -> ShardingStrategy | None:
        """The strategy; None if it is not legal."""
        mesh, sizes = self.mesh, self.sizes
        for factor, axes in factor_axes.items():
            if len(axes) > 1 and not mesh.divides(
                axes, sizes[factor]
            ):  # of single axes only those that divide have the job
                return None
        for before, factor in self.compound:
            if factor in factor_axes and mesh.ways(factor_axes.get(before, ())) != sizes[before]:
                return None  # a shard would not be one contiguous block
        busy = [(axis, job) for axis, job in enumerate(jobs) if job.factors or job.monoid]
        layouts = [
            Layout(_dims(operand, factor_axes), self._partial(busy, present, number))
            for operand, present, number in self.operands
        ]
        if any(layout.mixes_monoids for layout in layouts if layout.partial):
            return None
        ways = mesh.ways({axis for axes in factor_axes.values() for axis in axes})
        split = len(self.rule.inputs)
        return ShardingStrategy(
            tuple(sorted(factor_axes.items())), tuple(layouts[:split]), tuple(layouts[split:]), ways
        )

    def _partial(
        self, busy: Sequence[tuple[int, _Job]], present: frozenset[str], input_number: int | None
    ) -> tuple[tuple[int, str], ...]:
        """Partial axes of one operand: `input_number` is None for outputs.

        An axis that shards factors which go together leaves no partial sums where the operand has one of them.
        """
        reduced, rule = self.reduced, self.rule
        entries = []
        for axis, job in busy:
            monoids = [] if present.intersection(job.factors) else [reduced[f] for f in job.factors if f in reduced]
            if monoids and (input_number is None or input_number in rule.seeds):
                entries.append((axis, monoids[0]))
            elif job.monoid and (input_number is None or input_number in job.group):
                entries.append((axis, job.monoid))
        return tuple(entries)


def _dims(operand: Operand, factor_axes: Mapping[str, Axes]) -> tuple[Axes, ...]:
    return tuple(
        [
            factor_axes.get(dim[0], ()) if len(dim) == 1 else tuple([a for f in dim for a in factor_axes.get(f, ())])
            for dim in operand
        ]
    )


def most_divided(strategies: Sequence[ShardingStrategy]) -> tuple[ShardingStrategy, ...]:
    """Only the strategies that divide the work the most ways."""
    most = max(strategy.ways for strategy in strategies)
    return tuple(strategy for strategy in strategies if strategy.ways == most)

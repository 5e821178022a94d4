"""Which strategies of the literature a plan amounts to, in sentences.

In: a `Plan`. Out: sentences, each true of its layouts and collectives alone. For one mesh axis, with "split" for "split
over this axis":

    batch split by example, parameters not        data parallel; optimizer leaves split beside it: ZeRO-1/2
    batch split by example, parameters too,
        with all-gathers                          FSDP (ZeRO-3), if they are half of the parameters' bytes or more
        first of 3 or more dimensions, all-to-all expert parallel
    batch not split by example, parameters split  tensor parallel: by column, by row
    nothing split, no collective                  the devices along the axis repeat each other's work

A parameter is a leaf below `params`, an optimizer leaf one below `opt_state`, `mu`, `nu` or the like, whichever word
comes first in its path; of other state nothing is said, unless there are no `params`. What can go wrong: a matrix held
as (out, in) makes "by column" of what its author calls a row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from autopar.explain.paths import path_patterns
from autopar.explain.units import bytes_text, percent_text
from autopar.plan import Plan, ValuePlan

_OPTIMIZER_WORDS = frozenset({"opt_state", "optimizer", "optimizer_state", "mu", "nu", "trace", "momentum"})
_PARAMETER_WORDS = frozenset({"params", "parameters"})
_HALF = 0.5


@dataclasses.dataclass(frozen=True)
class _Finding:
    """`sentence` has {axis} and {ways} in it; `kinds` are the collectives that belong to it."""

    sentence: str
    kinds: tuple[str, ...] = ()


def findings(plan: Plan) -> tuple[str, ...]:
    """One sentence for each strategy of the module's table that the plan shows; equal ones of several axes are one."""
    axes_of: dict[_Finding, list[str]] = {}
    for name, size in zip(plan.axis_names, plan.mesh_shape, strict=True):
        if size > 1:
            for finding in _AxisUse(plan, name).findings():
                axes_of.setdefault(finding, []).append(name)
    return tuple(_sentence(plan, finding, axes) for finding, axes in axes_of.items())


def _sentence(plan: Plan, finding: _Finding, axes: Sequence[str]) -> str:
    text = finding.sentence.replace("{axis}", " and ".join(axes)).replace("{ways}", f"{_ways(plan, axes)} ways")
    evidence = "; ".join(
        f"{count:,.0f} {kind}, {bytes_text(size)}"
        for kind in finding.kinds
        for count, size in [_traffic(plan, kind, axes)]
        if count
    )
    return f"{text} ({evidence})" if evidence else text


def _traffic(plan: Plan, kind: str, axes: Sequence[str]) -> tuple[float, float]:
    """(times, bytes) per step of one kind of collective over any of `axes`."""
    chosen = [item for item in plan.collectives if item.kind == kind and not set(axes).isdisjoint(item.axes)]
    return sum(item.count for item in chosen), sum(item.count * item.bytes for item in chosen)


def _ways(plan: Plan, axes: Iterable[str]) -> int:
    return math.prod(plan.mesh_shape[plan.axis_names.index(axis)] for axis in axes)


@dataclasses.dataclass(frozen=True)
class _AxisUse:
    """What one mesh axis splits."""

    plan: Plan
    axis: str

    def findings(self) -> Iterator[_Finding]:
        """The rows of the module's table that hold for this axis."""
        if self._by_example:
            yield from self._with_split_batch()
        elif self._split(self._parameters):
            yield self._tensor_parallel()
        elif self._split(self._optimizer):
            share = self._share(self._split(self._optimizer), self._optimizer, "optimizer leaves")
            yield _Finding(f"{share} are split over {{axis}}, {{ways}}; batch and parameters are not")
        yield from self._by_other_dimension()
        if not self._appears:
            yield _Finding(
                "nothing is split over {axis} and no collective runs over it: its devices repeat the same work"
            )

    def _with_split_batch(self) -> Iterator[_Finding]:
        experts = self._experts()
        rest = [value for value in self._parameters if value not in experts]
        if experts:
            yield _Finding(
                f"expert parallel over {{axis}}, {{ways}}: {_names(experts)} split along the first dimension, "
                "and values exchanged",
                ("all-to-all",),
            )
        if self._is_sharded(rest):
            yield _Finding(
                f"fully sharded (FSDP, ZeRO-3) over {{axis}}, {{ways}}: "
                f"{self._batch_text} and {self._parameter_share(rest)} are split",
                ("all-gather", "reduce-scatter"),
            )
            return
        yield _Finding(
            f"data parallel over {{axis}}, {{ways}}: {self._batch_text} split by example"
            f"{self._replicated_text(rest, bool(experts))}",
            ("all-reduce",),
        )
        alone = self._optimizer_split_alone()
        if alone:
            share = self._share(alone, self._optimizer, "optimizer leaves")
            yield _Finding(
                f"optimizer state sharded (ZeRO-1/2) over {{axis}}, {{ways}}: {share} are split, "
                "their parameters are not",
                ("reduce-scatter", "all-gather"),
            )

    def _tensor_parallel(self) -> _Finding:
        split = self._split(self._parameters)
        matrices = [value for value in split if len(value.shape) == 2]
        others = [value for value in split if len(value.shape) != 2]
        ways_to_split = {
            "by column": [value for value in matrices if self.axis in value.spec[1]],
            "by row": [value for value in matrices if self.axis in value.spec[0]],
            "of other rank": others,
        }
        parts = [f"{len(values)} {how}" for how, values in ways_to_split.items() if values]
        return _Finding(
            f"tensor parallel over {{axis}}, {{ways}}: {self._parameter_share(self._parameters)} are split, "
            f"of them {', '.join(parts)}; the batch is not",
            ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"),
        )

    def _by_other_dimension(self) -> Iterator[_Finding]:
        for dimension in sorted({d for value in self._batch for d in self._dimensions(value) if d > 0}):
            split = [value for value in self._batch if dimension in self._dimensions(value)]
            yield _Finding(f"inputs split over {{axis}}, {{ways}}, along dimension {dimension}: {_names(split)}")

    def _experts(self) -> list[ValuePlan]:
        """Parameters of three or more dimensions, split along the first, if nothing gathers the split parameters."""
        if not self._runs("all-to-all"):
            return []
        experts = [v for v in self._split(self._parameters) if len(v.shape) > 2 and self.axis in v.spec[0]]
        return [] if self._is_sharded([v for v in self._parameters if v not in experts]) else experts

    def _is_sharded(self, values: Sequence[ValuePlan]) -> bool:
        return self._runs("all-gather") and self._bytes(self._split(values)) >= max(1, _HALF * self._bytes(values))

    def _replicated_text(self, parameters: Sequence[ValuePlan], others: bool) -> str:
        if not parameters:
            return ""
        split = self._split(parameters)
        share = percent_text(self._bytes(split), self._bytes(parameters))
        but = f" but for {_names(split)} ({share} of their bytes)" if split else ""
        return f", {'the other ' if others else ''}parameters replicated{but}"

    def _parameter_share(self, parameters: Sequence[ValuePlan]) -> str:
        return self._share(self._split(parameters), parameters, "parameters")

    def _share(self, some: Sequence[ValuePlan], values: Sequence[ValuePlan], noun: str) -> str:
        share = percent_text(self._bytes(some), self._bytes(values))
        return f"{len(some)} of {len(values)} {noun} ({share} of their bytes)"

    def _optimizer_split_alone(self) -> list[ValuePlan]:
        """Optimizer leaves that are split though the parameter they belong to, by path and shape, is not."""
        split = {(value.shape, _below(value.path, _PARAMETER_WORDS)) for value in self._split(self._parameters)}

        def follows(leaf: ValuePlan) -> bool:
            return any(leaf.shape == shape and f"/{leaf.path}".endswith(f"/{tail}") for shape, tail in split)

        return [leaf for leaf in self._split(self._optimizer) if not follows(leaf)]

    @property
    def _batch_text(self) -> str:
        arrays = [value for value in self._batch if value.shape]
        every = len(self._by_example) == len(arrays)
        return "the batch" if every else f"{len(self._by_example)} of {len(arrays)} batch inputs"

    @cached_property
    def _batch(self) -> list[ValuePlan]:
        return [value for value in self.plan.inputs if value.role == "batch"]

    @cached_property
    def _by_example(self) -> list[ValuePlan]:
        return [value for value in self._batch if 0 in self._dimensions(value)]

    @cached_property
    def _parameters(self) -> list[ValuePlan]:
        held = [value for value in self.plan.inputs if value.role != "batch"]
        named = [value for value in held if _kind(value.path) == "parameter"]
        return named or [value for value in held if value.role == "state" and _kind(value.path) is None]

    @cached_property
    def _optimizer(self) -> list[ValuePlan]:
        return [value for value in self.plan.inputs if value.role != "batch" and _kind(value.path) == "optimizer"]

    @property
    def _appears(self) -> bool:
        values = (*self.plan.inputs, *self.plan.outputs)
        return bool(self._split(values)) or any(self.axis in item.axes for item in self.plan.collectives)

    def _runs(self, kind: str) -> bool:
        return any(item.kind == kind and self.axis in item.axes for item in self.plan.collectives)

    def _split(self, values: Iterable[ValuePlan]) -> list[ValuePlan]:
        return [value for value in values if self._dimensions(value)]

    def _bytes(self, values: Iterable[ValuePlan]) -> int:
        """Bytes of the whole values, not of their parts."""
        return sum(v.bytes_per_device * _ways(self.plan, (a for axes in v.spec for a in axes)) for v in values)

    def _dimensions(self, value: ValuePlan) -> list[int]:
        return [dimension for dimension, axes in enumerate(value.spec) if self.axis in axes]


def _kind(path: str) -> str | None:
    for name in path.split("/"):
        if name in _OPTIMIZER_WORDS:
            return "optimizer"
        if name in _PARAMETER_WORDS:
            return "parameter"
    return None


def _below(path: str, words: frozenset[str]) -> str:
    """The path below the first of `words` in it; below its first component if there is none."""
    names = path.split("/")
    start = next((number for number, name in enumerate(names) if name in words), 0)
    return "/".join(names[start + 1 :])


def _names(values: Sequence[ValuePlan]) -> str:
    patterns = path_patterns(value.path for value in values)
    more = f", and {sum(pattern.count for pattern in patterns[2:])} more" if len(patterns) > 2 else ""
    return ", ".join(str(pattern) for pattern in patterns[:2]) + more

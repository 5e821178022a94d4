"""Which strategies of the literature a plan amounts to, in sentences.

In: a `Plan`. Out: sentences, each true of its layouts and collectives alone. For one mesh axis, with "split" and
"gathered" for "split over this axis" and "all-gathered over it":

    batch split by example                   and parameters whole: data parallel
      optimizer leaves split alone           ZeRO-1/2
      experts split, all-to-all              expert parallel
      parameters split and gathered          fully sharded (FSDP, ZeRO-3), if half of the bytes of those that are no experts are
    parameters split and not gathered        tensor parallel, if they hold 5 % of the parameters' bytes or more
    nothing split, no collective             the devices along the axis repeat each other's work

A parameter is a leaf below `params`, an optimizer leaf one below `opt_state`, `mu`, `nu` or the like, whichever word
comes first in its path; of other state nothing is said, unless there are no `params`. A parameter is gathered if the
operand of an all-gather has its shape, or the shape of what one step of a scan takes of it. An expert is a
parameter of three or more dimensions, split along the first, if an all-to-all moves an array with a dimension for the experts,
and its path has `moe` or `expert` in it or there is a router: a matrix with as many columns as there are experts and as many
rows as one of their dimensions. What can go wrong: a matrix held as (out, in) makes "by column" of what its author calls a row;
an activation of a parameter's shape passes for it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from autopar.explain.paths import path_patterns
from autopar.explain.units import bytes_text, percent_text, seconds_text
from autopar.plan import CollectivePlan, Plan, ValuePlan

_OPTIMIZER_WORDS = frozenset({"opt_state", "optimizer", "optimizer_state", "mu", "nu", "trace", "momentum"})
PARAMETER_WORDS = frozenset({"params", "parameters"})
_EXPERT_WORDS = ("expert", "moe")
_HALF = 0.5
_FEW = 0.05
"""Parameters with less of the bytes are said to be split, and the plan not to be tensor parallel."""

_HOW = (
    "of one dimension",
    "by column",
    "by row",
    "along the last of more dimensions",
    "along the first of more dimensions",
    "along an inner dimension",
)
"""The kinds of dimensions along which a parameter may be split."""


def findings(plan: Plan) -> tuple[str, ...]:
    """One sentence for each strategy of the module's table that the plan shows; equal ones of several axes are one."""
    axes_of: dict[str, list[str]] = {}
    for name, size in zip(plan.axis_names, plan.mesh_shape, strict=True):
        if size > 1:
            for finding in _AxisUse(plan, name).findings():
                axes_of.setdefault(finding, []).append(name)
    return tuple(
        finding.replace("{axis}", " and ".join(axes)).replace("{ways}", f"{_ways(plan, axes)} ways")
        for finding, axes in axes_of.items()
    )


def traffic(plan: Plan) -> tuple[str, ...]:
    """One sentence for the collectives over each combination of axes."""
    sums: dict[tuple[str, ...], dict[str, tuple[float, float]]] = {}
    for item in plan.collectives:
        kinds = sums.setdefault(item.axes, {})
        count, size = kinds.get(item.kind, (0.0, 0.0))
        kinds[item.kind] = (count + item.count, size + item.count * item.bytes)
    seconds = {
        axes: sum(item.count * item.predicted_s for item in plan.collectives if item.axes == axes) for axes in sums
    }
    return tuple(
        f"collectives over {' and '.join(axes)}: "
        + "; ".join(f"{count:,.0f} {kind}, {bytes_text(size)}" for kind, (count, size) in kinds.items())
        + f"; {seconds_text(seconds[axes])} in all, and compute takes {seconds_text(plan.compute_s)}"
        for axes, kinds in sums.items()
    )


def _ways(plan: Plan, axes: Iterable[str]) -> int:
    return math.prod(plan.mesh_shape[plan.axis_names.index(axis)] for axis in axes)


@dataclasses.dataclass(frozen=True)
class _AxisUse:
    """What one mesh axis splits."""

    plan: Plan
    axis: str

    def findings(self) -> Iterator[str]:
        """The rows of the module's table that hold for this axis."""
        if self._by_example:
            yield from self._with_split_batch()
        elif self._split(self._optimizer) and not self._split(self._parameters):
            share = self._share(self._split(self._optimizer), self._optimizer, "optimizer leaves")
            yield f"{share} are split over {{axis}}, {{ways}}; parameters are not"
        yield from self._tensor_parallel()
        yield from self._by_other_dimension()
        if not self._appears:
            yield "nothing is split over {axis} and no collective runs over it: its devices repeat the same work"

    def _with_split_batch(self) -> Iterator[str]:
        whole = [value for value in self._parameters if not self._dimensions(value)]
        if whole or not self._parameters:
            share = self._share(whole, self._parameters, "parameters")
            replicated = "" if not self._parameters else f", {share} replicated"
            yield f"data parallel over {{axis}}, {{ways}}: {self._batch_text} split by example{replicated}"
        alone = self._optimizer_split_alone()
        if alone:
            share = self._share(alone, self._optimizer, "optimizer leaves")
            yield (
                f"optimizer state sharded (ZeRO-1/2) over {{axis}}, {{ways}}: {share} split, their parameters are not"
            )
        if self._is_fully_sharded:
            share = self._share(self._gathered, self._parameters, "parameters")
            yield f"fully sharded (FSDP, ZeRO-3) over {{axis}}, {{ways}}: {self._batch_text} and {share} split"
        if self._experts:
            yield f"expert parallel over {{axis}}, {{ways}}: {names_text(self._experts)} split along the first dimension"

    def _tensor_parallel(self) -> Iterator[str]:
        explained = (self._gathered if self._is_fully_sharded else []) + (self._experts if self._by_example else [])
        split = [value for value in self._split(self._parameters) if value not in explained]
        if not split:
            return
        numbers = Counter(self._how(value) for value in split)
        listed = ", ".join(f"{numbers[how]} {how}" for how in _HOW if numbers[how])
        share = self._share(split, self._parameters, "parameters")
        batch = "" if self._by_example else "; the batch is not split by example"
        if self._bytes(split) < _FEW * self._bytes(self._parameters):
            yield f"{share} are split over {{axis}}, {{ways}}, of them {listed}{batch}"
        else:
            yield f"tensor parallel over {{axis}}, {{ways}}: {share} split, of them {listed}{batch}"

    def _how(self, value: ValuePlan) -> str:
        """Along which kind of dimension a parameter is split."""
        rank, (dimension, *_) = len(value.shape), self._dimensions(value)
        if rank <= 2:
            return _HOW[0] if rank < 2 else _HOW[2 - dimension]
        return _HOW[3] if dimension == rank - 1 else _HOW[4] if dimension == 0 else _HOW[5]

    def _by_other_dimension(self) -> Iterator[str]:
        for dimension in sorted({d for value in self._batch for d in self._dimensions(value) if d > 0}):
            split = [value for value in self._batch if dimension in self._dimensions(value)]
            yield f"inputs split over {{axis}}, {{ways}}, along dimension {dimension}: {names_text(split)}"

    @cached_property
    def _experts(self) -> list[ValuePlan]:
        exchanged = [_sizes(item.operand) for item in self._collectives if item.kind == "all-to-all"]
        ways = _ways(self.plan, [self.axis])
        return [
            value
            for value in self._split(self._parameters)
            if len(value.shape) > 2 and self.axis in value.spec[0] and value not in self._gathered
            if any({value.shape[0], value.shape[0] // ways} & {*sizes} for sizes in exchanged)
            if any(word in value.path.lower() for word in _EXPERT_WORDS) or self._has_router(value)
        ]

    def _has_router(self, experts: ValuePlan) -> bool:
        """Whether a matrix leads from a dimension of each expert to the experts."""
        number, *dimensions = experts.shape
        matrices = [value.shape for value in self._parameters if len(value.shape) == 2]
        return any(columns == number and rows in dimensions for rows, columns in matrices)

    @cached_property
    def _gathered(self) -> list[ValuePlan]:
        """Split parameters of which an all-gather has the shape, in any order of the dimensions."""
        gathers = [item for item in self._collectives if item.kind == "all-gather"]
        return [v for v in self._split(self._parameters) if any(_has_shape_of(item, v) for item in gathers)]

    @property
    def _is_fully_sharded(self) -> bool:
        if not self._by_example or not self._gathered:
            return False
        others = [value for value in self._parameters if value not in self._experts]
        return self._bytes(self._gathered) >= _HALF * self._bytes(others)

    def _share(self, some: Sequence[ValuePlan], values: Sequence[ValuePlan], noun: str) -> str:
        share = percent_text(self._bytes(some), self._bytes(values))
        return f"{len(some)} of {len(values)} {noun} ({share} of their bytes)"

    def _optimizer_split_alone(self) -> list[ValuePlan]:
        """Optimizer leaves that are split though the parameter they belong to, by path and shape, is not."""
        split = {(value.shape, _below(value.path, PARAMETER_WORDS)) for value in self._split(self._parameters)}

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
        return bool(self._split(values) or self._collectives)

    @cached_property
    def _collectives(self) -> list[CollectivePlan]:
        return [item for item in self.plan.collectives if self.axis in item.axes]

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
        if name in PARAMETER_WORDS:
            return "parameter"
    return None


def _below(path: str, words: frozenset[str]) -> str:
    """The path below the first of `words` in it; below its first component if there is none."""
    names = path.split("/")
    start = next((number for number, name in enumerate(names) if name in words), 0)
    return "/".join(names[start + 1 :])


def _has_shape_of(item: CollectivePlan, value: ValuePlan) -> bool:
    """Whether an operand, written as float32[16,64], has the sizes of `value`, or of one step of a scan over it."""
    sizes = sorted(_sizes(item.operand))
    one_step = sorted(value.shape[1:]) if item.count == value.shape[0] else []
    return bool(sizes) and sizes in (sorted(value.shape), one_step)


def _sizes(operand: str) -> list[int]:
    """The dimensions of an operand that is written as float32[16,64]."""
    match = re.search(r"\[([\d,]+)\]$", operand)
    return list(map(int, match[1].split(","))) if match else []


def names_text(values: Sequence[ValuePlan]) -> str:
    """The paths of values as two patterns, and how many more."""
    patterns = path_patterns(value.path for value in values)
    more = f", and {sum(pattern.count for pattern in patterns[2:])} more" if len(patterns) > 2 else ""
    return ", ".join(str(pattern) for pattern in patterns[:2]) + more

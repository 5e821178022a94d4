"""What a user can say about a step: options and layout constraints, as frozen data.

`constraints` of `parallelize` is a mapping from leaf-path globs to a layout, a preset such as `data_parallel()`, or a list of
these. A layout is a `PartitionSpec`, `Replicated()` or `Split(...)`. Constraints restrict the choices of the planner's one
model; nothing here is a mode of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from autopar.errors import ConstraintError


@dataclasses.dataclass(frozen=True)
class Replicated:
    """Every device holds the whole leaf; with `axes`, every device along those mesh axes."""

    axes: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Split:
    """The leaf is split over `axes` (all mesh axes if None), along any dimensions, as many ways as its shape allows."""

    axes: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class SplitBatch:
    """The leading dimension is split over `axes` (all mesh axes if None); so are, in every operation, the examples that it holds.

    `rest`: how the other dimensions are split, by other axes; whole if nothing is said."""

    axes: tuple[str, ...] | None = None
    rest: PartitionSpec = dataclasses.field(default_factory=PartitionSpec)


LeafLayout = PartitionSpec | Replicated | Split | SplitBatch


@dataclasses.dataclass(frozen=True)
class Rule:
    """One constraint: leaves of `role` (any if None) whose path matches `glob`."""

    glob: str
    layout: LeafLayout
    role: str | None = None
    must_match: bool = True


@dataclasses.dataclass(frozen=True)
class Constraints:
    """Rules in order; the last one that matches a leaf holds."""

    rules: tuple[Rule, ...] = ()


ConstraintsLike = Mapping[str, LeafLayout] | Constraints | Sequence["Mapping[str, LeafLayout] | Constraints"] | None


def _axes(axis: str | Sequence[str] | None) -> tuple[str, ...] | None:
    return None if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def data_parallel(axis: str | Sequence[str] | None = None) -> Constraints:
    """Split the batch over `axis` (all mesh axes if None) and replicate the state along it.

    In every operation that sees the examples, `axis` splits them, and no other axis does: those are left to the other dimensions.
    """
    axes = _axes(axis)
    return Constraints(
        (
            Rule("*", Replicated(axes), role="state", must_match=False),
            Rule("*", SplitBatch(axes), role="batch"),
        )
    )


def zero2(axis: str | Sequence[str] | None = None, *, optimizer: str = "*opt_state*") -> Constraints:
    """Data parallel, with the leaves that match `optimizer` split over `axis`: ZeRO stage 2."""
    axes = _axes(axis)
    return Constraints((*data_parallel(axis).rules, Rule(optimizer, Split(axes), role="state")))


def zero3(
    axis: str | Sequence[str] | None = None, *, optimizer: str = "*opt_state*", params: str = "*params*"
) -> Constraints:
    """As `zero2`, with the leaves that match `params` split too: ZeRO stage 3, fully sharded data parallel."""
    axes = _axes(axis)
    return Constraints((*zero2(axis, optimizer=optimizer).rules, Rule(params, Split(axes), role="state")))


def _rule(glob: str, layout: LeafLayout) -> Rule:
    if not isinstance(layout, LeafLayout):
        raise ConstraintError(
            f"the constraint on {glob!r} is {layout!r}, a {type(layout).__name__}; a layout is a PartitionSpec such as "
            "P('x', None), autopar.Replicated() or autopar.Split()"
        )
    return Rule(glob, layout)


def as_constraints(given: ConstraintsLike) -> Constraints:
    """All accepted forms as one `Constraints`."""
    if given is None:
        return Constraints()
    if isinstance(given, Constraints):
        return given
    if isinstance(given, Mapping):
        return Constraints(tuple(_rule(glob, layout) for glob, layout in given.items()))
    if isinstance(given, str) or not isinstance(given, Sequence):  # type: ignore[redundant-expr]
        raise ConstraintError(
            f"constraints={given!r} is a {type(given).__name__}; a mapping from leaf paths to layouts, a preset such as "
            "autopar.data_parallel(), or a list of these is expected"
        )
    return Constraints(tuple(rule for part in given for rule in as_constraints(part).rules))

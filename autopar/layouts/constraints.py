"""What a user can demand of a plan's layouts, as frozen data.

`constraints` of `parallelize` is a mapping from leaf-path globs to a layout, a preset such as `data_parallel()`, or a list of
these. A layout is a `PartitionSpec`, `Replicated()` or `Split(...)`. Constraints restrict the choices of the planner's one
model; nothing here is a mode of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import PartitionSpec

from autopar.errors import ConstraintError


def _axes(what: str, axes: object) -> tuple[str, ...] | None:
    """Names of mesh axes, given as one or as several; None stands for all. Raises ConstraintError."""
    if axes is None:
        return None
    names = (axes,) if isinstance(axes, str) or not isinstance(axes, Iterable) else tuple(axes)
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ConstraintError(
            f"{what}({axes!r}): names of mesh axes are expected, each once, such as 'x' or ('data', 'model')"
        )
    return names


@dataclasses.dataclass(frozen=True)
class Replicated:
    """A layout: every device holds the whole leaf.

    Attributes:
        axes: mesh axes along which the devices hold the same, as one name or several; along the others the search is free.
            None stands for all axes.
    """

    axes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """One name stands for itself."""
        object.__setattr__(self, "axes", _axes("Replicated", self.axes))


@dataclasses.dataclass(frozen=True)
class Split:
    """A layout: the leaf is split along whatever dimensions are best, as many ways as its shape allows.

    Attributes:
        axes: mesh axes to split over, as one name or several; None stands for all axes.
    """

    axes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """One name stands for itself."""
        object.__setattr__(self, "axes", _axes("Split", self.axes))


@dataclasses.dataclass(frozen=True)
class SplitBatch:
    """The leading dimension is split over `axes` (all mesh axes if None), and so are, in every operation, the examples along it.

    `rest`: how other axes split the other dimensions; whole by default."""

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


HOW_A_BATCH_IS_GIVEN = (
    "batch_argnums (default (1,)) lists the positional arguments that are batches; a keyword-only argument cannot be one: make "
    "it positional"
)


@dataclasses.dataclass(frozen=True)
class Constraints:
    """Rules in order; the last one that matches a leaf holds. `without`: kinds of collectives that the plan does not use."""

    rules: tuple[Rule, ...] = ()
    without: tuple[str, ...] = ()


ConstraintsLike = Mapping[str, LeafLayout] | Constraints | Sequence["Mapping[str, LeafLayout] | Constraints"] | None


def data_parallel(axis: str | Sequence[str] | None = None) -> Constraints:
    """Constraints of data parallelism: the batch is split by example, the state is replicated.

    In every operation that sees the examples, `axis` splits them and no other axis does; other axes are left to the other
    dimensions.

    Args:
        axis: the mesh axes, as one name or several; None stands for all axes.

    Raises:
        ConstraintError: `axis` is no name of a mesh axis, or names one twice.
    """
    axes = _axes("data_parallel", axis)
    return Constraints(
        (
            Rule("*", Replicated(axes), role="state", must_match=False),
            Rule("*", SplitBatch(axes), role="batch"),
        )
    )


def zero1(axis: str | Sequence[str] | None = None, *, optimizer: str = "*opt_state*") -> Constraints:
    """Constraints of ZeRO stage 1: as `zero2`, with whole gradients: they are all-reduced, and never reduce-scattered.

    A device updates its part of the state, and gathers the new parameters. No value of the step is reduce-scattered.

    Args:
        axis: the mesh axes, as one name or several; None stands for all axes.
        optimizer: a glob of the paths of the optimizer's leaves.

    Raises:
        ConstraintError: `axis` is no name of a mesh axis, or names one twice; once planned, no leaf matches the glob.
    """
    _axes("zero1", axis)
    return Constraints(zero2(axis, optimizer=optimizer).rules, without=("reduce-scatter",))


def zero2(axis: str | Sequence[str] | None = None, *, optimizer: str = "*opt_state*") -> Constraints:
    """Constraints of ZeRO stage 2: data parallel, with the optimizer's state split.

    Args:
        axis: the mesh axes, as one name or several; None stands for all axes.
        optimizer: a glob of the paths of the optimizer's leaves, such as `state/optimizer/*`.

    Raises:
        ConstraintError: `axis` is no name of a mesh axis, or names one twice; once planned, no leaf matches the glob.
    """
    axes = _axes("zero2", axis)
    return Constraints((*data_parallel(axis).rules, Rule(optimizer, Split(axes), role="state")))


def zero3(
    axis: str | Sequence[str] | None = None, *, optimizer: str = "*opt_state*", params: str = "*params*"
) -> Constraints:
    """Constraints of ZeRO stage 3, fully sharded data parallel: as `zero2`, with the parameters split too.

    Args:
        axis: the mesh axes, as one name or several; None stands for all axes.
        optimizer: a glob of the paths of the optimizer's leaves.
        params: a glob of the paths of the parameters.

    Raises:
        ConstraintError: `axis` is no name of a mesh axis, or names one twice; once planned, no leaf matches a glob.
    """
    axes = _axes("zero3", axis)
    return Constraints((*zero2(axis, optimizer=optimizer).rules, Rule(params, Split(axes), role="state")))


def _rule(glob: str, layout: LeafLayout) -> Rule:
    if not isinstance(glob, str):
        raise ConstraintError(f"the constraint on {glob!r} names no leaf: a path such as 'state/params/*' is expected")
    if not isinstance(layout, LeafLayout):
        raise ConstraintError(
            f"the constraint on {glob!r} is {layout!r}, a {type(layout).__name__}; a layout is a PartitionSpec such as "
            "P('x', None), autopar.Replicated() or autopar.Split()"
        )
    if isinstance(layout, PartitionSpec) and not all(_names_axes(entry) for entry in layout):
        raise ConstraintError(
            f"the constraint on {glob!r} is {layout}: for each dimension the name of a mesh axis, a tuple of names or None is "
            "expected; a leaf without a constraint is left to the planner"
        )
    return Rule(glob, layout)


def _names_axes(entry: object) -> bool:
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return all(isinstance(name, str) for name in names)


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
    parts = [as_constraints(part) for part in given]
    without = {kind for part in parts for kind in part.without}
    return Constraints(tuple(rule for part in parts for rule in part.rules), tuple(sorted(without)))

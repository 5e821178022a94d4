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


MADE = ("output", "value")
"""Roles of what a step makes, with which its paths begin: its results, and values that `checkpoint_name` names."""
LeafLayout = PartitionSpec | Replicated | Split | SplitBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """One constraint: leaves of `role` (any if None) whose path matches `glob`.

    `use`: leaves of the state that have this use in the step; of those without a known use the ones that match `glob`.
    `asked_by`: the preset and its argument that the rule comes from.
    """

    glob: str
    layout: LeafLayout
    role: str | None = None
    must_match: bool = True
    use: str | None = None
    asked_by: str = ""

    @property
    def is_on_results(self) -> bool:
        """Whether the glob may be that of values that the step makes: it begins like their paths."""
        return self.role is None and self.glob.startswith(MADE)


HOW_A_BATCH_IS_GIVEN = (
    "batch_argnums lists the positional arguments that are batches; without it they are those after the first that the step does "
    "not return; a keyword-only argument cannot be one: make it positional"
)


@dataclasses.dataclass(frozen=True)
class Constraints:
    """Rules in order; the last one that matches a leaf holds. `without`: kinds of collectives that the plan does not use."""

    rules: tuple[Rule, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def on_results(self) -> Constraints:
        """The rules on values that the step makes, which need not be met."""
        rules = (dataclasses.replace(rule, must_match=False) for rule in self.rules if rule.is_on_results)
        return Constraints(tuple(rules))


ConstraintsLike = Mapping[str, LeafLayout] | Constraints | Sequence["Mapping[str, LeafLayout] | Constraints"] | None


def data_parallel(axis: str | Sequence[str] | None = None) -> Constraints:
    """Constraints of data parallelism: the batch is split by example, the state is replicated.

    In every operation that sees the examples, `axis` splits them and no other axis does; other axes are left to the other
    dimensions.

    Args:
        axis: the mesh axes, as one name or several; None stands for all axes.

    Returns:
        Constraints for `parallelize(constraints=...)`, alone or in a list with others.

    Raises:
        ConstraintError: `axis` is no name of a mesh axis, or names one twice.
    """
    axes = _axes("data_parallel", axis)
    return Constraints(
        (
            Rule(glob="*", layout=Replicated(axes), role="state", must_match=False),
            Rule(glob="*", layout=SplitBatch(axes), role="batch"),
        )
    )


def zero1(axis: str | Sequence[str] | None = None, *, optimizer: str | None = None) -> Constraints:
    """Constraints of ZeRO stage 1: as `zero2`, with whole gradients: they are all-reduced, and never reduce-scattered.

    A device updates its part of the state, and gathers the new parameters. No value of the step is reduce-scattered.

    Args:
        axis: the mesh axes, as one name or several; None stands for all axes.
        optimizer: a glob of the paths of the optimizer's leaves; see `zero2`.

    Returns:
        Constraints for `parallelize(constraints=...)`, alone or in a list with others.

    Raises:
        ConstraintError: `axis` is no name of a mesh axis, or names one twice; once planned, no leaf is the optimizer's.
    """
    axes = _axes("zero1", axis)
    return Constraints(
        (*data_parallel(axis).rules, _of_the_optimizer("zero1", axes, optimizer)), without=("reduce-scatter",)
    )


def zero2(axis: str | Sequence[str] | None = None, *, optimizer: str | None = None) -> Constraints:
    """Constraints of ZeRO stage 2: data parallel, with the optimizer's state split.

    Args:
        axis: the mesh axes, as one name or several; None stands for all axes.
        optimizer: a glob of the paths of the optimizer's leaves, such as `state/optimizer/*`. None stands for the leaves of the
            state that the step updates from gradients and that the loss does not read; of leaves that it does not update from
            gradients, for those that match `*opt_state*`.

    Returns:
        Constraints for `parallelize(constraints=...)`, alone or in a list with others.

    Raises:
        ConstraintError: `axis` is no name of a mesh axis, or names one twice; once planned, no leaf is the optimizer's.
    """
    axes = _axes("zero2", axis)
    return Constraints((*data_parallel(axis).rules, _of_the_optimizer("zero2", axes, optimizer)))


def zero3(
    axis: str | Sequence[str] | None = None, *, optimizer: str | None = None, params: str | None = None
) -> Constraints:
    """Constraints of ZeRO stage 3, fully sharded data parallel: as `zero2`, with the parameters split too.

    An optimizer without state is none that must be split.

    Args:
        axis: the mesh axes, as one name or several; None stands for all axes.
        optimizer: a glob of the paths of the optimizer's leaves; see `zero2`.
        params: a glob of the paths of the parameters. None stands for the leaves of the state that the loss reads and that the
            step updates from gradients; of leaves that it does not update from gradients, for those that match `*params*`.

    Returns:
        Constraints for `parallelize(constraints=...)`, alone or in a list with others.

    Raises:
        ConstraintError: `axis` is no name of a mesh axis, or names one twice; once planned, no leaf is a parameter, or no leaf
            matches a glob.
    """
    axes = _axes("zero3", axis)
    of_the_optimizer = _of_the_optimizer("zero3", axes, optimizer)
    return Constraints(
        (
            *data_parallel(axis).rules,
            dataclasses.replace(of_the_optimizer, must_match=optimizer is not None),
            _split_of_use("parameter", axes, params, named="*params*", asked_by="zero3(params=...)"),
        )
    )


def _of_the_optimizer(preset: str, axes: tuple[str, ...] | None, glob: str | None) -> Rule:
    return _split_of_use("optimizer", axes, glob, named="*opt_state*", asked_by=f"{preset}(optimizer=...)")


def _split_of_use(use: str, axes: tuple[str, ...] | None, glob: str | None, *, named: str, asked_by: str) -> Rule:
    """Leaves that match the user's glob are split, or those that have the use; of leaves without one those that are named so."""
    if glob is not None:
        return Rule(glob=glob, layout=Split(axes), role="state", asked_by=asked_by)
    return Rule(glob=named, layout=Split(axes), role="state", use=use, asked_by=asked_by)


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
    return Rule(glob=glob, layout=layout)


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

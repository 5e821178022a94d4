"""Constraints as the layouts that each leaf may still have.

In: leaves with paths, roles and shapes; a mesh; `Constraints`. Out: for every leaf the tuple of allowed layouts, None where
all are. What can go wrong: a path that no leaf has, an axis that the mesh lacks, a dimension that does not divide; all of
them are reported at once.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Container, Mapping, Sequence
from typing import Protocol

from jax.sharding import PartitionSpec

from autopar.errors import ConstraintError
from autopar.layouts.constraints import (
    HOW_A_BATCH_IS_GIVEN,
    MADE,
    Constraints,
    LeafLayout,
    Replicated,
    Rule,
    Split,
    SplitBatch,
)
from autopar.layouts.mesh import Axes, Layout, LogicalMesh
from autopar.layouts.moves import all_layouts
from autopar.layouts.pieces import whole_path


class Leaf(Protocol):
    """What a constraint needs to know of a leaf."""

    @property
    def path(self) -> str:
        """`argument/key/key`."""

    @property
    def role(self) -> str:
        """state, batch, other or const; output or value if the step makes it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""

    @property
    def use(self) -> str | None:
        """What the step does with a leaf of its state: parameter or optimizer, None if that is not known."""


def allowed_layouts(
    leaves: Sequence[Leaf], mesh: LogicalMesh, constraints: Constraints, *, shared: Container[int] = ()
) -> list[tuple[Layout, ...] | None]:
    """Allowed layouts per leaf; ConstraintError lists everything that cannot be met.

    `shared`: the leaves, by number, of the batch that have no examples, which data parallelism leaves whole.
    """
    matched = {rule: [i for i, leaf in enumerate(leaves) if _matches(rule, leaf)] for rule in constraints.rules}
    missing = {rule: names for rule, found in matched.items() if found and (names := _missing_axes(rule, mesh))}
    problems: list[str] = [_no_such_axes(missing, mesh)] if missing else []
    allowed: list[tuple[Layout, ...] | None] = [None] * len(leaves)
    for rule in constraints.rules:
        if not matched[rule] and rule.must_match:
            problems.append(_no_such_leaf(rule, leaves))
        refused: list[str] = []
        for i in () if rule in missing else matched[rule]:
            try:
                whole = isinstance(rule.layout, SplitBatch) and i in shared
                allowed[i] = layouts_for(Replicated() if whole else rule.layout, leaves[i], mesh)
            except ConstraintError as error:
                refused.append(str(error))
        more = [f"... and {len(refused) - _SHOWN} more leaves of {rule.glob!r}"] if len(refused) > _SHOWN else []
        problems += [*refused[:_SHOWN], *more]
    if problems:
        raise ConstraintError("\n".join(dict.fromkeys(problems)))
    return allowed


_SHOWN = 5
"""Of how many leaves an error says why a constraint on all of them cannot be met."""


def _missing_axes(rule: Rule, mesh: LogicalMesh) -> list[str]:
    """The axes that a constraint names and the mesh lacks."""
    wanted = rule.layout
    entries = wanted if isinstance(wanted, PartitionSpec) else (wanted.axes or (), *_rest(wanted))
    names = [name for entry in entries for name in ([entry] if isinstance(entry, str) else entry or ())]
    return [name for name in dict.fromkeys(names) if name not in mesh.axis_names]


def _rest(wanted: LeafLayout) -> PartitionSpec:
    return wanted.rest if isinstance(wanted, SplitBatch) else PartitionSpec()


def _no_such_axes(missing: Mapping[Rule, Sequence[str]], mesh: LogicalMesh) -> str:
    """One sentence for all constraints that name axes which the mesh lacks."""
    named = (
        f"the constraint on {rule.glob} names mesh axis {', '.join(map(repr, axes))}" for rule, axes in missing.items()
    )
    return (
        f"{'; '.join(dict.fromkeys(named))}; the mesh has {', '.join(mesh.axis_names)}: use these names, or give it your own, as "
        "with mesh_shape={'data': 2, 'model': 4}"
    )


def batch_axes(
    leaves: Sequence[Leaf], mesh: LogicalMesh, constraints: Constraints, *, shared: Container[int] = ()
) -> dict[int, Axes]:
    """The leaves whose examples a preset splits, by number, with the axes that split them and nothing else."""
    found: dict[int, Axes] = {}
    for rule in constraints.rules:
        for i, leaf in enumerate(leaves):
            if _matches(rule, leaf):
                found.pop(i, None)
                if isinstance(rule.layout, SplitBatch) and leaf.shape and i not in shared:
                    found[i] = tuple(a for a in _numbers(rule.layout.axes, mesh) if mesh.shape[a] > 1)
    return found


def _matches(rule: Rule, leaf: Leaf) -> bool:
    if rule.role not in (None, leaf.role) or (leaf.role in MADE and not rule.is_on_results):
        return False
    if rule.use is not None and leaf.use is not None:
        return rule.use == leaf.use
    return any(fnmatch.fnmatchcase(p, rule.glob) for p in (leaf.path, whole_path(leaf.path)))


_WHAT_IT_IS = {
    "parameter": ("parameters", "updates no leaf of its state from a gradient with respect to that leaf"),
    "optimizer": ("state of an optimizer", "updates no leaf of its state from gradients, apart from parameters"),
}


def _no_such_use(rule: Rule, use: str, leaves: Sequence[Leaf]) -> str:
    """What a preset misses in the state, with globs that could be meant: the first keys of the state's paths."""
    state = [leaf.path for leaf in leaves if leaf.role == "state"]
    groups = list(dict.fromkeys(map(_group, state)))
    listed = ", ".join(map(repr, groups[:6])) + (", ..." if len(groups) > 6 else "")
    what, reason = _WHAT_IT_IS[use]
    return (
        f"{rule.asked_by.partition('(')[0]} splits the {what}, and finds none: the step {reason}, and no path matches "
        f"{rule.glob!r}. Name such leaves by a glob, {rule.asked_by.replace('...', 'GLOB')}, where the state has "
        f"{listed or 'no leaves'}"
    )


def _group(path: str) -> str:
    """A glob of the leaves that have the first two keys of a path."""
    keys = path.split("/")
    return "/".join([*keys[:2], "*"] if len(keys) > 2 else keys)


def _no_such_leaf(rule: Rule, leaves: Sequence[Leaf]) -> str:
    if rule.use is not None:
        return _no_such_use(rule, rule.use, leaves)
    roles = MADE if rule.is_on_results else {leaf.role for leaf in leaves}.difference(MADE)
    of_role = [leaf.path for leaf in leaves if leaf.role in roles and rule.role in (None, leaf.role)]
    word = rule.glob.strip("*").rsplit("/", 1)[-1]
    alike = set(difflib.get_close_matches(word, {part for path in of_role for part in path.split("/")}, cutoff=0.5))
    near = [path for path in of_role if (word and word in path) or alike & {*path.split("/")}] or of_role
    listed = ", ".join(near[:5]) + (", ..." if len(near) > 5 else "")
    kind = f"{rule.role} " if rule.role else ""
    names = f"; the glob is that of {rule.asked_by}" if rule.asked_by else ""
    if rule.role == "batch" and not of_role:
        names = f". No argument is a batch: {HOW_A_BATCH_IS_GIVEN}"
    whose = "result and no named value of the step" if rule.is_on_results else f"{kind}leaf of the step's arguments"
    return f"constraint {rule.glob!r} matches no {whose}; there are: {listed or 'none'}{names}"


def layouts_for(wanted: LeafLayout, leaf: Leaf, mesh: LogicalMesh) -> tuple[Layout, ...]:
    """The layouts of one leaf that meet one constraint, whose axes the mesh has."""
    if isinstance(wanted, PartitionSpec):
        return (_from_spec(wanted, leaf, mesh),)
    axes = _numbers(wanted.axes, mesh)
    plain = [la for la in all_layouts(leaf.shape, mesh, ()) if la.is_ascending]
    if isinstance(wanted, Replicated):
        return tuple(la for la in plain if not set(la.sharded_axes) & set(axes))
    if isinstance(wanted, Split):
        inside = [la for la in plain if set(la.sharded_axes) <= set(axes)]
        most = max(mesh.ways(la.sharded_axes) for la in inside)
        return tuple(la for la in inside if mesh.ways(la.sharded_axes) == most)
    split = _split_batch(leaf, mesh, tuple(a for a in axes if mesh.shape[a] > 1))
    if not wanted.rest:
        return (split,)
    return (_from_spec(PartitionSpec(mesh.names(split.dims[0]) or None, *wanted.rest), leaf, mesh),)


def _split_batch(leaf: Leaf, mesh: LogicalMesh, axes: tuple[int, ...]) -> Layout:
    if not leaf.shape or leaf.shape[0] == 0:
        return Layout.replicated(len(leaf.shape))
    if leaf.shape[0] % mesh.ways(axes):
        raise ConstraintError(
            f"data parallelism over mesh axes {', '.join(mesh.names(axes))} splits the batch {mesh.ways(axes)} ways, but "
            f"{leaf.path} has {leaf.shape[0]} examples (shape {leaf.shape}), which {mesh.ways(axes)} does not divide. Use a "
            f"batch that is a multiple of {mesh.ways(axes)}, or a smaller mesh axis."
        )
    return Layout((axes, *((),) * (len(leaf.shape) - 1)))


def _numbers(names: tuple[str, ...] | None, mesh: LogicalMesh) -> tuple[int, ...]:
    return tuple(range(len(mesh.shape))) if names is None else tuple(map(mesh.axis_names.index, names))


def _from_spec(spec: PartitionSpec, leaf: Leaf, mesh: LogicalMesh) -> Layout:
    if len(spec) > len(leaf.shape):
        raise ConstraintError(
            f"{spec} has {len(spec)} entries, {leaf.path} has {len(leaf.shape)} dimensions {leaf.shape}"
        )
    dims: list[tuple[int, ...]] = []
    for entry in (*spec, *(None,) * (len(leaf.shape) - len(spec))):
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        dims.append(tuple(a for a in _numbers(names, mesh) if mesh.shape[a] > 1))
    layout = Layout(tuple(axes if size else () for size, axes in zip(leaf.shape, dims, strict=True)))
    for d, (size, axes) in enumerate(zip(leaf.shape, layout.dims, strict=True)):
        if size % mesh.ways(axes):
            raise ConstraintError(
                f"{spec} splits dimension {d} of {leaf.path} {mesh.ways(axes)} ways, but its size {size} is not a multiple of "
                f"{mesh.ways(axes)}; choose another dimension or a smaller mesh axis"
            )
    if len(set(layout.sharded_axes)) != len(layout.sharded_axes):
        raise ConstraintError(f"{spec} for {leaf.path} uses a mesh axis twice; each axis can split one dimension only")
    return layout

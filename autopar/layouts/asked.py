"""Layouts that a step asks for by mesh axes of its own, on the mesh of a plan.

In: for each dimension of a value which axes split it, and how large these are, as `program/opened/constrain.py` reads it from an
equation. Out: the layouts of a plan's mesh that meet it. Names stand for axes of the plan's mesh that have the same name and
size. Else the step's stand for runs of the plan's axes that divide in as many parts, in order, such as `data` of 8 for `x` and
`y` of 2 and 4. What can go wrong: a mesh on which neither holds, or a dimension that does not divide.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from autopar.errors import ConstraintError
from autopar.layouts.mesh import Axes, Layout, LogicalMesh
from autopar.layouts.moves import all_layouts

ANY_SIZE = 0
"""Of an axis of the plan's mesh, whose size the step does not say."""
TRACED_AS = "sizes_of_the_plan"
"""A mesh axis that no mesh has. A mesh with it has the axis names of the plan's mesh, whose sizes are not known yet."""


@dataclasses.dataclass(frozen=True)
class AskedLayout:
    """What a step asks for.

    Attributes:
        dims: for each dimension the names of the axes that split it, major to minor; None leaves it to the search.
        mesh_axes: the axes of the step's mesh with their sizes, in order; `ANY_SIZE` where it names axes of the plan's mesh.
    """

    dims: tuple[tuple[str, ...] | None, ...]
    mesh_axes: tuple[tuple[str, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The axes that split a dimension."""
        return tuple(name for dim in self.dims for name in dim or ())

    def layouts(self, shape: Sequence[int], mesh: LogicalMesh, *, source: str) -> tuple[Layout, ...]:
        """The layouts of a value that meet it; `source` is the user's line. Raises ConstraintError."""
        axes = self._find_axes(mesh, source)
        dims = [None if dim is None else tuple(sorted(a for name in dim for a in axes[name])) for dim in self.dims]
        for d, (size, wanted) in enumerate(zip(shape, dims, strict=True)):
            if wanted and size % mesh.ways(wanted):
                raise ConstraintError(
                    f"the step asks at {source} for {self._spec()}, which splits dimension {d} of a value of shape "
                    f"{tuple(shape)} {mesh.ways(wanted)} ways, but {mesh.ways(wanted)} does not divide {size}. Use sizes that it "
                    "divides (a microbatch has fewer examples than the batch), or leave this dimension out: P.UNCONSTRAINED."
                )
        fixed = [None if dim is None else dim if size else () for size, dim in zip(shape, dims, strict=True)]
        if None not in fixed:
            return (Layout(tuple(dim for dim in fixed if dim is not None)),)
        plain = (la for la in all_layouts(tuple(shape), mesh, ()) if la.is_ascending)
        return tuple(la for la in plain if all(w is None or w == g for w, g in zip(fixed, la.dims, strict=True)))

    def _find_axes(self, mesh: LogicalMesh, source: str) -> Mapping[str, Axes]:
        """The axes of a mesh that each name stands for; those of size 1 split nothing. Raises ConstraintError."""
        sizes = dict(self.mesh_axes)
        if mesh.size == 1:
            return dict.fromkeys(sizes, ())
        own = {name: number for number, name in enumerate(mesh.axis_names)}
        if all(name in own and sizes[name] in (ANY_SIZE, mesh.shape[own[name]]) for name in self.names):
            return {name: (own[name],) if mesh.shape[own[name]] > 1 else () for name in self.names}
        found = _find_runs(self.mesh_axes, mesh)
        if found is None:
            raise ConstraintError(self._has_no_place(mesh, source))
        return found

    def _has_no_place(self, mesh: LogicalMesh, source: str) -> str:
        own = ", ".join(f"{name!r}: {size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True))
        asked = f"the step asks at {source} for {self._spec()}"
        if any(size == ANY_SIZE for _, size in self.mesh_axes):
            missing = ", ".join(repr(name) for name in self.names if name not in mesh.axis_names)
            return (
                f"{asked}, and the plan's mesh {{{own}}} has no axis {missing}. Name the axes: "
                "mesh_shape={'data': 2, 'model': 4}."
            )
        theirs = ", ".join(f"{name!r}: {size}" for name, size in self.mesh_axes)
        return (
            f"{asked} on a mesh {{{theirs}}}, whose axes are no axes of the plan's mesh {{{own}}}, nor products of such in this "
            f"order. Give mesh_shape={{{theirs}}}, or name axes of the plan's mesh: "
            "jax.lax.with_sharding_constraint(value, PartitionSpec(...)) without a mesh."
        )

    def _spec(self) -> str:
        shown = (
            "P.UNCONSTRAINED" if d is None else repr(d[0]) if len(d) == 1 else repr(d) if d else "None"
            for d in self.dims
        )
        return f"P({', '.join(shown)})"


def _find_runs(wanted: Sequence[tuple[str, int]], mesh: LogicalMesh) -> Mapping[str, Axes] | None:
    """The runs of axes of the mesh, in order, whose sizes multiply to those wanted; None if there are no such."""
    if math.prod(size for _, size in wanted) != mesh.size:
        return None
    left = [axis for axis, size in enumerate(mesh.shape) if size > 1]
    found: dict[str, Axes] = {}
    for name, size in wanted:
        run: list[int] = []
        while mesh.ways(run) < size and left:
            run.append(left.pop(0))
        if mesh.ways(run) != size:
            return None
        found[name] = tuple(run)
    return found

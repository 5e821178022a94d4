"""Tasks of a planned stage as compiled functions.

In: a `StageProgram`, the `Assignment` that planning chose for it, and a device mesh. Out: a `StageTask` for each `TaskCut`. A
value that is partial over mesh axes leaves an executable unreduced. Every device holds its own term. To JAX these are parts of
one array along its first dimension, so that a term keeps its shape, and XLA adds to it in its place. Terms of a scalar are a
vector. What can go wrong: a result has another layout than its reader expects. Both take the layout from the same `PlacedRef`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Set
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from autopar.compat import Var, source_line
from autopar.execution.weak_types import keep_weak_types
from autopar.intra_op.lowering.assignment import Assignment
from autopar.intra_op.lowering.per_device import Lowering, Placed
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.program.call import PyTree
from autopar.program.program import Equation
from autopar.program.task_name import TaskName
from autopar.program.walk import Scope
from autopar.stages.tasks.cuts import PlacedRef, TaskCut, Write, cut_into_tasks
from autopar.stages.tasks.refs import OutputRef, Ref
from autopar.stages.tasks.stage_program import StageProgram

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StageTask:
    """One executable. `run` takes the arrays of `reads` in order, and returns those of `writes` and the driver's witness.

    A task that runs once takes a list of the arrays of all microbatches for a ref that is per microbatch.

    Attributes:
        run: a jitted function.
        shapes: shapes and types of the arguments of `run`.
        results: shapes and types of `writes`.
        equations: the equations that the task computes.
    """

    name: TaskName
    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    donated: tuple[int, ...]
    run: Any
    shapes: tuple[jax.ShapeDtypeStruct | list[jax.ShapeDtypeStruct], ...]
    in_shardings: Mapping[Ref, NamedSharding]
    results: Mapping[Ref, jax.ShapeDtypeStruct]
    equations: tuple[Equation, ...]

    def lines(self) -> str:
        """Return the lines of the user's program that the task comes from, first and last; empty if none are known."""
        found = list(dict.fromkeys(filter(None, map(source_line, self.equations))))
        return " to ".join(dict.fromkeys((found[0], found[-1]))) if found else ""

    def lower(self) -> jax.stages.Lowered:
        """Lower the program for XLA."""
        lowered: jax.stages.Lowered = self.run.lower(*self.shapes)
        return lowered

    @functools.cached_property
    def executable(self) -> jax.stages.Compiled:
        """Compile an executable from shapes, for inspection."""
        return self.lower().compile()

    def as_text(self) -> str:
        """Return the optimised HLO."""
        return str(self.executable.as_text())


def make_stage_tasks(
    stage: StageProgram,
    assignment: Assignment,
    device_mesh: jax.sharding.Mesh,
    *,
    split_backward: bool = False,
    kept: Set[Var] = frozenset(),
) -> tuple[StageTask, ...]:
    """Make the executables of one stage, in the order in which they first run.

    Args:
        stage: the stage's program.
        assignment: the layouts that planning chose for it.
        device_mesh: the devices of the stage, in the shape of the assignment's mesh.
        split_backward: whether input gradients and weight gradients are two tasks.
        kept: leaves that another stage on the same devices reads, so that they are not donated.
    """
    lowering = Lowering(assignment)
    cuts = cut_into_tasks(stage, assignment, split_backward=split_backward, kept=kept)
    microbatches = stage.cut.loop.plan.microbatches
    weak = frozenset(OutputRef(i) for i, leaf in enumerate(stage.step.outputs) if leaf.weak_type)
    return tuple(_make_task(cut, lowering, device_mesh, microbatches=microbatches, weak=weak) for cut in cuts)


def _make_task(
    cut: TaskCut, lowering: Lowering, device_mesh: jax.sharding.Mesh, *, microbatches: int, weak: Set[Ref]
) -> StageTask:
    """Make the executable of one task; `weak` says which results are weakly typed."""
    reads, mesh = cut.reads, lowering.assignment.mesh
    by_ref: dict[Ref, PlacedRef] = {}
    for placed in cut.operands.values():
        by_ref.setdefault(placed.ref, placed)

    def each(of: Callable[[Ref], T]) -> tuple[T | list[T], ...]:
        """Return the value of each argument; a list of values for an argument that is a list of arrays."""
        return tuple([of(ref)] * microbatches if cut.comes_as_list(ref) else of(ref) for ref in reads)

    shardings = {ref: NamedSharding(device_mesh, _spec(mesh, by_ref[ref].layout)) for ref in reads}
    # The last output is the driver's witness.
    out_specs = (*(_spec(mesh, write.path[-1]) for write in cut.writes), PartitionSpec())
    sharded = jax.shard_map(
        _local(cut, lowering),
        mesh=device_mesh,
        in_specs=each(lambda ref: shardings[ref].spec),
        out_specs=out_specs,
        check_vma=False,
    )
    jitted = jax.jit(
        _rename(cut.name, keep_weak_types(sharded, [write.ref in weak for write in cut.writes])),
        in_shardings=each(shardings.__getitem__),
        out_shardings=tuple(NamedSharding(device_mesh, spec) for spec in out_specs),
        donate_argnums=cut.donated,
    )
    shapes = each(lambda ref: _shape(mesh, by_ref[ref], shardings[ref]))
    results = {w.ref: _result(mesh, w, device_mesh).update(weak_type=w.ref in weak) for w in cut.writes}
    writes = tuple(write.ref for write in cut.writes)
    return StageTask(
        name=cut.name,
        reads=reads,
        writes=writes,
        donated=cut.donated,
        run=jitted,
        shapes=shapes,
        in_shardings=shardings,
        results=results,
        equations=cut.equations,
    )


def _local(cut: TaskCut, lowering: Lowering) -> Callable[..., tuple[jax.Array, ...]]:
    """Return the function of one device: from the arrays of the reads to those of the writes and the driver's witness."""

    def local(*arrays: Any) -> tuple[jax.Array, ...]:
        given = dict(zip(cut.reads, arrays, strict=True))
        scope = Scope(lowering)
        for v, read in cut.operands.items():
            if cut.comes_as_list(read.ref):
                array = jnp.stack([_contract(x, read.layout) for x in given[read.ref]])
                scope.values[v] = Placed(array, read.layout.prepend())
            else:
                scope.values[v] = Placed(_contract(given[read.ref], read.layout), read.layout)
            if v in cut.entries:
                scope.values[v] = Placed(lowering.move_to(scope.values[v], cut.entries[v], v.aval), cut.entries[v])
        scope.run(cut.equations)
        found = []
        for write in cut.writes:
            placed = scope.value(write.atom)
            for layout in write.path:
                placed = Placed(lowering.move_to(placed, layout, write.atom.aval), layout)
            found.append(_expand(placed))
        return (*found, jnp.zeros((1,), jnp.bool_))

    return local


def _shape(mesh: LogicalMesh, placed: PlacedRef, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    terms = math.prod(mesh.shape[axis] for axis in placed.layout.partial_axes)
    shape = placed.aval.shape
    shape = (terms * shape[0], *shape[1:]) if shape else (terms,) * bool(placed.layout.partial)
    return jax.ShapeDtypeStruct(shape, placed.aval.dtype, sharding=sharding)


def _result(mesh: LogicalMesh, write: Write, device_mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct:
    placed = PlacedRef(write.ref, write.path[-1], write.atom.aval)
    return _shape(mesh, placed, NamedSharding(device_mesh, _spec(mesh, placed.layout)))


def _spec(mesh: LogicalMesh, layout: Layout) -> PartitionSpec:
    first, *others = layout.dims or ((),)
    dims = [(*layout.partial_axes, *first), *others] if layout.dims or layout.partial else []
    return PartitionSpec(*(mesh.names(axes) or None for axes in dims))


def _rename(name: TaskName, fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    def call(*arrays: PyTree) -> PyTree:
        return fun(*arrays)

    call.__name__ = str(name).replace(" ", "_").replace(".", "_")
    return call


def _expand(placed: Placed) -> jax.Array:
    """A device's term of a scalar as an array of one element."""
    return placed.array[None] if placed.layout.partial and not placed.layout.dims else placed.array


def _contract(array: jax.Array, layout: Layout) -> jax.Array:
    """What `_expand` expanded."""
    return array[0] if layout.partial and not layout.dims else array

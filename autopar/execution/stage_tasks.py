"""Tasks of a planned stage as compiled functions.

In: a `StageProgram`, the `Assignment` that planning chose for it, a device mesh. Out: a `StageTask` for each `TaskCut`. A value
that is partial over mesh axes leaves an executable as it is, unreduced: as an array with one more leading dimension per partial
axis, of which every device holds its own term. What can go wrong: a result whose layout is not the one that its reader expects;
both take it from the same `Slot`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from autopar.compat import Var
from autopar.execution.weak_types import keep_weak_types
from autopar.intra_op.lowering.assignment import Assignment
from autopar.intra_op.lowering.per_device import Lowering, Placed
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.program.walk import Scope
from autopar.stages.tasks.cuts import Ref, Slot, TaskCut, Write, cut_into_tasks
from autopar.stages.tasks.stage_program import StageProgram


@dataclasses.dataclass(frozen=True, eq=False)
class StageTask:
    """One executable; `run` takes the arrays of `reads`, in order, and returns those of `writes` and the driver's witness.

    A read that is not per microbatch though its ref is, stands for the list of all microbatches' arrays. `run` is a jitted
    function, `shapes` are those of its arguments, `results` those of `writes`.
    """

    name: str
    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    donated: tuple[int, ...]
    run: Any
    shapes: tuple[Any, ...]
    in_shardings: Mapping[Ref, NamedSharding]
    results: Mapping[Ref, jax.ShapeDtypeStruct]

    def as_text(self) -> str:
        """The optimised HLO."""
        return str(self.run.lower(*self.shapes).compile().as_text())


def stage_tasks(
    stage: StageProgram,
    assignment: Assignment,
    device_mesh: jax.sharding.Mesh,
    *,
    split_backward: bool = False,
    kept: Set[Var] = frozenset(),
) -> tuple[StageTask, ...]:
    """The executables of one stage in the order in which they first run.

    `split_backward`: input gradients and weight gradients are two tasks. `kept`: leaves that another stage on the same devices
    reads, so that they are not donated.
    """
    lowering = Lowering(assignment)
    cuts = cut_into_tasks(stage, assignment, split_backward=split_backward, kept=kept)
    microbatches = stage.cut.loop.plan.microbatches
    weak = frozenset(Ref("output", i) for i, leaf in enumerate(stage.step.outputs) if leaf.weak_type)
    return tuple(_compiled(cut, lowering, device_mesh, microbatches=microbatches, weak=weak) for cut in cuts)


def _compiled(
    cut: TaskCut, lowering: Lowering, device_mesh: jax.sharding.Mesh, *, microbatches: int, weak: Set[Ref]
) -> StageTask:
    """The executable of one task; `weak`: what it writes weakly typed."""
    reads, mesh = cut.reads, lowering.assignment.mesh
    by_ref: dict[Ref, Slot] = {}
    for slot in cut.slots.values():
        by_ref.setdefault(slot.ref, slot)

    def each(of: Callable[[Ref], Any]) -> tuple[Any, ...]:
        """What holds for each argument; for each array of it where it is a list."""
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
        _named(cut.name, keep_weak_types(sharded, [write.ref in weak for write in cut.writes])),
        in_shardings=each(shardings.__getitem__),
        out_shardings=tuple(NamedSharding(device_mesh, spec) for spec in out_specs),
        donate_argnums=cut.donated,
    )
    shapes = each(lambda ref: _shape(mesh, by_ref[ref], shardings[ref]))
    results = {w.ref: _result(mesh, w, device_mesh).update(weak_type=w.ref in weak) for w in cut.writes}
    writes = tuple(write.ref for write in cut.writes)
    return StageTask(cut.name, reads, writes, cut.donated, jitted, shapes, shardings, results)


def _local(cut: TaskCut, lowering: Lowering) -> Callable[..., tuple[Any, ...]]:
    """What one device does: arrays of the reads in, arrays of the writes and the driver's witness out."""

    def local(*arrays: Any) -> tuple[Any, ...]:
        given = dict(zip(cut.reads, arrays, strict=True))
        scope = Scope(lowering)
        for v, slot in cut.slots.items():
            if cut.comes_as_list(slot.ref):
                array = jnp.stack([_contract(x, slot.layout) for x in given[slot.ref]])
                scope.values[v] = Placed(array, slot.layout.prepend())
            else:
                scope.values[v] = Placed(_contract(given[slot.ref], slot.layout), slot.layout)
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


def _shape(mesh: LogicalMesh, slot: Slot, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    terms = (mesh.shape[axis] for axis in slot.layout.partial_axes)
    return jax.ShapeDtypeStruct((*terms, *slot.aval.shape), slot.aval.dtype, sharding=sharding)


def _result(mesh: LogicalMesh, write: Write, device_mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct:
    slot = Slot(write.ref, write.path[-1], write.atom.aval)
    return _shape(mesh, slot, NamedSharding(device_mesh, _spec(mesh, slot.layout)))


def _spec(mesh: LogicalMesh, layout: Layout) -> PartitionSpec:
    dims = [mesh.names(axes) or None for axes in layout.dims]
    return PartitionSpec(*(mesh.axis_names[axis] for axis in layout.partial_axes), *dims)


def _named(name: str, fun: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arrays: Any) -> Any:
        return fun(*arrays)

    call.__name__ = name.replace(" ", "_").replace(".", "_")
    return call


def _expand(placed: Placed) -> Any:
    array = placed.array
    for _ in placed.layout.partial:
        array = jnp.expand_dims(array, 0)
    return array


def _contract(array: Any, layout: Layout) -> Any:
    for _ in layout.partial:
        array = array[0]
    return array

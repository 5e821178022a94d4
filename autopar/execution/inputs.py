"""Make the driver's inputs from the leaves of a call: each leaf goes where its readers want it, the batch in slices.

In: the divided step, the tasks of its stages, and the arrays that the tasks read from outside. Out: `StepInputs`, which places
the leaves of a step with all copies in one call, and knows where leaves live between steps. What can go wrong:
`jax.device_put` may share the caller's buffer, and a step that donates the array would take it. Such arrays are copied first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from autopar.compat import Var, without_explicit_axes
from autopar.execution.batch_places import BatchLeaf, RowsPlace
from autopar.execution.pipeline_tasks import Item, PipelineTasks
from autopar.execution.special_values import unchecked
from autopar.intra_op.lowering.per_device import partition_spec
from autopar.program.step import TracedStep
from autopar.runtime.processes import are_here, as_it_is_now, from_host
from autopar.schedules.instructions import Value
from autopar.stages.tasks.refs import InputRef, NumberRef, Ref, RowRef

Key = tuple[int, Value]
"""An input of the driver: the mesh and the value."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Placement:
    """One input of the driver and its sharding.

    The input is the leaf with this number, or the examples `rows` of it for one microbatch, or a `constant`.
    """

    leaf: int | None
    rows: tuple[int, int] | None = None
    constant: ArrayLike | None = None
    sharding: NamedSharding
    is_donated: bool


class StepInputs:
    """Places the leaves of the divided step."""

    def __init__(
        self, step: TracedStep, tasks: PipelineTasks, given: Mapping[Key, Sequence[Item]], *, num_microbatches: int
    ) -> None:
        """Find the place of every input. `given`: the arrays that the tasks read from outside, by mesh and value."""
        self._step, self._tasks, self._given = step, tasks, given
        self._num_microbatches = num_microbatches
        self._numbers = {v: i for i, v in enumerate(step.program.invars)}

    @functools.cached_property
    def places(self) -> dict[int, NamedSharding]:
        """The sharding of each leaf of the divided step between steps, by number; leaves of the batch have none."""
        places: dict[int, NamedSharding] = {}
        for stage in self._tasks.stages:
            for i, port in enumerate(stage.program.inputs):
                if port.source == "leaf":
                    spec = partition_spec(stage.assignment.inputs[i], stage.assignment.mesh)
                    places.setdefault(self._numbers[port.var], NamedSharding(stage.device_mesh, spec))
        return places

    @functools.cached_property
    def wanted(self) -> dict[int, list[NamedSharding | None]]:
        """For each leaf of the divided step the shardings in which the driver takes it; None for slices of it."""
        wanted: dict[int, list[NamedSharding | None]] = {number: [] for number in self._numbers.values()}
        for one in (one for several in self._placements.values() for one in several):
            if one.leaf is not None:
                wanted[one.leaf].append(one.sharding if one.rows is None else None)
        return wanted

    def supply(self, leaves: Sequence[ArrayLike], meshes: Collection[int]) -> dict[Key, list[jax.Array]]:
        """Return the driver's inputs on these meshes. All copies are one call."""
        mine = {key: placements for key, placements in self._placements.items() if key[0] in meshes}
        flat = [one for placements in mine.values() for one in placements]
        with unchecked():
            placed = iter(_place([_array(one, leaves) for one in flat], flat))
        return {key: [next(placed) for _ in placements] for key, placements in mine.items()}

    def rows_places(self) -> dict[int, list[RowsPlace]]:
        """Return the places in which the driver takes each leaf of the divided step, by number, each with its examples."""
        found: dict[int, list[RowsPlace]] = {}
        for one in (one for several in self._placements.values() for one in several):
            if one.leaf is None:
                continue
            shape = self._step.inputs[one.leaf].shape
            rows = one.rows or ((0, shape[0]) if shape else None)
            sizes = shape if one.rows is None else (one.rows[1] - one.rows[0], *shape[1:])
            place = RowsPlace(rows, sizes, one.sharding)
            if place not in found.setdefault(one.leaf, []):
                found[one.leaf].append(place)
        return found

    def shape_of(self, item: Item, mesh: int) -> jax.ShapeDtypeStruct:
        """Return shape, type and sharding of an array that a task on a mesh makes, or that the driver takes there."""
        stage, ref = item
        if item in self._tasks.makers:
            return self._tasks.maker_of(item).results[ref]
        var = self._leaf_of(stage, ref)
        assert var is not None, f"{ref} of stage {stage} is no leaf of the step"
        return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, sharding=self._sharding(item, mesh))

    def _leaf_of(self, stage: int, ref: Ref) -> Var | None:
        """Find the leaf or the other stage's value behind an input of a stage; None for constants and microbatch numbers."""
        ports = self._tasks.stages[stage].program.inputs
        return ports[ref.port].var if isinstance(ref, InputRef | RowRef) and ref.port < len(ports) else None

    @functools.cached_property
    def _placements(self) -> dict[Key, list[_Placement]]:
        return {
            (mesh, value): [
                self._placement(stage, ref, value.microbatch, self._sharding((stage, ref), mesh))
                for stage, ref in items
            ]
            for (mesh, value), items in self._given.items()
        }

    def _placement(self, stage: int, ref: Ref, microbatch: int | None, sharding: NamedSharding) -> _Placement:
        var = self._leaf_of(stage, ref)
        if var is None:
            return _Placement(
                leaf=None, constant=self._constant(stage, ref, microbatch), sharding=sharding, is_donated=False
            )
        number = self._numbers[var]
        if isinstance(ref, InputRef):
            return _Placement(leaf=number, sharding=sharding, is_donated=self._step.inputs[number].donated)
        assert microbatch is not None, f"{ref} of stage {stage} is read in a microbatch"
        count = var.aval.shape[0] // self._num_microbatches
        rows = (microbatch * count, (microbatch + 1) * count)
        return _Placement(leaf=number, rows=rows, sharding=sharding, is_donated=False)

    def _constant(self, stage: int, ref: Ref, microbatch: int | None) -> ArrayLike:
        """Return a constant of the stage's program, or the number of a microbatch."""
        if isinstance(ref, NumberRef):
            return np.int32(microbatch or 0)
        assert isinstance(ref, InputRef), f"{ref} of stage {stage} comes from a task"
        program = self._tasks.stages[stage].program
        return program.step.constants[ref.port - len(program.inputs)]

    def _sharding(self, item: Item, mesh: int) -> NamedSharding:
        """Return the sharding in which the driver takes an array: its reader's, or its home's if that is on another mesh."""
        stage, ref = item
        if self._tasks.mesh_of(stage) == mesh:
            for name, task in self._tasks.by_name.items():
                if name.stage == stage and ref in task.in_shardings:
                    return task.in_shardings[ref]
        var = self._leaf_of(stage, ref)
        assert var is not None, f"{ref} of stage {stage} lives on no mesh"
        return self.places[self._numbers[var]]


def _array(one: _Placement, leaves: Sequence[ArrayLike]) -> ArrayLike:
    if one.leaf is None:
        assert one.constant is not None
        return one.constant
    leaf = leaves[one.leaf]
    if isinstance(leaf, BatchLeaf):
        placed = leaf.find(one.rows or ((0, leaf.shape[0]) if leaf.shape else None), one.sharding)
        if placed is not None:
            return placed
        leaf = np.asarray(leaf)
    return leaf if one.rows is None else _slice(leaf, *one.rows)


def _slice(leaf: ArrayLike, start: int, end: int) -> ArrayLike:
    """Return a range of examples of a batch leaf. For an array on devices this transfers nothing from the host."""
    if isinstance(leaf, jax.Array):
        return jax.lax.slice_in_dim(without_explicit_axes(leaf), start, end)
    rows: np.ndarray = np.asarray(leaf)[start:end]
    return rows


def _place(arrays: Sequence[Any], placements: Sequence[_Placement]) -> list[jax.Array]:
    """Move arrays to their placements, with one call for all that are elsewhere.

    Donated arrays are copied first: `device_put` may share the caller's buffer, and donation would take that.
    """
    result = list(arrays)
    moving = []
    for i, (array, wanted) in enumerate(zip(arrays, placements, strict=True)):
        given = getattr(array, "sharding", None)
        if isinstance(given, NamedSharding) and given.is_equivalent_to(wanted.sharding, array.ndim):
            continue
        if are_here(wanted.sharding.device_set):
            moving.append(i)
        else:
            result[i] = from_host(array, wanted.sharding)
    sources = [
        arrays[i].copy() if placements[i].is_donated and isinstance(arrays[i], jax.Array) else as_it_is_now(arrays[i])
        for i in moving
    ]
    moved = jax.device_put(sources, [placements[i].sharding for i in moving])
    for i, array in zip(moving, moved, strict=True):
        result[i] = array
    return result

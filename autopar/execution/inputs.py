"""From the leaves of a call to what the driver is handed: every leaf where its readers want it, the batch in slices.

In: the divided step, the tasks of its stages, and which arrays the tasks are given from outside. Out: `StepInputs`, which places
the leaves of a step, all copies in one call, and knows where leaves live between steps. What can go wrong: `jax.device_put` may
share the caller's buffer, and a step that donates would take it; what is donated is copied first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.compat import Var, as_it_is_now, without_explicit_axes
from autopar.execution.pipeline_tasks import Item, PipelineTasks
from autopar.intra_op.lowering.per_device import partition_spec
from autopar.program.step import TracedStep
from autopar.runtime.processes import are_here, from_host
from autopar.schedules.instructions import Value
from autopar.stages.tasks.cuts import Ref

Key = tuple[int, Value]
"""Where the driver is handed something: the mesh and the value."""


@dataclasses.dataclass(frozen=True)
class _Wish:
    """One array that the driver is handed: for which stage and ref, of which microbatch, where, and whether it is donated."""

    stage: int
    ref: Ref
    microbatch: int | None
    sharding: NamedSharding
    is_donated: bool


class StepInputs:
    """Places the leaves of the divided step."""

    def __init__(
        self, step: TracedStep, tasks: PipelineTasks, given: Mapping[Key, Sequence[Item]], *, num_microbatches: int
    ) -> None:
        """`given`: what the driver is handed from outside, by the mesh and the value under which it is handed it."""
        self._step, self._tasks, self._given = step, tasks, given
        self._num_microbatches = num_microbatches
        self._numbers = {v: i for i, v in enumerate(step.program.invars)}

    @functools.cached_property
    def places(self) -> dict[int, NamedSharding]:
        """Where each leaf of the divided step lives between steps, by number; leaves of the batch have no such place."""
        places: dict[int, NamedSharding] = {}
        for stage in self._tasks.stages:
            for i, port in enumerate(stage.program.inputs):
                if port.source == "leaf":
                    spec = partition_spec(stage.assignment.inputs[i], stage.assignment.mesh)
                    places.setdefault(self._numbers[port.var], NamedSharding(stage.device_mesh, spec))
        return places

    @functools.cached_property
    def wanted(self) -> dict[int, list[NamedSharding | None]]:
        """The shardings in which the driver is handed each leaf of the divided step; None for slices of it."""
        wanted: dict[int, list[NamedSharding | None]] = {number: [] for number in self._numbers.values()}
        for wish in (wish for wishes in self._wishes.values() for wish in wishes):
            ports = self._tasks.stages[wish.stage].program.inputs
            if wish.ref.kind in ("input", "row") and wish.ref.key < len(ports):
                sharding = wish.sharding if wish.ref.kind == "input" else None
                wanted[self._numbers[ports[wish.ref.key].var]].append(sharding)
        return wanted

    def supplied(self, leaves: Sequence[Any], meshes: Collection[int]) -> dict[Key, list[Any]]:
        """The driver's inputs on these meshes; all copies are one call."""
        by_var = dict(zip(self._step.program.invars, leaves, strict=True))
        mine = {key: wishes for key, wishes in self._wishes.items() if key[0] in meshes}
        flat = [wish for wishes in mine.values() for wish in wishes]
        placed = iter(_placed([self._array(wish, by_var) for wish in flat], flat))
        return {key: [next(placed) for _ in wishes] for key, wishes in mine.items()}

    def shape_of(self, item: Item, mesh: int) -> jax.ShapeDtypeStruct:
        """Shape, type and sharding of what a task on a mesh makes, or of what the driver is handed there."""
        stage, ref = item
        if item in self._tasks.makers:
            return self._tasks.nodes[self._tasks.makers[item]].task.results[ref]
        aval = self._tasks.stages[stage].program.inputs[ref.key].var.aval
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=self._sharding(item, mesh))

    @functools.cached_property
    def _wishes(self) -> dict[Key, list[_Wish]]:
        donated = {v for v, leaf in zip(self._step.program.invars, self._step.inputs, strict=True) if leaf.donated}

        def is_donated(stage: int, ref: Ref) -> bool:
            ports = self._tasks.stages[stage].program.inputs
            return ref.kind == "input" and ref.key < len(ports) and ports[ref.key].var in donated

        return {
            (mesh, value): [
                _Wish(stage, ref, value.microbatch, self._sharding((stage, ref), mesh), is_donated(stage, ref))
                for stage, ref in items
            ]
            for (mesh, value), items in self._given.items()
        }

    def _sharding(self, item: Item, mesh: int) -> NamedSharding:
        """Where the driver is handed an array: where its reader wants it, or, if that is another mesh, where it lives."""
        stage, ref = item
        planned = self._tasks.stages[stage]
        if planned.mesh == mesh:
            for node in self._tasks.nodes.values():
                if node.stage == stage and ref in node.task.in_shardings:
                    return node.task.in_shardings[ref]
        return self.places[self._numbers[planned.program.inputs[ref.key].var]]

    def _array(self, wish: _Wish, by_var: Mapping[Var, Any]) -> Any:
        program, ref, microbatch = self._tasks.stages[wish.stage].program, wish.ref, wish.microbatch or 0
        if ref.kind == "number":
            return np.int32(microbatch)
        if ref.key >= len(program.inputs):
            return program.step.constants[ref.key - len(program.inputs)]
        leaf = by_var[program.inputs[ref.key].var]
        if ref.kind == "row":
            rows = leaf.shape[0] // self._num_microbatches
            return _slice(leaf, microbatch * rows, (microbatch + 1) * rows)
        return leaf


def _slice(leaf: Any, start: int, end: int) -> Any:
    """Some examples of a batch leaf; of an array without a transfer from the host."""
    if isinstance(leaf, jax.Array):
        return jax.lax.slice_in_dim(without_explicit_axes(leaf), start, end)
    return leaf[start:end]


def _placed(arrays: Sequence[Any], wishes: Sequence[_Wish]) -> list[Any]:
    """Arrays where they are wanted, in one call for all that are not there yet.

    Donated ones are copied first: `device_put` may share the caller's buffer, and donation would take that.
    """
    result: list[Any] = list(arrays)
    moving = []
    for i, (array, wish) in enumerate(zip(arrays, wishes, strict=True)):
        given = getattr(array, "sharding", None)
        if isinstance(given, NamedSharding) and given.is_equivalent_to(wish.sharding, array.ndim):
            continue
        if are_here(wish.sharding.device_set):
            moving.append(i)
        else:
            result[i] = from_host(array, wish.sharding)
    sources = [
        arrays[i].copy() if wishes[i].is_donated and isinstance(arrays[i], jax.Array) else as_it_is_now(arrays[i])
        for i in moving
    ]
    moved = jax.device_put(sources, [wishes[i].sharding for i in moving])
    for i, array in zip(moving, moved, strict=True):
        result[i] = array
    return result

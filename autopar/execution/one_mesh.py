"""Compile a step that is planned on one mesh: one jitted shard_map program over the devices.

In: a `PlannedStep` and JAX devices. Out: a `CompiledStep`, called with the step's own arguments. Arrays that are not laid out as
the plan says are moved first. State that the step returned is in place already, and is donated. The devices may belong to several
processes; each of them calls the step and holds its own part of every array. What can go wrong: there are too few devices, or
arguments have another shape. The errors give the numbers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from autopar.compat import (
    checked_for_nans,
    undisturbed,
    without_explicit_axes,
)
from autopar.events import StepRun, reach, running
from autopar.execution.batch_places import BatchLeaf, RowsPlace, places_on_one_mesh
from autopar.execution.calls import (
    Given,
    check_leaves,
    copy_repeated,
    describe_run,
    refuse_consumed,
    telling_what_is_left,
)
from autopar.execution.devices import device_mesh
from autopar.execution.special_values import unchecked
from autopar.execution.turns import RUNNING
from autopar.execution.weak_types import keep_weak_types
from autopar.intra_op.lowering.per_device import map_over_mesh, partition_spec
from autopar.intra_op.request import PlannedStep
from autopar.program.call import CallSignature, PyTree
from autopar.program.crossing import deliver
from autopar.runtime.meetings import group_of, refusing_together
from autopar.runtime.processes import are_here, as_it_is_now, from_host, is_global
from autopar.runtime.resharding.reshard import reshard
from autopar.runtime.thread_settings import program_settings_here, under
from autopar.split_array import SplitArray


def _cut_into_microbatches(value: ArrayLike, shape: tuple[int, ...]) -> ArrayLike:
    """Reshape a leaf of the batch to (microbatches, examples, ...). On the host this copies nothing."""
    array = without_explicit_axes(value)
    return array.reshape(shape) if isinstance(array, jax.Array | np.ndarray) else np.reshape(array, shape)


class CompiledStep:
    """A step compiled for its plan. A call runs one step, on arguments of the traced shapes only."""

    def __init__(self, signature: CallSignature, planned: PlannedStep, devices: Sequence[jax.Device]) -> None:
        self.signature, self.traced, self.plan = signature, planned.traced, planned.plan
        traced, assignment = planned.traced, planned.assignment
        self.assignment = assignment
        self._settings, self._compiling = program_settings_here(), threading.Lock()
        self.mesh = device_mesh(assignment.mesh, devices[planned.plan.first_device :])
        specs = [partition_spec(layout, assignment.mesh) for layout in assignment.inputs]
        self.in_shardings = tuple(NamedSharding(self.mesh, spec) for spec in specs)
        out_specs = [partition_spec(layout, assignment.mesh) for layout in assignment.outputs]
        self.out_shardings = [NamedSharding(self.mesh, spec) for spec in out_specs]
        self._group = group_of(lambda: devices)
        self._words = "" if self._group is None else describe_run(signature.name, traced)
        self._is_local = are_here(self.mesh.devices.flat)
        self._donated = tuple(i for i, leaf in enumerate(traced.inputs) if leaf.donated)
        self._is_new = True
        self._accepted: list[object] = [object()] * len(traced.inputs)
        self._run = jax.jit(
            keep_weak_types(map_over_mesh(assignment, self.mesh), [leaf.weak_type for leaf in traced.outputs]),
            in_shardings=self.in_shardings,
            out_shardings=self.out_shardings,
            donate_argnums=self._donated,
        )

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Run one step on arguments of the traced structure, shapes and types; ArgumentError names those that differ."""
        bound, leaves = check_leaves(self.signature, self.traced, args, kwargs)
        return deliver(bound, self.run(leaves))

    def run(self, leaves: Sequence[Given]) -> Any:
        """Run one step on the flat leaves of its arguments. Returns the step's results as a tree."""
        with self._compiling:  # before the turn is taken, so that other threads can run steps meanwhile
            executable = self._callable()
        with RUNNING.take(self.signature.name), undisturbed():
            with refusing_together(self._group):
                refuse_consumed(self.signature.name, self.traced.input_paths(), leaves)
            if self._group is not None:
                self._group.meet(self._words)
            leaves, name = list(leaves), self.signature.name
            run = StepRun(name=name, plan=self.plan, standing=list, compiled=self, is_first=self._is_new)
            with running(run, leaves):
                with unchecked():
                    arrays = copy_repeated([*leaves, *self._constants], self._donated)
                    placed = [
                        x if getattr(x, "sharding", None) is self._accepted[i] else self._place(i, x)
                        for i, x in enumerate(arrays[: len(leaves)])
                    ]
                with telling_what_is_left(name, self.traced.input_paths(), leaves), checked_for_nans(name):
                    found = executable(*placed, *self._constants)
            self._is_new = False
            reach("launched", run, found)
        return jax.tree_util.tree_unflatten(self.traced.out_tree, found)

    def _place(self, number: int, value: Given) -> jax.Array:
        """Lay an array out as the step takes it. State that the step returned is laid out so already.

        Such state has the same sharding object that was accepted before, so `run` only compares the objects.

        A donated array that comes from elsewhere remains the caller's. Replicating it would share its buffer, and the
        donation would take that, so it is copied first. (`device_put(may_alias=False)` shares the buffer all the same in JAX
        0.10 to 0.12.)
        """
        sharding, leaf = self.in_shardings[number], self.traced.inputs[number]
        if isinstance(value, BatchLeaf):
            found = value.find((0, leaf.given_shape[0]) if leaf.given_shape else None, sharding)
            if found is not None:
                return found
        value = np.asarray(value) if isinstance(value, SplitArray | BatchLeaf) else value
        if leaf.microbatches > 1:
            return self._move(_cut_into_microbatches(value, leaf.shape), sharding)
        if isinstance(value, jax.Array):
            given = value.sharding
            if isinstance(given, NamedSharding) and given.is_equivalent_to(sharding, value.ndim):
                self._accepted[number] = given
                return value
            if leaf.donated and sharding.is_fully_replicated:
                value = value.copy()
        return self._move(value, sharding)

    def _move(self, value: ArrayLike, sharding: NamedSharding) -> jax.Array:
        if self._is_local:
            moved: jax.Array = jax.device_put(as_it_is_now(value), sharding)
            return moved
        return reshard(value, sharding) if is_global(value) else from_host(value, sharding)

    @functools.cached_property
    def _constants(self) -> tuple[jax.Array, ...]:
        """Return the arrays that the step closes over; devices that are only compiled for take none."""
        traced = self.traced
        shardings = self.in_shardings[len(traced.inputs) - len(traced.constants) :]
        return tuple(from_host(value, given) for value, given in zip(traced.constants, shardings, strict=True))

    @functools.cached_property
    def batch_places(self) -> dict[int, list[RowsPlace]]:
        """Return the places of each leaf of the batch, by number."""
        return places_on_one_mesh(self.traced, self.in_shardings[: len(self.traced.inputs)])

    @functools.cached_property
    def executable(self) -> jax.stages.Compiled:
        """Return XLA's executable. It is compiled ahead of time from shapes, under the settings of JAX at the time of tracing."""
        with undisturbed(), under(self._settings):
            return self.lower().compile()

    def _callable(self) -> Callable[..., Sequence[jax.Array]]:
        """Return the function that runs a step: the executable, or the jitted function if an argument has entries below a byte.

        JAX 0.10 compiles ahead of time for packed entries. Its arrays do not say that their entries are packed, so the
        executable refuses them.
        """
        if not any(_is_packed(leaf.dtype) for leaf in self.traced.inputs):
            return self.executable

        def run(*arrays: jax.Array) -> Sequence[jax.Array]:
            with under(self._settings):
                found: Sequence[jax.Array] = self._run(*arrays)
                return found

        return run

    def lower(self) -> jax.stages.Lowered:
        """Lower the program for XLA under the settings at the time of tracing."""
        shapes = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for leaf, sharding in zip(self.traced.inputs, self.in_shardings, strict=True)
        ]
        with undisturbed(), under(self._settings):
            return self._run.lower(*shapes)

    def as_text(self) -> str:
        """Return the optimised HLO."""
        return str(self.executable.as_text())

    def memory_analysis(self) -> Any:
        """Return XLA's own account of the memory of one device, in bytes."""
        return self.executable.memory_analysis()


def _is_packed(dtype: np.dtype) -> bool:
    """Whether XLA packs several entries of this type into one byte."""
    if jnp.issubdtype(dtype, jnp.integer):
        return bool(jnp.iinfo(dtype).bits < 8)
    return bool(jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8)

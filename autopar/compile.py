"""From an `Assignment` to something that runs: one jitted shard_map program over the devices.

In: a traced step, its assignment and plan, JAX devices. Out: a `CompiledStep`, called with the step's own arguments. Arrays that
are not laid out as the plan says are moved first; state that the step returns stays where it is and is donated. The devices may
belong to several processes, each of which calls the step and holds its own part of every array. What can go wrong: too few
devices, arguments of another shape; both are refused with the numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from autopar.compat import (
    as_it_is_now,
    checked_for_nans,
    is_inside_trace,
    make_mesh,
    undisturbed,
    without_explicit_axes,
)
from autopar.errors import ArgumentError, UnsupportedProgramError
from autopar.intra_op.lowering.assignment import Assignment
from autopar.intra_op.lowering.per_device import partition_spec, sharded
from autopar.layouts.mesh import LogicalMesh
from autopar.plan import Plan
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.step import TracedStep
from autopar.runtime.processes import absent_like, are_here, as_host, from_host, is_global, is_here
from autopar.runtime.resharding.reshard import brought_here, reshard
from autopar.runtime.thread_settings import program_settings_here, under
from autopar.split_array import SplitArray, SplitSharding, in_pieces, joined, placed_apart, taken_apart
from autopar.weak_types import weakly_typed


def device_mesh(mesh: LogicalMesh, devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    """JAX devices arranged as a logical mesh; ArgumentError if there are too few."""
    if mesh.size > len(devices):
        raise ArgumentError(
            f"mesh {mesh.shape} needs {mesh.size} devices, there are {len(devices)} ({', '.join(map(str, devices[:4]))}"
            f"{', ...' if len(devices) > 4 else ''}). Use a smaller mesh_shape; or, to try a plan on a CPU, start Python with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size}."
        )
    return make_mesh(np.array(devices[: mesh.size]).reshape(mesh.shape), mesh.axis_names)


def checked_leaves(
    signature: CallSignature, traced: TracedStep, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """The flat leaves of a call; ArgumentError if they are not of the traced structure, shapes and types."""
    bound = bind_arguments(signature, args, kwargs)
    leaves, tree = jax.tree_util.tree_flatten((bound.dynamic, dict(bound.kwargs)))
    refuse_tracers(signature.name, leaves)
    if tree != traced.in_tree:
        raise ArgumentError(
            f"{signature.name} was compiled for arguments of structure {traced.in_tree}, called with {tree}"
        )
    expected = traced.inputs[: len(leaves)]
    given = [x if isinstance(x, SplitArray) else jax.typeof(x) for x in leaves]
    wrong = [
        f"{leaf.path} is {x.dtype}{list(x.shape)}, compiled for {leaf.dtype}{list(leaf.given_shape)}"
        for leaf, x in zip(expected, given, strict=True)
        if (x.shape, x.dtype) != (leaf.given_shape, leaf.dtype)
    ]
    if wrong:
        raise ArgumentError(f"{'; '.join(wrong)}. Compile again for these arguments, or call the step, which does.")
    return leaves


def refuse_tracers(name: str, leaves: Sequence[Any]) -> None:
    """Raise ArgumentError inside a function that JAX traces, where arrays have no values, or no step can be run."""
    traced = sum(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    if not traced and not is_inside_trace():
        return
    without = f"{traced} of its {len(leaves)} arrays have no values yet" if traced else "its arrays are closed over"
    raise ArgumentError(
        f"{name} is called inside a function that JAX traces (jit, grad, vmap, scan, ...): {without}. A parallelized step is a "
        "program of its own on all devices: call it outside, with arrays, and take gradients inside the step. Its undecorated "
        "function can be called anywhere."
    )


def refuse_consumed(name: str, traced: TracedStep, leaves: Sequence[Any]) -> None:
    """Raise ArgumentError for arrays whose memory an earlier step has taken, by their paths."""
    gone = [
        leaf.path for leaf, x in zip(traced.inputs, leaves, strict=False) if hasattr(x, "is_deleted") and x.is_deleted()
    ]
    if gone:
        listed = ", ".join(gone[:4]) + (", ..." if len(gone) > 4 else "")
        raise ArgumentError(
            f"{len(gone)} of the {len(leaves)} arrays given to {name} no longer exist: {listed}. A step consumes its state: it "
            "takes the memory for the state that it returns. Pass the returned state on, `state, ... = step(state, batch)`; "
            "after a step that failed, start again from a saved one. To use the old state again, copy it before the step "
            "(jax.tree.map(jnp.copy, state)), or use parallelize(..., donate_argnums=()), which keeps both in memory."
        )


def each_taken_once(arrays: Sequence[Any], donated: Collection[int]) -> Sequence[Any]:
    """The arrays of a call, such that nothing else is in the memory that the step takes: of those given twice, copies.

    `donated`: the numbers of the arrays that it takes. XLA ends the process where one buffer is donated twice, or read and
    donated (0.10), or fails (0.12). Arrays of which another process has all the memory are let be.
    """
    if len(set(map(id, arrays))) == len(arrays):
        return arrays
    taken, result = set(donated), list(arrays)
    used = {id(x) for i, x in enumerate(arrays) if i not in taken}
    for i in sorted(taken):
        x = arrays[i]
        if id(x) in used and isinstance(x, jax.Array) and is_here(x.sharding):
            result[i] = x.copy()
        used.add(id(x))
    return result


def create_sharded(
    create_fn: Callable[..., Any], args: Sequence[Any], shardings: Sequence[NamedSharding | SplitSharding]
) -> Any:
    """`create_fn(*args)` with its leaves in the given shardings; no device ever holds more than its part.

    Leaves, and pieces of leaves, that live on different meshes are made by one program per mesh, in the processes that have
    devices of it.
    """
    tree = jax.tree.structure(jax.eval_shape(create_fn, *args))
    held, places = placed_apart(shardings)
    if not all(are_here(sharding.device_set) for sharding in places):
        args = jax.tree.map(as_host, tuple(args))
    meshes = list(dict.fromkeys(sharding.mesh for sharding in places))
    made: list[Any] = [None] * len(places)
    for mesh in meshes:
        here = [i for i, sharding in enumerate(places) if sharding.mesh == mesh]

        def some(*given: Any, here: Sequence[int] = here) -> list[Any]:
            parts = in_pieces(jax.tree.leaves(create_fn(*given)), held)
            return [parts[i] for i in here]

        if is_here(places[here[0]]):
            arrays = jax.jit(some, out_shardings=[places[i] for i in here])(*args)
        else:
            arrays = list(map(absent_like, jax.eval_shape(some, *args), [places[i] for i in here]))
        for i, array in zip(here, arrays, strict=True):
            made[i] = array
    return jax.tree.unflatten(tree, joined(made, held))


def gathered(tree: Any, devices: Sequence[jax.Device]) -> Any:
    """A tree with its arrays as ordinary ones on one device: the first, or of several processes the first of each."""
    leaves, structure = jax.tree.flatten(tree)
    held, parts = taken_apart(leaves)
    if are_here(devices):
        found = [jax.device_put(x, devices[0]) if isinstance(x, jax.Array) else x for x in parts]
    else:
        found = brought_here(parts, devices)
    whole = [jnp.concatenate(x.pieces, axis=x.dim) if isinstance(x, SplitArray) else x for x in joined(found, held)]
    return jax.tree.unflatten(structure, whole)


def _in_slices(value: Any, shape: tuple[int, ...]) -> Any:
    """A batch leaf as microbatches; on the host this copies nothing."""
    return without_explicit_axes(value).reshape(shape) if hasattr(value, "reshape") else np.reshape(value, shape)


class CompiledStep:
    """A step compiled for its plan. Calling it runs one step; it accepts arguments of the traced shapes only."""

    def __init__(
        self,
        signature: CallSignature,
        traced: TracedStep,
        assignment: Assignment,
        plan: Plan,
        devices: Sequence[jax.Device],
    ) -> None:
        self.signature, self.traced, self.plan = signature, traced, plan
        self._settings = program_settings_here()
        self.mesh = device_mesh(assignment.mesh, devices)
        specs = [partition_spec(layout, assignment.mesh) for layout in assignment.inputs]
        self.in_shardings = tuple(NamedSharding(self.mesh, spec) for spec in specs)
        out_specs = [partition_spec(layout, assignment.mesh) for layout in assignment.outputs]
        self.out_shardings = [NamedSharding(self.mesh, spec) for spec in out_specs]
        self._is_local = are_here(self.mesh.devices.flat)
        self._constants = tuple(
            from_host(value, sharding)
            for value, sharding in zip(
                traced.constants, self.in_shardings[len(traced.inputs) - len(traced.constants) :], strict=True
            )
        )
        self._donated = tuple(i for i, leaf in enumerate(traced.inputs) if leaf.donated)
        self._accepted: list[Any] = [object()] * len(traced.inputs)
        self._run = jax.jit(
            weakly_typed(sharded(assignment, self.mesh), [leaf.weak_type for leaf in traced.outputs]),
            in_shardings=self.in_shardings,
            out_shardings=self.out_shardings,
            donate_argnums=self._donated,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on arguments of the traced structure, shapes and types; ArgumentError names those that differ."""
        return self.run(checked_leaves(self.signature, self.traced, args, kwargs))

    def run(self, leaves: Sequence[Any]) -> Any:
        """Run on the flat leaves of the step's arguments; returns the step's results as a tree."""
        refuse_consumed(self.signature.name, self.traced, leaves)
        with undisturbed():
            arrays = each_taken_once([*leaves, *self._constants], self._donated)
            placed = [
                x if getattr(x, "sharding", None) is self._accepted[i] else self._placed(i, x)
                for i, x in enumerate(arrays[: len(leaves)])
            ]
            executable = self.executable
            with checked_for_nans(self.signature.name):
                found = executable(*placed, *self._constants)
        return jax.tree_util.tree_unflatten(self.traced.out_tree, found)

    def _placed(self, number: int, value: Any) -> Any:
        """The array where the step wants it; it is already there for state that the step returned.

        State that comes back has the very sharding object that was accepted before: that is all that `run` has to look at.

        A donated array that comes from elsewhere stays the caller's: replicating it would share its buffer, and the
        donation would take that, so it is copied first. (`device_put(may_alias=False)` shares it all the same, 0.10-0.12.)
        """
        sharding, leaf = self.in_shardings[number], self.traced.inputs[number]
        value = np.asarray(value) if isinstance(value, SplitArray) else value
        if leaf.microbatches > 1:
            return self._moved(_in_slices(value, leaf.shape), sharding)
        given = getattr(value, "sharding", None)
        if isinstance(given, NamedSharding) and given.is_equivalent_to(sharding, value.ndim):
            self._accepted[number] = given
            return value
        if leaf.donated and sharding.is_fully_replicated and given is not None:
            value = value.copy()
        return self._moved(value, sharding)

    def _moved(self, value: Any, sharding: NamedSharding) -> Any:
        if self._is_local:
            return jax.device_put(as_it_is_now(value), sharding)
        return reshard(value, sharding) if is_global(value) else from_host(value, sharding)

    @functools.cached_property
    def executable(self) -> Any:
        """XLA's executable, compiled ahead of time from shapes, under the settings of JAX under which the step was traced.

        JAX 0.10 to 0.12 compile some sharded programs of which every argument is empty, and not others.
        """
        shapes = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for leaf, sharding in zip(self.traced.inputs, self.in_shardings, strict=True)
        ]
        try:
            with undisturbed(), under(self._settings):
                return self._run.lower(*shapes).compile()
        except jax.errors.JaxRuntimeError as error:
            if any(0 not in leaf.shape for leaf in self.traced.inputs):
                raise
            listed = ", ".join(f"{leaf.path} {leaf.shape}" for leaf in self.traced.inputs[:4])
            raise UnsupportedProgramError(
                f"every argument of {self.signature.name} is empty ({listed}), and XLA compiles no sharded program for this one: "
                "there is nothing to split. Pass at least one argument with elements, or call it with jax.jit."
            ) from error

    def as_text(self) -> str:
        """The optimised HLO."""
        return str(self.executable.as_text())

    def memory_analysis(self) -> Any:
        """XLA's own account of the memory of one device."""
        return self.executable.memory_analysis()

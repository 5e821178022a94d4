"""From a step function to a `TracedStep`: the program, its leaves by name, and the role of each.

In: a Python function and its arguments, arrays or `jax.ShapeDtypeStruct`s. Out: a frozen `TracedStep`: the program, the trees
of arguments and results, for each input leaf its path (`argument/key/key`), role (state, batch or other) and whether it is
donated, and which output takes which state leaf's place. An argument is state if the step returns a value of the same
structure, shapes and types, as train steps do (`roles.py`). `retrace` is the one place where a pass has a rewritten step traced
again. What can go wrong: leaves that are not arrays, side effects, a
donated argument that the step does not return. Each is an error in the user's own names.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from autopar.compat import callers_mesh
from autopar.errors import ArgumentError, ConstraintError
from autopar.layouts.asked import TRACED_AS
from autopar.layouts.mesh import AXIS_NAMES
from autopar.program.batch import batch_arguments
from autopar.program.boundary.changes import refuse_lost_changes
from autopar.program.boundary.static_values import refuse_static_leaves
from autopar.program.boundary.weak_state import ChangedType, warn_of_weak_state
from autopar.program.call import BoundArguments, CallSignature, PyTree, dtype_of, leaf_paths
from autopar.program.crossing import Crossing, output_paths, refuse_numbers_as_arrays
from autopar.program.fingerprint import fingerprint_of
from autopar.program.from_jaxpr import program_of
from autopar.program.roles import (
    Roles,
    arguments_of_leaves,
    donated_arguments,
    input_leaves,
    outputs_of_state,
    returned_arguments,
)
from autopar.program.step import Leaf, TracedStep
from autopar.program.uses import find_uses

T = TypeVar("T")


def trace(signature: CallSignature, bound: BoundArguments, axis_names: Sequence[str] = AXIS_NAMES) -> TracedStep:
    """Trace the step; see the module's text. Raises ArgumentError, UnsupportedProgramError.

    `axis_names`: of the plan's mesh, which a PartitionSpec of the step may name.
    """
    leaves, in_tree = bound.flatten()
    paths = leaf_paths(bound)
    _refuse_non_arrays(signature, paths, leaves)
    crossing, closed, out_shape = _make_jaxpr(signature, bound, axis_names)
    program, constants = program_of(closed, rearranged=True)
    out_leaves, out_tree = jax.tree_util.tree_flatten(out_shape)
    state = returned_arguments(bound, out_shape)
    state_of_output = outputs_of_state(bound, state, out_leaves)
    uses = find_uses(program, state_of_output)
    places = arguments_of_leaves(bound)
    batch = batch_arguments(signature, bound, state.keys(), {places[number] for number in uses})
    refuse_static_leaves(signature.name, {bound.names[place]: bound.dynamic[place] for place in batch})
    refuse_lost_changes(
        signature.name, bound.names, [one for one in crossing.lost if one.place not in {*state, *batch}]
    )
    donated = donated_arguments(signature, bound, state, batch, out_shape)
    inputs = input_leaves(bound, paths, program, Roles(state, batch, donated, uses))
    consts = tuple(
        Leaf(path=f"constant/{i}", role="const", shape=tuple(v.aval.shape), dtype=v.aval.dtype)
        for i, v in enumerate(program.invars[len(leaves) :])
    )
    outputs = tuple(
        Leaf(path=p, role="output", shape=tuple(x.shape), dtype=x.dtype, weak_type=bool(x.weak_type))
        for p, x in zip(output_paths(out_shape), out_leaves, strict=True)
    )
    given = [(leaf, v.aval.weak_type) for leaf, v in zip(inputs, program.invars, strict=False)]
    pairs = [(*given[i], out) for out, i in zip(outputs, state_of_output, strict=True) if i is not None]
    changed = [ChangedType(leaf.path, str(leaf.dtype), weak) for leaf, weak, out in pairs if weak != out.weak_type]
    warn_of_weak_state(signature.name, changed)
    return TracedStep(
        program=program,
        constants=constants,
        in_tree=in_tree,
        out_tree=out_tree,
        inputs=(*inputs, *consts),
        outputs=outputs,
        state_of_output=state_of_output,
        fingerprint=fingerprint_of(program),
    )


def retrace(traced: TracedStep, leaves: Sequence[Leaf], run: Callable[..., PyTree]) -> TracedStep:
    """Trace a step again as another function of its leaves and constants, which may have other shapes.

    Constants that the function closes over become leaves of their own.
    """
    avals = [
        jax.ShapeDtypeStruct(leaf.shape, var.aval.dtype, weak_type=bool(getattr(var.aval, "weak_type", False)))
        for leaf, var in zip(leaves, traced.program.invars, strict=True)
    ]
    program, constants = program_of(jax.make_jaxpr(run)(*avals))
    added = tuple(
        Leaf(path=f"constant/{len(traced.constants) + i}", role="const", shape=tuple(v.aval.shape), dtype=v.aval.dtype)
        for i, v in enumerate(program.invars[len(leaves) :])
    )
    return dataclasses.replace(
        traced,
        program=program,
        constants=(*traced.constants, *constants),
        inputs=(*leaves, *added),
        fingerprint=fingerprint_of(program),
    )


def _make_jaxpr(
    signature: CallSignature, bound: BoundArguments, axis_names: Sequence[str]
) -> tuple[Crossing, Any, Any]:
    """(crossing, jaxpr, shapes of the results); under axis names only if the step names axes without a mesh."""
    dynamic, kwargs = _make_abstract(bound.dynamic), _make_abstract(dict(bound.kwargs))

    def make() -> tuple[Crossing, Any, Any]:
        crossing = Crossing(signature, bound)
        return crossing, *jax.make_jaxpr(crossing, return_shape=True)(*dynamic, **kwargs)

    try:
        return make()
    except TypeError as error:
        refuse_numbers_as_arrays(signature.name, bound, error)
        raise
    except RuntimeError as error:
        if "requires a non-empty mesh in context" not in str(error):
            raise
    sizes = callers_mesh()
    with _with_named_axes(sizes or dict.fromkeys((*axis_names, TRACED_AS), 1)):
        try:
            return make()
        except ValueError as error:
            if "is not found in mesh" not in str(error):
                raise
            raise ConstraintError(
                f"{signature.name} asks for a layout along an axis that no mesh has: {str(error).partition(' is not')[0]}. "
                f"The mesh has {', '.join(sizes or axis_names)}; name the axes of the plan's: "
                "mesh_shape={'data': 2, 'model': 4}."
            ) from error


def _with_named_axes(sizes: Mapping[str, int]) -> contextlib.AbstractContextManager[object]:
    """A context for tracing in which axes have these names, all Auto, without devices."""
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)
    return jax.sharding.use_abstract_mesh(mesh)


def _make_abstract(tree: T) -> T:
    """The tree with abstract values for leaves, so that tracing touches no device; Python numbers stay, weakly typed."""

    def leaf(x: Any) -> Any:
        if isinstance(x, (bool, int, float, complex)):
            return x
        weak = bool(getattr(x, "weak_type", False))
        # JAX 0.12 warns of dtypes that it narrows, except for NumPy's own arrays, which it narrows silently.
        dtype = jax.typeof(x).dtype if isinstance(x, (np.ndarray, np.generic)) else x.dtype
        return jax.ShapeDtypeStruct(np.shape(x), dtype, weak_type=weak)

    made: T = jax.tree.map(leaf, tree)
    return made


def _refuse_non_arrays(signature: CallSignature, paths: Sequence[str], leaves: Sequence[object]) -> None:
    wrong = [
        f"{path} is a {type(leaf).__name__} ({str(leaf)[:40]!r})"
        for path, leaf in zip(paths, leaves, strict=True)
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) and not isinstance(leaf, (bool, int, float, complex))
    ]
    for path, leaf in zip(paths, leaves, strict=True):
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not _has_a_dtype_of_jax(leaf):
            wrong.append(f"{path} is a {type(leaf).__name__} with dtype {leaf.dtype}, which JAX does not support")
    if wrong:
        raise ArgumentError(
            f"{signature.name} takes arrays, but {'; '.join(wrong)}. Pass such values with static_argnums, close over them, "
            "or take them out of the state or the batch."
        )


def _has_a_dtype_of_jax(leaf: object) -> bool:
    try:
        jax.typeof(leaf) if isinstance(leaf, np.ndarray) else dtype_of(leaf)
    except TypeError:
        return False
    return True

"""The arrays of one call: the key that identifies the call, and the checks before it runs.

In: a step's arguments. Out: the key under which the plan is kept, and the flat leaves that the step runs on. What can go wrong:
leaves have another structure, shape or type, are tracers, or are arrays whose memory an earlier step has taken. The errors name
the paths of the leaves.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np

from autopar.compat import is_inside_trace, users_contexts
from autopar.errors import ArgumentError
from autopar.execution.batch_places import BatchLeaf
from autopar.program.call import BoundArguments, CallSignature, PyTree, bind_arguments
from autopar.program.step import TracedStep
from autopar.runtime.processes import is_here
from autopar.runtime.thread_settings import program_settings_here
from autopar.split_array import SplitArray

Given: TypeAlias = jax.typing.ArrayLike | SplitArray | BatchLeaf
"""A leaf of a call: an array on devices or on the host, a number, or an array that autopar has laid out in parts."""
T = TypeVar("T")


class CallKey(NamedTuple):
    """The key of a call. Calls with equal keys run the same program, which is traced, planned and compiled once.

    Attributes:
        tree: the structure of the arguments.
        kinds: for each leaf its shape, type and weakness; the Python type of a leaf that is no array.
        static: the static arguments with their types and values.
        settings: the settings of JAX that decide what a program computes, with their names.
        contexts: the values of the contexts that the user made by `jax.make_user_context`.
    """

    tree: jax.tree_util.PyTreeDef
    kinds: tuple[object, ...]
    static: Hashable
    settings: tuple[tuple[str, Hashable], ...]
    contexts: tuple[Hashable, ...]


def key_of(call: BoundArguments) -> CallKey:
    """Return the key of a call under the current settings of JAX."""
    leaves, tree = call.flatten()
    settings = tuple(program_settings_here().items())
    return CallKey(tree, tuple(map(_kind_of, leaves)), call.constants, settings, users_contexts())


def _kind_of(leaf: Any) -> object:
    """Return what a leaf is traced as. Numbers and host arrays count as the `jax.Array` that replaces them after a step."""
    if isinstance(leaf, (bool, int, float, complex)):
        try:
            leaf = jax.typeof(leaf)
        except OverflowError:
            raise ArgumentError(
                f"the step is given a whole number of {int(leaf.real).bit_length()} bits, which "
                f"{jax.dtypes.canonicalize_dtype(int)} does not hold: pass a float"
            ) from None
    if not hasattr(leaf, "dtype"):
        return type(leaf)
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype) if isinstance(leaf, np.ndarray) else leaf.dtype
    return np.shape(leaf), str(dtype), bool(getattr(leaf, "weak_type", False))


def check_leaves(
    signature: CallSignature, traced: TracedStep, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[BoundArguments, list[Given]]:
    """Bind and flatten a call. Raises ArgumentError if its leaves differ from the traced structure, shapes or types."""
    bound = bind_arguments(signature, args, kwargs)
    leaves, tree = bound.flatten()
    refuse_without_values(signature.name, leaves)
    if tree != traced.in_tree:
        raise ArgumentError(
            f"{signature.name} was compiled for arguments of structure {traced.in_tree}, called with {tree}"
        )
    expected = traced.inputs[: len(leaves)]
    given = [x if isinstance(x, SplitArray | BatchLeaf) else jax.typeof(x) for x in leaves]
    wrong = [
        f"{leaf.path} is {x.dtype}{list(x.shape)}, compiled for {leaf.dtype}{list(leaf.given_shape)}"
        for leaf, x in zip(expected, given, strict=True)
        if (x.shape, x.dtype) != (leaf.given_shape, leaf.dtype)
    ]
    if wrong:
        raise ArgumentError(f"{'; '.join(wrong)}. Compile again for these arguments, or call the step, which does.")
    return bound, leaves


def describe_run(name: str, traced: TracedStep) -> str:
    """Say which step this process is about to run. All processes that run the same program get the same words."""
    leaves = [leaf for leaf in traced.inputs if leaf.role == "batch"]
    batch = ", ".join(f"{leaf.path} {leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
    return f"runs {name} (program {traced.fingerprint}; {batch})"


def refuse_without_values(name: str, leaves: Sequence[object]) -> None:
    """Raise ArgumentError if the call is inside a function that JAX traces, where no step can run, or has shapes for arrays."""
    shapes = sum(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    if shapes:
        raise ArgumentError(
            f"{shapes} of the {len(leaves)} arrays given to {name} are jax.ShapeDtypeStructs, which have no values. They are for "
            f"{name}.plan(...) and {name}.compile(...). Call the step with arrays: a state is made where the plan wants it by "
            f"{name}.init_state(create_fn, *args)"
        )
    traced = sum(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    if not traced and not is_inside_trace():
        return
    without = f"{traced} of its {len(leaves)} arrays have no values yet" if traced else "its arrays are closed over"
    raise ArgumentError(
        f"{name} is called inside a function that JAX traces (jit, grad, vmap, scan, ...): {without}. A parallelized step is a "
        "program of its own on all devices: call it outside, with arrays, and take gradients inside the step. Its undecorated "
        "function can be called anywhere."
    )


def refuse_consumed(name: str, paths: Iterable[str], leaves: Sequence[object]) -> None:
    """Raise ArgumentError if an earlier step has taken the memory of some arrays; the error lists their paths."""
    gone = _consumed(paths, leaves)
    if gone:
        raise ArgumentError(
            f"{len(gone)} of the {len(leaves)} arrays given to {name} no longer exist: {_list(gone)}. A step consumes its state: "
            "it takes the memory for the state that it returns. Pass the returned state on, `state, ... = step(state, batch)`; "
            "after a step that failed, start again from a saved one. To use the old state again, copy it before the step "
            "(jax.tree.map(jnp.copy, state)), or use parallelize(..., donate_argnums=()), which keeps both in memory."
        )


@contextlib.contextmanager
def telling_what_is_left(name: str, paths: Iterable[str], leaves: Sequence[object]) -> Iterator[None]:
    """Open a context in which an exception gets a note that lists the arrays which the step consumed before it failed."""
    try:
        yield
    except BaseException as error:
        gone = _consumed(paths, leaves)
        if gone:
            error.add_note(
                f"{name} has consumed {len(gone)} of the {len(leaves)} arrays that it was given: {_list(gone)}. Start again from "
                "a saved state."
            )
        else:
            error.add_note(f"All arrays that {name} was given are still there, and it can be called with them again.")
        raise


def _consumed(paths: Iterable[str], leaves: Sequence[object]) -> list[str]:
    """Return the paths of the arrays that no longer exist."""
    is_gone = [hasattr(x, "is_deleted") and x.is_deleted() for x in leaves]
    return list(itertools.compress(paths, is_gone)) if any(is_gone) else []


def _list(paths: Sequence[str]) -> str:
    return ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "")


def copy_repeated(arrays: Sequence[T], donated: Collection[int]) -> Sequence[T | jax.Array]:
    """Copy the donated arrays of a call that occur in it more than once, so that the step takes no memory that it also reads.

    If one buffer is donated twice, or is both read and donated, XLA ends the process (JAX 0.10) or fails (0.12). Arrays that
    only other processes hold are left as they are.

    Args:
        arrays: the flat arrays of the call.
        donated: the numbers of the arrays whose memory the step takes.

    Returns:
        The arrays, with copies in place of those that occurred before.
    """
    if len(set(map(id, arrays))) == len(arrays):
        return arrays
    taken = set(donated)
    result: list[T | jax.Array] = list(arrays)
    used = {id(x) for i, x in enumerate(arrays) if i not in taken}
    for i in sorted(taken):
        x = arrays[i]
        if id(x) in used and isinstance(x, jax.Array) and is_here(x.sharding):
            result[i] = x.copy()
        used.add(id(x))
    return result

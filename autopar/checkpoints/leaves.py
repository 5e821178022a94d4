"""Name the arrays of a state by their paths, and check them against those of a step.

In: a state, and where a step keeps its own. Out: arrays by path, or errors that name the paths. A path is that below the state,
such as `params/0/w`. What can go wrong: the state is of another model; all differences are told at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from autopar.checkpoints.about import SavedLeaf
from autopar.checkpoints.parts import Saved
from autopar.errors import ArgumentError, CheckpointError
from autopar.execution.published import PlacedLeaf
from autopar.program.boundary.static_values import is_array_like
from autopar.program.call import PyTree, dtype_of
from autopar.split_array import SplitArray

Name = tuple[str, ...]
"""A path as the keys along it."""
Tree = dict[str, object]
"""Arrays in dictionaries in dictionaries."""
_SHOWN = 4


def arrays_by_name(state: PyTree) -> dict[Name, Saved]:
    """Return the arrays of a state by path. Python numbers become arrays; other values are left out.

    Raises ArgumentError for two arrays of one path.
    """
    found: dict[Name, Saved] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if not is_array_like(leaf):
            continue
        name = _name(keys)
        if name in found:
            raise ArgumentError(
                f"two arrays of the state are called {path_of(name)} in a checkpoint, because two of their keys, such as 1 and "
                "'1', have one text: rename one of the keys"
            )
        found[name] = leaf if isinstance(leaf, SplitArray | jax.Array) else np.asarray(leaf, dtype_of(leaf))
    return found


def places_by_name(tree: PyTree) -> dict[Name, PlacedLeaf]:
    """Return the places of a state's arrays by path."""
    return {
        _name(keys): leaf
        for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        if isinstance(leaf, PlacedLeaf)
    }


def _name(keys: Sequence[Hashable]) -> Name:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys) or ("state",)


def nested(arrays: Mapping[Name, object]) -> Tree:
    """Nest the arrays in dictionaries for orbax. Raises ArgumentError for two arrays that orbax would name alike."""
    named: dict[str, Name] = {}
    tree: Tree = {}
    for name, array in arrays.items():
        other = named.setdefault(".".join(name), name)
        if other != name:
            raise ArgumentError(
                f"{path_of(name)} and {path_of(other)} of the state would have one name in a checkpoint: rename one of the keys"
            )
        inner = tree
        for key in name[:-1]:
            below = inner.setdefault(key, {})
            assert isinstance(below, dict), f"{path_of(name)} lies below an array"
            inner = below
        inner[name[-1]] = array
    return tree


def path_of(name: Name) -> str:
    """Return the path as errors and plans write it."""
    return "/".join(name)


def describe_leaf(name: Name, array: Saved) -> SavedLeaf:
    """Describe an array for a checkpoint."""
    key_kind = None
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        key_kind = str(jax.random.key_impl(array))
    return SavedLeaf(
        path=path_of(name),
        shape=tuple(array.shape),
        dtype=str(array.dtype),
        weak_type=bool(getattr(array, "weak_type", False)),
        key_kind=key_kind,
        keys=name if any("/" in key for key in name) else (),
    )


def refuse_other_state(arrays: Mapping[Name, Saved], wanted: Mapping[Name, PlacedLeaf], step: str) -> None:
    """Raise ArgumentError if arrays are not the state of a step."""
    wrong = _differences([describe_leaf(name, array) for name, array in arrays.items()], wanted)
    if wrong:
        raise ArgumentError(
            f"this is not the state of {step}: {_list(wrong)}. Save the state that the step returns; where several of its "
            "arguments are state, give them as a tuple, in their order."
        )


def refuse_other_checkpoint(
    saved: Sequence[SavedLeaf], wanted: Mapping[Name, PlacedLeaf], step: str, where: object
) -> None:
    """Raise CheckpointError if a checkpoint does not hold the state of a step."""
    wrong = _differences(saved, wanted)
    if wrong:
        raise CheckpointError(
            f"{where} does not hold the state of {step}: {_list(wrong)}. Restore it into the model and optimizer that it was "
            "saved from, with the same sizes; plan, devices and stages may differ."
        )


def _differences(given: Sequence[SavedLeaf], wanted: Mapping[Name, PlacedLeaf]) -> list[str]:
    """Say what is wrong with the given arrays, in one text for each leaf."""
    names = {leaf.name for leaf in given}
    wrong = [f"{path_of(name)} is missing" for name in wanted if name not in names]
    wrong += [f"{path_of(name)} is not in the step's state" for name in sorted(names - {*wanted})]
    for leaf in given:
        target = wanted.get(leaf.name)
        if target is not None and (leaf.shape, leaf.dtype) != (target.shape, str(target.dtype)):
            wrong.append(
                f"{leaf.path} is {leaf.dtype}{list(leaf.shape)}, the step's is {target.dtype}{list(target.shape)}"
            )
    return wrong


def _list(wrong: list[str]) -> str:
    return "; ".join(wrong[:_SHOWN]) + (f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else "")

"""The places of a compiled step's state and batch, as trees that callers can read.

In: a compiled step. Out: `Places`, with a `PlacedLeaf` for each array of the state and a `PlacedBatch` for each of the batch. If
several arguments are state, or batch, their trees come in a tuple. What can go wrong: the step has no state.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.execution.batch_places import batch_tree
from autopar.execution.one_mesh import CompiledStep
from autopar.execution.pipeline import CompiledPipeline
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.program.boundary.static_values import reveal_static
from autopar.program.call import PyTree
from autopar.program.loops import LoopEquation
from autopar.program.program import Equation
from autopar.program.step import Leaf, TracedStep, require_state
from autopar.rules.flops import number_format
from autopar.rules.table import entry_for, flops_of, rule_for
from autopar.split_array import SplitSharding


@dataclasses.dataclass(frozen=True)
class PlacedLeaf:
    """Shape, type and sharding of an array of the state. `path` is its name in plans and errors.

    The `sharding` is a `SplitSharding` if stages hold the array in pieces, and None if no stage reads it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding | SplitSharding | None


class Places:
    """The places of the arrays of a step under one plan; `name` is the name of the step."""

    def __init__(
        self, name: str, plan: Plan | PipelinePlan, compiled: CompiledStep | CompiledPipeline, wishes: Callable[[], str]
    ) -> None:
        """Look the places up in a compiled step. `wishes` returns a digest of what was asked of the plan."""
        self.name, self.plan, self._compiled, self._wishes = name, plan, compiled, wishes

    @property
    def wishes(self) -> str:
        """A digest of what was asked of the plan: cluster, devices, options and constraints, but not the step."""
        return self._wishes()

    @property
    def state(self) -> PyTree:
        """The state's tree, with a `PlacedLeaf` (path, shape, dtype, sharding) in the place of each array.

        Raises ArgumentError if the step has no state.
        """
        return state_tree(self._compiled.traced, self._compiled.in_shardings, self.name)

    @property
    def batch(self) -> PyTree:
        """The batch's tree, with a `PlacedBatch` (path, shape, dtype, places) in the place of each array.

        In a pipeline an array has a place for each microbatch in each stage that reads it. `rows_here()` returns the numbers of
        the examples that devices of this process compute with.
        """
        return batch_tree(self._compiled.traced, self._compiled.batch_places)

    @property
    def num_devices(self) -> int:
        """The number of devices that the step runs on."""
        compiled = self._compiled
        meshes = [compiled.mesh] if isinstance(compiled, CompiledStep) else [one.device_mesh for one in compiled.stages]
        return len({device for mesh in meshes for device in mesh.devices.flat})

    @functools.cached_property
    def flops(self) -> Mapping[str, float]:
        """The floating-point operations of one step on all devices together, by their number format."""
        found: dict[str, float] = {}
        for eqn in self._compiled.traced.program.equations:
            _add_flops(found, eqn, 1)
        return found


def _add_flops(found: dict[str, float], eqn: Equation, times: int) -> None:
    """Add the operations of an equation that runs `times` times; for a loop, the operations of its body."""
    if isinstance(eqn, LoopEquation):
        for inner in (inner for region in eqn.regions for inner in region.equations):
            _add_flops(found, inner, times * max(eqn.loop.trips, 1))
        return
    made = str(eqn.outvars[0].aval.dtype) if eqn.outvars else "float32"
    dtype = number_format(eqn) if entry_for(eqn).heavy else made
    found[dtype] = found.get(dtype, 0.0) + times * flops_of(eqn, rule_for(eqn))


def state_tree(
    traced: TracedStep,
    shardings: Sequence[NamedSharding] | Mapping[int, NamedSharding | SplitSharding],
    name: str,
) -> PyTree:
    """Return the state of a step as a tree with a `PlacedLeaf` for each array. Raises ArgumentError if it has no state."""
    require_state(traced, name)
    places = dict(enumerate(shardings)) if not isinstance(shardings, Mapping) else shardings
    numbers = jax.tree.unflatten(traced.in_tree, range(traced.in_tree.num_leaves))
    positional, keywords = numbers
    states = [one for one in (*positional, *keywords.values()) if _is_state(one, traced.inputs)]
    trees = [jax.tree.map(lambda i: _placed(traced.inputs[i], places.get(i)), reveal_static(one)) for one in states]
    return trees[0] if len(trees) == 1 else tuple(trees)


def _is_state(numbers: PyTree, leaves: Sequence[Leaf]) -> bool:
    """Whether an argument, given as the numbers of its leaves, is state."""
    return any(leaves[i].role == "state" for i in jax.tree.leaves(numbers))


def _placed(leaf: Leaf, sharding: NamedSharding | SplitSharding | None) -> PlacedLeaf:
    return PlacedLeaf(leaf.path, leaf.given_shape, leaf.dtype, sharding)

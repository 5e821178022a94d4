"""The public oracle for factor rules: any assignment of strategies computes the same function.

`run_with_random_strategies` runs any JAX function with a random legal strategy on every equation. If a rule is wrong, some
seed shows another result than `fun` itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np

from autopar.compat import make_mesh
from autopar.cost_model.hardware import PRESETS
from autopar.errors import ArgumentError
from autopar.intra_op.choices.graph import Node, build_graph
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.lowering.assignment import Assignment, assign
from autopar.intra_op.lowering.per_device import map_over_mesh
from autopar.layouts.mesh import LogicalMesh
from autopar.program.from_jaxpr import program_of
from autopar.rules.table import find_registered

T = TypeVar("T")
_MACHINES = ("cpu", "dgx-a100")
"""Values move as is cheapest: where a call is dear in few moves, where bytes are by reduce-scatters and permutes."""


def random_assignment(
    fun: Callable[..., object], *args: object, mesh_shape: Sequence[int] | Mapping[str, int], seed: int
) -> tuple[Assignment, tuple[jax.Array, ...], jax.tree_util.PyTreeDef]:
    """(assignment, constants, output tree) with a random legal strategy on every equation of `fun(*args)`.

    By even seeds values move as is cheapest on virtual devices, by odd ones as is cheapest on GPUs.
    """
    closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    program, constants = program_of(closed)
    graph = build_graph(
        program,
        LogicalMesh.of(mesh_shape),
        PRESETS[_MACHINES[seed % len(_MACHINES)]],
        PlannerOptions(every_strategy=True),
        input_layouts=[None] * len(program.invars),
        output_layouts=[None] * len(program.outvars),
    )
    rng = np.random.default_rng(seed)
    choice = [_choose(node, rng, seed) for node in graph.nodes]
    return assign(graph, choice), constants, jax.tree.structure(out_shape)


def _choose(node: Node, rng: np.random.Generator, seed: int) -> int:
    """The number of a strategy; under a registered rule one that splits a factor, whose turn comes with the seed."""
    strategies = node.choices.strategies
    number = int(rng.integers(len(strategies)))
    if node.equation is None or not find_registered([node.equation]):
        return number
    split = [{factor for factor, axes in strategy.factor_axes if axes} for strategy in strategies]
    factors = sorted(set[str]().union(*split))
    if not factors:
        return number
    turn = [k for k, names in enumerate(split) if factors[seed % len(factors)] in names]
    return turn[number % len(turn)]


def run_with_random_strategies(
    fun: Callable[..., T], *args: object, mesh_shape: Sequence[int] | Mapping[str, int], seed: int
) -> T:
    """Run `fun(*args)` on a mesh with a random legal strategy on every equation.

    Args:
        fun: a function of arrays, or trees of arrays, that JAX can trace.
        *args: its arguments.
        mesh_shape: sizes of the mesh axes, as a sequence or a mapping of names to sizes; their product is the number of devices.
        seed: equal seeds choose equal strategies. Equations whose rule was registered are always split: of as many seeds in a row
            as a rule has factors that may be, each splits another one.

    Returns:
        The outputs, equal to those of `fun(*args)` up to rounding if all factor rules are right.

    Raises:
        ArgumentError: there are fewer devices than the mesh needs.
    """
    assignment, constants, tree = random_assignment(fun, *args, mesh_shape=mesh_shape, seed=seed)
    mesh = assignment.mesh
    if mesh.size > len(jax.devices()):
        raise ArgumentError(f"mesh {mesh.shape} needs {math.prod(mesh.shape)} devices, there are {len(jax.devices())}")
    devices = np.array(jax.devices()[: mesh.size]).reshape(mesh.shape)
    device_mesh = make_mesh(devices, mesh.axis_names)
    # Such a program runs once and has many more operations than `fun`: compile it fast rather than well.
    run = jax.jit(map_over_mesh(assignment, device_mesh), compiler_options={"xla_backend_optimization_level": 0})
    outputs: T = jax.tree.unflatten(tree, run(*jax.tree.leaves(args), *constants))
    return outputs

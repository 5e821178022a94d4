"""The second back end: a plan's PartitionSpecs for a plain `jax.jit`, for users who want only the shardings.

In: a plan, the function that was planned, and arguments. Out: `jax.jit` of the function with the plan's layouts as in_shardings
and out_shardings, found by leaf path. Only the boundary is the plan's; XLA's partitioner chooses the layouts between. What can go
wrong: the plan lacks a leaf, or has it with another shape. The error lists the paths.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding

from autopar.errors import PlanError
from autopar.execution.devices import device_mesh
from autopar.execution.recent import Recent
from autopar.layouts.mesh import LogicalMesh
from autopar.plan import Plan, ValuePlan
from autopar.program.call import BoundArguments, CallSignature, PyTree, bind_arguments, leaf_paths
from autopar.program.crossing import Crossing, deliver, output_paths
from autopar.runtime.processes import as_it_is_now

MAX_PROGRAMS = 64
"""The number of sets of shapes for which a program is kept. The least recently used one is dropped first."""
_Type: TypeAlias = jax.core.ShapedArray | jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True, eq=False)
class _Jitted:
    run: jax.stages.Wrapped
    in_shardings: tuple[NamedSharding, ...]


class ShardedJit:
    """`jax.jit` of a function with a plan's shardings, made by `plain_jit`. It is called like the function."""

    def __init__(self, plan: Plan, signature: CallSignature, devices: Sequence[jax.Device] | None) -> None:
        self.plan, self._signature = plan, signature
        mesh = LogicalMesh(plan.mesh_shape, plan.axis_names)
        self._mesh = device_mesh(mesh, jax.devices() if devices is None else list(devices))
        self._jitted: Recent[Hashable, _Jitted] = Recent(MAX_PROGRAMS)
        functools.update_wrapper(self, signature.fun, updated=())

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Move the arguments to the plan's layouts and run the function. Its results have the plan's layouts."""
        jitted, bound = self._prepare(args, kwargs)
        leaves = [as_it_is_now(x) for x in bound.flatten()[0]]
        return deliver(bound, jitted.run(*jax.device_put(leaves, list(jitted.in_shardings))))

    def lower(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Lowered:
        """Lower the program for arrays or `jax.ShapeDtypeStruct`s, as `jax.jit(fun).lower` does."""
        jitted, bound = self._prepare(args, kwargs)
        return jitted.run.lower(*bound.flatten()[0])

    def _prepare(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> tuple[_Jitted, BoundArguments]:
        bound = bind_arguments(self._signature, args, kwargs)
        leaves, tree = bound.flatten()
        types = tuple(jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves)
        key = (tree, tuple((x.shape, x.dtype) for x in types), bound.constants)
        jitted = self._jitted.find(key)
        if jitted is None:
            jitted = self._jit(bound, tree, types)
            self._jitted.keep(key, jitted)
        return jitted, bound

    def _jit(self, bound: BoundArguments, tree: jax.tree_util.PyTreeDef, types: Sequence[_Type]) -> _Jitted:
        call = Crossing(self._signature, bound)

        def flat(*leaves: jax.Array) -> PyTree:
            dynamic, kwargs = jax.tree.unflatten(tree, leaves)
            return call(*dynamic, **kwargs)

        results = jax.eval_shape(flat, *types)
        given = [value for value in self.plan.inputs if value.role != "const"]
        in_shardings = self._shardings("argument", given, leaf_paths(bound), types)
        out = self._shardings("result", self.plan.outputs, output_paths(results), jax.tree.leaves(results))
        out_shardings = jax.tree.unflatten(jax.tree.structure(results), out)
        donated = self._donated_leaves(bound)
        run = jax.jit(flat, in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=donated)
        return _Jitted(run, in_shardings)

    def _shardings(
        self, what: str, planned: Sequence[ValuePlan], paths: Sequence[str], types: Sequence[_Type]
    ) -> tuple[NamedSharding, ...]:
        """Return the planned sharding of every leaf. Raises PlanError for leaves that the plan lacks or has otherwise."""
        by_path = {value.path: value for value in planned}
        wrong = [
            f"{what} {path} is {leaf.dtype}{list(leaf.shape)}, planned {_type_of(by_path.get(path))}"
            for path, leaf in zip(paths, types, strict=True)
            if path not in by_path or by_path[path].shape != tuple(leaf.shape)
        ]
        if wrong:
            raise PlanError(f"the plan was made for another step: {'; '.join(wrong[:6])}. Plan again.")
        return tuple(NamedSharding(self._mesh, by_path[path].partition_spec) for path in paths)

    def _donated_leaves(self, bound: BoundArguments) -> tuple[int, ...]:
        wanted = self._signature.donate_argnums
        numbers = [n for n, value in zip(bound.numbers, bound.dynamic, strict=True) for _ in jax.tree.leaves(value)]
        return tuple(place for place, number in enumerate(numbers) if number in wanted)


def _type_of(value: ValuePlan | None) -> str:
    return "nothing of this path" if value is None else f"{value.dtype}{list(value.shape)}"


def plain_jit(
    plan: Plan,
    fun: Callable[..., PyTree],
    *,
    devices: Sequence[jax.Device] | None = None,
    donate_argnums: tuple[int, ...] = (),
    static_argnums: tuple[int, ...] = (),
) -> ShardedJit:
    """Return `jax.jit(fun)` with a plan's layouts of arguments and results. XLA chooses the layouts between.

    Args:
        plan: a plan of one mesh.
        fun: the function that was planned.
        devices: the devices to run on; by default all devices of JAX.
        donate_argnums: positional arguments whose memory the results may take.
        static_argnums: positional arguments that are compile-time constants.

    Returns:
        A function of the arguments of `fun`, with `lower` as `jax.jit(fun)` has it.

    Raises:
        ArgumentError: there are too few devices.
        PlanError: a call passes leaves that the plan lacks, or has with another shape.
    """
    return ShardedJit(plan, CallSignature(fun, (), static_argnums, donate_argnums), devices)

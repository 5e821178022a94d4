"""A user's `jax.shard_map` as a function of whole arrays, which the plan may divide as it likes.

In: an equation of `shard_map`: a program for one device of the user's mesh, and how each operand is cut for it. Out: a jaxpr of
whole operands and results, in which that program is batched over the axes of that mesh, so that what its devices exchange is a
sum, a concatenation or a choice along batch dimensions. The sizes of the mesh keep their meaning; where its shards lie is for the
plan. What can go wrong: an exchange that JAX cannot batch, random bits whose batch is not that of single calls. Both are refused
at their line.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from autopar import compat
from autopar.compat import JaxprEqn, Literal, Params, Var
from autopar.errors import UnsupportedProgramError
from autopar.program.opened.called import called_by, operands_of

TYPES_ALONE = ("pvary", "pcast", "preduced", "reduced_vary_cast", "vary_unreduced_cast")
"""Operations that change what JAX knows about a value, and not the value."""
DIFFERENT_IN_A_BATCH = ("rng_bit_generator", "rng_uniform")
"""Operations that give a batch of calls other values than the calls one by one."""

Arrays = list[jax.Array]


def opened_by(eqn: JaxprEqn) -> object:
    """The jaxpr that an equation stands for, as `called_by`, and that of a `shard_map`. Raises UnsupportedProgramError."""
    return _open_island(eqn) if eqn.primitive.name == "shard_map" else called_by(eqn)


def _open_island(eqn: JaxprEqn) -> object:
    """The closed jaxpr of whole arrays that a `shard_map` stands for."""
    body, island = compat.open_jaxpr(eqn.params["jaxpr"]), _Island(eqn)
    for inner in _walk(body):
        if inner.primitive.name in DIFFERENT_IN_A_BATCH or _draws_from_others(inner):
            raise _refusal(eqn, inner, "its bits depend on how many devices draw at once; use threefry keys")
    given = _shapes_of(eqn.invars)
    try:
        with compat.attributed_to(eqn):
            return jax.make_jaxpr(functools.partial(island.run, body))(*given)
    except (NotImplementedError, ValueError, TypeError, KeyError, NameError, AssertionError) as error:
        raise _refusal(eqn, island.at, str(error).partition("\n")[0] or type(error).__name__) from error


def _draws_from_others(eqn: JaxprEqn) -> bool:
    """Whether an operation draws random bits that are no hashes of a key and a position."""
    drawn = eqn.primitive.name == "random_bits"
    return drawn and compat.generator_of(eqn.invars[0].aval.dtype) not in compat.HASHES


def _refusal(eqn: JaxprEqn, inner: JaxprEqn | None, reason: str) -> UnsupportedProgramError:
    operation = "" if inner is None else f" with {inner.primitive.name} at {compat.source_line(inner)}"
    return UnsupportedProgramError(
        f"the step calls jax.shard_map at {compat.source_line(eqn)}{operation}, which has no meaning as a function of whole "
        f"arrays: {reason}. Write what it computes without shard_map, or register a primitive with autopar.register_rule."
    )


def _walk(jaxpr: jex_core.Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in _equations(jaxpr):
        yield eqn
        for inner in jex_core.jaxprs_in_params(eqn.params):
            yield from _walk(compat.open_jaxpr(inner))


def _equations(jaxpr: jex_core.Jaxpr) -> Sequence[JaxprEqn]:
    return cast(Sequence[JaxprEqn], jaxpr.eqns)


class _Island:
    """A `shard_map`'s mesh and how its operands and results are cut. `at` is the operation that is traced last."""

    def __init__(self, eqn: JaxprEqn) -> None:
        self.at: JaxprEqn | None = None
        manual = eqn.params["newly_manual_axes"]
        self.sizes = {axis: size for axis, size in eqn.params["mesh"].shape.items() if axis in manual}
        self.in_specs = [_axes_of_dims(spec) for spec in eqn.params["in_specs"]]
        self.out_specs = [_axes_of_dims(spec) for spec in eqn.params["out_specs"]]

    def run(self, body: jex_core.Jaxpr, *operands: jax.Array) -> Arrays:
        """Whole operands to whole results."""
        function: Callable[..., Arrays] = functools.partial(self._evaluate, body, ())
        given = [{axis for axes in spec.values() for axis in axes} for spec in self.in_specs]
        for axis, size in reversed(self.sizes.items()):
            places = tuple(0 if axis in axes else None for axes in given)
            function = jax.vmap(function, in_axes=places, axis_name=axis, axis_size=size)
        shards = [self._cut(x, spec) for x, spec in zip(operands, self.in_specs, strict=True)]
        return [self._join(x, spec) for x, spec in zip(function(*shards), self.out_specs, strict=True)]

    def _cut(self, array: jax.Array, spec: Mapping[int, Sequence[str]]) -> jax.Array:
        """The shards of an array along leading dimensions, one for each axis that cuts it, in the order of the mesh."""
        shape, place = list[int](), dict[str, int]()
        for d, size in enumerate(array.shape):
            for axis in spec.get(d, ()):
                place[axis] = len(shape)
                shape.append(self.sizes[axis])
            shape.append(size // math.prod(self.sizes[axis] for axis in spec.get(d, ())))
        leading = [place[axis] for axis in self.sizes if axis in place]
        rest = [d for d in range(len(shape)) if d not in leading]
        return array.reshape(shape).transpose(*leading, *rest) if leading else array

    def _join(self, shards: jax.Array, spec: Mapping[int, Sequence[str]]) -> jax.Array:
        """The array of shards along a leading dimension for each axis of the mesh, equal along those that cut nothing."""
        cutting = [axis for axis in self.sizes if any(axis in axes for axes in spec.values())]
        for number, axis in reversed(list(enumerate(self.sizes))):
            shards = shards if axis in cutting else jax.lax.index_in_dim(shards, 0, number, keepdims=False)
        local = shards.shape[len(cutting) :]
        order, shape = list[int](), list[int]()
        for d, size in enumerate(local):
            order += [*(cutting.index(axis) for axis in spec.get(d, ())), len(cutting) + d]
            shape.append(size * math.prod(self.sizes[axis] for axis in spec.get(d, ())))
        return shards.transpose(order).reshape(shape) if cutting else shards

    def _evaluate(self, jaxpr: jex_core.Jaxpr, consts: Sequence[jax.typing.ArrayLike], *operands: jax.Array) -> Arrays:
        """The results of the program of one device, in the batch of all."""
        values: dict[object, jax.Array] = dict(
            zip((*jaxpr.constvars, *jaxpr.invars), (*map(jnp.asarray, consts), *operands), strict=True)
        )

        def read(atom: object) -> jax.Array:
            return jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else values[atom]

        for eqn in _equations(jaxpr):
            self.at = eqn
            with compat.attributed_to(eqn):
                values.update(zip(eqn.outvars, self._operation(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _operation(self, eqn: JaxprEqn, operands: Arrays) -> Sequence[jax.Array]:
        name, params = eqn.primitive.name, dict(eqn.params)
        if name in TYPES_ALONE:
            return operands
        if name == "psum_invariant":
            return jax.tree.leaves(jax.lax.psum(operands, params["axes"]))
        if name in ("all_gather", "all_gather_invariant") and params["axis_index_groups"] is None:
            return [_gather(x, _names(params["axis_name"]), params) for x in operands]
        if name == "reduce_scatter" and len(_names(params["axis_name"])) > 1 and params["axis_index_groups"] is None:
            return [_scatter_sum(x, _names(params["axis_name"]), params) for x in operands]
        if name == "ppermute":
            return [_permute(x, _names(params["axis_name"]), params["perm"]) for x in operands]
        called = opened_by(eqn)
        if called is not None:
            inner = operands_of(called, operands)
            return self._evaluate(compat.open_jaxpr(called), compat.constants_of(called), *inner)
        if name in ("scan", "while", "cond"):
            params = {key: self._retrace(value) for key, value in params.items()}
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
        return results if eqn.primitive.multiple_results else (results,)

    def _retrace(self, parameter: object) -> object:
        """A parameter of control flow; a jaxpr as it is without the types of a mesh."""
        if isinstance(parameter, (tuple, list)):
            return type(parameter)(self._retrace(part) for part in parameter) if _has_jaxprs(parameter) else parameter
        if not _has_jaxprs((parameter,)):
            return parameter
        jaxpr = compat.open_jaxpr(parameter)
        given = _shapes_of(jaxpr.invars)
        return jax.make_jaxpr(functools.partial(self._evaluate, jaxpr, compat.constants_of(parameter)))(*given)


def _shapes_of(atoms: Sequence[object]) -> list[jax.ShapeDtypeStruct]:
    avals = [cast(Var, atom).aval for atom in atoms]
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]


def _names(axis_name: object) -> tuple[str, ...]:
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (str(axis_name),)


def _gather(shard: jax.Array, axes: Sequence[str], params: Params) -> jax.Array:
    """The shards of all devices along some axes, one after the other: JAX batches it along one axis at a time."""
    count, dim, stacked = math.prod(jax.lax.axis_size(axis) for axis in axes), params["all_gather_dimension"], shard
    for axis in reversed(axes):
        stacked = jax.lax.all_gather(stacked, axis)
    joined = jnp.moveaxis(stacked.reshape(count, *shard.shape), 0, dim)
    return joined.reshape(*shard.shape[:dim], -1, *shard.shape[dim + 1 :]) if params["tiled"] else joined


def _permute(shard: jax.Array, axes: Sequence[str], pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """What the device that is to send to this one has, zeros if none does; JAX batches only exchanges of all with all."""
    count = math.prod(jax.lax.axis_size(axis) for axis in axes)
    sender = {to: start for start, to in pairs}
    all_shards = _gather(shard, axes, {"all_gather_dimension": 0, "tiled": False})
    own = jnp.array([sender.get(number, count) for number in range(count)])[jax.lax.axis_index(tuple(axes))]
    received: jax.Array = jnp.where(own < count, all_shards[jnp.minimum(own, count - 1)], jnp.zeros_like(shard))
    return received


def _scatter_sum(term: jax.Array, axes: Sequence[str], params: Params) -> jax.Array:
    """This device's part of the sum of all devices' terms along several axes."""
    total, dim = jax.lax.psum(term, tuple(axes)), params["scatter_dimension"]
    size = total.shape[dim] // math.prod(jax.lax.axis_size(axis) for axis in axes)
    part: jax.Array = jax.lax.dynamic_slice_in_dim(total, jax.lax.axis_index(tuple(axes)) * size, size, dim)
    return part if params["tiled"] else part.squeeze(dim)


def _has_jaxprs(parameters: Sequence[object]) -> bool:
    return any(hasattr(part, "eqns") or hasattr(part, "jaxpr") for part in parameters)


def _axes_of_dims(spec: jax.sharding.PartitionSpec) -> dict[int, tuple[str, ...]]:
    """For each dimension that is cut, the axes that cut it, from major to minor."""
    entries = enumerate(spec)
    return {d: _names(entry) for d, entry in entries if entry is not None}

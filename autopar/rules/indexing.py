"""Factor rules and local forms of gather, scatter and dynamic slices.

An indexed dimension that is sharded is looked up by the shard that holds the position; the others contribute the
neutral element. So a gather's result is partial(sum) over it, while a scatter writes in place and reduces nothing. Index
batches of a scatter-add reduce: every shard scatters its updates, and the operand that they land on must be partial too
(the `seed`). In: an equation, or a `LocalCall`. Out: a `FactorRule`, or local results. What can go wrong: the bounds
mode, which speaks of global positions; it is settled before positions become local.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode

from autopar.compat import JaxprEqn, Literal
from autopar.layouts.monoids import neutral_element
from autopar.rules.by_shape import Factors, keep_dimensions, shape_of
from autopar.rules.factor_rule import Dim, FactorRule, make_rule
from autopar.rules.on_shard import LocalCall
from autopar.rules.reductions import is_complex


def dynamic_slice(eqn: JaxprEqn) -> FactorRule:
    """a b, . . -> a c | whole: b c: dimensions taken from end to end may be sharded."""
    same = [i == o for i, o in zip(shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]), strict=True)]
    return keep_dimensions(eqn, same)


def dynamic_update_slice(eqn: JaxprEqn) -> FactorRule:
    """a b, a c, . . -> a b | whole: b c | linear: 0 1 | any."""
    factors, whole = Factors(), []
    operand = factors.operand(shape_of(eqn.invars[0]))
    update: list[Dim] = []
    for dim, size in zip(operand, shape_of(eqn.invars[1]), strict=True):
        if factors.sizes[dim[0]] == size:
            update.append(dim)
        else:
            update.append((factors.new(size),))
            whole += [dim[0], update[-1][0]]
    starts: list[tuple[Dim, ...]] = [() for _ in eqn.invars[2:]]
    linear = [] if any(isinstance(v, Literal) for v in eqn.invars[:2]) else [(0, 1)]
    inputs = [tuple(operand), tuple(update), *starts]
    return make_rule(inputs, [tuple(operand)], factors.sizes, whole=whole, linear=linear, any_monoid=True)


def _share_batch(
    eqn: JaxprEqn, operand_batch: Sequence[int], index_batch: Sequence[int]
) -> tuple[Factors, list[Dim], list[Dim]]:
    """(factors, dimensions of the operand, of the indices); the batch dimensions that both have share their factors."""
    factors = Factors()
    operand, indices = factors.operand(shape_of(eqn.invars[0])), factors.operand(shape_of(eqn.invars[1]))
    for on_operand, on_indices in zip(operand_batch, index_batch, strict=True):
        indices[on_indices] = operand[on_operand]
    return factors, operand, indices


def gather(eqn: JaxprEqn) -> FactorRule:
    """v d, b s 1 -> b s d | sum: v | linear: 0: looked-up positions v, index batches b s, slices d."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand_batch, index_batch = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    factors, operand, indices = _share_batch(eqn, operand_batch, index_batch)
    whole, reduced = [indices[-1][0]], {}
    slices: list[Dim] = []
    for d, (dim, size) in enumerate(zip(operand, sizes, strict=True)):
        taken_whole = size == factors.sizes[dim[0]] and d not in numbers.start_index_map
        if d in numbers.start_index_map and size == 1:
            reduced[dim[0]] = "sum"
        elif not taken_whole and d not in operand_batch:
            whole.append(dim[0])
        if d not in (*numbers.collapsed_slice_dims, *operand_batch):
            slices.append(dim if taken_whole else (factors.new(size),))
            whole += [] if taken_whole else [slices[-1][0]]
    batches = iter(indices[:-1])
    slice_dims = iter(slices)
    rank = len(shape_of(eqn.outvars[0]))
    out = [next(slice_dims) if d in numbers.offset_dims else next(batches) for d in range(rank)]
    linear = [(0,)] if not isinstance(eqn.invars[0], Literal) and _fill_is_additive(eqn) else []
    return make_rule(
        [tuple(operand), tuple(indices)], [tuple(out)], factors.sizes, reduced=reduced, whole=whole, linear=linear
    )


def _fill_is_additive(eqn: JaxprEqn) -> bool:
    """Whether adding what every device fills in for positions outside gives that fill again: nothing, NaN, or zero."""
    if eqn.params["mode"] != GatherScatterMode.FILL_OR_DROP:
        return True
    fill = eqn.params.get("fill_value")
    if fill is None:
        return bool(jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.inexact))
    return bool(fill == 0 or fill != fill)


_IN_ANY_ORDER = {"indices_are_sorted": False, "unique_indices": False}
"""What holds of positions once those of other shards are replaced by one that is dropped, whatever the user promised of all."""


def gather_local(call: LocalCall) -> Sequence[jax.Array]:
    """Look up what this shard holds; zero elsewhere, and the fill value once where no shard holds the position."""
    operand, indices = call.operands
    numbers = call.params["dimension_numbers"]
    dims = call.rule.inputs[0]
    sizes = tuple(
        call.local_size(dim) if call.is_sharded(dim) and size != 1 else size
        for dim, size in zip(dims, call.params["slice_sizes"], strict=True)
    )
    sharded = [(k, d) for k, d in enumerate(numbers.start_index_map) if call.is_sharded(dims[d])]
    if not sharded:
        return call.bind(operand, indices, slice_sizes=sizes)
    fills = call.params["mode"] == GatherScatterMode.FILL_OR_DROP
    columns = [indices[..., k] for k in range(indices.shape[-1])]
    held: jax.Array = jnp.asarray(True)
    outside: jax.Array = jnp.asarray(False)
    first: jax.Array = jnp.asarray(True)
    for k, d in sharded:
        position, size = _clamp(columns[k], call.eqn.invars[0].aval.shape[d], fills)
        local = position - call.offset(dims[d])
        inside = (local >= 0) & (local < call.local_size(dims[d]))
        held = held & inside
        outside = outside | (position < 0) | (position >= size)
        first = first & (call.shard_index(dims[d][0]) == 0)
        columns[k] = jnp.where(inside, local, 0).astype(indices.dtype)
    (found,) = call.bind(operand, jnp.stack(columns, axis=-1), slice_sizes=sizes, **_IN_ANY_ORDER)
    missing = jnp.where(outside & first, _fill_value(call, found.dtype), neutral_element("sum", found.dtype))
    spread = [d for d in range(found.ndim) if d not in numbers.offset_dims]
    return (jnp.where(_spread(held, found, spread), found, _spread(missing, found, spread)),)


def _clamp(position: jax.Array, size: int, fills: bool) -> tuple[jax.Array, int]:
    """Global positions as int32: clamped into the dimension unless positions outside fill or drop."""
    signed = position.astype(jnp.int32) if position.dtype.itemsize <= 4 else position
    return (signed if fills else jnp.clip(signed, 0, size - 1)), size


def _fill_value(call: LocalCall, dtype: jnp.dtype) -> jax.Array:
    fill = call.params.get("fill_value")
    if fill is None:
        if jnp.issubdtype(dtype, jnp.inexact):
            fill = jnp.nan
        elif jnp.issubdtype(dtype, jnp.bool_):
            fill = True
        else:
            info = jnp.iinfo(dtype)
            fill = info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max
    return jnp.asarray(fill, dtype)


def _spread(value: jax.Array, like: jax.Array, dims: Sequence[int]) -> jax.Array:
    return jax.lax.broadcast_in_dim(value, like.shape, dims)


def _scatter(eqn: JaxprEqn, monoid: str | None, *, linear: Sequence[tuple[int, ...]]) -> FactorRule:
    numbers = eqn.params["dimension_numbers"]
    operand_batch, index_batch = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    factors, operand, indices = _share_batch(eqn, operand_batch, index_batch)
    whole, reduced = [indices[-1][0]], {}
    for d, dim in enumerate(indices[:-1]):
        if d not in index_batch:
            if monoid is None:
                whole.append(dim[0])
            else:
                reduced[dim[0]] = monoid
    kept = [d for d in range(len(operand)) if d not in (*numbers.inserted_window_dims, *operand_batch)]
    update_shape = shape_of(eqn.invars[2])
    windows: list[Dim] = []
    for d, place in zip(kept, numbers.update_window_dims, strict=True):
        full = update_shape[place] == factors.sizes[operand[d][0]] and d not in numbers.scatter_dims_to_operand_dims
        windows.append(operand[d] if full else (factors.new(update_shape[place]),))
        whole += [] if full else [operand[d][0], windows[-1][0]]
    batches, window_dims = iter(indices[:-1]), iter(windows)
    updates = [
        next(window_dims) if d in numbers.update_window_dims else next(batches) for d in range(len(update_shape))
    ]
    groups = [g for g in linear if not any(isinstance(eqn.invars[i], Literal) for i in g)]
    inputs = [tuple(operand), tuple(indices), tuple(updates)]
    return make_rule(
        inputs,
        [tuple(operand)],
        factors.sizes,
        reduced=reduced,
        whole=whole,
        seeds=(0,) if monoid else (),
        linear=groups,
    )


def scatter_add(eqn: JaxprEqn) -> FactorRule:
    """v d, b s 1, b s d -> v d | sum: b s | seed: 0 | linear: 0 2."""
    return _scatter(eqn, "sum", linear=[(0, 2)])


def scatter_min(eqn: JaxprEqn) -> FactorRule:
    """As scatter-add, with min; of complex numbers b stays whole."""
    return _scatter(eqn, None if is_complex(eqn) else "min", linear=())


def scatter_max(eqn: JaxprEqn) -> FactorRule:
    """As scatter-add, with max; of complex numbers b stays whole."""
    return _scatter(eqn, None if is_complex(eqn) else "max", linear=())


def scatter_other(eqn: JaxprEqn) -> FactorRule:
    """scatter and scatter-mul: index batches stay whole, everything else as scatter-add."""
    return _scatter(eqn, None, linear=())


def scatter_local(call: LocalCall) -> Sequence[jax.Array]:
    """Positions relative to this shard; updates that belong to another shard are dropped."""
    operand, indices, updates = call.operands
    numbers = call.params["dimension_numbers"]
    dims = call.rule.inputs[0]
    sharded = [(k, d) for k, d in enumerate(numbers.scatter_dims_to_operand_dims) if call.is_sharded(dims[d])]
    if not sharded:
        return call.bind(operand, indices, updates)
    fills = call.params["mode"] == GatherScatterMode.FILL_OR_DROP
    kept = [d for d in range(len(dims)) if d not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)]
    windows = dict(zip(kept, (updates.shape[p] for p in numbers.update_window_dims), strict=True))
    single = math.prod(indices.shape[:-1]) == 1
    columns = []
    held: jax.Array | bool = True
    for k, d in enumerate(numbers.scatter_dims_to_operand_dims):
        size = call.eqn.invars[0].aval.shape[d]
        position, _ = _clamp(indices[..., k], size - windows.get(d, 1) + 1, fills)
        if call.is_sharded(dims[d]):
            local = position - call.offset(dims[d])
            inside = (local >= 0) & (local < call.local_size(dims[d]))
            position = jnp.where(inside, local, 0 if single else call.local_size(dims[d]))
            held = held & inside
        columns.append(position)
    mode = GatherScatterMode.FILL_OR_DROP
    (result,) = call.bind(operand, jnp.stack(columns, axis=-1), updates, mode=mode, **_IN_ANY_ORDER)
    # XLA turns a scatter of one update into slices. Up to JAX 0.10 it merges them with a slice of the operand and forgets
    # that a position outside is clamped, so here the position stays inside and the result is chosen instead.
    return (jnp.where(jnp.reshape(held, ()), result, operand) if single else result,)

"""`dot_product_attention`: attention that autopar knows as one operation, in steps that stock JAX runs as well.

In: what `jax.nn.dot_product_attention` takes. Out: what it returns, up to rounding. It is two primitives, one for each direction,
which a planner finds in the jaxpr of a whole train step: `attention` and `attention_backward`. On their own both compute block by
block. What can go wrong: derivatives of higher order and in forward mode, of which JAX says that there is no rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from autopar.attention import ring
from autopar.attention.blocks import Setting
from autopar.errors import ArgumentError

Avals = Sequence[jax.core.ShapedArray]

attention_p = Primitive("attention")
attention_backward_p = Primitive("attention_backward")


def dot_product_attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike | None = None,
    mask: jax.typing.ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: jax.typing.ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    is_balanced: bool = True,
) -> jax.Array:
    """Attention of every query to every key: `jax.nn.dot_product_attention`, as one operation that can be split over devices.

    It keeps one block of scores, and may be split by examples, heads, queries, and by queries and keys at once.

    Args:
        query: (B, T, N, H), or without B.
        key: (B, S, K, H), or without B; K divides N, and each of the K heads serves N / K neighbouring ones of the query.
        value: like `key`.
        bias: is added to the scores; broadcasts to (B, N, T, S), or (N, T, S) without B.
        mask: where it is true a query looks at a key; a bool with dimensions like those of `bias`.
        scale: what scores are multiplied by; 1 / sqrt(H) by default.
        is_causal: whether a query looks at no key of a later position.
        key_value_seq_lengths: int32 (B,), how many of the keys of each example count.
        local_window_size: how many positions a query looks to the left and to the right; one number is for both.
        is_balanced: whether devices exchange halves of a causal sequence to have the same work; else keys and values alone move.

    Returns:
        The result, of the shape and type of `query`.

    Raises:
        ArgumentError: the shapes or types do not go together.
    """
    arrays = [_four_dimensions(x) for x in (query, key, value)]
    pairwise = [None if x is None else _four_dimensions(x) for x in (bias, mask)]
    _check(*arrays, *pairwise)
    pairwise[1] = _with_lengths(key_value_seq_lengths, arrays[1].shape[1], pairwise[1])
    setting = Setting(
        scale=arrays[0].shape[-1] ** -0.5 if scale is None else float(scale),
        is_causal=bool(is_causal),
        window=_both_sides(local_window_size),
        has_bias=pairwise[0] is not None,
        has_mask=pairwise[1] is not None,
        queries=arrays[0].shape[1],
        keys=arrays[1].shape[1],
        is_balanced=bool(is_balanced),
    )
    return _attend(setting, *arrays, *pairwise).reshape(jnp.shape(query))


def _both_sides(window: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """How far a query looks to the left and to the right."""
    if window is None:
        return None
    left, right = (window, window) if isinstance(window, int) else window
    return int(left), int(right)


def _with_lengths(lengths: jax.typing.ArrayLike | None, keys: int, mask: jax.Array | None) -> jax.Array | None:
    """The mask, which also leaves out the keys behind the end of each example, if ends are given."""
    if lengths is None:
        return mask
    counted = (jnp.arange(keys) < jnp.asarray(lengths)[:, None])[:, None, None, :]
    return counted if mask is None else jnp.logical_and(mask, counted)


def _four_dimensions(x: jax.typing.ArrayLike) -> jax.Array:
    array = jnp.asarray(x)
    return array[None] if array.ndim == 3 else array


def _check(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None, mask: jax.Array | None) -> None:
    """Raise ArgumentError unless the arrays go together."""
    shown = f"query {query.dtype}{query.shape}, key {key.dtype}{key.shape}, value {value.dtype}{value.shape}"
    if query.ndim != 4 or key.ndim != 4 or key.shape != value.shape:
        raise ArgumentError(
            f"dot_product_attention: key and value need one shape of (B, S, K, H), query (B, T, N, H): {shown}"
        )
    if not query.dtype == key.dtype == value.dtype or not jnp.issubdtype(query.dtype, jnp.floating):
        raise ArgumentError(f"dot_product_attention: query, key and value need one floating-point type: {shown}")
    if (
        (query.shape[0], query.shape[3]) != (key.shape[0], key.shape[3])
        or not key.shape[2]
        or query.shape[2] % key.shape[2]
    ):
        raise ArgumentError(
            f"dot_product_attention: B and H must agree, and the heads of key divide those of query: {shown}"
        )
    whole = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    for name, given in (("bias", bias), ("mask", mask)):
        if given is None:
            continue
        if given.ndim != 4 or any(size not in (1, full) for size, full in zip(given.shape, whole, strict=True)):
            raise ArgumentError(
                f"dot_product_attention: {name} has shape {given.shape}, which does not broadcast to {whole}"
            )
        if (given.dtype == bool) != (name == "mask"):
            raise ArgumentError(
                f"dot_product_attention: {name} has type {given.dtype}; a mask is bool, and a bias is not"
            )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    setting: Setting,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
) -> jax.Array:
    return _attend_forward(setting, query, key, value, bias, mask)[0]


def _attend_forward(setting: Setting, *operands: jax.Array | None) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    """(result, what the backward pass needs)."""
    results = attention_p.bind(*(x for x in operands if x is not None), setting=setting)
    return results[0], (*operands, *results)


def _attend_backward(setting: Setting, kept: tuple[jax.Array | None, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    query, key, value, bias, mask, *results = kept
    given = [x for x in (query, key, value, bias, mask, *results, cotangent) if x is not None]
    gradients = list(attention_backward_p.bind(*given, setting=setting))
    to_bias = None if bias is None else gradients.pop()
    return (*gradients, to_bias, None)


_attend.defvjp(_attend_forward, _attend_backward)


def _results(query: jax.core.ShapedArray, *_: object, setting: Setting) -> list[jax.core.ShapedArray]:
    kind = jnp.promote_types(query.dtype, jnp.float32)
    batch, length, heads, _ = query.shape
    kept = jax.core.ShapedArray((batch, heads, length), kind)
    return [jax.core.ShapedArray(query.shape, query.dtype), kept, kept]


def _gradients(*operands: jax.core.ShapedArray, setting: Setting) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in operands[: 4 if setting.has_bias else 3]]


def _batch(
    primitive: Primitive, operands: Sequence[jax.Array], dims: Sequence[Any], *, setting: Setting
) -> tuple[list[jax.Array], list[int]]:
    """Mapped attention is attention of more examples."""
    (size, *_) = (x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    stacked = [
        jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    ]
    examples = stacked[0].shape[1]
    merged = [jnp.broadcast_to(x, (size, examples, *x.shape[2:])).reshape(-1, *x.shape[2:]) for x in stacked]
    results = [x.reshape(size, examples, *x.shape[1:]) for x in primitive.bind(*merged, setting=setting)]
    if primitive is attention_backward_p and setting.has_bias and stacked[3].shape[1] == 1:
        results[3] = jnp.sum(results[3], axis=1, keepdims=True)
    return results, [0] * len(results)


def _define(primitive: Primitive, avals: Callable[..., Avals], compute: Callable[..., Sequence[jax.Array]]) -> None:
    """Tell JAX all about a primitive."""

    def run(*operands: jax.Array, setting: Setting) -> Sequence[jax.Array]:
        return compute(setting, operands)

    primitive.multiple_results = True
    primitive.def_impl(jax.jit(run, static_argnames="setting"))
    primitive.def_abstract_eval(avals)
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))


_define(attention_p, _results, ring.attend)
_define(attention_backward_p, _gradients, ring.attend_back)

"""`call_python`: `jax.pure_callback` on one device of several that share the threads of a CPU.

In: a `pure_callback` on local operands. Out: its results. JAX copies what it gives the callback on a thread of the device, and on
a CPU that stands for several devices these all wait, in a collective or a callback, for one another. Here the callback gets
arrays that need no thread. What can go wrong: a callback that itself computes with JAX on large arrays, which may wait as before;
element types that NumPy cannot share, which are copied by JAX. An `io_callback` is called on one device, and the others get
what it returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from autopar.callbacks import inside_callback
from autopar.rules.on_shard import LocalCall

ALIGNMENT = 64
"""Bytes at multiples of which XLA takes over memory without a copy."""

Callback = Callable[..., Sequence[jax.typing.ArrayLike]]
call_python_p = Primitive("call_python")
call_python_p.multiple_results = True
call_python_p.def_abstract_eval(lambda *_, result_avals, **__: list(result_avals))
ask_python_p = Primitive("ask_python")
ask_python_p.multiple_results = True
ask_python_p.def_abstract_eval(lambda *_, result_avals, **__: list(result_avals))


def call_python(call: LocalCall) -> Sequence[jax.Array]:
    """The callback of a `pure_callback` on operands that every device has whole."""
    names = ("callback", "result_avals")
    results: Sequence[jax.Array] = call_python_p.bind(*call.operands, **{name: call.params[name] for name in names})
    return results


def ask_once(call: LocalCall) -> Sequence[jax.Array]:
    """The callback of an `io_callback`, which the device that is first on every axis makes for all."""
    places = [call.mesh.index(axis) for axis in range(len(call.mesh.shape))]
    if all(isinstance(place, int) for place in places):  # the whole program, before it is divided over devices
        return call.bind(*call.operands)
    own, avals = {name: call.params[name] for name in ("callback", "result_avals")}, call.params["result_avals"]
    results: Sequence[jax.Array] = jax.lax.cond(
        functools.reduce(jnp.logical_and, [place == 0 for place in places]),
        lambda *values: tuple(ask_python_p.bind(*values, **own)),
        lambda *_: tuple(jnp.zeros(aval.shape, aval.dtype) for aval in avals),
        *call.operands,
    )
    return [jax.lax.all_gather(x, call.mesh.axis_names)[0] for x in results]


def call_with_arrays(callback: Callback, operands: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """The results of a callback that is given JAX's arrays, in memory of their own."""
    with inside_callback(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        return tuple(np.asarray(x) for x in callback(*map(_as_array, operands)))


def _as_array(values: np.ndarray) -> jax.Array:
    """A copy of an array as JAX's, in memory that JAX takes over at once."""
    if values.dtype.kind not in "iufc" or not values.size:
        return jnp.asarray(values)
    room = np.empty(values.nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    own = room[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    own[...] = values
    return jnp.from_dlpack(own)


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: Any, callback: Callback, result_avals: object, is_effect: bool = False
) -> Any:
    """The operation as MLIR's values, which JAX leaves without a type of their own."""

    def run(*given: np.ndarray) -> tuple[np.ndarray, ...]:
        return call_with_arrays(callback, [np.asarray(x) for x in given])

    avals_in, avals_out = (cast(list[jax.core.ShapedArray], list(side)) for side in (ctx.avals_in, ctx.avals_out))
    results, _, _ = mlir.emit_python_callback(
        ctx, run, None, list(operands), avals_in, avals_out, has_side_effect=is_effect
    )
    return results


mlir.register_lowering(call_python_p, _lower)
mlir.register_lowering(ask_python_p, functools.partial(_lower, is_effect=True))

"""The jaxpr that an equation stands for: of a call, of a branch for every platform, of a composite of other operations.

In: an equation. Out: a jaxpr, and the operands that it takes. What can go wrong: a composite whose function JAX does not trace,
which raises what JAX raises; a call that is to stay one, such as a kernel, which is none of these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from autopar import compat
from autopar.compat import JaxprEqn, Literal
from autopar.program.opened.generators import draws_as_hashes

T = TypeVar("T")

CALLS = {
    "call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "composite": "jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_lin": "call_jaxpr",
    "custom_partitioning": "call",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "call_jaxpr",
    "custom_vmap_call": "call",
    "eval_jaxpr": "call_jaxpr",
    "jit": "jaxpr",
    "linear_call": "callee",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
    "remat_opt": "fwd_jaxpr",
    "tagged_call": "jaxpr",
    "xla_metadata_call": "jaxpr",
}
"""The parameter in which a call has its jaxpr."""
COMPOSITES = (
    "bcoo_dot_general",
    "bcoo_dot_general_sampled",
    "bcoo_extract",
    "bcoo_fromdense",
    "bcoo_sort_indices",
    "bcoo_spdot_general",
    "bcoo_sum_duplicates",
    "bcoo_todense",
    "bcoo_transpose",
    "bcsr_dot_general",
    "bcsr_extract",
    "bcsr_fromdense",
    "bcsr_todense",
    "coo_fromdense",
    "coo_matmat",
    "coo_matvec",
    "coo_todense",
    "csr_fromdense",
    "csr_matmat",
    "csr_matvec",
    "csr_todense",
    "custom_linear_solve",
    "todense",
)
"""Operations that JAX defines, and runs, as functions of other operations. Equinox has some of its own."""
INSIDE_KERNELS = "mosaic"
"""The platform of code inside a Pallas kernel, for which JAX's own functions, such as `jnp.diagonal`, have a branch."""


def called_by(eqn: JaxprEqn) -> Any:
    """The jaxpr that an equation stands for; None if it is an operation, or control flow."""
    if eqn.primitive.name in CALLS:
        return eqn.params[CALLS[eqn.primitive.name]]
    if eqn.primitive.name in COMPOSITES or compat.is_defined_by_equinox(eqn.primitive):
        return _trace(eqn, functools.partial(compat.implementation_of(eqn.primitive), **eqn.params))
    drawing = draws_as_hashes(eqn)
    if drawing is not None:
        return _trace(eqn, drawing)
    if eqn.primitive.name == "while" and _conditions_of(eqn):
        return _trace_with_one_condition(eqn)
    platforms = eqn.params.get("branches_platforms")
    if platforms is None or any(named is not None and set(named) != {INSIDE_KERNELS} for named in platforms):
        return None
    return eqn.params["branches"][platforms.index(None)]


def operands_of(closed: Any, operands: Sequence[T]) -> Sequence[T]:
    """The operands that a jaxpr takes: the last ones, since a call may have the number of a branch in front of them."""
    return operands[len(operands) - len(compat.open_jaxpr(closed).invars) :]


def _trace(eqn: JaxprEqn, implementation: Callable[..., object]) -> Any:
    """The jaxpr of what an equation does, with the user's line at each of its operations."""
    given = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in eqn.invars]
    with compat.attributed_to(eqn):
        return jax.make_jaxpr(implementation)(*given)


def _conditions_of(eqn: JaxprEqn) -> tuple[int, ...]:
    """The shape of a while loop's condition: of a `vmap` of one, it has an entry per example."""
    (condition,) = compat.open_jaxpr(eqn.params["cond_jaxpr"]).outvars
    shape: tuple[int, ...] = getattr(condition.aval, "shape", ())
    return shape


def _trace_with_one_condition(eqn: JaxprEqn) -> Any:
    """The jaxpr of a `vmap` of a while loop: it goes on while any example's condition is true.

    An example whose condition is false keeps its values, as in JAX's own lowering.
    """
    goes_on_for, step = (jax.extend.core.jaxpr_as_fun(eqn.params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
    first = eqn.params["cond_nconsts"]
    last = first + eqn.params["body_nconsts"]

    def run(*operands: jax.Array) -> Sequence[jax.Array]:
        def going(values: Sequence[jax.Array]) -> jax.Array:
            condition: jax.Array = goes_on_for(*operands[:first], *values)[0]
            return condition

        def body(values: Sequence[jax.Array]) -> list[jax.Array]:
            condition = going(values)
            pairs = zip(step(*operands[first:last], *values), values, strict=True)
            return [_chosen(condition, new, old) for new, old in pairs]

        carried: Sequence[jax.Array] = jax.lax.while_loop(lambda v: jnp.any(going(v)), body, list(operands[last:]))
        return carried

    return _trace(eqn, run)


def _chosen(condition: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Entries of `new` where the condition holds for their example, or else of `old`."""
    chosen: jax.Array = jax.lax.select(jax.lax.broadcast_in_dim(condition, new.shape, range(condition.ndim)), new, old)
    return chosen


def branch_that_runs(eqn: JaxprEqn, operands: Sequence[object]) -> int | None:
    """The number of the branch of a cond that a constant chooses; None if several may run, or if it is no cond."""
    if eqn.primitive.name != "cond" or not isinstance(operands[0], Literal):
        return None
    return max(0, min(int(np.asarray(operands[0].val)), len(eqn.params["branches"]) - 1))

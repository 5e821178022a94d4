"""The jaxpr that an equation stands for: of a call, of a branch for every platform, of a composite of other operations.

In: an equation. Out: a jaxpr, and the operands that it takes. What can go wrong: a composite whose function JAX does not trace,
which raises what JAX raises; a call that is to stay one, such as a kernel, which is none of these.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax

from autopar import compat
from autopar.compat import JaxprEqn

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
        return _trace_composite(eqn)
    platforms = eqn.params.get("branches_platforms")
    if platforms is None or any(named is not None and set(named) != {INSIDE_KERNELS} for named in platforms):
        return None
    return eqn.params["branches"][platforms.index(None)]


def operands_of(closed: Any, operands: Sequence[T]) -> Sequence[T]:
    """The operands that a jaxpr takes: the last ones, since a call may have the number of a branch in front of them."""
    return operands[len(operands) - len(compat.open_jaxpr(closed).invars) :]


def _trace_composite(eqn: JaxprEqn) -> Any:
    """The jaxpr of a composite's own implementation, with the user's line at each of its operations."""
    given = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in eqn.invars]
    with compat.attributed_to(eqn):
        return jax.make_jaxpr(functools.partial(compat.implementation_of(eqn.primitive), **eqn.params))(*given)

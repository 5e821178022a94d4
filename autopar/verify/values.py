"""The results of a compiled step beside those of `jax.jit` on one device, leaf by leaf.

In: a compiled step and arrays. Out: a row for each result, with the largest difference of an entry as a share of the result's
largest entry. Numbers that must be exact (integers, truths, keys) may not differ. Others are added up in another order, so
they may differ by rounding: by `TOLERANCES` of their type, or by what the step itself makes of rounding, whichever is more.
For the latter the reference runs once more with arguments that are off by `NUDGE` roundings, or by half a rounding of the
shortest type that the step computes in, where that is more: compilers round such values in some places and not in others.

    off = max(NUDGE eps, eps of the shortest type / 2)
    allowed = max(tolerance of the type, FACTOR * max |reference(x (1 +- off)) - reference(x)| / max |reference(x)|)

So an optimizer that divides a gradient of nearly nothing by its own size, as Adam does, is judged by how much that moves.
What can go wrong: one device cannot hold the whole step; then there is nothing to compare with, and JAX says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compat import undisturbed
from autopar.errors import ArgumentError
from autopar.execution.calls import check_leaves
from autopar.execution.one_mesh import CompiledStep
from autopar.execution.pipeline import CompiledPipeline
from autopar.execution.state import gather_to_one
from autopar.program.call import BoundArguments, PyTree
from autopar.program.crossing import Crossing, output_paths
from autopar.program.step import TracedStep
from autopar.verification import Verdict, VerifiedRow

TOLERANCES: Mapping[str, float] = {"float64": 1e-12, "complex128": 1e-12, "float32": 1e-5, "complex64": 1e-5}
"""Of a result's largest entry, by type; of shorter types eight of their roundings."""
NUDGE, FACTOR = 8, 8
Value: TypeAlias = jax.Array | np.ndarray | float
"""A leaf: an array on devices or on the host, a key, a number."""


def rows(
    compiled: CompiledStep | CompiledPipeline,
    devices: Sequence[jax.Device],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
) -> Iterator[VerifiedRow]:
    """A row for each result. Raises ArgumentError for arguments without values."""
    name = compiled.signature.name
    given = jax.tree.leaves((tuple(args), dict(kwargs)))
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in given):
        raise ArgumentError(f"to compare values {name} needs arrays, not shapes: it is run with them")
    bound, leaves = check_leaves(compiled.signature, compiled.traced, args, kwargs)
    if not all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
        yield VerifiedRow(
            topic="values",
            what="results",
            unit="error",
            planned=None,
            compiled=None,
            verdict="unknown",
            note="some arguments are in other processes, and one device is to have all of them",
        )
        return
    host = [_on_host(leaf) for leaf in leaves]
    with undisturbed():
        reference = _Reference(compiled, bound)
        expected, nudged = reference.run(host), reference.run(_nudge(host, _coarsest_eps(compiled.traced)))
    found = jax.tree.leaves(gather_to_one(compiled.run([_copy(leaf) for leaf in host]), devices))
    for path, one, wanted, other in zip(reference.paths, found, expected, nudged, strict=True):
        yield _row(path, _on_host(one), _on_host(wanted), _on_host(other))


class _Reference:
    """The undecorated step by `jax.jit` on one device, from flat leaves to flat results."""

    def __init__(self, compiled: CompiledStep | CompiledPipeline, bound: BoundArguments) -> None:
        _, tree = bound.flatten()
        crossing = Crossing(compiled.signature, bound)
        self.paths: Sequence[str] = ()

        def flat(*leaves: jax.Array) -> PyTree:
            dynamic, kwargs = jax.tree.unflatten(tree, leaves)
            results = crossing(*dynamic, **kwargs)
            self.paths = output_paths(results)
            return jax.tree.leaves(results)

        self._run = jax.jit(flat)

    def run(self, leaves: Sequence[Value]) -> Sequence[Value]:
        """The results, in order; `paths` are known then."""
        device = jax.local_devices()[0]
        found: Sequence[Value] = self._run(*(jax.device_put(leaf, device) for leaf in leaves))
        return found


def _on_host(leaf: object) -> Value:
    """A leaf as an array of NumPy; keys, and numbers, which decide no types, as they are."""
    if isinstance(leaf, int | float) or (isinstance(leaf, jax.Array) and _is_key(leaf)):
        return leaf
    return np.asarray(leaf)


def _copy(leaf: Value) -> Value:
    return jax.random.clone(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _coarsest_eps(traced: TracedStep) -> float:
    """Of the shortest floating-point type of a value that the step computes; 0 without any."""
    types = {getattr(value.aval, "dtype", None) for equation in traced.program.walk() for value in equation.outvars}
    return max(
        (float(jnp.finfo(dtype).eps) for dtype in types if dtype is not None and jnp.issubdtype(dtype, jnp.inexact)),
        default=0.0,
    )


def _nudge(leaves: Sequence[Value], coarsest_eps: float) -> list[Value]:
    """The leaves with every floating-point number off by some roundings, up or down."""
    draw = np.random.default_rng(0)
    return [_nudged(leaf, draw, coarsest_eps / 2) for leaf in leaves]


def _nudged(leaf: Value, draw: np.random.Generator, least_share: float) -> Value:
    if not isinstance(leaf, np.ndarray) or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    off = max(NUDGE * float(jnp.finfo(leaf.dtype).eps), least_share)
    share = off * draw.choice((-1.0, 1.0), size=leaf.shape)
    return (leaf.astype(np.float64) * (1 + share)).astype(leaf.dtype)


def _row(path: str, found: Value, wanted: Value, nudged: Value) -> VerifiedRow:
    found, wanted, nudged = (
        np.asarray(jax.random.key_data(x)) if _is_key(x) else np.asarray(x) for x in (found, wanted, nudged)
    )
    tolerance, error = _tolerance(wanted.dtype), _error(found, wanted)
    allowed = tolerance
    if tolerance:
        moved = _error(nudged, wanted)
        allowed = max(tolerance, FACTOR * (moved if moved is not None else 0.0))
    verdict: Verdict = "matches" if error is not None and error <= allowed else "differs"
    note = "" if allowed == tolerance else f"{wanted.dtype}, by what the step makes of rounding"
    if error is None:
        note = (
            f"{found.dtype}{list(found.shape)} instead of {wanted.dtype}{list(wanted.shape)}, or infinities elsewhere"
        )
    return VerifiedRow(
        topic="values",
        what=path,
        unit="error",
        planned=allowed,
        compiled=error,
        verdict=verdict,
        note=note or f"{wanted.dtype}",
    )


def _tolerance(dtype: np.dtype) -> float:
    """The share of the largest entry by which an entry may differ; 0 for types that must be exact."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    return TOLERANCES.get(str(dtype), 8 * float(jnp.finfo(dtype).eps))


def _error(found: np.ndarray, wanted: np.ndarray) -> float | None:
    """The largest difference of an entry as a share of the largest entry; None where there is none to tell."""
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return None
    if not jnp.issubdtype(wanted.dtype, jnp.inexact):
        return float(np.mean(found != wanted)) if wanted.size else 0.0
    wide = np.complex128 if np.iscomplexobj(wanted) else np.float64
    one, other = found.astype(wide), wanted.astype(wide)
    finite = np.isfinite(other)
    if not np.array_equal(finite, np.isfinite(one)) or not np.array_equal(one[~finite], other[~finite], equal_nan=True):
        return None
    if not finite.any():
        return 0.0
    scale = float(np.abs(other[finite]).max())
    worst = float(np.abs(one[finite] - other[finite]).max())
    return worst / max(scale, float(np.finfo(np.float32).tiny))

"""The results of a compiled step beside those of `jax.jit` on one device, leaf by leaf.

In: a compiled step and arrays. Out: a row for each result, with the largest difference of an entry as a share of the result's
largest entry. Numbers that must be exact (integers, truths, keys) may not differ. Others are added up in another order, so
they may differ by rounding: by `TOLERANCES` of their type, or by what the step itself makes of rounding, whichever is more.
For the latter the reference runs once more with arguments that are off by `NUDGE` roundings, or by half a rounding of the
shortest type that the step computes in, where that is more: compilers round such values in some places and not in others.

    off = max(NUDGE eps, eps of the shortest type / 2)
    allowed = max(tolerance of the type, FACTOR * max |reference(x (1 +- off)) - reference(x)| / max |reference(x)|)

So an optimizer that divides a gradient of nearly nothing by its own size, as Adam does, is judged by how much that moves. Where
rounding turns such a gradient around, Adam's first step goes the other way, in a few entries and in others each time. So where an
entry differs by more, the reference runs with arguments that are off by `FACTOR` times more. A result matches if no entry differs
by more than twice of what the farthest one moves then, and all differ by no more on average than they move:

    max |found - reference(x)| <= 2 max |reference(x (1 +- FACTOR off)) - reference(x)|
    mean |found - reference(x)| <= mean |reference(x (1 +- FACTOR off)) - reference(x)|

Where a step makes little of rounding, that is what is allowed anyway.
What can go wrong: one device cannot hold the whole step; then there is nothing to compare with, and JAX says so.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    eps = _coarsest_eps(compiled.traced)
    with undisturbed():
        reference = _Reference(compiled, bound)
        expected, nudged = reference.run(host), reference.run(_nudge(host, eps))
    found = jax.tree.leaves(gather_to_one(compiled.run([_copy(leaf) for leaf in host]), devices))

    @functools.cache
    def nudged_far() -> Sequence[Value]:
        with undisturbed():
            return reference.run(_nudge(host, eps, times=FACTOR))

    for place, (path, one, wanted, other) in enumerate(zip(reference.paths, found, expected, nudged, strict=True)):
        row = _row(path, _on_host(one), _on_host(wanted), _on_host(other))
        if row.verdict == "differs" and row.planned and row.compiled is not None:
            row = _on_average(row, _on_host(one), _on_host(wanted), _on_host(nudged_far()[place]))
        yield row


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


def _nudge(leaves: Sequence[Value], coarsest_eps: float, *, times: float = 1.0) -> list[Value]:
    """The leaves with every floating-point number off by some roundings, up or down; by so many times more."""
    draw = np.random.default_rng(0)
    return [_nudged(leaf, draw, coarsest_eps / 2, times) for leaf in leaves]


def _nudged(leaf: Value, draw: np.random.Generator, least_share: float, times: float) -> Value:
    if not isinstance(leaf, np.ndarray) or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    off = times * max(NUDGE * float(jnp.finfo(leaf.dtype).eps), least_share)
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
    note = "" if allowed == tolerance else f"{wanted.dtype}, by what the step makes of rounding"
    verdict: Verdict = "matches" if error is not None and error <= allowed else "differs"
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


def _on_average(row: VerifiedRow, found: Value, wanted: Value, nudged: Value) -> VerifiedRow:
    """The row as a match if entries differ no more on average, and hardly more at worst, than in a run that is off by more."""
    found, wanted, nudged = np.asarray(found), np.asarray(wanted), np.asarray(nudged)
    error, moved = _error(found, wanted, np.mean), _error(nudged, wanted, np.mean)
    worst, worst_moved = _error(found, wanted), _error(nudged, wanted)
    if error is None or moved is None or worst is None or worst_moved is None:
        return row
    if error > moved or worst > 2 * worst_moved:
        return row
    note = f"{wanted.dtype}, on average, by what the step makes of rounding: it turns single entries around"
    return dataclasses.replace(row, planned=moved, compiled=error, verdict="matches", note=note)


def _tolerance(dtype: np.dtype) -> float:
    """The share of the largest entry by which an entry may differ; 0 for types that must be exact."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    return TOLERANCES.get(str(dtype), 8 * float(jnp.finfo(dtype).eps))


def _error(
    found: np.ndarray, wanted: np.ndarray, worst_of: Callable[[np.ndarray], np.floating] = np.max
) -> float | None:
    """The largest difference of an entry as a share of the largest entry; None where there is none to tell.

    `worst_of`: what is told of all differences, the mean in place of the largest.
    """
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
    worst = float(worst_of(np.abs(one[finite] - other[finite])))
    return worst / max(scale, float(np.finfo(np.float32).tiny))

"""Program to JAX and back: the one place where a pass has a rewritten step traced again.

In: a step, the leaves of the new one, and a function of their values. Out: the step that this function computes. Constants that
the function closes over become leaves of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax

from autopar.program.call import PyTree
from autopar.program.fingerprint import fingerprint_of
from autopar.program.from_jaxpr import program_of
from autopar.program.step import Leaf, TracedStep


def retrace(traced: TracedStep, leaves: Sequence[Leaf], run: Callable[..., PyTree]) -> TracedStep:
    """Trace a step again as another function of its leaves and constants, which may have other shapes."""
    avals = [
        jax.ShapeDtypeStruct(leaf.shape, var.aval.dtype, weak_type=bool(getattr(var.aval, "weak_type", False)))
        for leaf, var in zip(leaves, traced.program.invars, strict=True)
    ]
    program, constants = program_of(jax.make_jaxpr(run)(*avals))
    added = tuple(
        Leaf(path=f"constant/{len(traced.constants) + i}", role="const", shape=tuple(v.aval.shape), dtype=v.aval.dtype)
        for i, v in enumerate(program.invars[len(leaves) :])
    )
    return dataclasses.replace(
        traced,
        program=program,
        constants=(*traced.constants, *constants),
        inputs=(*leaves, *added),
        fingerprint=fingerprint_of(program),
    )

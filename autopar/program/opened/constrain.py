"""Equations that ask for a layout: what they ask for, and the copy that stands for them in a program.

In: an equation of `jax.lax.with_sharding_constraint` or `jax.sharding.reshard`. It says for each dimension of a value which axes
split it, and how large these are. Out: a copy, `constrain`, that says so without a mesh. What can go wrong: a sharding that names
no axes of a mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from autopar.compat import JaxprEqn, source_line
from autopar.errors import ConstraintError
from autopar.layouts.asked import ANY_SIZE, TRACED_AS, AskedLayout

constrain_p = Primitive("constrain")
"""The operand, in a layout that meets the parameter `asked`."""
constrain_p.def_impl(lambda value, *, asked: value)
constrain_p.def_abstract_eval(lambda value, *, asked: value)
mlir.register_lowering(constrain_p, mlir.lower_fun(lambda value, *, asked: value, multiple_results=False))

PARAMETER_OF = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}
"""The parameter with the sharding, by primitive."""


class _HasParameters(Protocol):
    """What asks: an equation of a program."""

    @property
    def primitive(self) -> Primitive: ...

    @property
    def params(self) -> Mapping[str, Any]: ...


_Equation = TypeVar("_Equation", bound=_HasParameters)


def find_asked(equations: Iterable[_Equation]) -> Iterator[tuple[_Equation, AskedLayout]]:
    """The equations that ask for a layout, each with what it asks for."""
    for eqn in equations:
        if eqn.primitive is constrain_p:
            yield eqn, eqn.params["asked"]


def asked_of(eqn: JaxprEqn) -> AskedLayout | None:
    """What one of `PARAMETER_OF` asks for; None if that is nothing. Raises ConstraintError."""
    sharding = eqn.params[PARAMETER_OF[eqn.primitive.name]]
    rank = len(eqn.outvars[0].aval.shape)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        if getattr(sharding, "is_fully_replicated", False):
            return AskedLayout(((),) * rank, ())
        raise ConstraintError(
            f"the step asks for {sharding} at {source_line(eqn)}, which names no axes of a mesh: give a PartitionSpec of axes of "
            "the plan's mesh, or a NamedSharding."
        )
    if eqn.primitive.name == "reshard" and not any(sharding.spec):
        return None  # JAX reshards constants that it makes itself, and says nothing of axes that are Auto
    is_plans = TRACED_AS in sharding.mesh.axis_names
    sizes = [(name, size) for name, size in sharding.mesh.shape.items() if name != TRACED_AS]
    return AskedLayout(
        dims=tuple(_names(entry) for entry in (*sharding.spec, *(None,) * (rank - len(sharding.spec)))),
        mesh_axes=tuple((name, ANY_SIZE if is_plans else size) for name, size in sizes),
    )


def _names(entry: object) -> tuple[str, ...] | None:
    """The axes that split a dimension; None if it is unconstrained."""
    if entry is jax.sharding.PartitionSpec.UNCONSTRAINED:
        return None
    return () if entry is None else tuple(entry) if isinstance(entry, tuple) else (str(entry),)

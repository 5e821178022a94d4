"""What makes two programs, or two operations, the same.

`fingerprint_of` digests a whole program; by it a plan recognises its step. `signature` and the keys compare equations within one
process, by content.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compat import JaxprEqn, Var, constants_of, open_jaxpr
from autopar.compat import Literal as JaxLiteral
from autopar.content import Identity, digest_of
from autopar.program.program import Atom, Program


def fingerprint_of(program: Program) -> str:
    """A digest of the program's operations with their parameters, of shapes and structure; equal programs have equal digests.

    Constants are inputs of the program: their values do not count.
    """
    numbers: dict[Var, int] = {}
    body = _scope(program, (), numbers)
    return digest_of((body, [numbers.get(eqn.after) for eqn in program.equations if eqn.after is not None]))[:16]


def outline_of(program: Program) -> str:
    """A digest of what decides how a program can be split: all but the values of the literals that its operations take."""
    numbers: dict[Var, int] = {}
    body = _scope(program, (), numbers, literals=False)
    return digest_of((body, [numbers.get(eqn.after) for eqn in program.equations if eqn.after is not None]))[:16]


def signature(equations: Sequence[JaxprEqn], numbers: dict[Var, int], *, literals: bool = True) -> Hashable:
    """Equations with variables numbered in order of appearance; `numbers` is filled.

    `literals`: whether the values of the literals that operations take count.
    """
    return tuple(
        (
            eqn.primitive.name,
            tuple(_atom(v, numbers, literals=literals) for v in eqn.invars),
            tuple((_atom(v, numbers, literals=literals), aval_key(v)) for v in eqn.outvars),
            tuple((name, _value(value)) for name, value in sorted(eqn.params.items()) if not _is_region(eqn, value)),
            tuple(_scope(region, (), literals=literals) for region in getattr(eqn, "regions", ())),
            getattr(eqn, "loop", None),
        )
        for eqn in equations
    )


def operation_key(eqn: JaxprEqn) -> Hashable:
    """Equal for equations that do the same with equal operands: the same primitive with the same parameters."""
    params = tuple(eqn.params.items())
    try:
        hash(params)
    except TypeError:
        params = tuple((name, _value(value)) for name, value in params)
    return eqn.primitive, params


def operand_key(atom: Atom) -> Hashable:
    """What a rule may know of an operand: its shape and dtype, and a literal's value."""
    if not isinstance(atom, JaxLiteral):
        return cast(Hashable, atom.aval)
    value = np.asarray(atom.val)
    return atom.aval, id(atom.val) if value.dtype == object else value.tobytes()


def _is_region(eqn: JaxprEqn, value: object) -> bool:
    """Whether a parameter holds the nested programs that the equation also has as `regions`."""
    several = value if isinstance(value, tuple) and value else (value,)
    return bool(getattr(eqn, "regions", ())) and all(hasattr(open_jaxpr(v), "eqns") for v in several)


class _Scope(Protocol):
    """A nested `Program`, or a jaxpr."""

    @property
    def invars(self) -> Sequence[Var]: ...

    @property
    def outvars(self) -> Sequence[Var | JaxLiteral]: ...


def _scope(
    program: _Scope, constants: Sequence[object], numbers: dict[Var, int] | None = None, *, literals: bool = True
) -> Hashable:
    """A nested program by content; `numbers` is filled."""
    numbers = {} if numbers is None else numbers
    inputs = (*getattr(program, "constvars", ()), *program.invars)
    heads = tuple((_atom(v, numbers), aval_key(v)) for v in inputs)
    equations: Sequence[JaxprEqn] = getattr(program, "equations", ()) or getattr(program, "eqns", ())
    body = signature(equations, numbers, literals=literals)
    ends = tuple(_atom(v, numbers, literals=literals) for v in program.outvars)
    return heads, body, ends, tuple(_value(c) for c in constants)


def _atom(atom: Var | JaxLiteral, numbers: dict[Var, int], *, literals: bool = True) -> Hashable:
    if isinstance(atom, JaxLiteral):
        return "literal", _value(np.asarray(atom.val)) if literals else None, aval_key(atom)
    return numbers.setdefault(atom, len(numbers))


def aval_key(atom: Var | JaxLiteral) -> Hashable:
    """Shape, dtype and weak type of a value."""
    aval = atom.aval
    return tuple(getattr(aval, "shape", ())), str(getattr(aval, "dtype", aval)), bool(getattr(aval, "weak_type", False))


def _value(value: object) -> Hashable:
    """A parameter as a value that compares by content; a function or the like compares by identity."""
    if hasattr(open_jaxpr(value), "eqns"):
        return _scope(cast(_Scope, open_jaxpr(value)), constants_of(value))
    if isinstance(value, (np.ndarray, np.generic, jax.Array)) and not jnp.issubdtype(value.dtype, jax.dtypes.extended):
        array = np.asarray(value)
        return "array", str(array.dtype), array.shape, array.tobytes()
    if isinstance(value, Mapping):
        return tuple((name, _value(inner)) for name, inner in sorted(value.items()))
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(_value(inner) for inner in value)
    has_content = getattr(value, "__hash__", None) is not None
    return type(value).__name__, value if has_content else Identity(id(value))

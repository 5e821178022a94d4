"""What makes two programs, or two operations, the same: the one place that says so.

`fingerprint_of` digests a whole program; by it a plan recognises its step, and says where another program begins to differ.
`signature` and the keys compare equations within one process. All of them compare what `_content` and its neighbours see: the
primitive, every parameter by content, operands, results, nested programs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Hashable, Mapping, Sequence
from operator import itemgetter
from typing import Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compat import JaxprEqn, Var, constants_of, open_jaxpr
from autopar.compat import Literal as JaxLiteral
from autopar.content import Identity, plain_text
from autopar.program.program import Atom, Program


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """A digest of a program, and a trail of two digits for each equation of `Program.walk`, which digest all up to it.

    So of two trails the first difference is where the programs begin to differ, or one in 256 times an equation later.
    """

    digest: str
    trail: str

    def __str__(self) -> str:
        return self.digest

    def first_difference(self, trail: str) -> int | None:
        """The number of the first equation that another program does not have, by its trail; None if that has them all."""
        pairs = range(0, len(self.trail), 2)
        return next((at // 2 for at in pairs if self.trail[at : at + 2] != trail[at : at + 2]), None)


def fingerprint_of(program: Program) -> Fingerprint:
    """That of the program's operations with their parameters, of shapes and structure; equal programs have equal ones.

    Constants are inputs of the program: their values do not count.
    """
    return _Tracks(literals=True).follow(program)


def outline_of(program: Program) -> Fingerprint:
    """That of what decides how a program can be split: all but the values of the literals that its operations take."""
    return _Tracks(literals=False).follow(program)


class _Tracks:
    """A digest that grows with each equation."""

    def __init__(self, *, literals: bool) -> None:
        self._hash, self._literals, self._trail = hashlib.sha256(), literals, list[str]()

    def follow(self, program: Program) -> Fingerprint:
        self._scope(program)
        return Fingerprint(self._hash.hexdigest()[:16], "".join(self._trail))

    def _scope(self, program: Program) -> None:
        numbers: dict[Var, int] = {}
        self._add(_heads(program, numbers))
        for eqn in program.equations:
            self._add(_content(eqn, numbers, literals=self._literals))
            self._add(None if eqn.after is None else _atom(eqn.after, numbers))
            self._trail.append(self._hash.copy().digest()[:1].hex())
            for region in eqn.regions:
                self._scope(region)
        self._add(_ends(program, numbers, literals=self._literals))

    def _add(self, value: object) -> None:
        self._hash.update(f"{plain_text(value)}\n".encode())


def signature(equations: Sequence[JaxprEqn], numbers: dict[Var, int], *, literals: bool = True) -> Hashable:
    """Equations with variables numbered in order of appearance; `numbers` is filled.

    `literals`: whether the values of the literals that operations take count.
    """
    return tuple(
        (
            _content(eqn, numbers, literals=literals),
            tuple(_scope(region, (), literals=literals) for region in getattr(eqn, "regions", ())),
        )
        for eqn in equations
    )


def _content(eqn: JaxprEqn, numbers: dict[Var, int], *, literals: bool) -> Hashable:
    """An equation without its nested programs; `numbers` is filled."""
    return (
        eqn.primitive.name,
        tuple(_atom(v, numbers, literals=literals) for v in eqn.invars),
        tuple((_atom(v, numbers, literals=literals), aval_key(v)) for v in eqn.outvars),
        _parameters(eqn),
        getattr(eqn, "loop", None),
    )


def _parameters(eqn: JaxprEqn) -> Hashable:
    """The parameters by content, without nested programs that the equation also has as `regions`."""
    return tuple((name, _value(value)) for name, value in sorted(eqn.params.items()) if not _is_region(eqn, value))


def operation_key(eqn: JaxprEqn) -> Hashable:
    """Equal for equations that do the same with equal operands: the same primitive with the same parameters."""
    regions = tuple(map(id, getattr(eqn, "regions", ())))
    return eqn.primitive, _parameters(eqn), regions


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


def _scope(program: _Scope, constants: Sequence[object], *, literals: bool = True) -> Hashable:
    """A nested program by content."""
    numbers: dict[Var, int] = {}
    heads = _heads(program, numbers)
    equations: Sequence[JaxprEqn] = getattr(program, "equations", ()) or getattr(program, "eqns", ())
    body = signature(equations, numbers, literals=literals)
    return heads, body, _ends(program, numbers, literals=literals), tuple(_value(c) for c in constants)


def _heads(program: _Scope, numbers: dict[Var, int]) -> Hashable:
    inputs = (*getattr(program, "constvars", ()), *program.invars)
    return tuple((_atom(v, numbers), aval_key(v)) for v in inputs)


def _ends(program: _Scope, numbers: dict[Var, int], *, literals: bool) -> Hashable:
    return tuple(_atom(v, numbers, literals=literals) for v in program.outvars)


def _atom(atom: Var | JaxLiteral, numbers: dict[Var, int], *, literals: bool = True) -> Hashable:
    if isinstance(atom, JaxLiteral):
        return "literal", _value(np.asarray(atom.val)) if literals else None, aval_key(atom)
    return numbers.setdefault(atom, len(numbers))


def aval_key(atom: Var | JaxLiteral) -> Hashable:
    """Shape, dtype and weak type of a value."""
    aval = atom.aval
    shape, dtype = tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", aval)
    return shape, _text_of(dtype), bool(getattr(aval, "weak_type", False))


@functools.cache
def _text_of(dtype: Hashable) -> str:
    """The name of a type of numbers; numpy takes microseconds to find it."""
    return str(dtype)


def _in_order(mapping: Mapping[Hashable, object]) -> Sequence[tuple[Hashable, object]]:
    """The items of a mapping in an order that depends on its keys alone; of keys that have none by their types and texts."""
    try:
        return sorted(mapping.items(), key=itemgetter(0))
    except TypeError:
        return sorted(mapping.items(), key=lambda item: (type(item[0]).__name__, repr(item[0])))


def _value(value: object) -> Hashable:
    """A parameter as a value that compares by content; a function or the like compares by identity."""
    if value is None or type(value) in (bool, int, str):  # most are
        return type(value).__name__, value
    if hasattr(open_jaxpr(value), "eqns"):
        return _scope(cast(_Scope, open_jaxpr(value)), constants_of(value))
    if isinstance(value, (np.ndarray, np.generic, jax.Array)) and not jnp.issubdtype(value.dtype, jax.dtypes.extended):
        array = np.asarray(value)
        return "array", str(array.dtype), array.shape, array.tobytes()
    if isinstance(value, Mapping):
        return tuple((name, _value(inner)) for name, inner in _in_order(value))
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(_value(inner) for inner in value)
    has_content = getattr(value, "__hash__", None) is not None
    return type(value).__name__, value if has_content else Identity(id(value), value)

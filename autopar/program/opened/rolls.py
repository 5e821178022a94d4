"""`roll`: the rows of an array along one dimension moved on, those at the end to the front, as `jnp.roll` does.

JAX writes it as two slices and their concatenation, and its transpose as the sum of two slices that are padded with zeros.
In: the equations of a program, in order. Out: the same, with one `roll` for each of these, which devices that hold the rows in
parts run by sending a few to their neighbours. What remains unread is left to dead code elimination. What can go wrong: -0.0
in a transpose, to which the sum adds 0.0 where a roll adds nothing; XLA's simplifier leaves such a sum out as well.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from autopar.compat import Literal, Var

roll_p = Primitive("roll")
"""The operand with the rows of `dimension` moved on by `shift` places, 0 < shift < rows."""


def _roll(x: jax.Array, *, dimension: int, shift: int) -> jax.Array:
    size = x.shape[dimension]
    parts = [lax.slice_in_dim(x, *ends, axis=dimension) for ends in ((size - shift, size), (0, size - shift))]
    return lax.concatenate(parts, dimension)


roll_p.def_impl(_roll)
roll_p.def_abstract_eval(lambda x, *, dimension, shift: x)
mlir.register_lowering(roll_p, mlir.lower_fun(_roll, multiple_results=False))


class _IsEquation(Protocol):
    """What is read: an equation of a program, a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def primitive(self) -> Primitive: ...

    @property
    def invars(self) -> Sequence[Var | Literal]: ...

    @property
    def outvars(self) -> Sequence[Var]: ...

    @property
    def params(self) -> dict[str, Any]: ...


_Equation = TypeVar("_Equation", bound=_IsEquation)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Rows start to stop of `whole` along a dimension, and nothing left out along the others."""

    whole: Var
    dimension: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class _Placed:
    """A piece with zeros around it, so that it is as long as the whole, and begins at row `at`."""

    piece: _Piece
    at: int


def with_rolls(equations: Iterable[_Equation], results: Sequence[Var | Literal]) -> list[_Equation]:
    """The equations, of which those that make up a roll, or the transpose of one, are one equation.

    Args:
        equations: of one scope, in order.
        results: of that scope.
    """
    found = _Finder(equations, results)
    return [new for eqn in found.equations for new in found.replaced(eqn)]


class _Finder(Generic[_Equation]):
    """What makes each value of a scope, and how often it is read."""

    def __init__(self, equations: Iterable[_Equation], results: Sequence[Var | Literal]) -> None:
        self.equations = list(equations)
        self._maker = {v: eqn for eqn in self.equations for v in eqn.outvars}
        self._reads = Counter(v for eqn in self.equations for v in eqn.invars if isinstance(v, Var))
        self._reads.update(v for v in results if isinstance(v, Var))

    def replaced(self, eqn: _Equation) -> Sequence[_Equation]:
        """What stands in an equation's place."""
        if eqn.primitive.name == "concatenate" and len(eqn.invars) == 2:
            front, back = map(self._piece, eqn.invars)
            if _are_turned(front, back) and front is not None and front.dimension == eqn.params["dimension"]:
                return [_rolled(eqn, eqn.outvars[0], front.whole, front.dimension, front.stop - front.start)]
        if eqn.primitive.name == "add_any":
            return self._sum(eqn)
        return [eqn]

    def _sum(self, eqn: _Equation) -> Sequence[_Equation]:
        """The transpose of a roll: two pieces that are put beside each other, at once or one after the other."""
        for place, other in (eqn.invars, reversed(eqn.invars)):
            one = self._placed(place)
            if one is None:
                continue
            two, rest = self._placed(other), None
            if two is None:
                two, rest = self._earlier(one, other)
            first, last = (one, two) if two is None or one.at < two.at else (two, one)
            if last is None or not _are_turned(first.piece, last.piece) or (first.at, last.at) != (0, _rows(first)):
                continue
            shift = _rows(first)
            if rest is None:
                return [_rolled(eqn, eqn.outvars[0], first.piece.whole, first.piece.dimension, shift)]
            made = Var(eqn.outvars[0].aval)
            roll = _rolled(eqn, made, first.piece.whole, first.piece.dimension, shift)
            return [roll, dataclasses.replace(eqn, invars=(rest, made))]
        return [eqn]

    def _earlier(self, one: _Placed, total: Var | Literal) -> tuple[_Placed | None, Var | Literal | None]:
        """(the other piece of what `one` is a piece of, the sum without it) if a sum that nothing else reads added it last."""
        made = self._maker.get(total) if isinstance(total, Var) and self._reads[total] == 1 else None
        if made is not None and made.primitive.name == "add_any":
            for place, rest in (made.invars, reversed(made.invars)):
                two = self._placed(place)
                if two is not None and two.piece.whole is one.piece.whole:
                    return two, rest
        return None, None

    def _piece(self, value: Var | Literal) -> _Piece | None:
        """What a value is cut from; None if it is no piece along one dimension."""
        eqn = self._maker.get(value) if isinstance(value, Var) else None
        if eqn is None or eqn.primitive.name not in ("split", "slice"):
            return None
        whole = eqn.invars[0]
        if not isinstance(whole, Var) or not _has_plain_type(whole):
            return None
        if eqn.primitive.name == "split":
            sizes, number = eqn.params["sizes"], [v is value for v in eqn.outvars].index(True)
            start = int(sum(sizes[:number]))
            return _Piece(whole, eqn.params["axis"], start, start + int(sizes[number]))
        if any(n != 1 for n in eqn.params["strides"] or ()):
            return None
        ends = list(zip(eqn.params["start_indices"], eqn.params["limit_indices"], strict=True))
        cut = [d for d, size in enumerate(whole.aval.shape) if ends[d] != (0, size)]
        return _Piece(whole, cut[0], *map(int, ends[cut[0]])) if len(cut) == 1 else None

    def _placed(self, value: Var | Literal) -> _Placed | None:
        """Where a piece is put between zeros; None if a value is not made so."""
        eqn = self._maker.get(value) if isinstance(value, Var) else None
        if eqn is None or eqn.primitive.name != "pad" or not _is_zero(eqn.invars[1]):
            return None
        piece = self._piece(eqn.invars[0])
        if piece is None or eqn.outvars[0].aval.shape != piece.whole.aval.shape:
            return None
        config = [tuple(map(int, entry)) for entry in eqn.params["padding_config"]]
        low, high, between = config.pop(piece.dimension)
        is_placed = low >= 0 and high >= 0 and not between and all(entry == (0, 0, 0) for entry in config)
        return _Placed(piece, low) if is_placed else None


def _rows(placed: _Placed) -> int:
    return placed.piece.stop - placed.piece.start


def _are_turned(first: _Piece | None, last: _Piece | None) -> bool:
    """Whether the first is the end of the array of which the last is the beginning, and none of its rows is missing."""
    if first is None or last is None or first.whole is not last.whole or first.dimension != last.dimension:
        return False
    size = first.whole.aval.shape[first.dimension]
    return (last.start, first.stop) == (0, size) and last.stop == first.start and 0 < first.start < size


def _rolled(eqn: _Equation, out: Var, whole: Var, dimension: int, shift: int) -> _Equation:
    return dataclasses.replace(
        eqn, primitive=roll_p, invars=(whole,), outvars=(out,), params={"dimension": dimension, "shift": shift}
    )


def _has_plain_type(value: Var) -> bool:
    """Whether its elements are numbers, not random keys."""
    return not jnp.issubdtype(value.aval.dtype, jax.dtypes.extended)


def _is_zero(value: Var | Literal) -> bool:
    return isinstance(value, Literal) and bool(np.asarray(value.val) == 0)

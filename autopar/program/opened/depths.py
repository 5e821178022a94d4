"""How many equations each value of a growing scope is behind.

In: the scope's equations, of which there are more at each call. Out: a mapping from values to numbers of equations. Only the new
equations are read, so that a scope with many barriers is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jax.extend.core import Primitive
from jax.lax import optimization_barrier_p

from autopar.compat import Literal, Var


class _Step(Protocol):
    """What is asked of an equation."""

    @property
    def primitive(self) -> Primitive: ...

    @property
    def invars(self) -> Sequence[Var | Literal]: ...

    @property
    def outvars(self) -> Sequence[Var]: ...

    @property
    def after(self) -> Var | None: ...


class Depths:
    """See the module's text."""

    def __init__(self) -> None:
        self._known: dict[Var, int] = {}
        self._read = 0

    def after(self, equations: Sequence[_Step]) -> dict[Var, int]:
        """How many equations each value is behind; a copy behind a barrier is there as soon as what it is a copy of.

        `equations`: those of the last call, and what was appended to them. A value that no equation makes is not in the mapping.
        """
        known = self._known
        for eqn in equations[self._read :]:
            is_copy = eqn.primitive is optimization_barrier_p
            behind = [known[v] for v in (*eqn.invars, eqn.after) if not isinstance(v, Literal) and v in known]
            if behind or not is_copy:
                known.update((v, max(behind, default=0) + (not is_copy)) for v in eqn.outvars)
        self._read = len(equations)
        return known

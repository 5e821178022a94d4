"""Values that are zero everywhere, which XLA's simplifier leaves out of sums.

In: equations with the numbers of their operands. Out: which operand of a sum is its result. So a norm of real numbers, as the sum
of the squares of their real and of their imaginary parts, reads only the first. What can go wrong: a zero that is found by
arithmetic, such as x - x, is not known here, and need not be known to XLA.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.compat import Literal
from autopar.intra_op.xla_cpu.table import adds_two, keeps_zero
from autopar.program.program import Atom, Equation


class Zeros:
    """The numbers of values that are zero everywhere."""

    def __init__(self) -> None:
        """No value is known to be zero."""
        self._known: set[int] = set()

    def find_same(self, eqn: Equation, read: Sequence[int]) -> int | None:
        """The place of the operand that a sum hands on, as the other one is zero; None if it is no such sum."""
        if not adds_two(eqn):
            return None
        aval = eqn.outvars[0].aval
        for kept, other in ((0, 1), (1, 0)):
            is_alike = eqn.invars[kept].aval.shape == aval.shape and eqn.invars[kept].aval.dtype == aval.dtype
            if is_alike and read[kept] >= 0 and self._is_zero(eqn.invars[other], read[other]):
                return kept
        return None

    def note(self, eqn: Equation, read: Sequence[int], result: int) -> None:
        """Note the result of an equation if it is zero because its operand is."""
        if keeps_zero(eqn) and self._is_zero(eqn.invars[0], read[0]):
            self._known.add(result)

    def _is_zero(self, atom: Atom, number: int) -> bool:
        if isinstance(atom, Literal):
            return np.issubdtype(atom.aval.dtype, np.number) and bool(np.all(np.asarray(atom.val) == 0))
        return number in self._known

"""Which values before a loop over microbatches are equal, so that the loop keeps one of them.

In: the equations before the loop, in order. Out: for each value that equals an earlier one, that earlier one. Backward that does
forward again behind barriers casts the same parameters once more. Within one microbatch that saves the memory of the first cast
between forward and backward. What is made before a loop is there as long as the loop runs, so a second cast only takes memory,
and a second gather. Equal are: what stands behind a barrier and in front of it, and the results of the same operation on equal
operands. What can go wrong: nothing; an operation that has to run as often as it is written is never taken for another one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from autopar.compat import Literal, Var
from autopar.program.fingerprint import operand_key, operation_key
from autopar.program.program import Atom, Equation, fan_out_p
from autopar.rules.table import entry_for


def find_equal(equations: Sequence[Equation]) -> Mapping[Var, Var]:
    """The first value that each value equals, of those that equal an earlier one; see the module's text."""
    first: dict[Var, Var] = {}
    made: dict[Hashable, tuple[Var, ...]] = {}

    def key(atom: Atom) -> Hashable:
        return operand_key(atom) if isinstance(atom, Literal) else first.get(atom, atom)

    for eqn in equations:
        operand = eqn.invars[0] if eqn.invars else None
        is_name = eqn.primitive is fan_out_p or entry_for(eqn).barrier
        if is_name and operand is not None and not isinstance(operand, Literal):
            first[eqn.outvars[0]] = first.get(operand, operand)
        elif not entry_for(eqn).once:
            known = made.setdefault((operation_key(eqn), *map(key, eqn.invars)), eqn.outvars)
            first.update((v, w) for v, w in zip(eqn.outvars, known, strict=True) if v is not w)
    return first

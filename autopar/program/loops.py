"""Control flow in a `Program`: what fills each input of a nested program, and where each of its results goes.

In: an equation with nested programs and the numbers of its operands (`Loop`). Out: `LoopEquation.nested`, the nested
programs with an `Entry` for every input and an `Exit` for every result. This is the only place that knows how scan, while
and cond group their operands:

    scan    operands: constants, carries, stacks. The body takes the same, a row of each stack; it returns carries and rows.
    while   operands: constants of the condition, constants of the body, carries. The body takes its constants and the
    carries, and
            returns carries; the condition takes its own constants and the carries as the body has them, and returns the decision.
    cond    operands: the branch number and what every branch takes. Every branch returns all results.

A new form of control flow needs an entry in `_NESTED`; whoever walks programs (`walk.py`) then follows it without a change.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import Literal as OneOf
from typing import TypeVar

from autopar.compat import Literal, Var
from autopar.program.program import Atom, Equation, Program

LoopKind = OneOf["scan", "while", "cond"]
Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """Control flow: its kind, numbers of constant and carried operands, and how often its body runs.

    `captured`: places of operands that the primitive itself does not take: the constants that nested programs close over.
    `trips` of a while is a guess. `is_reversed` and `unroll` are a scan's.
    """

    kind: LoopKind
    consts: int = 0
    carries: int = 0
    condition_consts: int = 0
    trips: int = 1
    captured: frozenset[int] = frozenset()
    is_reversed: bool = False
    unroll: int = 1


class Filled(enum.Enum):
    """How an input of a nested program gets its value.

    CONSTANT: from an operand, the same in every iteration. CARRY: from an operand in the first iteration, then from the one
    before. ROW: one row of an operand per iteration. PASSED: a carry as the body has it, which the condition looks at.
    """

    CONSTANT = "constant"
    CARRY = "carry"
    ROW = "row"
    PASSED = "passed"


class Goes(enum.Enum):
    """Where a result of a nested program goes.

    CARRY: to the next iteration, and after the last to a result of the loop. ROW: to a row of a result. BRANCH: to a result, if
    this branch runs. DECISION: it says whether the body runs again.
    """

    CARRY = "carry"
    ROW = "row"
    BRANCH = "branch"
    DECISION = "decision"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Entry:
    """An input of a program nested in `loop`; `head` is the fan_out that is its only user.

    `atom`: the operand of the loop that fills it, number `place`. PASSED: what the body returns, by its exit `passed`.
    """

    loop: LoopEquation
    var: Var
    filled: Filled
    head: Equation
    atom: Atom
    place: int = -1
    passed: Exit | None = None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Exit:
    """A result of a program nested in `loop`; `maker` is the fan_out that makes it, None for a literal.

    `place`: of which result of the loop it is (a part), -1 for a DECISION. `carry`: the entry that takes it in the next
    iteration.
    """

    loop: LoopEquation
    atom: Atom
    goes: Goes
    maker: Equation | None
    place: int = -1
    carry: Entry | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Nested:
    """A nested program with what fills its inputs and where its results go, in order."""

    program: Program
    entries: tuple[Entry, ...]
    exits: tuple[Exit, ...]

    def entries_filled(self, *kinds: Filled) -> list[Entry]:
        """The inputs that get their values in one of these ways."""
        return [entry for entry in self.entries if entry.filled in kinds]

    def carries_and_rows(self, results: Sequence[Value]) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
        """A value per result apart: those that go to the next iteration, and the others."""
        pairs = list(zip(self.exits, results, strict=True))
        carries = tuple(x for exit_, x in pairs if exit_.goes is Goes.CARRY)
        return carries, tuple(x for exit_, x in pairs if exit_.goes is not Goes.CARRY)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LoopEquation(Equation):
    """Control flow: a scan, a while or a cond."""

    loop: Loop

    @functools.cached_property
    def nested(self) -> tuple[Nested, ...]:
        """The nested programs in the order in which they are walked: a body before the condition that looks at its results."""
        return _NESTED[self.loop.kind](self)

    @functools.cached_property
    def results(self) -> tuple[tuple[Exit, ...], ...]:
        """For each result of the loop the exit that it comes from, or one exit of every branch."""
        exits = [exit_ for nested in self.nested for exit_ in nested.exits]
        return tuple(tuple(e for e in exits if e.place == place) for place in range(len(self.outvars)))

    @property
    def branch_number(self) -> Atom | None:
        """The operand that says which branch of a cond runs."""
        return self.invars[0] if self.loop.kind == "cond" else None

    def operands_to(self, filled: Filled) -> list[Atom]:
        """The operands that fill inputs of the body, or of the first branch, in this way."""
        return [entry.atom for entry in self.nested[0].entries_filled(filled)]

    def results_from(self, goes: Goes) -> list[Var]:
        """The results that come from such exits."""
        return [var for var, exits in zip(self.outvars, self.results, strict=True) if exits[0].goes is goes]

    def own_operands(self, operands: Sequence[Value]) -> list[Value]:
        """Those of a value per operand that the primitive takes: not what its nested programs close over."""
        return [value for place, value in enumerate(operands) if place not in self.loop.captured]


def _nested_in_scan(eqn: LoopEquation) -> tuple[Nested, ...]:
    return (_body(eqn),)


def _nested_in_while(eqn: LoopEquation) -> tuple[Nested, ...]:
    count, condition, body = eqn.loop.condition_consts, eqn.regions[0], _body(eqn)
    constants = [_filled(eqn, condition, i, Filled.CONSTANT, eqn.invars[i], place=i) for i in range(count)]
    passed = [
        _filled(eqn, condition, count + i, Filled.PASSED, exit_.atom, passed=exit_)
        for i, exit_ in enumerate(body.exits)
    ]
    return body, Nested(condition, (*constants, *passed), (_exit(eqn, condition, 0, Goes.DECISION),))


def _nested_in_cond(eqn: LoopEquation) -> tuple[Nested, ...]:
    return tuple(
        Nested(
            branch,
            tuple(
                _filled(eqn, branch, i, Filled.CONSTANT, eqn.invars[i + 1], place=i + 1)
                for i in range(len(branch.invars))
            ),
            tuple(_exit(eqn, branch, i, Goes.BRANCH, place=i) for i in range(len(branch.outvars))),
        )
        for branch in eqn.regions
    )


_NESTED = {"scan": _nested_in_scan, "while": _nested_in_while, "cond": _nested_in_cond}


def _body(eqn: LoopEquation) -> Nested:
    """The body of a scan or a while: constants, carries, rows in; carries, rows out."""
    body, loop, first = eqn.regions[-1], eqn.loop, eqn.loop.condition_consts
    kinds = [
        *[Filled.CONSTANT] * loop.consts,
        *[Filled.CARRY] * loop.carries,
        *[Filled.ROW] * (len(body.invars) - loop.consts - loop.carries),
    ]
    entries = tuple(
        _filled(eqn, body, i, kind, atom, place=first + i)
        for i, (kind, atom) in enumerate(zip(kinds, eqn.invars[first:], strict=True))
    )
    carried = entries[loop.consts : loop.consts + loop.carries]
    carries = [_exit(eqn, body, i, Goes.CARRY, place=i, carry=entry) for i, entry in enumerate(carried)]
    rows = [_exit(eqn, body, i, Goes.ROW, place=i) for i in range(loop.carries, len(body.outvars))]
    return Nested(body, entries, (*carries, *rows))


def _filled(
    loop: LoopEquation,
    program: Program,
    number: int,
    filled: Filled,
    atom: Atom,
    *,
    place: int = -1,
    passed: Exit | None = None,
) -> Entry:
    """Input `number` of a nested program; its equations begin with the fan_outs of the inputs."""
    var, head = program.invars[number], program.equations[number]
    assert head.invars == (var,), "an input of a nested program has a fan_out as its only user"
    return Entry(loop=loop, var=var, filled=filled, head=head, atom=atom, place=place, passed=passed)


def _exit(
    loop: LoopEquation, program: Program, number: int, goes: Goes, *, place: int = -1, carry: Entry | None = None
) -> Exit:
    """Result `number` of a nested program; its equations end with the fan_outs of the results that are no literals."""
    atom = program.outvars[number]
    after = sum(not isinstance(v, Literal) for v in program.outvars[number:])
    maker = None if isinstance(atom, Literal) else program.equations[-after]
    assert maker is None or maker.outvars == (atom,), "a result of a nested program is made by a fan_out of its own"
    return Exit(loop=loop, atom=atom, goes=goes, maker=maker, place=place, carry=carry)

"""Arrays that pass between the tasks of a stage, as values by which they are known.

A port is the number of an input or output of the stage's program (`StageProgram`); a carry and a result are numbers of the
operands and results of its loop over microbatches. `per_microbatch` says whether every microbatch has an array of its own.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from autopar.compat import Var
from autopar.layouts.mesh import Layout


@dataclasses.dataclass(frozen=True)
class InputRef:
    """A leaf, a lent leaf, an exchanged value, or, behind the ports, a constant of the stage's program."""

    port: int
    per_microbatch: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class RowRef:
    """One microbatch of an input that is a stack: rows of the batch, or what another stage sends."""

    port: int
    per_microbatch: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class NumberRef:
    """The number of the microbatch."""

    per_microbatch: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class ValueRef:
    """A value that a task of the stage makes."""

    var: Var
    per_microbatch: bool = False


@dataclasses.dataclass(frozen=True)
class MovedRef:
    """A constant of the loop in the layout in which the loop reads it; a literal is known by the first operand that it is."""

    source: Var | int
    layout: Layout
    per_microbatch: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class AccumulatorRef:
    """What the microbatches add up."""

    carry: int
    per_microbatch: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class SliceRef:
    """One microbatch of a result that is joined after the loop."""

    result: int
    per_microbatch: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class SendRef:
    """One microbatch of what another stage receives."""

    port: int
    per_microbatch: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class OutputRef:
    """What is made once, for the step or for another stage."""

    port: int
    per_microbatch: ClassVar[bool] = False


Ref = InputRef | RowRef | NumberRef | ValueRef | MovedRef | AccumulatorRef | SliceRef | SendRef | OutputRef
"""An array between tasks of a stage."""

"""Who hands a value to whom in a strategy graph, as data: the ends of its edges.

Several uses may have one source: a program brings the value into a layout once for all of them (`least_costs.py`).
"""

from __future__ import annotations

import dataclasses

from autopar.avals import Aval


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a value comes from: an output of a node; `stacked` if the value is a stack of such outputs."""

    node: int
    output: int
    stacked: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """A value passed from a node to an operand of another; `aval` is what changes layout, `trips` how often.

    `stacked`: the reader gets a row of it. `exposed`: the part of the seconds of a change that a step waits for. `held`: its
    layout may not change.
    """

    source: Source
    target: int
    operand: int
    stacked: bool
    aval: Aval
    trips: float
    exposed: float = 1.0
    held: bool = False

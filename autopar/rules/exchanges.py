"""What the devices exchange while an operation runs that its rule divides along factors which go together.

In: an equation, its rule, and which mesh axes divide each factor. Out: a `Division`: the collectives that the operation's local
form performs by itself, and how unevenly its work is divided. What can go wrong: a local form that performs others;
`tests/rules/test_collectives.py` compares the two in compiled programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping

from autopar.compat import JaxprEqn
from autopar.layouts.mesh import Axes, LogicalMesh
from autopar.rules.factor_rule import FactorRule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """Permutations of one kind within an operation.

    Attributes:
        value: the number of the operand that is sent, or of the result, counted on from the last operand.
        axes: the mesh axes along which each device sends to another.
        bytes: what a device sends at a time.
        count: how often.
        is_beside_work: whether the operation computes meanwhile.
        part: what of the value is sent; equal for equal parts, which a compiler sends once for all operations that need them.
            None: nothing that another operation sends.
    """

    value: int
    axes: Axes
    bytes: int
    count: int
    is_beside_work: bool
    part: Hashable = None


@dataclasses.dataclass(frozen=True)
class Division:
    """What a division of an operation brings; `slowest`: the work of the device with the most, over that of the mean."""

    exchanges: tuple[Exchange, ...] = ()
    slowest: float = 1.0


Divided = Callable[[JaxprEqn, FactorRule, Mapping[str, Axes], LogicalMesh], Division]

"""One row of the rule table: what an operation does, as far as planning has to know."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence

from autopar.compat import JaxprEqn
from autopar.rules import on_shard
from autopar.rules.exchanges import Divided
from autopar.rules.factor_rule import FactorRule
from autopar.rules.flops import Flops, of_elements

Rule = Callable[[JaxprEqn], FactorRule]
Groups = Callable[[JaxprEqn], Sequence[tuple[int, ...]]]
Scratch = Callable[[JaxprEqn, Sequence[Sequence[int]]], int]


class Work(enum.Enum):
    """What an operation's work consists of, by which it is priced.

    CONTRACTION: multiply-adds, many per element; the work must be divided.
    CONVOLUTION: the same, over windows.
    POINTWISE:   arithmetic on each element by itself; a compiler does it inside of what reads the result.
    FREE:        none; the result is the operand under another name or shape, or follows from positions alone.
    MOVE:        elements change places.
    REDUCTION:   whole dimensions are reduced.
    RANDOM:      random bits are drawn, at too high a price to draw them again for every reader.
    OTHER:       anything else: a kernel of its own, priced by the bytes that it reads and writes and by its start, whatever it
                 computes.
    """

    CONTRACTION = "contraction"
    CONVOLUTION = "convolution"
    POINTWISE = "pointwise"
    FREE = "free"
    MOVE = "move"
    REDUCTION = "reduction"
    RANDOM = "random"
    OTHER = "other"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrimitiveRule:
    """A row of the table; its docstring says what the columns mean."""

    rule: Rule
    work: Work = Work.OTHER
    local: on_shard.Local = on_shard.unchanged
    flops: Flops = of_elements
    adds: bool = False
    picks: bool = False
    barrier: bool = False
    permutation: Callable[[JaxprEqn], tuple[int, ...]] | None = None
    divided: Divided | None = None
    scratch: Scratch | None = None
    once: bool = False
    between: Callable[[JaxprEqn], float] | None = None
    holes: Callable[[JaxprEqn], float] | None = None
    masks: Callable[[JaxprEqn], float] | None = None
    if_finite: Groups | None = dataclasses.field(default=None, compare=False)  # left out of digests of users' rules

    @property
    def heavy(self) -> bool:
        """Whether it is a contraction, over windows or not, whose work must be divided."""
        return self.work is Work.CONTRACTION or self.convolves

    @property
    def convolves(self) -> bool:
        """Whether it has kernels for windows."""
        return self.work is Work.CONVOLUTION

    @property
    def random(self) -> bool:
        """Whether it draws random bits."""
        return self.work is Work.RANDOM

    @property
    def free(self) -> bool:
        """Whether it computes nothing."""
        return self.work is Work.FREE

    @property
    def fused(self) -> bool:
        """Whether compilers do it inside of what reads its result."""
        return self.work in (Work.POINTWISE, Work.FREE)

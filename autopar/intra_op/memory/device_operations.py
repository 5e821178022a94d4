"""What one device runs, as an XLA compiler is taken to see it: operations on values, in blocks.

`device_program` writes it, `footprint` reckons from it which buffers are there and when. Nothing here decides anything.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Mapping

from autopar.compat import Var
from autopar.intra_op.memory.compilers import XLA_CPU, Compiler
from autopar.layouts.mesh import Layout


class Kind(enum.Enum):
    """How an operation is run.

    ALIAS: not at all. CHEAP: folded into its readers. MOVED: so too, but it reads elements elsewhere than it writes them.
    COSTLY: folded if one operation reads it, by compilers that keep what is costly; DEAR: so by all, and then what is made of it
    alone, element by element, is kept in its place. REDUCE: by itself, reading what is folded. LIBRARY: a REDUCE that a library
    does if it is large enough. WHOLE: by itself, from buffers.
    """

    ALIAS = "alias"
    CHEAP = "cheap"
    MOVED = "moved"
    COSTLY = "costly"
    DEAR = "dear"
    REDUCE = "reduce"
    LIBRARY = "library"
    WHOLE = "whole"


FOLDED = (Kind.CHEAP, Kind.MOVED, Kind.COSTLY, Kind.DEAR)
"""Operations that are folded into those that read them."""
ELEMENTWISE = (Kind.CHEAP, Kind.COSTLY, Kind.DEAR)
"""Those of them that read each element where they write the result, if the result is as large."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Value:
    """A value of one device; `var` is the variable whose layout decides its size.

    `copy_of`: the input that it is, or the cast of one, perhaps in another layout; it then needs memory of its own only if that
    is so. `scope`: the module that makes it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    var: Var | None
    itemsize: int
    copy_of: int | None = None
    scope: str = ""

    @property
    def elements(self) -> int:
        """How many elements a device holds."""
        return self.bytes // max(self.itemsize, 1)


@dataclasses.dataclass(frozen=True)
class Held:
    """The number of a value and the layout it lies in; -1 is a literal."""

    value: int
    layout: Layout


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Operation:
    """Inputs and outputs are numbers of values; `over[i]` is what output i takes the place of if nobody reads it again.

    Operations of one `group` that do not wait for each other are merged, as XLA does with all-reduces. What is `by_library` the
    library of a LIBRARY operation does too, on the way to it. What `adds` is the sum of its two inputs if it is CHEAP, and adds
    to its first, which it is `over`, if it is WHOLE. What `multiplies` is a matrix product, which may take a summand. What
    `has_workspace` is a library's, whose result nothing else writes over. `reshaped` inputs it reads under another shape, which
    XLA writes down as an operation of its own between the two. What `chooses` runs one of its bodies, whose outputs are its own.
    """

    kind: Kind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    over: tuple[int, ...] = ()
    bodies: tuple[Block, ...] = ()
    group: Hashable = None
    by_library: bool = False
    adds: bool = False
    multiplies: bool = False
    has_workspace: bool = False
    chooses: bool = False
    reshaped: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """Operations in program order and what they compute; everything they read from elsewhere is there already.

    `places`: of a loop's body, for outputs the values that they are in the next trip: they end in that memory. `compiler`:
    who compiles it.
    """

    operations: tuple[Operation, ...]
    outputs: tuple[int, ...]
    places: Mapping[int, int] = dataclasses.field(default_factory=dict)
    compiler: Compiler = XLA_CPU


@dataclasses.dataclass(frozen=True)
class Span:
    """A buffer and the steps from which to which it is taken."""

    value: int
    first: int
    last: int

"""The walk in which every equation gets its operands in the layouts that its strategy asks for.

In: an `Assignment`. Out: for domains whose values lie in layouts (arrays, layouts alone, buffers), the moves that bring a
value from one layout to another, and which copies are gathered. How a move is made is the domain's own business.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Generic

from autopar.avals import Aval, is_opaque
from autopar.compat import Literal
from autopar.intra_op.lowering.assignment import Layouts, is_gathered
from autopar.intra_op.lowering.copies import CopyingDomain
from autopar.layouts.mesh import Layout
from autopar.layouts.moves import Move
from autopar.program.program import Atom
from autopar.program.walk import Scope, V


class LayoutDomain(CopyingDomain[V, Layout], Generic[V]):
    """A domain that follows an assignment, or other layouts."""

    def __init__(self, layouts: Layouts) -> None:
        self.layouts, self.copy_span = layouts, layouts.copy_span

    @abc.abstractmethod
    def layout_of(self, value: V) -> Layout:
        """The layout in which a value lies."""

    def need(self, atom: Atom, form: Layout, scope: Scope[V]) -> V:
        """The value of an operand in the layout in which an equation takes it; most lie in it already."""
        if not isinstance(atom, Literal):
            value = scope.values[atom]
            if self.layout_of(value) == form:
                return value
        return super().need(atom, form, scope)

    def path(self, value: V, layout: Layout, aval: Aval) -> Sequence[Move]:
        """The cheapest moves that bring a value into a layout; none for opaque values, which are never split."""
        given = self.layout_of(value)
        if given == layout or is_opaque(aval):
            return ()
        return self.layouts.spaces.between(aval, given, layout).path(given, layout)

    def is_gathered(self, value: V, form: Layout, aval: Aval) -> bool:
        """Whether all moves on the way are gatherings."""
        return is_gathered(self.path(value, form, aval))

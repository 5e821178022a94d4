"""Values in several forms: brought into a form once, and again when the copy has been dropped.

In: a domain whose values can be brought into other forms, such as arrays or buffers into other layouts. Out: what an
equation asks for. A value that several equations need in one form is brought there once and kept until its last use. Where
memory is short, copies that gathering alone makes are not kept: with a `copy_span`, a gathered copy that no equation has
used for more than so many equations is made again, and no gathering starts before the `latest` value is there. What can go
wrong: forms that are equal but not hashed so.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable
from typing import Generic, TypeVar

from autopar.avals import Aval
from autopar.compat import Literal
from autopar.program.program import Atom
from autopar.program.walk import Domain, Scope, V

F = TypeVar("F", bound=Hashable)


class CopyingDomain(Domain[V], Generic[V, F]):
    """A domain with forms; `copy_span` None: copies are kept until their last use."""

    copy_span: int | None = None

    @abc.abstractmethod
    def bring(self, value: V, form: F, aval: Aval, scope: Scope[V], *, late: V | None = None) -> V:
        """The value in a form; `late`: made no earlier than this other value is there."""

    @abc.abstractmethod
    def is_gathered(self, value: V, form: F, aval: Aval) -> bool:
        """Whether gathering alone brings the value into a form that it does not have yet."""

    def need(self, atom: Atom, form: F, scope: Scope[V]) -> V:
        """The value of an operand in the form in which an equation takes it."""
        if isinstance(atom, Literal):
            return self.bring(self.literal(atom, scope), form, atom.aval, scope)
        copy, used = scope.copies.get((atom, form), (None, None))
        value, aval = scope.values[atom], atom.aval
        is_late = self._is_stale(used, scope) and self.is_gathered(value, form, aval)
        if copy is None or is_late:
            copy = self.bring(value, form, aval, scope, late=scope.latest if is_late else None)
        scope.copies[atom, form] = copy, scope.position
        return copy

    def _is_stale(self, used: int | None, scope: Scope[V]) -> bool:
        """Whether a copy last used there, or never, is one that would not be kept for so long."""
        if self.copy_span is None:
            return False
        return used is None or scope.position - used > self.copy_span

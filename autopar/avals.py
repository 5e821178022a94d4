"""Facts of an abstract value (`aval`): its elements, their size, the bytes of the whole.

In: what JAX says of a value before there is one. Out: numbers and names that every pass needs. What can go wrong: element types
that are no plain numbers, such as random keys; `is_opaque` tells them apart.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Protocol

import numpy as np


class Aval(Protocol):
    """The shape and the type of elements of a value."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each dimension."""

    @property
    def dtype(self) -> Any:
        """NumPy's type of elements, or JAX's for random keys."""


class HasAval(Protocol):
    """A variable or a literal."""

    @property
    def aval(self) -> Any:
        """Its shape and dtype."""


def itemsize_of(aval: Any) -> int:
    """Bytes of one element."""
    return int(aval.dtype.itemsize)


@functools.cache
def dtype_name(dtype: Any) -> str:
    """The name of a type of elements, which NumPy makes anew each time."""
    return str(dtype)


def is_opaque(aval: Any) -> bool:
    """Whether elements are not plain numbers (random keys): such values are never split or combined."""
    return not isinstance(aval.dtype, np.dtype)


def bytes_of(var: HasAval) -> int:
    """Bytes of a whole value, on all devices together."""
    return int(math.prod(var.aval.shape)) * itemsize_of(var.aval)

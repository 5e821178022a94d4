"""A table of the most recently used keys, of limited size."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from autopar.errors import warn

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A table that drops the least recently used key when it has more than `limit` keys; None keeps all keys."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.dropped = 0
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def find(self, key: K, *, is_use: bool = True, holds: Callable[[V], bool] = lambda value: True) -> V | None:
        """Return the value of a key, or None if there is none that still `holds`. With `is_use` the key counts as used now."""
        with self._lock:
            if is_use and key in self._values:
                self._values.move_to_end(key)
            value = self._values.get(key)
            return value if value is not None and holds(value) else None

    def keep(self, key: K, value: V) -> None:
        """Keep a value for a key, which counts as used now. `dropped` counts the keys that were dropped."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while self.limit is not None and len(self._values) > self.limit:
                self._values.popitem(last=False)
                self.dropped += 1

    def values(self) -> tuple[V, ...]:
        """Return all values, the least recently used one first."""
        with self._lock:
            return tuple(self._values.values())


def warn_of_many(name: str, limit: int | None) -> None:
    """Warn that the step with this name has dropped a program."""
    warn(
        f"{name} was called with more than {limit} sets of shapes, types and static values, and from now on drops the least "
        "recently used program: a call that needs it again plans and compiles again. Pad batches to a few sizes, or raise "
        "max_programs."
    )

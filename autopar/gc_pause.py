"""Python's garbage collector while a step is planned.

A traced step consists of about a million objects, all alive, and planning makes many more. Full collections would walk through
all of them again and again, for a sixth of the planning time. Collections of young objects would take another sixth, and JAX has
XLA look for garbage at each; yet planning leaves hardly any garbage in cycles. So there are none, and what is left counts as
old afterwards. A step that was planned before is garbage in cycles, and old: who plans many in one process never gives the
collector a reason to look at it. So if a pause left much behind, the next one begins with a full collection. What can go wrong:
garbage in cycles, also of other threads, stays until then. Pauses of several threads overlap, and the last one to end puts the
thresholds back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
from collections.abc import Iterator

YOUNG = 100_000_000
"""Number of new objects before a collection of young ones; Python's own is some hundreds. GPT-39B makes 20 million, and needs 8 %
more memory without any collection (`benchmarks/planning_ordinary.py`)."""
NEVER = 1_000_000
"""Number of collections of younger objects before a full one."""
MANY = 1_000_000
"""New objects that the next collection of young ones is to be spared: it walks over fewer in a tenth of a second."""


@dataclasses.dataclass
class _Pauses:
    """How many threads are in a pause, the collector's thresholds before the first of them, and whether the last left much."""

    count: int = 0
    left_much: bool = False
    before: tuple[int, int, int] = (0, 0, 0)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


_PAUSES = _Pauses()


@contextlib.contextmanager
def pause_full_collections() -> Iterator[None]:
    """A context in which the collector does not look for garbage; one that is off stays off."""
    with _PAUSES.lock:
        if not _PAUSES.count:
            young, middle, _ = _PAUSES.before = gc.get_threshold()
            if _PAUSES.left_much and young and gc.isenabled():
                gc.collect()
            gc.set_threshold(max(young, YOUNG) if young else 0, middle, NEVER)
        _PAUSES.count += 1
    try:
        yield
    finally:
        with _PAUSES.lock:
            _PAUSES.count -= 1
            if not _PAUSES.count:
                _PAUSES.left_much = gc.get_count()[0] >= MANY
                _count_all_as_old()
                gc.set_threshold(*_PAUSES.before)


def _count_all_as_old() -> None:
    """Spare the next collection of young objects all that is there, if that is much.

    Nothing is done where the user has frozen objects. To count these takes long if they are many.
    """
    if gc.get_count()[0] >= MANY and not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()  # it puts what was frozen among the old

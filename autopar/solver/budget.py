"""What a search may still spend: seconds, units of work, and patience.

In: limits. Out: whether to go on. Every search asks its `Budget` often and hands over the best that it has when the budget is
over. One unit of work is one entry of a cost matrix that is looked at once; what takes longer, such as array operations on what
is small (`CALL`), counts as so many entries. Units are counted the same on every machine, so two runs with equal `work` and no
limit of seconds end at the same place. What can go wrong: a search that does not ask runs on; work that is not counted makes
equal units of two problems unequal seconds (`benchmarks/iopddl.py` prints nanoseconds per unit).
"""

from __future__ import annotations

import math
import mmap
import struct
import time
from collections.abc import Callable

SECONDS_PER_UNIT = 4e-9
"""What a unit of work takes on a core of today, roughly: to compare work with what it may save, never to end it."""
CALL = 1_000.0
"""Units of work of a few array operations beside their entries, or of a step of a loop in Python: some microseconds."""
_DOUBLE = struct.Struct("d")


class LateError(Exception):
    """The clock has ended what cannot hand over a part of itself."""


class LeftError(BaseException):
    """A search is left where it stands, from outside. It is no Exception, or the search would take it for an error of a job.

    Attributes:
        asked: what was sought, noted by who knows it on the way out.
    """

    asked: tuple[object, object] | None = None


class Flag:
    """A truth that forks of this process share: whoever raises it, all see it."""

    def __init__(self, *, is_raised: bool = False) -> None:
        """Raise it at once if it `is_raised`."""
        self._byte = mmap.mmap(-1, 1)
        self._byte[0] = is_raised

    def __bool__(self) -> bool:
        return bool(self._byte[0])

    def lift(self) -> None:
        """Raise the flag, for good."""
        self._byte[0] = 1


class Least:
    """The least number that forks of this process have told each other. Of two that tell one at once, one may be lost."""

    def __init__(self, value: float = math.inf) -> None:
        self._bytes = mmap.mmap(-1, _DOUBLE.size)
        self.tell(value)

    @property
    def value(self) -> float:
        """The least so far; infinite before there is one."""
        (told,) = _DOUBLE.unpack(self._bytes[:])
        return told or math.inf

    def tell(self, value: float) -> None:
        """Tell a positive number, which counts if it is the least."""
        if 0 < value < self.value:
            self._bytes[:] = _DOUBLE.pack(value)


class Budget:
    """A limit of seconds, of units of work, or of both; over as soon as one is reached or `stop` is called.

    Parts of a budget (`part`) end with it, and what is spent of a part is spent of the whole.
    """

    def __init__(
        self,
        *,
        seconds: float = math.inf,
        work: float = math.inf,
        whole: Budget | None = None,
        clock: Budget | None = None,
        once: Flag | None = None,
        until: Callable[[], bool] | None = None,
    ) -> None:
        """Start the clock.

        Args:
            seconds: of wall time, from now on.
            work: units; see the module's text.
            whole: the budget that this one is a part of.
            clock: a budget whose clock ends this one too, while its work is its own.
            once: a flag before which that clock does not count; None: it always does.
            until: says whether what is sought is of no more use, which ends it as well; asked often.
        """
        self.work, self.spent = work, 0.0
        self._until = until
        self._whole, self._clock, self._once = whole, clock, once
        self._stopped: bytearray | mmap.mmap = bytearray(1)
        self._started = time.monotonic()
        self._ends = self._started + seconds

    @property
    def is_over(self) -> bool:
        """Whether to end the search."""
        if self.spent >= self.work or self.is_late or (self._until is not None and self._until()):
            return True
        return self._whole is not None and self._whole.is_over

    @property
    def is_late(self) -> bool:
        """Whether the clock has ended it, or `stop`; work aside."""
        if self._stopped[0] or time.monotonic() >= self._ends:
            return True
        if self._clock is not None and (self._once is None or self._once) and self._clock.is_late:
            return True
        return self._whole is not None and self._whole.is_late

    @property
    def clock_left_s(self) -> float:
        """Seconds until a clock that may end it is over, even if that clock does not count yet; infinite without one."""
        own = max(0.0, self._ends - time.monotonic())
        return min([own, *(budget.clock_left_s for budget in (self._clock, self._whole) if budget is not None)])

    def require_time(self) -> None:
        """Raise LateError if it `is_late`; for what takes long and is of no use unless it is finished."""
        if self.is_late:
            raise LateError

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    @property
    def used(self) -> float:
        """The part of its seconds that is over, between 0 and 1; 0 without such a limit."""
        left_s = self.seconds_left
        return self.elapsed_s / (self.elapsed_s + left_s) if left_s else 1.0

    @property
    def seconds_left(self) -> float:
        """Seconds of wall time until it is over at the latest; infinite without such a limit."""
        own = max(0.0, self._ends - time.monotonic())
        if self._clock is not None and (self._once is None or self._once):
            own = min(own, self._clock.seconds_left)
        return own if self._whole is None else min(own, self._whole.seconds_left)

    @property
    def work_left(self) -> float:
        """Units of work until it is over at the latest; infinite without such a limit."""
        own = max(0.0, self.work - self.spent)
        return own if self._whole is None else min(own, self._whole.work_left)

    def spend(self, work: float) -> None:
        """Note that units of work were done."""
        self.spent += work
        if self._whole is not None:
            self._whole.spend(work)

    def stop(self) -> None:
        """End it now; for signal handlers and other threads."""
        self._stopped[0] = 1

    def share_with_forks(self) -> Budget:
        """The same budget, whose `stop` reaches processes that are forked from now on."""
        self._stopped = mmap.mmap(-1, 1)
        return self

    def clocked(self, *, work: float = math.inf, once: Flag | None = None) -> Budget:
        """A budget with work of its own, which is not spent of this one, and with this one's clock, `once` a flag is raised."""
        return Budget(work=work, clock=self, once=once)

    def hurried(self, *, work: float = math.inf) -> Budget:
        """A part that the clock ends in any case, whether or not the flag is raised `once` it counts."""
        return Budget(work=work, whole=self, clock=self._clock)

    def part(self, share: float) -> Budget:
        """A budget of this share of what is left, between 0 and 1."""
        return Budget(seconds=share * self.seconds_left, work=share * self.work_left, whole=self)

    def limit(
        self, *, seconds: float = math.inf, work: float = math.inf, until: Callable[[], bool] | None = None
    ) -> Budget:
        """A part with limits of its own."""
        return Budget(seconds=seconds, work=work, whole=self, until=until)

"""Clocks for steps on devices that may share cores, and memory that stays with the process.

Virtual CPU devices share the cores and keep them busy, so a step takes the processor seconds of all threads over the cores.
That is measured there: it hardly changes while other programs run, and on a quiet machine it is the time on the clock.

What can go wrong on Linux: an allocator that gives freed buffers back to the system. Every step then pays for new pages
again, up to a third of its time, and not the same in each process. `keep_freed_memory` asks it not to.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Sequence

import jax

from autopar.cost_model.cores import available_cores

_MALLOPT = {"trim threshold": (-1, 2**31 - 1), "top pad": (-2, 2**28), "mapped regions": (-4, 0)}
"""glibc's options, as (number, value): the free memory beyond which it gives back; what it keeps spare, more than a heap of
64 MB, which is then never given back whole; and whether large buffers get regions of their own."""


def keep_freed_memory() -> bool:
    """Make this process keep the memory that it frees, if its allocator is glibc's; returns whether it will.

    Call it before devices are first used.
    """
    if sys.platform != "linux" or not hasattr(library := ctypes.CDLL(None), "mallopt"):
        return False
    return all(library.mallopt(option, value) == 1 for option, value in _MALLOPT.values())


def step_clock(devices: Sequence[jax.Device]) -> Callable[[], float]:
    """The clock of steps on these devices, in seconds: the wall's, for virtual CPU devices processor seconds over cores."""
    if devices[0].platform != "cpu" or len(devices) == 1:
        return time.perf_counter
    busy = cores_of(devices)
    return lambda: time.process_time() / busy


def cores_of(devices: Sequence[jax.Device]) -> int:
    """How many cores virtual CPU devices can keep busy: those that this process may use, at most one for each device."""
    return min(available_cores(), len(devices))


def undisturbed_s(times_s: Sequence[float]) -> float:
    """What a step takes when little else runs: the lower decile of its times, the second least of fifteen."""
    return sorted(times_s)[len(times_s) // 10]

"""The runtime's intervals: how long a thread waits before it looks again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Seconds. All trade processor time against a late reaction; `benchmarks/runtime_overhead.py` shows what they cost.

    Attributes:
        poll_s: No thread waits longer without looking: a mesh, in case a second Ctrl-C keeps the first from waking it;
            the calling thread, because Python does not notice a signal that comes between its last look and a wait.
        leave_s: How long the caller waits for a thread that may be stuck in XLA because of another process.
        exit_s: How much longer each process than the one before it waits for such threads when it exits. Only where several
            have such threads does one wait so long: another one ends in seconds, also on a busy machine, and frees them. With
            two seconds a process whose thread was freed a moment later aborted (`tests/test_processes.py`).
        longest_exit_s: The longest such wait.
        look_s: How often a process that waits for others asks whether one of them has failed.
        shortest_pause_s: The first pause between two looks at an array in computation; each pause is twice the one before.
        longest_pause_s: The longest such pause.
    """

    poll_s: float = 0.5
    leave_s: float = 2.0
    exit_s: float = 10.0
    longest_exit_s: float = 60.0
    look_s: float = 0.5
    shortest_pause_s: float = 5e-5
    longest_pause_s: float = 2e-3


TUNING = Tuning()

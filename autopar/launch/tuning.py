"""The supervisor's intervals."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Seconds. They trade an early reaction against work and against false alarms; `tests/launch` shows how fast restarts are.

    Attributes:
        look_s: The supervisor looks at its workers at least this often; what they write and their ends wake it earlier.
        beat_s: A worker says this often that it lives; a line of a hundred bytes.
        stopped_s: A worker may stand still by a signal for so long, as under a debugger, before it counts as lost.
        start_s: How much later than others the first sign of a worker may come, while Python and its packages are loaded.
        exit_s: A script that has failed may take so long to exit; JAX waits there for the others, and they for it.
        settle_s: After a first failure others are waited for this long, so that the cause is told from what follows of it.
        failure_grace_s: What survivors of a failure have to end by themselves. They cannot save: one of them is missing.
        drain_s: How long what ended workers have written is read, if a process that they left behind keeps it open.
        nap_s: The supervisor's own standstill, as of a laptop that sleeps, from which on silence is not held against workers.
    """

    look_s: float = 0.1
    beat_s: float = 0.5
    stopped_s: float = 3.0
    start_s: float = 60.0
    exit_s: float = 2.0
    settle_s: float = 0.3
    failure_grace_s: float = 3.0
    drain_s: float = 1.0
    nap_s: float = 3.0


TUNING = Tuning()

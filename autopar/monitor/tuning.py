"""The monitor's intervals."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """They trade processor time against a late reaction; `benchmarks/monitor_overhead.py` shows what they cost.

    Attributes:
        look_s: Seconds between two looks at what stands still, at the most.
        looks: How many looks there are within the time after which a step is named.
        first_call: How many times longer the first call of a plan may take, in which a pipeline is compiled.
        shortest_pause_s: Seconds of the first pause between two looks at a result; each pause is twice the one before.
        longest_pause_s: Seconds of the longest such pause, and how exact `StepMetrics.step_s` is.
        leave_s: How many seconds the end of monitoring waits for the results of steps that are still under way.
    """

    look_s: float = 0.5
    looks: int = 8
    first_call: float = 3.0
    shortest_pause_s: float = 1e-4
    longest_pause_s: float = 2e-3
    leave_s: float = 5.0


TUNING = Tuning()

"""The monitor's intervals."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Intervals that trade processor time against a late reaction; `benchmarks/monitor_overhead.py` shows their cost.

    Attributes:
        look_s: The most seconds between two looks for a stall.
        looks: The number of looks within the time after which a stall is reported.
        first_call: The factor by which the first call of a plan, which compiles a pipeline, may take longer.
        shortest_pause_s: Seconds of the first pause between two looks at a result; each pause is twice the one before.
        longest_pause_s: Seconds of the longest such pause, which bounds the error of `StepMetrics.step_s`.
        leave_s: The most seconds that the end of monitoring waits for results of steps that are under way.
    """

    look_s: float = 0.5
    looks: int = 8
    first_call: float = 3.0
    shortest_pause_s: float = 1e-4
    longest_pause_s: float = 2e-3
    leave_s: float = 5.0


TUNING = Tuning()

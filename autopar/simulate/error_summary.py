"""Errors of predictions against measurements: of each row, and of a table.

In: rows with their predictions. Out: an `ErrorSummary`. A row's target is its step time where that was published, else its
TFLOP/s per device, turned round so that too slow is positive in both. Ranks are compared by Spearman's correlation, ties
sharing their mean rank. A run that ran out of memory is recalled if it is predicted not to fit; a run that was measured and is
predicted not to fit is a false alarm. What can go wrong: an average over rows of different clusters; read the rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from autopar.simulate.closed_forms.job_prediction import JobPrediction
from autopar.simulate.rows import Row

GIGA = 1e9


@dataclasses.dataclass(frozen=True)
class PricedRow:
    """A row and what is predicted for it, by plans of its parts if they could be planned.

    `closed`: the closed form beside it, where plans were asked for; `not_planned`: why it had to take their place.
    """

    row: Row
    predicted: JobPrediction
    closed: JobPrediction | None = None
    not_planned: str = ""

    @property
    def planned(self) -> bool:
        """Whether plans say what is predicted."""
        return self.closed is not None and not self.not_planned

    @property
    def measured_step_s(self) -> float | None:
        """Seconds per step as published, or as the published TFLOP/s amount to; None if neither is known."""
        if self.row.step_s is not None:
            return self.row.step_s
        if not self.row.model_tflops_per_device:
            return None
        job = self.predicted.job
        return job.model_flops / job.devices / (self.row.model_tflops_per_device * 1e12)

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured step time; None without a measurement."""
        measured = self.measured_step_s
        return None if not measured else self.predicted.step.step_s / measured - 1

    @property
    def closed_error(self) -> float | None:
        """The same of the closed form."""
        measured = self.measured_step_s
        return None if not measured or self.closed is None else self.closed.step.step_s / measured - 1

    @property
    def apart(self) -> float | None:
        """(plans - closed form) / closed form; None where there are no plans."""
        if self.closed is None or self.not_planned:
            return None
        return self.predicted.step.step_s / self.closed.step.step_s - 1

    @property
    def memory_error(self) -> float | None:
        """(predicted - measured) / measured peak memory."""
        measured = self.row.peak_mem_GB
        return None if not measured else self.predicted.step.memory.peak_bytes / (measured * GIGA) - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorSummary:
    """See the module; None where there is nothing to compare."""

    rows: int
    compared: int
    mean_absolute_error: float | None
    max_absolute_error: float | None
    mean_error: float | None
    rank_correlation: float | None
    memory_mean_absolute_error: float | None
    out_of_memory_recall: float | None
    false_alarms: int
    planned: int = 0
    mean_apart: float | None = None
    closed_form_mean_absolute_error: float | None = None


def summarise(rows: Sequence[PricedRow]) -> ErrorSummary:
    """The summary of a table's rows."""
    compared = [(row.error, row) for row in rows if row.error is not None and not row.row.out_of_memory]
    errors = [error for error, _ in compared]
    memory = [row.memory_error for row in rows if row.memory_error is not None and not row.row.out_of_memory]
    ran_out = [row for row in rows if row.row.out_of_memory]
    apart = [abs(row.apart) for row in rows if row.apart is not None]
    closed = [abs(row.closed_error) for _, row in compared if row.closed_error is not None]
    predicted = [row.predicted.step.step_s for _, row in compared]
    measured = [row.measured_step_s or math.nan for _, row in compared]
    return ErrorSummary(
        rows=len(rows),
        compared=len(compared),
        mean_absolute_error=_mean([abs(error) for error in errors]),
        max_absolute_error=max((abs(error) for error in errors), default=None),
        mean_error=_mean(errors),
        rank_correlation=rank_correlation(predicted, measured),
        memory_mean_absolute_error=_mean([abs(error) for error in memory]),
        out_of_memory_recall=_mean([float(not row.predicted.step.fits) for row in ran_out]),
        false_alarms=sum(not row.predicted.step.fits for _, row in compared),
        planned=len(apart),
        mean_apart=_mean(apart),
        closed_form_mean_absolute_error=_mean(closed),
    )


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's: the correlation of ranks, ties sharing their mean rank; None if either is constant or shorter than 2."""
    a, b = _ranks(first), _ranks(second)
    if len(set(a)) < 2 or len(set(b)) < 2:
        return None
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    together = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    apart = math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))
    return together / apart


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2 for value in values
    ]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

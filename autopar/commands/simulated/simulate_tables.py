"""What `simulate --table` prints: tables of rows and of their parts, and a summary of the errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autopar.commands.terminal.printing import new_table
from autopar.cost_model.overlap import Kind, overlap_ratio
from autopar.explain.units import bytes_text, seconds_text
from autopar.simulate.error_summary import GIGA, ErrorSummary, PricedRow

SHOWN_KINDS: tuple[Kind, ...] = ("tensor", "pipeline", "data_parallel", "zero3")
CONTEXT: Kind = "context"
"""Shown where some row divides its sequences."""


def make_rows_table(rows: Sequence[PricedRow]) -> Table:
    """Predicted against measured, row by row."""
    table = new_table(
        "Predicted against measured",
        "row", "cluster", "step", "predicted", "TFLOP/s", "predicted", "error", "memory", "predicted", "fits",
        words=("row", "cluster", "fits"),
    )  # fmt: skip
    for priced in rows:
        row, step = priced.row, priced.predicted.step
        measured_bytes = None if row.peak_mem_GB is None else row.peak_mem_GB * GIGA
        cells = (
            row.id,
            row.cluster_name,
            "out of memory" if row.out_of_memory else _or_dash(row.step_s, seconds_text),
            seconds_text(step.step_s),
            _or_dash(row.model_tflops_per_device, "{:.1f}".format),
            f"{priced.predicted.tflops_per_device:.1f}",
            _or_dash(priced.error, "{:+.1%}".format),
            _or_dash(measured_bytes, bytes_text),
            bytes_text(step.memory.peak_bytes),
            "yes" if step.fits else "no",
        )
        table.add_row(*map(Text, cells))
    return table


def make_closed_form_table(rows: Sequence[PricedRow]) -> Table:
    """The plans of the parts against the closed form; apart is plans over closed form."""
    table = new_table(
        "The plan of each part against the closed form",
        "row", "plans", "closed form", "apart", "error", "closed form's", "tensor", "closed form's", "compute",
        "closed form's", "",
        words=("row", ""),
    )  # fmt: skip
    for priced in rows:
        assert priced.closed is not None
        step, closed = priced.predicted.step, priced.closed.step
        if not priced.planned:
            table.add_row(priced.row.id, "-", seconds_text(closed.step_s), *[""] * 7, Text(priced.not_planned))
            continue
        cells = (
            priced.row.id,
            seconds_text(step.step_s),
            seconds_text(closed.step_s),
            _or_dash(priced.apart, "{:+.1%}".format),
            _or_dash(priced.error, "{:+.1%}".format),
            _or_dash(priced.closed_error, "{:+.1%}".format),
            *(seconds_text(one.communication["tensor"].total_s) for one in (step, closed)),
            *(seconds_text(one.compute_s) for one in (step, closed)),
            "",
        )
        table.add_row(*map(Text, cells))
    return table


def _or_dash(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


def make_parts_table(rows: Sequence[PricedRow]) -> Table:
    """Where the seconds of each row's step go."""
    divided = any(priced.predicted.step.communication[CONTEXT].total_s for priced in rows)
    table = new_table(
        "Where the step goes; overlap is hidden over all communication of a kind",
        "row", "compute", "bubble", "optimizer", "tensor", "overlap", "pipeline", "overlap", "data", "overlap", "zero3",
        "overlap", *(("context", "overlap") if divided else ()), "experts",
        words=("row",),
    )  # fmt: skip
    for priced in rows:
        step = priced.predicted.step
        kinds = []
        for kind in (*SHOWN_KINDS, *((CONTEXT,) if divided else ())):
            part = step.communication[kind]
            ratio = overlap_ratio(part)
            kinds += [seconds_text(part.exposed_s), _or_dash(ratio, "{:.0%}".format)]
        cells = (
            priced.row.id,
            *(seconds_text(seconds) for seconds in (step.compute_s, step.bubble_s, step.optimizer_s)),
            *kinds,
            seconds_text(step.communication["expert"].exposed_s),
        )
        table.add_row(*map(Text, cells))
    return table


def print_summary(console: Console, summary: ErrorSummary) -> None:
    """Print the errors of all rows together, in words."""
    console.print()
    lines = [f"{summary.rows} rows priced, {summary.compared} of them with a measurement to compare"]
    if summary.mean_absolute_error is not None and summary.max_absolute_error is not None:
        lines.append(
            f"error of the step time: mean absolute {summary.mean_absolute_error:.1%}, max {summary.max_absolute_error:.1%}, "
            f"mean signed {summary.mean_error:+.1%}"
        )
    if summary.rank_correlation is not None:
        lines.append(f"rank correlation {summary.rank_correlation:.3f}")
    if summary.memory_mean_absolute_error is not None:
        lines.append(f"error of the peak memory: mean absolute {summary.memory_mean_absolute_error:.1%}")
    if summary.out_of_memory_recall is not None:
        lines.append(f"out of memory: {summary.out_of_memory_recall:.0%} of the runs that ran out are flagged")
    lines.append(f"{summary.false_alarms} runs that were measured are predicted not to fit")
    if summary.mean_apart is not None:
        error = _or_dash(summary.closed_form_mean_absolute_error, "{:.1%}".format)
        lines.append(
            f"{summary.planned} rows by plans of their parts, mean {summary.mean_apart:.1%} apart from the closed form; "
            f"its error of the step time: mean absolute {error}"
        )
    for line in lines:
        console.print(line, markup=False, highlight=False)

"""`simulate`: what published or planned runs should cost on a cluster that one need not own.

In: a table of runs (`--table`), or a saved plan and a cluster (`--plan`, `--cluster`: `simulate_plan`). Out: predicted against
measured for each row and a summary of the errors. The parts of a row's model are built and planned by the ordinary planner under
the row's plan; the closed form is priced beside it as a cross-check, and alone with `--closed-form`. A row that cannot be priced
is an error on standard error, the other rows still run, and the exit status says so.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autopar.commands.simulate_plan import print_json, simulate_plan, titled_table
from autopar.errors import ArgumentError
from autopar.explain import standard_output
from autopar.explain.units import bytes_text, seconds_text
from autopar.simulate.closed_forms.job_prediction import predict
from autopar.simulate.error_summary import GIGA, ErrorSummary, PricedRow, summarise
from autopar.simulate.overlap import Kind, overlap_ratio
from autopar.simulate.planned_parts import PartPlanner, planned_prediction
from autopar.simulate.rows import Row, RowError, read_table

SOME_ROWS_FAILED = 1
SHOWN_KINDS: tuple[Kind, ...] = ("tensor", "pipeline", "data_parallel", "zero3")
JSON_KEYS = (
    "id", "source", "cluster", "step_s", "predicted_step_s", "model_tflops_per_device",
    "predicted_model_tflops_per_device", "peak_mem_GB", "predicted_peak_mem_GB", "fits",
)  # fmt: skip


def simulate(options: argparse.Namespace) -> int:
    """Run `simulate`; 0 if everything asked for could be priced."""
    return simulate_plan(options) if options.table is None else _simulate_table(options)


def _simulate_table(options: argparse.Namespace) -> int:
    output: Path | None = options.csv
    planner = None if options.closed_form else PartPlanner()
    found = [_priced(row, planner) if isinstance(row, Row) else row for row in read_table(options.table)]
    priced = [row for row in found if isinstance(row, PricedRow)]
    failed = [row for row in found if isinstance(row, RowError)]
    summary = summarise(priced)
    if output is not None:
        _write_csv(output, priced)
    if options.json:
        print_json(
            {"rows": [json_row(row) for row in priced], "errors": [str(e) for e in failed], "summary": _plain(summary)}
        )
    elif priced:
        console = standard_output()
        console.print(_rows_table(priced))
        console.print(_parts_table(priced))
        if planner is not None:
            console.print(_closed_form_table(priced))
        _print_summary(console, summary)
    for error in failed:
        sys.stderr.write(f"autopar: {options.table}: {error}\n")
    return SOME_ROWS_FAILED if failed else 0


def _priced(row: Row, planner: PartPlanner | None) -> PricedRow | RowError:
    try:
        closed = predict(row.cluster, row.job)
        if planner is None:
            return PricedRow(row, closed)
        planned, reason = planned_prediction(planner, row.cluster, closed.job)
        return PricedRow(row, planned or closed, closed, reason)
    except ValueError as error:
        return RowError(f"row {row.number} ({row.id}): column 'cluster' is {row.cluster_name!r}: {error}")


def json_row(row: PricedRow) -> dict[str, object]:
    """A row as `--json` and `--csv` write it: what is asked for, then the parts of the prediction."""
    step, job = row.predicted.step, row.predicted.job
    required = (
        row.row.id, row.row.source, row.row.cluster_name, row.row.step_s, step.step_s, row.row.model_tflops_per_device,
        row.predicted.tflops_per_device, row.row.peak_mem_GB, step.memory.peak_bytes / GIGA, step.fits,
    )  # fmt: skip
    ratios = {f"{kind}_overlap_ratio": overlap_ratio(step.communication[kind]) for kind in SHOWN_KINDS}
    return {
        **dict(zip(JSON_KEYS, required, strict=True)),
        "error": row.error,
        "compute_s": step.compute_s,
        "exposed_comm_s": step.exposed_comm_s,
        "bubble_s": step.bubble_s,
        "optimizer_s": step.optimizer_s,
        "states_GB": step.memory.states_bytes / GIGA,
        "activations_GB": step.memory.activation_bytes / GIGA,
        "microbatch": job.microbatch,
        "virtual_stages": job.virtual_stages,
        **ratios,
        **_closed_columns(row),
    }


def _closed_columns(row: PricedRow) -> dict[str, object]:
    """What the closed form says of a row beside its plans; nothing where it was asked for alone."""
    if row.closed is None:
        return {}
    return {
        "closed_form_step_s": row.closed.step.step_s,
        "closed_form_error": row.closed_error,
        "apart": row.apart,
        "not_planned": row.not_planned,
    }


def _plain(summary: ErrorSummary) -> dict[str, object]:
    return dataclasses.asdict(summary)


def _write_csv(path: Path, rows: Sequence[PricedRow]) -> None:
    records = [json_row(row) for row in rows]
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(records[0]) if records else list(JSON_KEYS))
            writer.writeheader()
            writer.writerows(records)
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}") from None


def _rows_table(rows: Sequence[PricedRow]) -> Table:
    table = titled_table(
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


def _closed_form_table(rows: Sequence[PricedRow]) -> Table:
    """The plans of the parts against the closed form; apart is plans over closed form."""
    table = titled_table(
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


def _parts_table(rows: Sequence[PricedRow]) -> Table:
    table = titled_table(
        "Where the step goes; overlap is hidden over all communication of a kind",
        "row", "compute", "bubble", "optimizer", "tensor", "overlap", "pipeline", "overlap", "data", "overlap", "zero3",
        "overlap", "experts",
        words=("row",),
    )  # fmt: skip
    for priced in rows:
        step = priced.predicted.step
        kinds = []
        for kind in SHOWN_KINDS:
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


def _print_summary(console: Console, summary: ErrorSummary) -> None:
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

"""`simulate`: what published or planned runs should cost on a cluster that one need not own.

A table of runs (`--table`) gives predicted against measured for each row, and a summary of the errors; `--plan` and `--cluster`
are in `simulate_plan.py`. The parts of a row's model are built and planned by the ordinary planner under
the row's plan; the closed form is priced beside it as a cross-check, and alone with `--closed-form`. A row that cannot be priced
is an error on standard error, the other rows still run, and the exit status says so.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from autopar.commands.simulated.simulate_plan import simulate_plan
from autopar.commands.simulated.simulate_tables import (
    CONTEXT,
    SHOWN_KINDS,
    make_closed_form_table,
    make_parts_table,
    make_rows_table,
    print_summary,
)
from autopar.commands.terminal.printing import print_json
from autopar.cost_model.cores import available_cores
from autopar.cost_model.overlap import overlap_ratio
from autopar.explain import standard_output
from autopar.files.whole_file import save
from autopar.gc_pause import pause_full_collections
from autopar.live_line import show_progress
from autopar.progress import enter
from autopar.simulate.closed_forms.job_prediction import predict
from autopar.simulate.error_summary import GIGA, PricedRow, summarise
from autopar.simulate.planned_parts import PartPlanner, planned_prediction
from autopar.simulate.rows import Row, RowError, read_table

SOME_ROWS_FAILED = 1
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
    with show_progress(), pause_full_collections():
        found = price_rows(read_table(options.table), planner)
    priced = [row for row in found if isinstance(row, PricedRow)]
    failed = [row for row in found if isinstance(row, RowError)]
    summary = summarise(priced)
    if output is not None:
        _write_csv(output, priced)
    if options.json:
        rows, errors = [json_row(row) for row in priced], [str(error) for error in failed]
        print_json({"rows": rows, "errors": errors, "summary": dataclasses.asdict(summary)})
    elif priced:
        console = standard_output()
        console.print(make_rows_table(priced))
        console.print(make_parts_table(priced))
        if planner is not None:
            console.print(make_closed_form_table(priced))
        print_summary(console, summary)
    for error in failed:
        sys.stderr.write(f"autopar: {options.table}: {error}\n")
    return SOME_ROWS_FAILED if failed else 0


def price_rows(rows: Sequence[Row | RowError], planner: PartPlanner | None) -> list[PricedRow | RowError]:
    """What is predicted for each row, by the closed form alone without a planner; a RowError where that cannot be.

    The parts of all rows are planned first, equal ones once, on as many cores as there are.
    """
    closed = [_closed_form(row) if isinstance(row, Row) else row for row in rows]
    found = [one for one in closed if isinstance(one, PricedRow)]
    if planner is None:
        return list(closed)
    jobs = [(one.row.cluster, one.predicted.job) for one in found]
    planner.plan_ahead(jobs, processes=available_cores())
    return [_by_plans(one, planner) if isinstance(one, PricedRow) else one for one in closed]


def _closed_form(row: Row) -> PricedRow | RowError:
    enter(f"row {row.number} ({row.id})")
    try:
        return PricedRow(row, predict(row.cluster, row.job))
    except ValueError as error:
        return RowError(f"row {row.number} ({row.id}): column 'cluster' is {row.cluster_name!r}: {error}")


def _by_plans(priced: PricedRow, planner: PartPlanner) -> PricedRow:
    """The same by plans of its parts, if they can be made."""
    closed = priced.predicted
    planned, reason = planned_prediction(planner, priced.row.cluster, closed.job)
    return PricedRow(priced.row, planned or closed, closed, reason)


def json_row(row: PricedRow) -> dict[str, object]:
    """A row as `--json` and `--csv` write it: the required columns, then the parts of the prediction."""
    step, job = row.predicted.step, row.predicted.job
    required = (
        row.row.id, row.row.source, row.row.cluster_name, row.row.step_s, step.step_s, row.row.model_tflops_per_device,
        row.predicted.tflops_per_device, row.row.peak_mem_GB, step.memory.peak_bytes / GIGA, step.fits,
    )  # fmt: skip
    ratios = {f"{kind}_overlap_ratio": overlap_ratio(step.communication[kind]) for kind in (*SHOWN_KINDS, CONTEXT)}
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


def _write_csv(path: Path, rows: Sequence[PricedRow]) -> None:
    records = [json_row(row) for row in rows]
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, fieldnames=list(records[0]) if records else list(JSON_KEYS))
    writer.writeheader()
    writer.writerows(records)
    save(path, table.getvalue())

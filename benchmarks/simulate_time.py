"""How long `simulate --table` takes over many rows, in closed form and by plans of the parts.

In: a table of runs, how many rows. Out: for each way wall and processor seconds of all rows, and how many distinct parts were
planned. The rows are those of the table, then the same with another recomputation, ZeRO stage, microbatch or number of data
ranks, as far as the plan is possible: runs of one study differ in this way. What can go wrong: other work on the machine;
processor seconds count forks as well.

    python benchmarks/simulate_time.py [--table FILE] [--rows 344] [--closed-form]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from autopar.commands.simulated.simulate import price_rows
from autopar.gc_pause import pause_full_collections
from autopar.simulate.closed_forms.training_job import TrainingJob, problems
from autopar.simulate.error_summary import PricedRow
from autopar.simulate.planned_parts import PartPlanner
from autopar.simulate.rows import Row, read_table

TABLE = Path(__file__).resolve().parent.parent / "tests" / "data" / "yardstick" / "published_steps.csv"


def variants(job: TrainingJob) -> Iterator[TrainingJob]:
    """The job, then others of the same model."""
    sizes = (job.microbatch,) if job.microbatch is None else (job.microbatch, 2 * job.microbatch)
    for ranks, size, zero_stage, recompute in itertools.product(
        (1, 2), sizes, (job.zero_stage, 1), (job.recompute, "full", "selective", "none")
    ):
        one = dataclasses.replace(
            job, data_ranks=ranks * job.data_ranks, devices=ranks * job.devices, global_batch=ranks * job.global_batch,
            microbatch=size, zero_stage=zero_stage, recompute=recompute,
        )  # fmt: skip
        if not any(problems(one)):
            yield one


def rows_of(table: Path, count: int) -> list[Row]:
    """That many rows: the first variant of each, then the second of each, and so on, none twice."""
    read = [row for row in read_table(table) if isinstance(row, Row)]
    columns = itertools.zip_longest(
        *([dataclasses.replace(row, job=job) for job in dict.fromkeys(variants(row.job))] for row in read)
    )
    return [row for column in columns for row in column if row is not None][:count]


def timed(rows: Sequence[Row], planner: PartPlanner | None) -> str:
    """Price the rows; one line about it."""
    wall_s, before = time.perf_counter(), os.times()
    with pause_full_collections():
        found = price_rows(rows, planner)
    after = os.times()
    cpu_s = sum(after[:4]) - sum(before[:4])
    planned = sum(isinstance(one, PricedRow) and one.planned for one in found)
    plans = "" if planner is None else f"; {planned} rows by {planner.plans} plans of parts"
    return f"{len(found)} rows: {time.perf_counter() - wall_s:.1f} s, {cpu_s:.1f} s of processors{plans}"


def main() -> int:
    """Time both ways."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--rows", type=int, default=344)
    parser.add_argument("--closed-form", action="store_true", help="not by plans")
    options = parser.parse_args()
    rows = rows_of(options.table, options.rows)
    print("closed form,", timed(rows, None))
    if not options.closed_form:
        print("plans,      ", timed(rows, PartPlanner()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

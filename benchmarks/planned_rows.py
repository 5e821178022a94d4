"""How far the closed form of a row and the plans of its parts are apart, row by row, for every family.

In: the yardstick's published steps, Alpa's runs whose plans are known (GPT, experts, residual networks), and one small row of
each family under several plans. Out: a line per row (seconds of both, how far apart they are, the error of both where there is
a measurement, processor seconds of planning), and a summary by source; `--json` writes it. The planner builds each part of the
real model from `models/` and plans it under the row's plan, stated as constraints; both compose the parts with one schedule.
What can go wrong: to read agreement as truth; the errors beside it say how far both are from measurements.

    python benchmarks/planned_rows.py [--source WORD] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from autopar.cost_model.hardware import Cluster, preset
from autopar.files.whole_file import save
from autopar.simulate.closed_forms.job_prediction import predict
from autopar.simulate.closed_forms.training_job import TrainingJob
from autopar.simulate.closed_forms.transformer_shape import TransformerShape
from autopar.simulate.planned_parts import PartPlanner, planned_prediction
from autopar.simulate.rows import Row, read_table

sys.path.insert(0, str(Path(__file__).resolve().parent))
from alpa_rows import end_to_end, measured_s

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "data" / "yardstick"
FAMILIES = {
    "gpt": TransformerShape(
        family="gpt", layers=24, hidden=2048, heads=16, kv_heads=16, ffn_hidden=8192, vocab=51200, seq_len=1024
    ),
    "bert": TransformerShape(
        family="bert", layers=24, hidden=2048, heads=16, kv_heads=16, ffn_hidden=8192, vocab=30592, seq_len=512
    ),
    "llama": TransformerShape(
        family="llama", layers=32, hidden=4096, heads=32, kv_heads=8, ffn_hidden=11008, vocab=32000, seq_len=2048
    ),
    "t5": TransformerShape(
        family="t5", layers=12, hidden=2048, heads=16, kv_heads=16, ffn_hidden=8192, vocab=32128, seq_len=512
    ),
    "moe": TransformerShape(
        family="moe",
        layers=16,
        hidden=1024,
        heads=16,
        kv_heads=16,
        ffn_hidden=4096,
        vocab=32000,
        seq_len=1024,
        experts=8,
        expert_group=1024,
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A job to price twice, with what was measured if anything was."""

    source: str
    id: str
    cluster: Cluster
    job: TrainingJob
    measured_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Seconds by both paths; errors against the measurement; `note` says why a row was not planned."""

    source: str
    id: str
    closed_s: float
    planner_s: float | None
    closed_error: float | None
    planner_error: float | None
    planning_cpu_s: float
    note: str

    @property
    def apart(self) -> float | None:
        """(planner - closed form) / closed form."""
        return None if self.planner_s is None else self.planner_s / self.closed_s - 1


def cases(folder: Path) -> Iterator[Case]:
    """Every row."""
    for row in read_table(folder / "published_steps.csv"):
        if isinstance(row, Row):
            tflops = row.model_tflops_per_device
            turned_s = row.job.model_flops / row.job.devices / (tflops * 1e12) if tflops else None
            yield Case(row.source, row.id, row.cluster, row.job, row.step_s or turned_s)
    runs = end_to_end(folder)
    for run in runs:
        if run.method == "auto" and run.job is not None:
            yield Case("Alpa OSDI'22 auto", run.id, preset("p3.16xlarge"), run.job, measured_s(run, runs))
    for name, shape in FAMILIES.items():
        base = TrainingJob(
            shape=shape,
            devices=8,
            global_batch=64,
            microbatch=4,
            data_ranks=4,
            tensor_ranks=2,
            stages=1,
            virtual_stages=1,
            recompute="full",
            expert_ranks=4 if shape.experts > 1 else 1,
        )
        plans = {
            "tensor": base,
            "sequence": dataclasses.replace(base, sequence_parallel=True, recompute="none"),
            "zero3": dataclasses.replace(base, data_ranks=8, tensor_ranks=1, zero_stage=3),
            "stages": dataclasses.replace(base, devices=16, stages=2),
        }
        for plan, job in plans.items():
            yield Case("families", f"{name}-{plan}", preset("dgx-a100-80gb"), job)


def priced(planner: PartPlanner, case: Case) -> Outcome:
    """One row by both paths."""
    closed = predict(case.cluster, case.job)
    started = time.process_time()
    planned, note = planned_prediction(planner, case.cluster, closed.job)
    planner_s = planned.step.step_s if planned is not None else None

    def error(seconds: float | None) -> float | None:
        return seconds / case.measured_s - 1 if seconds and case.measured_s else None

    closed_s = closed.step.step_s
    took_s = time.process_time() - started
    return Outcome(case.source, case.id, closed_s, planner_s, error(closed_s), error(planner_s), took_s, note)


def main() -> int:
    """Print every row and the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--yardstick", type=Path, default=FOLDER)
    parser.add_argument("--source", default="", help="only sources whose name holds this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console, planner, found = Console(width=150, highlight=False), PartPlanner(), []
    for case in cases(options.yardstick):
        if options.source.lower() in case.source.lower():
            outcome = priced(planner, case)
            found.append(outcome)
            console.print(_line(outcome), markup=False)
    for source in dict.fromkeys(outcome.source for outcome in found):
        console.print(_summary(source, [outcome for outcome in found if outcome.source == source]), markup=False)
    if options.json:
        rows = [dataclasses.asdict(outcome) | {"apart": outcome.apart} for outcome in found]
        save(options.json, json.dumps(rows, indent=1) + "\n")
    return 0


def _line(outcome: Outcome) -> str:
    if outcome.planner_s is None:
        return f"{outcome.id:34} closed form {outcome.closed_s:9.3f} s  not planned: {outcome.note}"
    errors = [f"{error:+.1%}" if error is not None else "-" for error in (outcome.closed_error, outcome.planner_error)]
    return (
        f"{outcome.id:34} closed form {outcome.closed_s:9.3f} s  planner {outcome.planner_s:9.3f} s  "
        f"apart {outcome.apart:+7.1%}  errors {errors[0]:>7} {errors[1]:>7}  {outcome.planning_cpu_s:.1f} s"
    )


def _summary(source: str, found: Sequence[Outcome]) -> str:
    apart = [abs(outcome.apart) for outcome in found if outcome.apart is not None]
    closed = [abs(o.closed_error) for o in found if o.closed_error is not None and o.planner_error is not None]
    planner = [abs(o.planner_error) for o in found if o.planner_error is not None]
    errors = ""
    if planner:
        errors = f"; errors: closed form {sum(closed) / len(closed):.1%}, planner {sum(planner) / len(planner):.1%}"
    seconds = sum(outcome.planning_cpu_s for outcome in found) / len(found)
    return (
        f"{source}: {len(apart)} of {len(found)} rows planned, mean {sum(apart) / max(1, len(apart)):.1%} apart, "
        f"max {max(apart, default=0):.1%}{errors}; {seconds:.1f} processor seconds a row"
    )


if __name__ == "__main__":
    sys.exit(main())

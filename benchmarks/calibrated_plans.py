"""Predicted against measured step time of 12 plans of three models, on this machine as `autopar calibrate` found it.

In: a cluster file (`--cluster FILE`), or none, and then the machine is calibrated first. GPT, MoE and Wide-ResNet at the sizes of
`intra_op_plans.py`, each under four plans that differ in mesh and constraints, on 8 virtual CPU devices. Out: per plan the
planner's prediction and the median of rounds in which every plan makes one step; the errors, their mean, and the rank
correlation over all plans and within each model. Measured is the clock that calibration goes by: processor seconds of all threads
over the cores, which is the wall's time on a quiet machine and hardly changes on a busy one; the wall's is shown too. What
can go wrong: a machine so busy that caches are lost all the time; every step then takes more than when it was calibrated.

    python benchmarks/calibrated_plans.py [--cluster FILE] [--rounds 15] [--json FILE]
"""

from __future__ import annotations

from intra_op_plans import (
    SIZES,
    Variant,
    autopar_variant,
    measure,
    one_step,
    reference_loss,
)  # sets XLA's flags: before JAX

# isort: split
import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import autopar
from autopar.commands.calibrate import calibrate_to_file
from autopar.cost_model.measurements import step_clock
from autopar.models import registry

TARGET_ERROR, TARGET_RANK = 0.25, 0.8

PLANS: Mapping[str, Mapping[str, Any]] = {
    "mesh (8,)": {"mesh_shape": (8,)},
    "mesh (2,4)": {"mesh_shape": (2, 4)},
    "data_parallel() (8,)": {"mesh_shape": (8,), "constraints": autopar.data_parallel()},
    "zero3() (8,)": {"mesh_shape": (8,), "constraints": autopar.zero3()},
}


def variants_of(name: str, cluster: Path) -> tuple[list[Variant], float]:
    """The compiled plans of one model, and its first loss on one device."""
    model = registry.build(name, **SIZES[name])
    # Kept on the host: variants donate their state, and each must start from the same one.
    state = jax.device_get(jax.jit(model.create_state)(jax.random.key(0)))
    batch = next(model.data(0))
    loss = reference_loss(model, state, batch)
    made = [
        autopar_variant(f"{name}, {plan}", model, state, batch, cluster=cluster, **options)
        for plan, options in PLANS.items()
    ]
    return made, loss


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks."""

    def ranks(values: Sequence[float]) -> list[int]:
        return [sorted(values).index(value) for value in values]

    return statistics.correlation(ranks(first), ranks(second))


def main() -> None:
    """Calibrate unless a file is given, plan, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", type=Path, help="a cluster file; default: calibrate now")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="+", default=list(SIZES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 130)
    with tempfile.TemporaryDirectory() as folder:
        cluster = options.cluster or Path(folder) / "this_machine.json"
        if options.cluster is None:
            calibrate_to_file(cluster, seconds=120.0, console=console)
        rows = [row for name in options.models for row in rows_of(name, cluster, options.rounds)]
    report(rows, console)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def rows_of(name: str, cluster: Path, rounds: int) -> list[dict[str, Any]]:
    """Predicted and measured seconds of a model's plans."""
    variants, loss = variants_of(name, cluster)
    measure(variants, 0, loss)  # the first steps: right, and no longer cold
    clock = step_clock(jax.devices())
    steps: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for turn in range(rounds):
        start = turn % len(variants)
        for variant in (*variants[start:], *variants[:start]):
            started = clock()
            one_step(variant)
            steps[variant.name].append(clock() - started)
    rows = []
    for variant in variants:
        assert variant.plan is not None
        rows.append(
            {
                "plan": variant.name,
                "model": name,
                "predicted_s": variant.plan.step_s,
                "predicted_comm_s": variant.plan.comm_s,
                "measured_s": statistics.median(steps[variant.name]),
                "wall_s": statistics.median(variant.times_s),
                "least_wall_s": min(variant.times_s),
            }
        )
    return rows


def report(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """The table and what it says of the model."""
    table = Table(title=f"{len(rows)} plans, calibrated on this machine")
    table.add_column("plan")
    for heading in ("predicted, ms", "communication", "measured, ms", "wall, ms", "least wall, ms", "error"):
        table.add_column(heading, justify="right")
    errors = [row["predicted_s"] / row["measured_s"] - 1 for row in rows]
    for row, error in zip(rows, errors, strict=True):
        keys = ("predicted_s", "predicted_comm_s", "measured_s", "wall_s", "least_wall_s")
        times = (row[key] * 1e3 for key in keys)
        table.add_row(row["plan"], *(f"{time:.1f}" for time in times), f"{error:+.1%}")
    console.print(table)
    within = sum(abs(error) <= TARGET_ERROR for error in errors)
    rank = rank_correlation([row["predicted_s"] for row in rows], [row["measured_s"] for row in rows])
    mean, worst = statistics.fmean(map(abs, errors)), max(map(abs, errors))
    console.print(
        f"absolute error: mean {mean:.1%}, largest {worst:.1%}, {within} of {len(rows)} within {TARGET_ERROR:.0%}"
    )
    console.print(f"median of predicted/measured: {statistics.median(error + 1 for error in errors):.2f}")
    console.print(f"rank correlation: {rank:.2f} over all plans (target {TARGET_RANK})")
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == name]
        rank = rank_correlation([row["predicted_s"] for row in own], [row["measured_s"] for row in own])
        console.print(f"  within {name}: {rank:.2f}")


if __name__ == "__main__":
    main()

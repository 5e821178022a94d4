"""Predicted against measured step time of 12 plans of three models, on this machine as `autopar calibrate` found it.

In: a cluster file (`--cluster FILE`), or none, and then the machine is calibrated first. GPT, MoE and Wide-ResNet at the
sizes of `intra_op_plans.py`, each under four plans that differ in mesh and constraints, on 8 virtual CPU devices. Out: per plan
the planner's prediction and what its step takes; the errors, their mean and largest, and the rank correlation over all plans and
within each model. All plans take turns, two steps each a round, the second timed, and of a plan's times the lower decile
counts: what it takes when nothing disturbs. Two clocks are shown. The wall's is the time that a step takes, and what the planner
predicts. Processor seconds of all threads over the cores leave out that cores idle while collectives wait for ranks; held
against them is the same prediction without that waiting. They hardly change on a busy machine, the wall's clock is then of no
use. The process keeps the memory that it frees, while it calibrates as well: page faults otherwise add up to a third to
steps, other ones in every process. What can go wrong: a busy machine.

    python benchmarks/calibrated_plans.py [--cluster FILE] [--rounds 21] [--json FILE]
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
from autopar.commands.machine.calibrate import calibrate_to_file
from autopar.cost_model.calibration.clocks import keep_freed_memory, step_clock, undisturbed_s
from autopar.cost_model.calibration.fit_waiting import remove_waiting
from autopar.cost_model.hardware import Cluster, load_cluster
from autopar.files.whole_file import save
from autopar.models import registry
from autopar.plan import Plan
from autopar.simulate.reprice import collective_prices

TARGET_ERROR, TARGET_RANK = 0.25, 0.8
CLOCKS: Mapping[str, tuple[str, str]] = {
    "the wall's clock": ("predicted_s", "wall_s"),
    "processor seconds over cores, nothing waiting": ("predicted_processor_s", "processor_s"),
}
"""What is predicted and what is measured, by either clock."""

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
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--models", nargs="+", default=list(SIZES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    keep_freed_memory()
    console = Console(width=None if Console().is_terminal else 130)
    with tempfile.TemporaryDirectory() as folder:
        cluster = options.cluster or Path(folder) / "this_machine.json"
        if options.cluster is None:
            calibrate_to_file(cluster, seconds=240.0, console=console)
        rows = rows_of(options.models, cluster, options.rounds, console)
    report(rows, console)
    if options.json:
        save(options.json, json.dumps(rows, indent=1) + "\n")


def timed(variants: Sequence[Variant], rounds: int, console: Console) -> dict[str, list[float]]:
    """Seconds of `rounds` steps of every variant, by the clock of calibration; each variant starts a round in its turn."""
    clock = step_clock(jax.devices())
    steps: dict[str, list[float]] = {variant.name: [] for variant in variants}
    with console.status("measuring") as status:
        for turn in range(rounds):
            status.update(f"measuring, round {turn + 1} of {rounds}")
            start = turn % len(variants)
            for variant in (*variants[start:], *variants[:start]):
                one_step(variant)  # in training a step follows one of its own, whose code and operands are near
                variant.times_s.pop()
                started = clock()
                one_step(variant)
                steps[variant.name].append(clock() - started)
    return steps


def rows_of(models: Sequence[str], cluster: Path, rounds: int, console: Console) -> list[dict[str, Any]]:
    """Predicted and measured seconds of the models' plans."""
    made: list[tuple[str, Variant]] = []
    for name in models:
        with console.status(f"planning and compiling {len(PLANS)} plans of {name}"):
            variants, loss = variants_of(name, cluster)
            measure(variants, 0, loss)  # the first steps: right, and no longer cold
        made += [(name, variant) for variant in variants]
    steps = timed([variant for _, variant in made], rounds, console)
    machine = load_cluster(cluster)
    return [row_of(name, variant, steps[variant.name], machine) for name, variant in made]


def row_of(model: str, variant: Variant, processor_s: Sequence[float], cluster: Cluster) -> dict[str, Any]:
    """Figures of one plan."""
    plan = variant.plan
    assert plan is not None
    return {
        "plan": variant.name,
        "model": model,
        "collectives": sum(item.count for item in plan.collectives),
        "predicted_s": plan.step_s,
        "predicted_comm_s": plan.comm_s,
        "wall_s": undisturbed_s(variant.times_s),
        "median_wall_s": statistics.median(variant.times_s),
        "predicted_processor_s": plan.step_s - waiting_s(plan, cluster),
        "processor_s": undisturbed_s(processor_s),
        "median_processor_s": statistics.median(processor_s),
    }


def waiting_s(plan: Plan, cluster: Cluster) -> float:
    """The part of the plan's predicted step in which cores idle because collectives wait for ranks."""
    waiting_s_of, ready_s_of = (collective_prices(plan, one) for one in (cluster, remove_waiting(cluster)))
    return sum(item.count * (waiting_s_of(item) - ready_s_of(item)) for item in plan.collectives)


def report(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """The table and what it says of the model."""
    table = Table(title=f"{len(rows)} plans, calibrated on this machine; ms")
    table.add_column("plan")
    wall, processor = ("predicted", "wall", "median", "error"), ("without waiting", "processor", "median", "error")
    for heading in ("collectives", *wall, *processor):
        table.add_column(heading, justify="right")
    for row in rows:
        texts = [f"{row['collectives']:.0f}"]
        for predicted, measured in CLOCKS.values():
            texts += [f"{row[key] * 1e3:.1f}" for key in (predicted, measured, f"median_{measured}")]
            texts += [f"{row[predicted] / row[measured] - 1:+.1%}"]
        table.add_row(row["plan"], *texts)
    console.print(table)
    for clock, keys in CLOCKS.items():
        summary(rows, keys, clock, console)


def summary(rows: Sequence[Mapping[str, Any]], keys: tuple[str, str], clock: str, console: Console) -> None:
    """Errors and rank correlations of what the first key predicts of the second."""
    predicted, measured = keys
    errors = [row[predicted] / row[measured] - 1 for row in rows]
    within = sum(abs(error) <= TARGET_ERROR for error in errors)
    mean, worst = statistics.fmean(map(abs, errors)), max(map(abs, errors))

    def rank(of: Sequence[Mapping[str, Any]]) -> float:
        return rank_correlation([row[predicted] for row in of], [row[measured] for row in of])

    models = dict.fromkeys(row["model"] for row in rows)
    inside = ", ".join(f"{name} {rank([row for row in rows if row['model'] == name]):.2f}" for name in models)
    met = within == len(rows) and rank(rows) >= TARGET_RANK
    console.print(
        f"by {clock}: absolute error mean {mean:.1%}, largest {worst:.1%}, {within} of {len(rows)} within {TARGET_ERROR:.0%}; "
        f"median of predicted/measured {statistics.median(error + 1 for error in errors):.2f}; rank correlation "
        f"{rank(rows):.2f} over all plans (target {TARGET_RANK}), within {inside}: {'met' if met else 'missed'}"
    )


if __name__ == "__main__":
    main()

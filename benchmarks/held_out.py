"""Cross-validation of the one constant that is fitted on training steps: its errors on rows that it was not fitted on.

In: published runs with their sources, clusters and sizes. Out: for each group of rows that is left out (one table, one cluster,
one size class) the `matrix` constant with the least squared error on all other rows, and with it the mean error and Kendall's tau
of the group. Prices are those of the closed form: fitting over plans takes minutes. Beside it what the cluster files take from
where: figures whose source is a document or a measurement, and those that their own source calls an estimate.

What can go wrong: groups that share machine and software are less independent than their names; the clusters are the strictest.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autopar.cost_model.machine import Cluster
from autopar.simulate.closed_forms import job_prediction
from autopar.simulate.closed_forms.prices import InTraining
from autopar.simulate.closed_forms.training_job import TrainingJob

TRIED = tuple(InTraining(matrix=part / 100) for part in range(86, 101))
SIZES = ((5e9, "below 5 B"), (50e9, "5 to 50 B"), (float("inf"), "above 50 B"))
CLUSTER_FILES = Path(__file__).resolve().parent.parent / "cost_model" / "clusters"


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run: where it stands, what was measured."""

    table: str
    cluster: Cluster
    job: TrainingJob
    measured_s: float

    @property
    def size(self) -> str:
        """The class of its model's parameters."""
        return next(name for limit, name in SIZES if self.job.shape.parameters < limit)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A group that was left out: the constant that the others give, and its error there."""

    kind: str
    name: str
    rows: int
    matrix: float
    mean_error: float
    tau: float | None


Errors = Mapping[InTraining, Sequence[float]]
"""For each constant that was tried, predicted over measured - 1 of every run."""


def held_out(runs: Sequence[Run]) -> list[HeldOut]:
    """Every group left out once, if there is another of its kind."""
    errors = errors_of(runs)
    kinds = {"table": lambda run: run.table, "cluster": lambda run: run.cluster.name, "size": lambda run: run.size}
    found = []
    for kind, name_of in kinds.items():
        for name in dict.fromkeys(map(name_of, runs)):
            mine = [i for i, run in enumerate(runs) if name_of(run) == name]
            if len(mine) == len(runs):
                continue  # nothing is left to fit on
            found.append(_leave_out(kind, name, mine, runs, errors))
    return found


def _leave_out(kind: str, name: str, mine: Sequence[int], runs: Sequence[Run], errors: Errors) -> HeldOut:
    others = [i for i in range(len(runs)) if i not in mine]
    best = min(TRIED, key=lambda reached: root_mean_square([errors[reached][i] for i in others]))
    found = [errors[best][i] for i in mine]
    measured = [runs[i].measured_s for i in mine]
    predicted = [(1 + error) * seconds for error, seconds in zip(found, measured, strict=True)]
    return HeldOut(
        kind=kind,
        name=name,
        rows=len(mine),
        matrix=best.matrix,
        mean_error=_mean(map(abs, found)),
        tau=kendall_tau(predicted, measured),
    )


def errors_of(runs: Sequence[Run]) -> Errors:
    """Every run priced with every constant."""
    return {reached: [_error(run, reached) for run in runs] for reached in TRIED}


def root_mean_square(errors: Sequence[float]) -> float:
    """What is least at the constant that is taken."""
    return math.sqrt(_mean(error * error for error in errors))


def _error(run: Run, reached: InTraining) -> float:
    return job_prediction.predict(run.cluster, run.job, reached=reached).step.step_s / run.measured_s - 1


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pairs in one order less pairs in the other, over all that are tied in neither (tau-a of those); None without any."""
    signs = [(first[i] - first[j]) * (second[i] - second[j]) for i, j in itertools.combinations(range(len(first)), 2)]
    untied = [sign for sign in signs if sign]
    return sum(1 if sign > 0 else -1 for sign in untied) / len(untied) if untied else None


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def print_held_out(found: Sequence[HeldOut], console: Console) -> None:
    """One line per group, and the mean of the clusters."""
    table = Table("left out", "group", "rows", "matrix", "mean error", "tau", box=None)
    for one in found:
        tau = "" if one.tau is None else f"{one.tau:.2f}"
        table.add_row(one.kind, one.name, str(one.rows), f"{one.matrix:.2f}", f"{one.mean_error:.1%}", tau)
    console.print("\nLeft out of the fit, by closed form")
    console.print(table)
    for kind in ("table", "cluster", "size"):
        groups = [one for one in found if one.kind == kind]
        if not groups:
            continue
        worst = max(groups, key=lambda one: one.mean_error)
        rows = sum(one.rows for one in groups)
        mean = sum(one.mean_error * one.rows for one in groups) / rows
        spread = f"worst {worst.mean_error:.1%} ({worst.name})"
        console.print(f"  one {kind} left out: mean error {mean:.1%} over {rows} rows, {spread}")


def print_sources(names: Iterable[str], console: Console) -> None:
    """How many entries of each cluster file's `sources` name a document or a measurement, and which are estimates."""
    console.print("\nSourced and estimated figures of the cluster files")
    for name in names:
        sources = json.loads((CLUSTER_FILES / f"{name}.json").read_text(encoding="utf-8"))["sources"]
        estimates = [place for place, text in sources.items() if text.startswith("estimate")]
        console.print(
            f"  {name}: {len(sources) - len(estimates)} sourced, {len(estimates)} estimates: {', '.join(estimates)}"
        )

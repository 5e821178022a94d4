"""`rank`: plan one step on several clusters and numbers of devices, and compare time, memory and price.

In: the step and lists of clusters and numbers of devices. Out: a row per combination, fastest first, and which of them is the
fastest, needs the fewest device-seconds, and costs least where the cluster files state a price. What can go wrong: nothing fits
on a cluster. Its row says so, and the others are planned all the same. A signal ends the search that is under way with the best
plan that it has, and no other begins; the rows until then are printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from rich.table import Table
from rich.text import Text

from autopar.api import ParallelStep
from autopar.commands.arguments.subject import Subject, find_subject
from autopar.commands.plans.parallel import count_devices, count_devices_of_nodes, make_parallel
from autopar.commands.plans.plan import plan_step
from autopar.commands.terminal.interruption import interruptible
from autopar.commands.terminal.printing import new_table, print_json
from autopar.cost_model.hardware import find_cluster
from autopar.errors import AutoparError
from autopar.explain import standard_output
from autopar.explain.units import bytes_text, percent_text, seconds_text
from autopar.live_line import show_progress
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.progress import begin_search, enter

NOTHING_FITS = 1
_HOUR_S = 3600.0
_STEPS_OF_PRICE = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranked:
    """One cluster with a number of its devices, and what the best plan on them should cost.

    Attributes:
        cluster: the name of the preset, or the path of the file.
        devices: how many.
        step_s: predicted seconds per step; None if there is no plan, like all below but `reason`.
        device_s: device-seconds per step.
        peak_bytes: predicted peak memory of one device.
        memory_bytes: what a device has for programs, or the limit that was asked for.
        usd_per_1000_steps: the price, if the cluster file states one for a device and hour.
        way: the plan in a few words.
        reason: why there is no plan.
    """

    cluster: str
    devices: int
    step_s: float | None = None
    device_s: float | None = None
    peak_bytes: int | None = None
    memory_bytes: int | None = None
    usd_per_1000_steps: float | None = None
    way: str = ""
    reason: str = ""


def rank(options: argparse.Namespace) -> int:
    """Run `rank`; 0 if the step fits at least one of the clusters. A signal leaves the rows until then."""
    with show_progress(options.verbose):
        enter("building the model")
        subject = find_subject(options.model, options.sizes)
        pairs = [(cluster, count) for cluster in options.clusters for count in _counts(cluster, options)]
        ranking = _Ranking(subject, options)
        with interruptible(ranking.stop) as interruption:
            ranking.plan_on_all(pairs)
    rows = sorted(ranking.rows, key=_seconds)
    if options.json:
        print_json({"model": options.model, "rows": [dataclasses.asdict(row) for row in rows]})
    else:
        console = standard_output()
        console.print(make_table(rows))
        for sentence in describe_best(rows):
            console.print(f"- {sentence}", markup=False, highlight=False)
    interruption.finish(f"{len(rows)} of {len(pairs)} combinations were planned")
    return 0 if any(row.step_s is not None for row in rows) else NOTHING_FITS


def _counts(cluster: str, options: argparse.Namespace) -> list[int]:
    """The numbers of devices of a cluster that are compared, each once. Raises ArgumentError for one that --mesh has not."""
    counts: Sequence[int | None] = options.devices or (None,)
    if options.nodes is not None:
        counts = [count_devices_of_nodes(nodes, cluster) for nodes in options.nodes]
    asked = [argparse.Namespace(**{**vars(options), "devices": count, "nodes": None}) for count in counts]
    return list(dict.fromkeys(map(count_devices, asked)))


class _Ranking:
    """The rows that are planned so far, and the step whose search is under way."""

    def __init__(self, subject: Subject, options: argparse.Namespace) -> None:
        self.rows: list[Ranked] = []
        self._subject, self._options, self._is_stopped = subject, options, False
        self._step: ParallelStep | None = None

    def stop(self) -> bool:
        """End the search that is under way, and begin no other; whether there is something to print."""
        self._is_stopped = True
        return (self._step is not None and self._step.stop_planning()) or bool(self.rows)

    def plan_on_all(self, pairs: Sequence[tuple[str, int]]) -> None:
        """Add a row for each cluster and number of devices, until it is stopped."""
        for number, (cluster, count) in enumerate(pairs, 1):
            if self._is_stopped:
                return
            begin_search(f"{count} device{'s' * (count > 1)} of {cluster}, {number} of {len(pairs)}")
            asked = argparse.Namespace(**{**vars(self._options), "cluster": cluster})
            self.rows.append(self._plan_on(cluster, count, asked))

    def _plan_on(self, cluster: str, count: int, asked: argparse.Namespace) -> Ranked:
        try:
            self._step = make_parallel(self._subject.step, count, asked)
            return _row(cluster, count, plan_step(self._step, self._subject, asked))
        except AutoparError as error:
            return Ranked(cluster=cluster, devices=count, reason=str(error))


def _row(cluster: str, count: int, found: Plan | PipelinePlan) -> Ranked:
    """The row of a plan."""
    device_s, price = found.step_s * count, find_cluster(cluster).usd_per_device_hour
    return Ranked(
        cluster=cluster,
        devices=count,
        step_s=found.step_s,
        device_s=device_s,
        peak_bytes=found.peak_bytes,
        memory_bytes=found.memory_limit_bytes,
        usd_per_1000_steps=None if price is None else _STEPS_OF_PRICE * device_s / _HOUR_S * price,
        way=_way(found),
    )


def _way(plan: Plan | PipelinePlan) -> str:
    """A plan in a few words."""
    parts = f", {plan.num_microbatches} microbatches" if plan.num_microbatches > 1 else ""
    if isinstance(plan, PipelinePlan):
        return f"{plan.num_stages} stages{parts}, {plan.schedule}"
    return f"mesh {' x '.join(map(str, plan.mesh_shape))}{parts}"


def _seconds(row: Ranked) -> float:
    return float("inf") if row.step_s is None else row.step_s


def make_table(rows: Sequence[Ranked]) -> Table:
    """A row for each combination, fastest first; prices only where there are any."""
    priced = any(row.usd_per_1000_steps is not None for row in rows)
    columns = ["cluster", "devices", "step", "device-seconds", "memory", "plan"]
    if priced:
        columns.insert(4, f"USD / {_STEPS_OF_PRICE:,} steps")
    table = new_table("Fastest first", *columns, words=("cluster", "plan"))
    for row in rows:
        if row.step_s is None or row.device_s is None or row.peak_bytes is None:
            cells = ["-", "-", "-", _reason_text(row.reason)]
        else:
            cells = [seconds_text(row.step_s), seconds_text(row.device_s), _memory_text(row), row.way]
        if priced:
            cells.insert(2, "-" if row.usd_per_1000_steps is None else _usd_text(row.usd_per_1000_steps))
        table.add_row(*map(Text, (row.cluster, str(row.devices), *cells)))
    return table


def _usd_text(usd: float) -> str:
    """A price in cents, or to three digits where that is finer: 12.34, 0.0567."""
    if usd >= 1 or usd == 0:
        return f"{usd:,.2f}"
    return f"{usd:.{2 - math.floor(math.log10(usd))}f}"


def _reason_text(reason: str) -> str:
    """Why there is no plan, in a sentence; all of it is in the JSON."""
    sentence = reason.partition("\n")[0].partition("; ")[0].rstrip(".")
    return sentence if sentence.startswith("no plan") else f"no plan: {sentence}"


def _memory_text(row: Ranked) -> str:
    assert row.peak_bytes is not None
    if not row.memory_bytes:
        return bytes_text(row.peak_bytes)
    return f"{bytes_text(row.peak_bytes)} ({percent_text(row.peak_bytes, row.memory_bytes)})"


def describe_best(rows: Sequence[Ranked]) -> Iterator[str]:
    """Say which combination is best, in each respect that is known."""
    kinds: tuple[tuple[str, Callable[[Ranked], float | None]], ...] = (
        ("fastest", lambda row: row.step_s),
        ("fewest device-seconds per step", lambda row: row.device_s),
        ("cheapest", lambda row: row.usd_per_1000_steps),
    )
    for words, figure in kinds:
        known = [(value, row) for row in rows if (value := figure(row)) is not None]
        if known:
            best = min(known, key=lambda pair: pair[0])[1]
            yield f"{words}: {best.devices} devices of {best.cluster}"
    if all(row.usd_per_1000_steps is None for row in rows) and any(row.step_s is not None for row in rows):
        yield (
            'no price is known: "usd_per_device_hour": 2.5 in a cluster file, named in --clusters, adds that of '
            f"{_STEPS_OF_PRICE:,} steps"
        )
    without = next((row for row in rows if row.step_s is None), None)
    if without is not None:
        at = f"--cluster {without.cluster} --devices {without.devices}"
        yield f"why there is no plan, and what would do: `autopar explain MODEL {at} --conflict`, with the same flags"
    if all(row.step_s is None for row in rows):
        yield "the step fits none of them: more devices, or --memory-limit and --recompute, may help"

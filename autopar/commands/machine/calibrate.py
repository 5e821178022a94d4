"""`calibrate`: measure the devices at hand and write a cluster file.

The file is one that `parallelize(cluster=PATH)` and `plan --cluster PATH` accept. It is written as soon as every figure can be
told, and again at the end. A table shows what was found and how well the figures explain the measurements. What can go wrong: a
busy machine; the table's spread shows it, and a warning says so. Too little time: what was left out is said, in the file too, and
an error if it was not enough for every figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from autopar.commands.arguments.devices import ask_for_virtual_devices, find_devices
from autopar.commands.machine.calibration_report import (
    MEASURED_WAITING,
    describe_left_out,
    describe_steps,
    describe_waiting,
    in_words,
    list_left_out,
    make_table,
    waiting_source,
    warn_if_busy,
)
from autopar.commands.machine.refit import refit_to_file
from autopar.commands.machine.whole_steps import Beside, measure_whole_steps, steps_left_out
from autopar.commands.terminal.printing import print_json
from autopar.cost_model.calibration.cases import Case, Sample, cases_for, needed_of
from autopar.cost_model.calibration.clocks import keep_freed_memory
from autopar.cost_model.calibration.fit_cluster import Calibrated, MeasuredDevices, fit_cluster, slow_down
from autopar.cost_model.calibration.fit_waiting import add_waiting, remove_waiting
from autopar.cost_model.calibration.measure import measure
from autopar.cost_model.calibration.waiting import Waited, measure_waiting, ranks_wait
from autopar.cost_model.cluster_files import cluster_text
from autopar.cost_model.hardware import find_preset
from autopar.cost_model.machine import Cluster
from autopar.errors import ArgumentError, warn
from autopar.files.whole_file import save

PARTS = 0.5
"""The part of the time that goes to measuring parts; the rest is for whole steps."""


def calibrate(options: argparse.Namespace) -> int:
    """Run the command; returns its exit status."""
    if options.runs:
        refit_to_file(options.output, options.runs, Console(stderr=options.json))
        if options.json:
            _print_file(options.output, {})
        return 0
    keep_freed_memory()
    if options.devices is not None or jax.config.jax_platforms in (None, "", "cpu"):  # type: ignore[attr-defined]
        ask_for_virtual_devices(options.devices or 8)
    console = Console(stderr=options.json)
    found = calibrate_to_file(options.output, seconds=options.seconds, count=options.devices, console=console)
    if options.json:
        _print_file(options.output, found.errors)
    return 0


def _print_file(path: Path, errors: Mapping[str, float]) -> None:
    """Print the cluster file that was written, with the errors of its fits."""
    cluster = json.loads(path.read_text(encoding="utf-8"))
    print_json({"file": str(path), "errors": dict(errors), "cluster": cluster})


def calibrate_to_file(
    path: Path,
    *,
    seconds: float,
    console: Console,
    count: int | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> Calibrated:
    """Measure devices, write the cluster file, and show what was found.

    Args:
        path: The file to write.
        seconds: How long to take, with compiling. What has begun when they are over is ended.
        console: Where to show progress and figures.
        count: How many devices to measure; by default all that there are.
        now: The clock of `seconds`.

    Raises:
        ArgumentError: The file cannot be written, or time was over before every figure could be told.
    """
    _check_output(path)
    devices = find_devices(count)
    nearest = find_preset(devices[0].platform, devices[0].device_kind)
    if nearest.guess:
        warn(nearest.guess)
    clock = _Clock(seconds, now)
    measuring = _Measuring(devices, nearest.cluster, path, console, clock)
    console.print(f"measuring {_in_words(devices)} for about {seconds:g} s at the most")
    samples = measuring.parts()
    found = measuring.fit(samples)
    has_time = clock.left_s() > measuring.first_s
    waited = _measure_waiting(devices, console) if has_time else []
    waiting = add_waiting(found.cluster, waited)
    beside = measure_whole_steps(
        remove_waiting(waiting), devices, console, left_s=clock.left_s, first_s=measuring.first_s
    )
    cluster = slow_down(waiting, beside.rates, launches=beside.launches)
    left_out = [*list_left_out(measuring.cases, samples), *steps_left_out(devices, beside.ratios)]
    if not has_time and ranks_wait(devices):
        left_out.append("what collectives wait for ranks")
    sources = _name_sources(beside, waiting_source(waited, has_time=has_time))
    measuring.write(cluster, left_out, sources)
    _show(console, dataclasses.replace(found, cluster=cluster), samples, waited)
    for line in (*describe_steps(beside), *describe_left_out(left_out), f"wrote {path}"):
        console.print(line)
    warn_if_busy(samples, waited)
    return dataclasses.replace(found, cluster=cluster)


def _check_output(path: Path) -> None:
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ArgumentError(
            f"--output {path}: the folder {path.absolute().parent} has to exist, and the file be a file"
        )


class _Clock:
    """The time of the whole command."""

    def __init__(self, seconds: float, now: Callable[[], float]) -> None:
        self.seconds, self.now, self._begun_s = seconds, now, now()

    def left_s(self) -> float:
        return self.seconds - self.taken_s()

    def taken_s(self) -> float:
        return self.now() - self._begun_s


class _Measuring:
    """Measures parts, and writes what they say as soon as that is every figure."""

    def __init__(
        self, devices: Sequence[jax.Device], preset: Cluster, path: Path, console: Console, clock: _Clock
    ) -> None:
        self.cases = cases_for(devices[0].platform, len(devices))
        self.first_s = math.inf
        self._devices, self._preset, self._path, self._console, self._clock = devices, preset, path, console, clock

    def parts(self) -> list[Sample]:
        """Measure, and write the first figures. Raises ArgumentError if time does not suffice for them."""
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        samples: dict[Case, Sample] = {}
        needed, compiled, seconds = set(needed_of(self.cases)), 0, self._clock.seconds
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("starting", total=1.0)
            for event in measure(
                self._devices, self.cases, seconds=PARTS * seconds, most_s=seconds, now=self._clock.now
            ):
                if isinstance(event, Sample):
                    samples[event.case] = event
                    if math.isinf(self.first_s) and needed <= samples.keys():
                        self._write_first(list(samples.values()))
                else:
                    compiled += event[0].startswith("compiling")
                    progress.update(task, description=event[0], completed=event[1])
        if not needed <= samples.keys():
            raise ArgumentError(_too_little_time(seconds, self._clock.taken_s(), compiled, len(needed)))
        return list(samples.values())

    def _write_first(self, samples: Sequence[Sample]) -> None:
        self.first_s = self._clock.taken_s()
        left_out = [*list_left_out(self.cases, samples), *steps_left_out(self._devices, {})]
        sources = _name_sources(Beside({}), "waiting was not measured yet")
        self.write(self.fit(samples).cluster, left_out, sources)
        self._console.print(
            f"wrote first figures, of {len(samples)} measurements, to {self._path} after {self.first_s:.0f} s; measuring more"
        )

    def fit(self, samples: Sequence[Sample]) -> Calibrated:
        """The cluster that the samples speak of."""
        measured = MeasuredDevices(self._devices[0].device_kind, len(self._devices), _memory_bytes(self._devices))
        return fit_cluster(samples, self._preset, measured, name=self._path.stem)

    def write(self, cluster: Cluster, left_out: Sequence[str], sources: Mapping[str, str]) -> None:
        """Write the file, with what was left out."""
        about = f"{_in_words(self._devices)} of {platform.machine()}, measured by `autopar calibrate`"
        about += "".join(f"; {line}" for line in describe_left_out(left_out))
        save(self._path, cluster_text(cluster, about=about, sources=sources))


def _in_words(devices: Sequence[jax.Device]) -> str:
    return f"{len(devices)} device{'s' * (len(devices) != 1)} {devices[0].device_kind!r}"


def _too_little_time(seconds: float, taken_s: float, compiled: int, needed: int) -> str:
    enough_s = 10 * math.ceil(0.2 * taken_s * needed / max(compiled, 1))
    return (
        f"--seconds {seconds:g} did not suffice: {compiled} of the {needed} measurements that all figures need were compiled in "
        f"{taken_s:.0f} s, so no cluster file was written; give more time, such as --seconds {enough_s}"
    )


def _show(console: Console, found: Calibrated, samples: Sequence[Sample], waited: Sequence[Waited]) -> None:
    console.print(make_table(found, samples))
    for line in describe_waiting(found.cluster, waited):
        console.print(line)


def _name_sources(beside: Beside, waiting: str) -> dict[str, str]:
    """Where the figures of the file come from, by its parts."""
    measured = f"measured by `autopar calibrate` with JAX {jax.__version__}"
    whole = "whole steps were not measured, which may take longer than their parts"
    if beside.ratios:
        whole = f"times in the ratio of whole steps to their parts, {in_words(beside)}"
    merged = " and all_reduce_latency" if waiting == MEASURED_WAITING else ""
    return {
        "device": f"{measured}, all devices busy at once; {whole}; memory as the system tells",
        "tiers": f"collectives {measured}, and transfers between meshes where devices share the host; {waiting}; "
        "latency and bandwidth of other tiers from the preset of this device",
        "overlap": "from the preset of this device",
        "compiler": f"calls{merged} {measured}; the rest from the preset of this device",
    }


def _measure_waiting(devices: Sequence[jax.Device], console: Console) -> list[Waited]:
    """What collectives between pieces of compute take, where devices share cores; nothing elsewhere."""
    waited = []
    if ranks_wait(devices):
        with console.status("collectives between compute") as status:
            for event in measure_waiting(devices):
                if isinstance(event, Waited):
                    waited.append(event)
                else:
                    status.update(event)
    return waited


def _memory_bytes(devices: Sequence[jax.Device]) -> float:
    """What a device's allocator may hand out; of a CPU, an equal part of the machine's memory."""
    stats = devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / len(devices)

"""`calibrate`: measure the devices at hand and write a cluster file.

The file is one that `parallelize(cluster=PATH)` and `plan --cluster PATH` accept. A table shows what was found and how well
the figures explain the measurements. What can go wrong: a busy machine; the table's spread shows it, and a warning says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from autopar.commands.arguments.devices import ask_for_virtual_devices, find_devices
from autopar.commands.machine.calibration_report import describe_waiting, make_table, waiting_source, warn_if_busy
from autopar.commands.machine.refit import refit_to_file
from autopar.commands.machine.whole_steps import measure_whole_steps
from autopar.commands.terminal.printing import print_json
from autopar.cost_model.calibration.cases import Case, Sample, cases_for
from autopar.cost_model.calibration.clocks import keep_freed_memory
from autopar.cost_model.calibration.fit_cluster import Calibrated, MeasuredDevices, fit_cluster, slow_down
from autopar.cost_model.calibration.fit_waiting import add_waiting, remove_waiting
from autopar.cost_model.calibration.measure import measure
from autopar.cost_model.calibration.waiting import Waited, are_steady, measure_waiting, ranks_wait
from autopar.cost_model.cluster_files import cluster_text
from autopar.cost_model.hardware import find_preset
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


def calibrate_to_file(path: Path, *, seconds: float, console: Console, count: int | None = None) -> Calibrated:
    """Measure devices, write the cluster file, and show what was found.

    Args:
        path: The file to write.
        seconds: How long to measure; compiling comes on top where it takes longer.
        console: Where to show progress and figures.
        count: How many devices to measure; by default all that there are.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ArgumentError(
            f"--output {path}: the folder {path.absolute().parent} has to exist, and the file be a file"
        )
    devices = find_devices(count)
    nearest = find_preset(devices[0].platform, devices[0].device_kind)
    if nearest.guess:
        warn(nearest.guess)
    samples = _measure_parts(devices, cases_for(devices[0].platform, len(devices)), PARTS * seconds, console=console)
    measured = MeasuredDevices(devices[0].device_kind, len(devices), _memory_bytes(devices))
    found = fit_cluster(samples, nearest.cluster, measured, name=path.stem)
    waited = _measure_waiting(devices, console)
    waiting = add_waiting(found.cluster, waited)
    ratios = measure_whole_steps(remove_waiting(waiting), devices, console)
    factor = math.prod(ratios.values()) ** (1 / len(ratios))
    cluster = slow_down(waiting, factor)
    about = f"{len(devices)} devices {measured.kind!r} of {platform.machine()}, measured by `autopar calibrate`"
    save(path, cluster_text(cluster, about=about, sources=_name_sources(ratios, factor, waited)))
    console.print(make_table(found, samples))
    for line in describe_waiting(cluster, waited):
        console.print(line)
    console.print(
        f"whole steps take {factor:.2f} times the sum of their parts ({_list_ratios(ratios)}); the file has it in the device's "
        "figures"
    )
    console.print(f"wrote {path}")
    warn_if_busy(samples, waited)
    return dataclasses.replace(found, cluster=cluster)


def _name_sources(ratios: Mapping[str, float], factor: float, waited: Sequence[Waited]) -> dict[str, str]:
    """Where the figures of the file come from, by its parts."""
    measured = f"measured by `autopar calibrate` with JAX {jax.__version__}"
    return {
        "device": f"{measured}, all devices busy at once; times in the ratio of whole steps to their parts, {factor:.2f} "
        f"({_list_ratios(ratios)}); memory as the system tells",
        "tiers": f"collectives {measured}; {waiting_source(waited)}; latency and bandwidth of other tiers from the preset "
        "of this device",
        "overlap": "from the preset of this device",
        "compiler": f"calls{' and all_reduce_latency' if are_steady(waited) else ''} {measured}; the rest from the preset of "
        "this device",
    }


def _list_ratios(ratios: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())


def _measure_parts(
    devices: Sequence[jax.Device], cases: Sequence[Case], seconds: float, *, console: Console
) -> list[Sample]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    samples = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=1.0)
        for event in measure(devices, cases, seconds=seconds):
            if isinstance(event, Sample):
                samples.append(event)
            else:
                progress.update(task, description=event[0], completed=event[1])
    return samples


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

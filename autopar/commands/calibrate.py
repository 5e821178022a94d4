"""`calibrate`: measure the devices at hand and write a cluster file.

In: where to write, how long to take. Out: a file that `parallelize(cluster=PATH)` and `plan --cluster PATH` accept, and a
table of what was found and how well the figures explain the measurements. What can go wrong: a busy machine; the table's
spread shows it, and a warning says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from autopar import data_parallel, parallelize
from autopar.commands.devices import ask_for_virtual_devices, devices_for
from autopar.cost_model.calibrate import Calibrated, calibrated_cluster, slowed, with_waiting, without_waiting
from autopar.cost_model.cluster_files import save_cluster
from autopar.cost_model.hardware import Cluster, preset_for_device_kind
from autopar.cost_model.measurements import (
    Case,
    Sample,
    cases_for,
    keep_freed_memory,
    measure,
    step_clock,
    undisturbed_s,
)
from autopar.cost_model.waiting import Waited, measure_waiting, ranks_wait, steady
from autopar.errors import ArgumentError, warn
from autopar.models import registry
from autopar.plan import Plan

WHOLE_STEPS_CPU: Mapping[str, Mapping[str, int]] = {
    "bert": {"layers": 1, "hidden": 256, "heads": 8, "seq": 64, "batch": 16},
    "unet": {"base_channels": 32, "image_size": 16, "batch": 32},
}
WHOLE_STEPS: Mapping[str, Mapping[str, int]] = {
    "bert": {"layers": 2, "hidden": 2048, "heads": 16, "seq": 512, "batch": 16},
    "unet": {"base_channels": 128, "image_size": 64, "batch": 32},
}
"""Models whose whole steps are held against the sum of their parts: so large that an accelerator does not just launch kernels."""
PARTS = 0.5
"""The part of the time that goes to measuring parts."""
WARM_STEPS, STEPS = 2, 15
UNSTEADY = 1.5
"""Where the median round takes this many times the least, the machine counts as busy."""


def calibrate(options: argparse.Namespace) -> int:
    """Run the command; returns its exit status."""
    keep_freed_memory()
    if options.devices is not None or jax.config.jax_platforms in (None, "", "cpu"):  # type: ignore[attr-defined]
        ask_for_virtual_devices(options.devices or 8)
    calibrate_to_file(options.output, seconds=options.seconds, count=options.devices, console=Console())
    return 0


def calibrate_to_file(path: Path, *, seconds: float, console: Console, count: int | None = None) -> Calibrated:
    """Measure `count` devices (all that there are if None), write the cluster file, show what was found."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ArgumentError(
            f"--output {path}: the folder {path.absolute().parent} has to exist, and the file be a file"
        )
    devices = devices_for(count)
    samples = _measured(devices, cases_for(devices[0].platform, len(devices)), PARTS * seconds, console)
    first = devices[0]
    found = calibrated_cluster(
        samples,
        preset_for_device_kind(first.platform, first.device_kind),
        name=path.stem,
        device=first.device_kind,
        memory_bytes=_memory_bytes(devices),
        devices=len(devices),
    )
    waited = _waited(devices, console)
    waiting = with_waiting(found.cluster, waited)
    ratios = _whole_step_ratios(without_waiting(waiting), devices, console)
    factor = math.prod(ratios.values()) ** (1 / len(ratios))
    cluster = slowed(waiting, factor)
    about = f"{len(devices)} devices {first.device_kind!r} of {platform.machine()}, measured by `autopar calibrate`"
    measured = f"measured by `autopar calibrate` with JAX {jax.__version__}"
    beside = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    sources = {
        "device": f"{measured}, all devices busy at once; times in the ratio of whole steps to their parts, {factor:.2f} "
        f"({beside}); memory as the system tells",
        "tiers": f"collectives {measured}; {_waiting_source(waited)}; latency and bandwidth of other tiers from the preset "
        "of this device",
        "overlap": "from the preset of this device",
        "compiler": f"calls{' and all_reduce_latency' if steady(waited) else ''} {measured}; the rest from the preset of this "
        "device",
    }
    save_cluster(path, cluster, about=about, sources=sources)
    console.print(_table(found, samples))
    for line in _waiting_lines(cluster, waited):
        console.print(line)
    console.print(
        f"whole steps take {factor:.2f} times the sum of their parts ({beside}); the file has it in the device's figures"
    )
    console.print(f"wrote {path}")
    _warn_if_busy(samples, waited)
    return dataclasses.replace(found, cluster=cluster)


@dataclasses.dataclass
class _WholeStep:
    """A data-parallel step ready to run: what the cluster says that it computes and does beside that, and its times."""

    name: str
    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Any
    batch: Any
    computed_s: float
    beside_s: float
    times_s: list[float] = dataclasses.field(default_factory=list)

    def run(self, clock: Callable[[], float]) -> None:
        """Make two steps and time the second: in training a step follows one of its own, whose code and operands are near."""
        self.state, _ = jax.block_until_ready(self.step(self.state, self.batch))
        started = clock()
        self.state, _ = jax.block_until_ready(self.step(self.state, self.batch))
        self.times_s.append(clock() - started)

    def ratio(self) -> float:
        """Seconds that the step computed, over those that the cluster says."""
        computed_s = undisturbed_s(self.times_s) - self.beside_s
        return max(computed_s, 0.1 * self.beside_s) / self.computed_s


def _whole_step(name: str, sizes: Mapping[str, int], cluster: Cluster, devices: Sequence[jax.Device]) -> _WholeStep:
    """Plan a data-parallel step of a model, ready to run."""
    model = registry.build(name, **sizes)
    step = parallelize(
        model.train_step,
        devices=devices,
        mesh_shape=(len(devices),),
        constraints=data_parallel(),
        cluster=cluster,
        num_microbatches=1,
    )
    state = jax.device_get(jax.jit(model.create_state)(jax.random.key(0)))
    batch = next(model.data(0))
    plan = step.plan(state, batch)
    assert isinstance(plan, Plan)
    beside_s = plan.comm_s + cluster.dispatch_s(len(plan.inputs))
    return _WholeStep(name, step, state, batch, plan.step_s - beside_s, beside_s)


def _whole_step_ratios(cluster: Cluster, devices: Sequence[jax.Device], console: Console) -> dict[str, float]:
    """What whole steps take over what the cluster says, for each model; they take turns, so that all see the same machine."""
    clock = step_clock(devices)
    models = WHOLE_STEPS_CPU if devices[0].platform == "cpu" else WHOLE_STEPS
    with console.status("planning whole steps") as status:
        steps = []
        for name, sizes in models.items():
            status.update(f"planning and compiling a step of {name}")
            steps.append(_whole_step(name, sizes, cluster, devices))
        for turn in range(WARM_STEPS + STEPS):
            status.update(f"whole steps, round {turn + 1} of {WARM_STEPS + STEPS}")
            for step in steps:
                step.run(clock)
    for step in steps:
        del step.times_s[:WARM_STEPS]
    return {step.name: step.ratio() for step in steps}


def _measured(devices: Sequence[jax.Device], cases: Sequence[Case], seconds: float, console: Console) -> list[Sample]:
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


def _waited(devices: Sequence[jax.Device], console: Console) -> list[Waited]:
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


def _waiting_source(waited: Sequence[Waited]) -> str:
    if steady(waited):
        return "waiting by the wall's clock, beside compute alone"
    return "waiting was not measured: " + ("other programs ran" if waited else "each device has a core of its own")


def _waiting_lines(cluster: Cluster, waited: Sequence[Waited]) -> Iterator[str]:
    """What was found of waiting, in words; nothing if other programs ran."""
    if not steady(waited):
        return
    for sample in waited:
        what = f"{sample.merged} all-reduces at once" if sample.merged > 1 else "an all-reduce"
        yield (
            f"{what} of {sample.ranks} ranks between {sample.grain.operation}s of {sample.compute_s * 1e3:.1f} ms: "
            f"{sample.seconds * 1e6:.0f} us"
        )
    per_rank_s = cluster.tiers[0].measured["all-reduce"].waiting_s_per_rank
    yield (
        f"collectives wait {per_rank_s * 1e6:.1f} n us for ranks that share cores; one of many all-reduces pays "
        f"{cluster.all_reduce_latency:.2f} of latency and waiting"
    )


def _memory_bytes(devices: Sequence[jax.Device]) -> float:
    """What the device's allocator may hand out; of a CPU, an equal part of the machine's memory."""
    stats = devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / len(devices)


def _table(found: Calibrated, samples: Sequence[Sample]) -> Table:
    cluster, device = found.cluster, found.cluster.device
    table = Table(title=f"cluster {cluster.name}: {device.name}")
    for heading in ("what", "found", "mean error", "median round / least"):
        table.add_column(heading)

    def row(what: str, text: str, key: str) -> None:
        kind = key.split(" ")[0]
        spreads = sorted(sample.spread for sample in samples if sample.case.kind == kind)
        table.add_row(what, text, f"{found.errors[key]:.0%}", f"{spreads[len(spreads) // 2]:.2f}")

    for dtype, peak in device.peak_flops_per_s.items():
        half = ", ".join(f"{length:.0f}" for length in device.efficiency_of(dtype).half)
        row(f"products, {dtype}", f"{peak / 1e9:,.1f} GFLOP/s, half lengths {half}", f"product {dtype}")
    row("pointwise equations", f"{device.memory_bytes_per_s / 1e9:.2f} GB/s written", "pointwise")
    row("operands in another order", f"{device.reorder_s_per_byte * 1e9:.2f} ns a byte", "reordered")
    row("transposed copies", f"{device.transpose_s_per_byte * 1e9:.2f} ns a byte", "transposed")
    row("random bits", f"{device.random_s_per_byte * 1e9:.2f} ns a byte", "random")
    table.add_row("launch of an operation", f"{device.launch_s * 1e6:.1f} us")
    row("calls", f"{cluster.call_s * 1e6:.0f} us + {cluster.call_s_per_array * 1e6:.1f} us an array", "dispatch")
    for kind, figures in cluster.tiers[0].measured.items():
        latency = f"{figures.latency_s * 1e6:.0f} + {figures.latency_s_per_rank * 1e6:.1f} n us"
        per_byte = f"{figures.s_per_byte * 1e9:.3f} + {figures.s_per_byte_per_rank * 1e9:.4f} n ns a byte"
        row(kind, f"{latency}, {per_byte}", kind)
    return table


def _warn_if_busy(samples: Sequence[Sample], waited: Sequence[Waited]) -> None:
    if waited and not steady(waited):
        warn(
            f"other programs ran: compute took {max(sample.disturbed for sample in waited):.1f} times its processor time, so "
            "what collectives wait for their ranks could not be measured. Predicted steps are those of processor time, too fast "
            "where a plan has many small collectives; close other programs and calibrate again"
        )
    spreads = sorted(sample.spread for sample in samples)
    typical = spreads[len(spreads) // 2]
    if typical > UNSTEADY:
        warn(
            f"the machine was busy while it was measured: a typical round took {typical:.1f} times the least one. Close other "
            "programs and calibrate again, or give more time with --seconds"
        )

"""Measured over ideal makespan of every pipeline schedule, through the real driver.

In: stages, microbatches, milliseconds. Each stage has one device, whose compute is emulated by a callback that sleeps: two
cores cannot compute four stages at once, and can sleep for as many as you like. A forward of a mesh takes `--task-ms`, an input
gradient and a weight gradient the same each, so a whole backward takes twice as long; with v chunks per mesh a task takes the
v-th part. A task whose inputs are there begins at its launch or at the end of the task before it, whichever is later: the time
that JAX takes to call the callback counts as part of it, as it would behind the task before it on a real device. A task that
waits for another device begins when its callback is called, less what JAX takes from one sleeping callback to the next in a
plain chain of calls (0.3 to 0.8 ms of waking, Python and threads, which no device has and no driver causes): that is measured
first, printed, and the least of several chains.

Each step is measured twice. In a row: the devices have something to do for another `--busy-ms` when the driver begins, as they
have in a training loop, which does not wait for a step before it starts the next; then XLA's CPU client launches ahead, as on an
accelerator. And idle: the devices are free. Then XLA's CPU client runs a program with a callback in the thread that launches it,
so what the driver does between two tasks lies between the tasks.

Out: the makespan of the simulator (transfers and dispatch take no time there), the median measured one with its quartiles and
the least, and the ratio of median to ideal. The schedules take turns, a step each, so that other work on the machine meets all
of them alike. Then the peak of live bytes on the first device in a step without sleep, whose residuals are the only large
arrays: in the proportion of the microbatches in flight, m for GPipe and p for 1F1B. What can go wrong: other work on the machine
delays threads. The least of the rounds tells what the driver costs, the median what the machine allows; where the quartiles lie
far apart, neither says anything about the driver.

    python benchmarks/pipeline_efficiency.py [--stages 4] [--microbatches 8] [--task-ms 10] [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["AUTOPAR_CACHE"] = "off"

import argparse
import dataclasses
import json
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from emulated_device import BUSY_S, SMALL, Call, EmulatedDevice, measure_hop, occupy
from rich.console import Console
from rich.table import Table

from autopar.files.whole_file import save
from autopar.runtime.driver import Driver
from autopar.schedules.chain import make_chain
from autopar.schedules.in_flight import microbatches_in_flight
from autopar.schedules.instructions import InstructionList, TaskSpec, Value
from autopar.schedules.schedules import NAMED_SCHEDULES, make_schedule
from autopar.schedules.simulate import simulate
from autopar.schedules.tasks import Schedule
from autopar.schedules.timeline import Timeline

SCHEDULES = tuple((name, known.fewest_chunks) for name, known in NAMED_SCHEDULES.items())
UNITS = {"forward": 1, "backward": 2, "input_gradient": 1, "weight_gradient": 1}


@dataclasses.dataclass(frozen=True)
class Emulation:
    """One schedule on emulated devices, ready to run."""

    program: InstructionList
    devices: Sequence[EmulatedDevice]
    callables: Mapping[str, Call]
    transfer: Callable[[jax.Array, Value, int, int], jax.Array]
    inputs: Callable[[], dict[tuple[int, Value], jax.Array]]
    ideal_s: float

    def driver(self) -> Driver:
        """The driver that a real step would have."""
        return Driver(self.program, self.callables, self.transfer)


@dataclasses.dataclass(frozen=True)
class Makespans:
    """What was measured of one schedule one way; ratios are to the ideal makespan."""

    median_ms: float
    quartiles_ms: tuple[float, float]
    least_ms: float
    ratio: float
    least_ratio: float

    @classmethod
    def of(cls, seconds: Sequence[float], ideal_s: float) -> Makespans:
        """The figures of all rounds."""
        quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3
        median_s, least_s = statistics.median(seconds), min(seconds)
        return cls(
            median_ms=median_s * 1e3,
            quartiles_ms=(quartiles[0] * 1e3, quartiles[2] * 1e3),
            least_ms=least_s * 1e3,
            ratio=median_s / ideal_s,
            least_ratio=least_s / ideal_s,
        )


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table; `peak_bytes` is what the first device held at most, beyond its inputs."""

    schedule: str
    ideal_ms: float
    in_a_row: Makespans
    idle: Makespans
    in_flight: int
    peak_bytes: int


def emulate(schedule: Schedule, *, task_s: float, residual_bytes: int, hop_s: float = 0.0) -> Emulation:
    """Compile one sleeping program per task and device."""
    work = make_chain(schedule)
    program = work.emit()
    devices = jax.devices()

    def seconds(kind: str) -> float:
        return UNITS[kind] * task_s / schedule.virtual_stages

    def inputs() -> dict[tuple[int, Value], jax.Array]:
        pairs = [(mesh, value) for mesh, values in work.inputs.items() for value in values]
        return {(mesh, value): jax.device_put(jnp.ones(SMALL), devices[mesh]) for mesh, value in pairs}

    def transfer(array: jax.Array, value: Value, source_mesh: int, target_mesh: int) -> jax.Array:
        return jax.device_put(array, devices[target_mesh])

    emulated = [EmulatedDevice(device, hop_s=hop_s) for device in devices[: schedule.num_meshes]]
    callables = {
        spec.name: _compile(spec, emulated[spec.mesh], seconds=seconds(spec.kind), residual_bytes=residual_bytes)
        for spec in work.specs
    }

    ideal_s = simulate(program, run_s=lambda run: seconds(run.kind)).makespan_s
    return Emulation(program, emulated, callables, transfer, inputs, ideal_s)


def _compile(spec: TaskSpec, device: EmulatedDevice, *, seconds: float, residual_bytes: int) -> Call:
    """A task that takes its seconds and returns arrays of its outputs' sizes."""

    def size(name: str) -> int:
        return residual_bytes // 4 if re.fullmatch(r"r\d+", name) else SMALL

    return device.program(
        (lambda: device.work(seconds)) if seconds > 0 else None,
        [size(slot.name) for slot in spec.inputs],
        lambda zero: [jnp.broadcast_to(zero, (size(slot.name),)) for slot in spec.outputs],
    )


def device_bytes(device: jax.Device) -> int:
    """Bytes of all live arrays on a device; arrays that share a buffer count once.

    JAX waits for an array here without letting other threads run Python, so no task may be in a callback.
    """
    buffers = {}
    for array in jax.live_arrays():
        if not array.is_deleted():
            for shard in array.addressable_shards:
                if shard.device == device:
                    buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(buffers.values())


def one_step(emulation: Emulation, driver: Driver, *, busy_s: float) -> float:
    """Seconds of one step from when the devices are free: in `busy_s`, as if a step before were in computation."""
    inputs = emulation.inputs()
    jax.block_until_ready(list(inputs.values()))
    started = occupy(emulation.devices, busy_s) if busy_s > 0 else time.perf_counter()
    jax.block_until_ready(list(driver.run(inputs).values()))
    return time.perf_counter() - started


def measure(
    schedules: Sequence[Schedule], *, task_s: float, busy_s: Sequence[float], rounds: int, hop_s: float = 0.0
) -> tuple[list[list[list[float]]], list[Timeline]]:
    """Seconds of `rounds` steps of each schedule behind each of `busy_s`, in turns after a warm-up; a timeline of one more."""
    emulations = [emulate(schedule, task_s=task_s, residual_bytes=32, hop_s=hop_s) for schedule in schedules]
    pairs = [(emulation, emulation.driver()) for emulation in emulations]
    for pair in pairs:
        one_step(*pair, busy_s=max(busy_s))
    turns = [[[one_step(*pair, busy_s=each) for each in busy_s] for pair in pairs] for _ in range(rounds)]
    for emulation, driver in pairs:
        driver.run(emulation.inputs(), record=True)
    seconds = [[[turn[i][j] for turn in turns] for j in range(len(busy_s))] for i in range(len(pairs))]
    return seconds, [driver.timeline() for _, driver in pairs]


def row_of(schedule: Schedule, seconds: Sequence[Sequence[float]], *, task_s: float, residual_bytes: int) -> Row:
    """The figures of one schedule, from its seconds in a row and idle."""
    ideal_s = emulate(schedule, task_s=task_s, residual_bytes=32).ideal_s
    in_a_row, idle = (Makespans.of(own, ideal_s) for own in seconds)
    return Row(
        schedule=schedule.name,
        ideal_ms=ideal_s * 1e3,
        in_a_row=in_a_row,
        idle=idle,
        in_flight=microbatches_in_flight(schedule)[0],
        peak_bytes=_peak_bytes(schedule, residual_bytes=residual_bytes),
    )


def _peak_bytes(schedule: Schedule, *, residual_bytes: int) -> int:
    """Most bytes on the first device after any of its tasks, beyond what was there before the step."""
    emulation = emulate(schedule, task_s=0.0, residual_bytes=residual_bytes)
    first = jax.devices()[0]
    seen = []

    def watched(call: Call) -> Call:
        def run(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
            results = call(arrays)
            seen.append(device_bytes(first))
            return results

        return run

    callables = {name: watched(call) for name, call in emulation.callables.items() if name.endswith("0")}
    driver = Driver(emulation.program, {**emulation.callables, **callables}, emulation.transfer)
    inputs = emulation.inputs()
    before = device_bytes(first)
    driver.run(inputs)
    return max(seen) - before


def print_table(rows: Sequence[Row], *, work: str, hop_s: float) -> None:
    """The rows, for people."""
    title = f"{work}, JAX {jax.__version__}, whose plain chains take {hop_s * 1e3:.2f} ms more per task"
    table = Table(title=f"{title}\nmedian (quartiles) in ms, median / ideal, least / ideal")
    for column in ("schedule", "ideal ms", "in a row", "ratio", "least", "idle", "ratio", "least"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    table.add_column("in flight, stage 0", justify="right")
    table.add_column("peak MB, device 0", justify="right")
    for row in rows:
        cells = []
        for measured in (row.in_a_row, row.idle):
            low, high = measured.quartiles_ms
            cells.append(f"{measured.median_ms:.1f} ({low:.1f} to {high:.1f})")
            cells += [f"{measured.ratio:.3f}", f"{measured.least_ratio:.3f}"]
        table.add_row(row.schedule, f"{row.ideal_ms:.0f}", *cells, str(row.in_flight), f"{row.peak_bytes / 1e6:.2f}")
    Console(width=160).print(table)


def main() -> None:
    """Run all schedules and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4, help="number of meshes, one device each; at most 8")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--task-ms", type=float, default=10.0)
    parser.add_argument(
        "--busy-ms", type=float, default=BUSY_S * 1e3, help="what devices still have to do when a step in a row begins"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--residual-kb", type=int, default=1024, help="what a forward keeps for its backward")
    parser.add_argument("--traces", type=Path, help="a folder for one Chrome trace per schedule, measured")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    schedules = [
        make_schedule(name, num_meshes=arguments.stages, num_microbatches=arguments.microbatches, virtual_stages=v)
        for name, v in SCHEDULES
    ]
    task_s, residual_bytes = arguments.task_ms / 1e3, arguments.residual_kb * 1024
    busy_s = (arguments.busy_ms / 1e3, 0.0)
    hop_s = measure_hop(task_s=task_s)
    seconds, timelines = measure(schedules, task_s=task_s, busy_s=busy_s, rounds=arguments.rounds, hop_s=hop_s)
    rows = [
        row_of(schedule, own, task_s=task_s, residual_bytes=residual_bytes)
        for schedule, own in zip(schedules, seconds, strict=True)
    ]
    for schedule, timeline in zip(schedules, timelines, strict=True):
        if arguments.traces:
            arguments.traces.mkdir(parents=True, exist_ok=True)
            save(arguments.traces / f"{schedule.name}.json", timeline.trace_text(schedule.name))
    work = f"{arguments.stages} stages x {arguments.microbatches} microbatches of {arguments.task_ms:g} ms"
    print_table(rows, work=work, hop_s=hop_s)
    if arguments.json:
        save(arguments.json, json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Measured over ideal makespan of every pipeline schedule, through the real driver.

In: stages, microbatches, milliseconds. Each stage has one device, whose compute is emulated by a callback that sleeps: two
cores cannot compute four stages at once, and can sleep for as many as you like. The callback sleeps for what is left of the
task's time since its launch, or since the end of the task before it. A forward of a mesh takes `--task-ms`, an input gradient
and a weight gradient the same each, so a whole backward takes twice as long; with v chunks per mesh a task takes the v-th
part. Out: the makespan of the simulator (transfers and dispatch take no time there), the median measured one with its quartiles
and the least, and the ratio of median to ideal. The schedules take turns, a step each, so that other work on the machine meets
all of them alike. The time that JAX takes to launch a program counts as part of the task, as it would behind the task before it
on a real device; what the driver adds between two tasks does not. Then the peak of live bytes on the first device in a step
without sleep, whose residuals are the only large arrays: in the proportion of the microbatches in flight, m for GPipe and p for
1F1B. What can go wrong: other work on the machine delays threads. The least of the rounds tells what the driver costs, the
median what the machine allows; where the quartiles lie far apart, neither says anything about the driver. And sleep itself is
late, and so is a callback's result: by how much is measured on tasks that run alone, one after the other and without a driver,
and the last ratio is to the makespan of tasks that take so much longer each.

    python benchmarks/pipeline_efficiency.py [--stages 4] [--microbatches 8] [--task-ms 10] [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import collections
import dataclasses
import json
import re
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from autopar.runtime.chain import chain
from autopar.runtime.check import microbatches_in_flight
from autopar.runtime.driver import Driver
from autopar.runtime.instructions import InstructionList, TaskSpec, Value
from autopar.runtime.schedules import Schedule, make_schedule
from autopar.runtime.simulate import simulate
from autopar.runtime.timeline import Timeline

SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("inference", 1))
UNITS = {"forward": 1, "backward": 2, "input_gradient": 1, "weight_gradient": 1}
SMALL = (8,)


Call = Callable[[Sequence[jax.Array]], Sequence[jax.Array]]


class DeviceClock:
    """An emulated device: a task starts when it is launched or when the one before has ended, whichever is later."""

    def __init__(self) -> None:
        """A device that has nothing to do."""
        self._launched_s: collections.deque[float] = collections.deque()
        self._ended_s = 0.0
        self._busy = threading.Lock()  # XLA may start a task whose inputs came late beside the one before it

    def launch(self) -> None:
        """A task is queued now."""
        self._launched_s.append(time.perf_counter())

    def wait(self, seconds: float) -> None:
        """Sleep until the oldest queued task has had its time."""
        with self._busy:
            end_s = max(self._launched_s.popleft(), self._ended_s) + seconds
            time.sleep(max(0.0, end_s - time.perf_counter()))
            self._ended_s = time.perf_counter()


@dataclasses.dataclass(frozen=True)
class Emulation:
    """One schedule on emulated devices, ready to run. `ideal_of_longer_s`: the makespan if each task takes so much longer."""

    program: InstructionList
    callables: Mapping[str, Call]
    transfer: Callable[[jax.Array, Value, int, int], jax.Array]
    inputs: Callable[[], dict[tuple[int, Value], jax.Array]]
    ideal_s: float
    ideal_of_longer_s: Callable[[float], float]

    def driver(self) -> Driver:
        """The driver that a real step would have."""
        return Driver(self.program, self.callables, self.transfer)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table; `peak_bytes` is what the first device held at most, beyond its inputs."""

    schedule: str
    ideal_ms: float
    median_ms: float
    quartiles_ms: tuple[float, float]
    least_ms: float
    ratio: float
    least_ratio: float
    ratio_to_tasks_alone: float
    in_flight: int
    peak_bytes: int


def emulate(schedule: Schedule, *, task_s: float, residual_bytes: int) -> Emulation:
    """Compile one sleeping program per task and device."""
    work = chain(schedule)
    program = work.emit()
    devices = jax.devices()

    def seconds(kind: str) -> float:
        return UNITS[kind] * task_s / schedule.virtual_stages

    def inputs() -> dict[tuple[int, Value], jax.Array]:
        pairs = [(mesh, value) for mesh, values in work.inputs.items() for value in values]
        return {(mesh, value): jax.device_put(jnp.ones(SMALL), devices[mesh]) for mesh, value in pairs}

    def transfer(array: jax.Array, value: Value, source_mesh: int, target_mesh: int) -> jax.Array:
        return jax.device_put(array, devices[target_mesh])

    clocks = [DeviceClock() for _ in range(schedule.num_meshes)]
    callables = {
        spec.name: _compile(
            spec,
            clocks[spec.mesh],
            device=devices[spec.mesh],
            seconds=seconds(spec.kind),
            residual_bytes=residual_bytes,
        )
        for spec in work.specs
    }

    def ideal_s(longer_s: float) -> float:
        return simulate(program, run_s=lambda run: seconds(run.kind) + longer_s).makespan_s

    return Emulation(program, callables, transfer, inputs, ideal_s(0.0), ideal_s)


def _compile(spec: TaskSpec, clock: DeviceClock, *, device: jax.Device, seconds: float, residual_bytes: int) -> Call:
    """A program that sleeps until its time since the launch is over, then returns arrays of the task's output sizes."""

    def shape(name: str) -> tuple[int, ...]:
        return (residual_bytes // 4,) if re.fullmatch(r"r\d+", name) else SMALL

    def sleep(_: Any) -> np.ndarray[Any, Any]:
        clock.wait(seconds)
        return np.zeros((), np.float32)

    def program(*arrays: jax.Array) -> list[jax.Array]:
        zero = arrays[-1][0]
        if seconds > 0:
            zero = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), np.float32), zero)
        return [jnp.broadcast_to(zero, shape(slot.name)) for slot in spec.outputs] or [zero]

    def launch(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        clock.launch()
        return compiled(*arrays)[: len(spec.outputs)]

    place = jax.sharding.SingleDeviceSharding(device)
    shapes = [jax.ShapeDtypeStruct(shape(slot.name), np.float32, sharding=place) for slot in spec.inputs]
    compiled = jax.jit(program, out_shardings=place).lower(*shapes).compile()
    return launch


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


def one_step(emulation: Emulation, driver: Driver) -> float:
    """Seconds of one step."""
    inputs = emulation.inputs()
    jax.block_until_ready(list(inputs.values()))
    started = time.perf_counter()
    jax.block_until_ready(list(driver.run(inputs).values()))
    return time.perf_counter() - started


def measure(schedules: Sequence[Schedule], *, task_s: float, rounds: int) -> tuple[list[list[float]], list[Timeline]]:
    """Seconds of `rounds` steps of each schedule, in turns after a warm-up, and a timeline of one more."""
    emulations = [emulate(schedule, task_s=task_s, residual_bytes=32) for schedule in schedules]
    pairs = [(emulation, emulation.driver()) for emulation in emulations]
    for pair in pairs:
        one_step(*pair)
    turns = [[one_step(*pair) for pair in pairs] for _ in range(rounds)]
    for emulation, driver in pairs:
        driver.run(emulation.inputs(), record=True)
    return [list(seconds) for seconds in zip(*turns, strict=True)], [driver.timeline() for _, driver in pairs]


def late_s(*, task_s: float, rounds: int) -> float:
    """How much longer than its seconds a task takes that runs alone, by the median: sleep and callbacks are late."""
    alone = emulate(make_schedule("inference", num_meshes=1, num_microbatches=1), task_s=task_s, residual_bytes=32)
    (call,) = alone.callables.values()
    arrays = list(alone.inputs().values())
    taken = []
    for _ in range(2 * rounds):
        started = time.perf_counter()
        jax.block_until_ready(call(arrays))
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[rounds:]) - task_s


def row_of(schedule: Schedule, seconds: Sequence[float], *, task_s: float, residual_bytes: int, longer_s: float) -> Row:
    """The figures of one schedule; `longer_s`: how much longer each task takes alone."""
    emulation = emulate(schedule, task_s=task_s, residual_bytes=32)
    ideal_s = emulation.ideal_s
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3
    return Row(
        schedule=schedule.name,
        ideal_ms=ideal_s * 1e3,
        median_ms=statistics.median(seconds) * 1e3,
        quartiles_ms=(quartiles[0] * 1e3, quartiles[2] * 1e3),
        least_ms=min(seconds) * 1e3,
        ratio=statistics.median(seconds) / ideal_s,
        least_ratio=min(seconds) / ideal_s,
        ratio_to_tasks_alone=statistics.median(seconds) / emulation.ideal_of_longer_s(longer_s),
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


def print_table(rows: Sequence[Row], *, stages: int, microbatches: int, task_ms: float, longer_ms: float) -> None:
    """The rows, for people."""
    each = f"{task_ms:g} ms ({task_ms + longer_ms:.2f} alone)"
    table = Table(title=f"{stages} stages x {microbatches} microbatches of {each}, JAX {jax.__version__}")
    for column in (
        "schedule",
        "ideal ms",
        "median ms",
        "quartiles ms",
        "least ms",
        "median / ideal",
        "least / ideal",
        "median / alone",
        "in flight, stage 0",
        "peak MB, device 0",
    ):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for row in rows:
        spread = f"{row.quartiles_ms[0]:.1f} to {row.quartiles_ms[1]:.1f}"
        measured = (f"{row.median_ms:.1f}", spread, f"{row.least_ms:.1f}")
        figures = (
            f"{row.ideal_ms:.0f}",
            *measured,
            f"{row.ratio:.3f}",
            f"{row.least_ratio:.3f}",
            f"{row.ratio_to_tasks_alone:.3f}",
        )
        table.add_row(row.schedule, *figures, str(row.in_flight), f"{row.peak_bytes / 1e6:.2f}")
    Console(width=160).print(table)


def main() -> None:
    """Run all schedules and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4, help="number of meshes, one device each; at most 8")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--task-ms", type=float, default=10.0)
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
    longer_s = late_s(task_s=task_s, rounds=arguments.rounds)
    seconds, timelines = measure(schedules, task_s=task_s, rounds=arguments.rounds)
    rows = [
        row_of(schedule, own, task_s=task_s, residual_bytes=residual_bytes, longer_s=longer_s)
        for schedule, own in zip(schedules, seconds, strict=True)
    ]
    for schedule, timeline in zip(schedules, timelines, strict=True):
        if arguments.traces:
            arguments.traces.mkdir(parents=True, exist_ok=True)
            timeline.save(arguments.traces / f"{schedule.name}.json", schedule.name)
    shape = {"stages": arguments.stages, "microbatches": arguments.microbatches}
    print_table(rows, **shape, task_ms=arguments.task_ms, longer_ms=longer_s * 1e3)
    if arguments.json:
        arguments.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()

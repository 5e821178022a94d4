"""What pipelining costs where it cannot gain: real compute on one machine, pipelined against one stage after another.

In: stages, microbatches, width of the matrices. Each stage has one virtual device, and XLA's CPU kernels use every core for
any one of them, so a pipelined step cannot be faster than its tasks one by one; it should not be slower. Out: for each
schedule the median milliseconds of the step through the real driver, those of the same tasks and transfers called in a
row by one thread that waits for each, and the median of the ratios of paired rounds: at most 1.05 is asked for. What can go
wrong: other work on the machine; only ratios of a pair are compared.

    python benchmarks/pipeline_real_compute.py [--stages 4] [--microbatches 8] [--width 384] [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["AUTOPAR_CACHE"] = "off"

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from autopar.files.whole_file import save
from autopar.runtime.driver import Driver
from autopar.schedules.chain import Chain, make_chain
from autopar.schedules.instructions import Free, InstructionList, Run, Send, TaskSpec, Value
from autopar.schedules.schedules import NAMED_SCHEDULES, make_schedule

SCHEDULES = tuple((name, known.fewest_chunks) for name, known in NAMED_SCHEDULES.items())

Call = Callable[[Sequence[jax.Array]], Sequence[jax.Array]]
Arrays = dict[tuple[int, Value], jax.Array]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table; `ratio` is the median of paired rounds."""

    schedule: str
    pipelined_ms: float
    in_a_row_ms: float
    ratio: float


def compile_task(spec: TaskSpec, width: int) -> Call:
    """Multiply all inputs, then as many matrices as there are outputs."""

    def program(*arrays: jax.Array) -> list[jax.Array]:
        product = arrays[0]
        for array in arrays[1:]:
            product = jnp.tanh(product @ array) / width
        return [product + n for n in range(len(spec.outputs))]

    place = jax.sharding.SingleDeviceSharding(jax.devices()[spec.mesh])
    shape = jax.ShapeDtypeStruct((width, width), jnp.float32, sharding=place)
    compiled = jax.jit(program, out_shardings=place).lower(*[shape] * len(spec.inputs)).compile()
    return lambda arrays: compiled(*arrays) if spec.outputs else []


def transfer(array: jax.Array, value: Value, source_mesh: int, target_mesh: int) -> jax.Array:
    """Copy to the other device without waiting."""
    return jax.device_put(array, jax.devices()[target_mesh])


def in_a_row(program: InstructionList, callables: Mapping[str, Call], arrays: Arrays) -> None:
    """The program by one thread that waits for every task and transfer."""
    for instruction in program.instructions:
        mesh = instruction.mesh
        if isinstance(instruction, Run):
            results = callables[instruction.task]([arrays[mesh, value] for value in instruction.reads])
            jax.block_until_ready(results)
            arrays.update(zip([(mesh, value) for value in instruction.writes], results, strict=True))
        elif isinstance(instruction, Send):
            value, target = instruction.value, instruction.target_mesh
            arrays[target, value] = jax.block_until_ready(transfer(arrays[mesh, value], value, mesh, target))
        elif isinstance(instruction, Free):
            del arrays[mesh, instruction.value]


def measure(name: str, work: Chain, *, width: int, rounds: int) -> Row:
    """Paired rounds, after one of each to warm up."""
    program = work.emit()
    callables = {spec.name: compile_task(spec, width) for spec in work.specs}
    driver = Driver(program, callables, transfer)

    def inputs() -> Arrays:
        pairs = [(mesh, value) for mesh, values in work.inputs.items() for value in values]
        arrays = {(mesh, v): jax.device_put(jnp.ones((width, width)), jax.devices()[mesh]) for mesh, v in pairs}
        jax.block_until_ready(list(arrays.values()))
        return arrays

    pairs = []
    for _ in range(rounds + 1):
        arrays = inputs()
        started = time.perf_counter()
        jax.block_until_ready(list(driver.run(arrays).values()))
        pipelined_s = time.perf_counter() - started
        arrays = inputs()
        started = time.perf_counter()
        in_a_row(program, callables, arrays)
        pairs.append((pipelined_s, time.perf_counter() - started))
    pipelined, row = zip(*pairs[1:], strict=True)
    ratio = statistics.median(one / other for one, other in pairs[1:])
    return Row(name, statistics.median(pipelined) * 1e3, statistics.median(row) * 1e3, ratio)


def main() -> None:
    """Run all schedules and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4, help="number of meshes, one device each; at most 8")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name, v in SCHEDULES:
        sizes = {"num_meshes": arguments.stages, "num_microbatches": arguments.microbatches, "virtual_stages": v}
        work = make_chain(make_schedule(name, **sizes))
        rows.append(measure(name, work, width=arguments.width, rounds=arguments.rounds))
    table = Table(title=f"{arguments.stages} stages x {arguments.microbatches} microbatches, JAX {jax.__version__}")
    for column in ("schedule", "pipelined ms", "in a row ms", "median of paired ratios"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for row in rows:
        table.add_row(row.schedule, f"{row.pipelined_ms:.1f}", f"{row.in_a_row_ms:.1f}", f"{row.ratio:.3f}")
    Console(width=100).print(table)
    if arguments.json:
        save(arguments.json, json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()

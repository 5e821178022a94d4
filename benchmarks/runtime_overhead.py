"""What autopar costs per step beside a hand-written `jax.jit` of the same layout, and what an instruction of the runtime costs.

In: sizes of a GPT, rounds. Out: milliseconds of both steps, run in turn, and the median of the paired ratios; the same plan, data
parallelism, once through `parallelize` and once through `jax.jit` with shardings written by hand. Then the Python time per
instruction of a pipeline whose executables are replaced by functions that do nothing, so that only the driver is left. What can
go wrong: other work on the machine; pairs are run in alternating order, and the median is over pairs.

    python benchmarks/runtime_overhead.py [--hidden 128] [--batch 32] [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["AUTOPAR_CACHE"] = "off"

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import autopar
from autopar.compat import make_mesh
from autopar.files.whole_file import save
from autopar.models.config import DTYPES
from autopar.models.registry import build
from autopar.runtime.driver import Driver
from autopar.schedules.chain import make_chain
from autopar.schedules.instructions import Run
from autopar.schedules.schedules import make_schedule

RATIO_TARGET = 1.02
INSTRUCTION_TARGET_US = 50.0


def seconds(step: Callable[[Any, Any], Any], state: Any, batch: Any) -> tuple[float, Any]:
    """(seconds of one step, the new state)."""
    started = time.perf_counter()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    return time.perf_counter() - started, state


def paired(options: argparse.Namespace) -> list[tuple[float, float]]:
    """(autopar's seconds, the hand-written step's) of every round."""
    built = build("gpt", hidden=options.hidden, batch=options.batch, layers=2, dropout=0.0, dtype=options.dtype)
    mesh = make_mesh(np.array(jax.devices()), ("x",))
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))
    by_hand = jax.jit(built.train_step, in_shardings=(whole, rows), out_shardings=(whole, whole), donate_argnums=0)
    batch = next(built.data(0))
    step = autopar.parallelize(
        built.train_step, mesh_shape=(8,), constraints=autopar.data_parallel(), collectives=("all-reduce",)
    )
    step.plan(jax.eval_shape(built.create_state, jax.random.key(0)), batch)
    states = [
        step.init_state(built.create_state, jax.random.key(0)),
        jax.jit(built.create_state, out_shardings=whole)(jax.random.key(0)),
    ]
    steps: list[Callable[[Any, Any], Any]] = [step, by_hand]
    found = []
    for number in range(options.rounds + 2):
        times = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            times[which], states[which] = seconds(steps[which], states[which], batch)
        found.append((times[0], times[1]))
    return found[2:]


def instruction_us(rounds: int) -> float:
    """Least microseconds per instruction of a driver whose tasks do nothing: 4 stages, 16 microbatches."""
    program = make_chain(make_schedule("1f1b", num_meshes=4, num_microbatches=16)).emit()
    runs = {i.task: len(i.writes) for i in program.instructions if isinstance(i, Run)}
    nothing = {task: lambda arrays, count=count: [None] * count for task, count in runs.items()}
    driver = Driver(program, nothing, lambda array, value, source, target: array)
    inputs = dict.fromkeys(program.inputs)
    times = []
    for _ in range(rounds + 2):
        started = time.perf_counter()
        driver.run(inputs)
        times.append(time.perf_counter() - started)
    return min(times[2:]) / len(program.instructions) * 1e6


def main() -> None:
    """Print the table; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="that the model computes in")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pairs = paired(options)
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    ours_ms, theirs_ms = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
    overhead_us = instruction_us(options.rounds)
    table = Table("what", "figure", "target", title="Overhead of the runtime")
    table.add_row("autopar's step", f"{ours_ms:.1f} ms", "")
    table.add_row("jax.jit by hand, same layout", f"{theirs_ms:.1f} ms", "")
    table.add_row("median of paired ratios", f"{ratio:.3f}", f"<= {RATIO_TARGET}")
    table.add_row("per instruction", f"{overhead_us:.0f} us", f"<= {INSTRUCTION_TARGET_US:.0f} us")
    Console().print(table)
    if options.json:
        figures = {"autopar_ms": ours_ms, "jit_ms": theirs_ms, "ratio": ratio, "instruction_us": overhead_us}
        save(options.json, json.dumps({**figures, "pairs_s": pairs}, indent=1))


if __name__ == "__main__":
    main()

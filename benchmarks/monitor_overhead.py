"""What watching a step costs: a `Monitor` with metrics and stalls, against none, on the same steps in turn.

In: sizes of a GPT, rounds. Out: milliseconds of a step with and without a monitor, the median of the paired ratios, and
microseconds of a moment that nobody and that one observer hears. What can go wrong: other work on the machine; pairs are run in
alternating order.

    python benchmarks/monitor_overhead.py [--hidden 64] [--rounds 40]
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["AUTOPAR_CACHE"] = "off"

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

import autopar
from autopar.events import observing, reach
from autopar.models.registry import build
from autopar.monitor import Monitor

RATIO_TARGET = 1.02
STEPS = 5
"""Of each turn."""


def paired(options: argparse.Namespace) -> list[tuple[float, float]]:
    """(seconds of some steps with a monitor, without one) of every round."""
    built = build("gpt", hidden=options.hidden, batch=16, layers=2, dropout=0.0)
    batch = next(built.data(0))
    step = autopar.parallelize(built.train_step, mesh_shape=(4,), constraints=autopar.data_parallel())
    step.plan(jax.eval_shape(built.create_state, jax.random.key(0)), batch)
    state, found = step.init_state(built.create_state, jax.random.key(0)), []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds + 2):
            times = [0.0, 0.0]
            for which in (0, 1) if number % 2 else (1, 0):
                watched = (
                    Monitor(stall_s=60, metrics=Path(folder) / "metrics") if which == 0 else contextlib.nullcontext()
                )
                with watched:
                    started = time.perf_counter()
                    for _ in range(STEPS):
                        state, metrics = step(state, batch)
                    jax.block_until_ready((state, metrics))
                    times[which] = (time.perf_counter() - started) / STEPS
            found.append((times[0], times[1]))
    return found[2:]


def moment_us(*, is_heard: bool) -> float:
    """Least microseconds of a moment."""
    count, times = 100_000, []
    with observing(lambda moment: None) if is_heard else contextlib.nullcontext():
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(count):
                reach("instruction", None)
            times.append(time.perf_counter() - started)
    return min(times) / count * 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    pairs = paired(options)
    ratio = statistics.median(watched / alone for watched, alone in pairs)
    watched_ms, alone_ms = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
    table = Table("what", "figure", "target", title="Overhead of watching")
    table.add_row("a step with a monitor", f"{watched_ms:.2f} ms", "")
    table.add_row("the same without", f"{alone_ms:.2f} ms", "")
    table.add_row("median of paired ratios", f"{ratio:.3f}", f"<= {RATIO_TARGET}")
    table.add_row("a moment that nobody hears", f"{moment_us(is_heard=False):.2f} us", "")
    table.add_row("a moment that one observer hears", f"{moment_us(is_heard=True):.2f} us", "")
    Console().print(table)


if __name__ == "__main__":
    main()

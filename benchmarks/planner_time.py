"""Planning time against depth: GPT of hidden 2048 on the logical mesh (2,4), one core, no devices.

In: depths. For each, the train step is traced from shapes alone and planned for 8 GPUs of a DGX A100. Out: seconds to trace,
to build the strategy graph, to solve, and the rest (placing the moves, predicting memory, describing the plan), seconds per
layer, and the exponent p of time ~ layers^p between neighbouring depths: 1 is linear. Seconds are processor seconds of this
process, which a busy machine hardly changes; wall time is beside them. What can go wrong: the process is held to one core
by `sched_setaffinity`, which only Linux has; elsewhere the figures are for all cores. Pipelines are measured by
`stage_search_time.py`.

    python benchmarks/planner_time.py [--max-layers 48] [--layers 2 4] [--profile 30] [--json FILE]
"""

from __future__ import annotations

import os

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["AUTOPAR_CACHE"] = "off"

import argparse
import contextlib
import cProfile
import dataclasses
import functools
import itertools
import json
import math
import pstats
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import autopar
from autopar import api
from autopar.files.whole_file import save
from autopar.intra_op import mesh_search
from autopar.models import registry
from autopar.models.config import DTYPES

DEPTHS = (2, 4, 8, 16, 24, 48)
PHASES = ("trace", "graph", "memory", "solve", "assign", "describe")


@dataclasses.dataclass
class Stopwatch:
    """Seconds by phase, gathered by wrapping the functions that do them."""

    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed into `phase`."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            result = function(*args, **kwargs)
            self.seconds[phase] += time.process_time() - started
            if phase == "graph":
                self.sizes = {"nodes": len(result.nodes), "edges": len(result.edges)}
            return result

        return timed


@contextlib.contextmanager
def watched() -> Iterator[Stopwatch]:
    """Time the passes that `plan` calls; they are put back afterwards."""
    watch = Stopwatch()
    places = [
        (api, "trace", "trace"),
        (mesh_search, "graph_for", "graph"),
        (mesh_search, "memory_of_step", "memory"),
        (mesh_search, "lift_bound", "solve"),
        (mesh_search, "choose", "solve"),
        (mesh_search, "choose_within_limit", "solve"),
        (mesh_search, "assign", "assign"),
        (mesh_search, "describe_plan", "describe"),
    ]
    saved = [(module, name, getattr(module, name)) for module, name, _ in places]
    for (module, name, original), (_, _, phase) in zip(saved, places, strict=True):
        setattr(module, name, watch.wrap(phase, original))
    try:
        yield watch
    finally:
        for module, name, original in saved:
            setattr(module, name, original)


def plan_once(layers: int, given: argparse.Namespace) -> dict[str, Any]:
    """Plan one depth; seconds by phase, and the plan's figures."""
    sizes = {
        "hidden": given.hidden,
        "heads": 16,
        "seq": 1024,
        "vocab": 51200,
        "batch": given.batch,
        "remat": given.remat,
        "dtype": given.dtype,
    }
    model = registry.build("gpt", layers=layers, **sizes)
    state = jax.eval_shape(model.create_state, jax.eval_shape(lambda: jax.random.key(0)))
    step = autopar.parallelize(model.train_step, devices=8, mesh_shape=(2, 4), cluster="dgx-a100")
    with watched() as watch:
        started, started_cpu = time.perf_counter(), time.process_time()
        plan = step.plan(state, model.batch_shape())
        total_s, wall_s = time.process_time() - started_cpu, time.perf_counter() - started
    return {
        "layers": layers,
        "total_s": total_s,
        "wall_s": wall_s,
        **{f"{phase}_s": watch.seconds[phase] for phase in PHASES},
        **watch.sizes,
        "step_s": plan.step_s,
        "peak_bytes": plan.peak_bytes,
        "gap": (plan.step_s - plan.lower_bound_s) / plan.step_s,
    }


def exponents(rows: Sequence[dict[str, Any]]) -> list[float | None]:
    """p of total ~ layers^p from the row before; None for the first."""
    pairs = itertools.pairwise(rows)
    grown = [math.log(b["total_s"] / a["total_s"]) / math.log(b["layers"] / a["layers"]) for a, b in pairs]
    return [None, *grown]


def table_of(rows: Sequence[dict[str, Any]], given: argparse.Namespace) -> Table:
    """One row per depth."""
    table = Table(title=f"Planning GPT, hidden {given.hidden}, batch {given.batch}, on (2,4), one core; seconds")
    headings = (
        "layers",
        "wall",
        "total",
        "per layer",
        "exponent",
        *PHASES,
        "nodes",
        "edges",
        "gap, %",
        "peak, GB",
        "step, s",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for row, exponent in zip(rows, exponents(rows), strict=True):
        table.add_row(
            str(row["layers"]),
            f"{row['wall_s']:.1f}",
            f"{row['total_s']:.1f}",
            f"{row['total_s'] / row['layers']:.2f}",
            "" if exponent is None else f"{exponent:.2f}",
            *(f"{row[f'{phase}_s']:.1f}" for phase in PHASES),
            str(row["nodes"]),
            str(row["edges"]),
            f"{row['gap'] * 100:.2f}",
            f"{row['peak_bytes'] / 1e9:.1f}",
            f"{row['step_s']:.3f}",
        )
    return table


def main() -> None:
    """Plan each depth, print the table, profile the last depth if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, nargs="+", default=DEPTHS)
    parser.add_argument(
        "--max-layers", type=int, default=max(DEPTHS), help="leave out deeper ones (default %(default)s)"
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="that the model computes in")
    parser.add_argument("--remat", action="store_true", help="recompute each block in the backward pass")
    parser.add_argument(
        "--profile", type=int, metavar="N", help="plan the deepest again under cProfile; print N functions"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    given = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 150)
    rows: list[dict[str, Any]] = []
    for layers in (n for n in given.layers if n <= given.max_layers):
        rows.append(plan_once(layers, given))
        console.print(
            f"{layers} layers: {rows[-1]['total_s']:.1f} s of processor, {rows[-1]['wall_s']:.1f} s", style="dim"
        )
        if given.json is not None:
            save(given.json, json.dumps(rows, indent=1) + "\n")
    console.print(table_of(rows, given))
    if given.profile:
        with cProfile.Profile() as profile:
            plan_once(rows[-1]["layers"], given)
        statistics = pstats.Stats(profile)
        statistics.sort_stats("cumulative").print_stats(given.profile)
        statistics.sort_stats("tottime").print_stats(given.profile)


if __name__ == "__main__":
    main()

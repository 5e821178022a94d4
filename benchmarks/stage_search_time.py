"""Planning time of a pipeline: GPT-39B (48 layers of hidden 8192) for 8 nodes of 8 V100s, and its growth with the depth.

In: depths, unrolled or scanned. For each, the train step is traced from shapes alone, its stages are searched, and those chosen
are planned. Out: processor seconds to trace, of the phases in time, of the search and of the chosen stages; the wall time; the
stages; and the exponent p of time ~ layers^p from the depth before. What can go wrong: a depth that the machine's memory does
not hold; its row says so, and the others run.

    python benchmarks/stage_search_time.py [--layers 48] [--scan] [--hidden 8192] [--cluster p3dn.24xlarge] [--batch 128]
                                           [--microbatches 64]
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["AUTOPAR_CACHE"] = "off"

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from autopar.cost_model.cores import available_cores
from autopar.cost_model.hardware import find_cluster
from autopar.errors import OutOfMemoryError
from autopar.files.whole_file import save
from autopar.gc_pause import pause_full_collections
from autopar.inter_op import search_pipeline as search_module
from autopar.inter_op.plan_pipeline import PipelineWishes
from autopar.inter_op.search_pipeline import OneStage, SearchedPipeline, search_pipeline
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.request import PlanRequest
from autopar.layouts.constraints import Constraints
from autopar.models import registry
from autopar.models.config import DTYPES
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.trace import trace

SIZES = {"seq": 1024, "vocab": 51200, "dropout": 0.0}
HEAD = 128
"""Width of an attention head."""


class Laps:
    """Processor seconds by phase, gathered around the functions of the search that do them."""

    NAMES = ("make_loops", "search_stages", "plan_with_recomputation")

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(self.NAMES, 0.0)
        self._saved = {name: getattr(search_module, name) for name in self.NAMES}

    def __enter__(self) -> Laps:
        for name, function in self._saved.items():
            setattr(search_module, name, self._timed(name, function))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._saved.items():
            setattr(search_module, name, function)

    def _timed(self, name: str, function: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.process_time() - started

        return timed


def plan_once(layers: int, given: argparse.Namespace) -> dict[str, Any]:
    """Plan one depth; seconds by phase, and the stages."""
    width = {"hidden": given.hidden, "heads": given.hidden // HEAD}
    name = "gpt_scan" if given.scan else "gpt"
    model = registry.build(name, layers=layers, batch=given.batch, dtype=given.dtype, **width, **SIZES)
    state = jax.eval_shape(model.create_state, jax.eval_shape(lambda: jax.random.key(0)))
    machine = find_cluster(given.cluster)
    limit = int(machine.usable_memory_bytes) if math.isfinite(machine.usable_memory_bytes) else None
    request = PlanRequest(
        meshes=(),
        cluster=machine,
        memory_limit_bytes=limit,
        constraints=Constraints(),
        options=PlannerOptions(),
        processes=given.processes,
    )
    started, wall = time.process_time(), time.perf_counter()
    signature = CallSignature(model.train_step, (1,), (), "auto")
    wishes = PipelineWishes(num_stages=1, num_microbatches=given.microbatches)
    found: SearchedPipeline | OneStage = OneStage()
    with pause_full_collections(), Laps() as laps:
        traced = trace(signature, bind_arguments(signature, (state, model.batch_shape()), {}))
        trace_s = time.process_time() - started
        try:
            found = search_pipeline(traced, wishes, request, devices=given.devices)
            outcome = _stages(found) if isinstance(found, SearchedPipeline) else "one stage"
        except OutOfMemoryError as error:
            outcome = str(error).split("\n", 1)[0]
    return {
        "layers": layers,
        "trace_s": trace_s,
        "time_axis_s": laps.seconds["make_loops"],
        "search_s": laps.seconds["search_stages"],
        "stages_s": laps.seconds["plan_with_recomputation"],
        "total_s": time.process_time() - started,
        "wall_s": time.perf_counter() - wall,
        "step_s": found.pipeline.plan.step_s if isinstance(found, SearchedPipeline) else None,
        "outcome": outcome,
    }


def _stages(found: SearchedPipeline) -> str:
    plan = found.pipeline.plan
    shapes = " ".join("x".join(map(str, stage.plan.mesh_shape)) for stage in plan.stages)
    return f"{plan.num_stages} stages on {shapes}{', recomputing' if plan.recompute else ''}"


def table_of(rows: list[dict[str, Any]], given: argparse.Namespace) -> Table:
    """One row per depth."""
    scanned = " as one scan" if given.scan else ""
    title = f"Planning GPT, hidden {given.hidden}{scanned}, for {given.devices} devices of {given.cluster}; processor seconds"
    table = Table(title=title)
    for heading in ("layers", "trace", "time axis", "search", "stages", "total", "wall", "exponent", "step, s"):
        table.add_column(heading, justify="right")
    table.add_column("found")
    before: dict[str, Any] | None = None
    for row in rows:
        grown = ""
        if before is not None and row["layers"] != before["layers"]:
            grown = f"{math.log(row['total_s'] / before['total_s']) / math.log(row['layers'] / before['layers']):.2f}"
        seconds = [
            f"{row[name]:.1f}" for name in ("trace_s", "time_axis_s", "search_s", "stages_s", "total_s", "wall_s")
        ]
        step_s = "" if row["step_s"] is None else f"{row['step_s']:.1f}"
        table.add_row(str(row["layers"]), *seconds, grown, step_s, row["outcome"])
        before = row
    return table


def main() -> None:
    """Plan each depth and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[48])
    parser.add_argument("--scan", action="store_true", help="the layers as one lax.scan")
    parser.add_argument("--hidden", type=int, default=8192, help=f"a multiple of {HEAD}")
    parser.add_argument("--cluster", default="p3dn.24xlarge")
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="that the model computes in")
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--processes", type=int, default=available_cores(), help="default: one per core, %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    given = parser.parse_args()
    rows = []
    console = Console(width=None if Console().is_terminal else 170)
    for layers in given.layers:
        rows.append(plan_once(layers, given))
        console.print(f"{layers} layers: {rows[-1]['total_s']:.1f} s of processor", style="dim")
        if given.json is not None:
            save(given.json, json.dumps(rows, indent=1) + "\n")
    console.print(table_of(rows, given))


if __name__ == "__main__":
    main()

"""What a restart takes to plan: a GPT planned by a search, and then by a later run that finds the plan in the cache.

In: layers. For each case (everything open; four stages) the step is planned twice from shapes alone for the 8 V100s of a
p3.16xlarge, with an empty plan cache of its own. Out: seconds of the processor and of the wall to search; and of the second time
to trace, to decide (all from the traced step to its plan), and to restore what is compiled; and whether both plans are equal.
What can go wrong: a busy machine, on which the wall's clock is of no use.

    python benchmarks/restart_time.py [--layers 12] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from rich.console import Console
from rich.table import Table

import autopar
from autopar import api, decide
from autopar.files.whole_file import save
from autopar.models import registry
from autopar.plan_cache.recall import Recalled

CASES: dict[str, dict[str, Any]] = {
    "everything open": {},
    "4 stages, 16 microbatches, 1f1b": {"num_stages": 4, "num_microbatches": 16, "schedule": "1f1b"},
}
PARTS = {
    "trace": (api, "trace"),
    "search": (decide, "_search"),
    "decide": (api, "decide_together"),
    "restore": (decide, "_restore_kept"),
}
SIZES = {"hidden": 768, "heads": 12, "seq": 512, "vocab": 50304, "batch": 64, "dropout": 0.0}


def watch(seconds: dict[str, list[float]]) -> None:
    """Note the processor's and the wall's seconds of each part from now on."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time(), time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name] = [time.process_time() - started[0], time.perf_counter() - started[1]]

        return run

    for name, (module, attribute) in PARTS.items():
        setattr(module, attribute, timed(name, getattr(module, attribute)))


def plan_twice(layers: int, wishes: dict[str, Any], seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Plan a step with an empty cache and again with a full one; seconds of each part, and whether the plans are equal."""
    model = registry.build("gpt", layers=layers, **SIZES)
    state = jax.eval_shape(model.create_state, jax.eval_shape(lambda: jax.random.key(0)))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOPAR_CACHE"] = folder
        plans, runs = [], []
        for _ in range(2):
            seconds.clear()
            step = autopar.parallelize(model.train_step, devices=8, cluster="p3.16xlarge", **wishes)
            plans.append(step.plan(state, model.batch_shape()))
            if len(plans) == 2:  # as its compilation does
                assert isinstance(step._memory.last.planned, Recalled)
                assert step._memory.last.planned.whole
            runs.append(dict(seconds))
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    return {
        "layers": layers,
        "is_equal": plans[0] == plans[1],
        "entry_bytes": size,
        "search": runs[0]["search"],
        **{part: runs[1][part] for part in ("trace", "decide", "restore")},
    }


def main() -> None:
    """Print one row per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[12])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    watch(seconds)
    parts = ("search", "trace", "decide", "restore")
    table = Table("layers", "case", *parts, "equal", "entry", title="Seconds of the processor (of the wall)")
    rows = []
    for layers in given.layers:
        for name, wishes in CASES.items():
            row = plan_twice(layers, wishes, seconds)
            rows.append({"case": name, **row})
            cells = (f"{row[part][0]:.2f} ({row[part][1]:.2f})" for part in parts)
            table.add_row(str(layers), name, *cells, str(row["is_equal"]), f"{row['entry_bytes']:,} B")
    Console(width=130).print(table)
    if given.json:
        save(given.json, json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

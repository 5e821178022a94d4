"""How far the sum of a stage's layers is from the stage planned as a whole, for stages that the search chose.

In: models, a machine of several nodes. The search over stages prices a range of layers by the sum of its layers, each planned
like a stage of its own; what two layers would save or lose at the layout in which one hands a value to the next is left out.
Out: for each chosen stage its seconds per microbatch by that sum over those of its plan, and the largest difference. What can go
wrong: a model that one mesh holds best has no stages; its row says so.

    python benchmarks/layer_sums.py [--models gpt moe t5 llama] [--cluster p3.16xlarge] [--devices 16]
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from autopar.cost_model.cores import available_cores
from autopar.cost_model.hardware import find_cluster
from autopar.errors import AutoparError
from autopar.gc_pause import pause_full_collections
from autopar.inter_op.plan_pipeline import PipelineWishes
from autopar.inter_op.search_pipeline import OneStage, search_pipeline
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.request import PlanRequest
from autopar.layouts.constraints import Constraints
from autopar.models import registry
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.trace import trace

SIZES: Mapping[str, Mapping[str, int]] = {
    "gpt": {"layers": 12, "hidden": 1024, "heads": 16, "seq": 512, "batch": 64, "vocab": 32000},
    "moe": {"layers": 8, "hidden": 768, "heads": 12, "seq": 512, "batch": 64},
    "t5": {"layers": 6, "hidden": 768, "heads": 12, "seq": 256, "target_seq": 256, "batch": 64},
    "llama": {"layers": 8, "hidden": 1024, "heads": 16, "seq": 512, "batch": 64},
    "unet": {"batch": 256},
}


def ratios(name: str, given: argparse.Namespace) -> Sequence[float]:
    """Sum of the layers over the whole, for each stage that the search chose; none if one mesh is best."""
    model = registry.build(name, **SIZES[name])
    state = jax.eval_shape(model.create_state, jax.eval_shape(lambda: jax.random.key(0)))
    machine = find_cluster(given.cluster)
    limit = int(machine.usable_memory_bytes) if math.isfinite(machine.usable_memory_bytes) else None
    request = PlanRequest(
        meshes=(),
        cluster=machine,
        memory_limit_bytes=limit,
        constraints=Constraints(),
        options=PlannerOptions(),
        processes=available_cores(),
    )
    signature = CallSignature(model.train_step, (1,), (), "auto")
    wishes = PipelineWishes(num_stages=1, num_microbatches=given.microbatches)
    with pause_full_collections():
        traced = trace(signature, bind_arguments(signature, (state, model.batch_shape()), {}))
        found = search_pipeline(traced, wishes, request, devices=given.devices)
    if isinstance(found, OneStage):
        return ()
    whole = [stage.forward_s + stage.backward_s for stage in found.pipeline.staged.stages]
    return [by_layers / s for by_layers, s in zip(found.by_layers_s, whole, strict=True)]


def row_of(name: str, given: argparse.Namespace) -> tuple[Any, ...]:
    """A row of the table."""
    try:
        found = ratios(name, given)
    except AutoparError as error:
        return (name, "", "", str(error).split("\n", 1)[0])
    if not found:
        return (name, "1", "", "one stage is best")
    largest = max(abs(ratio - 1) for ratio in found)
    return (name, str(len(found)), f"{largest:.1%}", " ".join(f"{ratio:.3f}" for ratio in found))


def main() -> None:
    """Search each model's stages and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--cluster", default="p3.16xlarge")
    parser.add_argument("--devices", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=16)
    given = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 130)
    table = Table(
        title=f"Sum of the layers over the stage planned as a whole, {given.devices} devices of {given.cluster}"
    )
    for heading in ("model", "stages", "largest difference", "each stage"):
        table.add_column(heading)
    for name in given.models:
        with console.status(f"planning {name}"):
            table.add_row(*row_of(name, given))
    console.print(table)


if __name__ == "__main__":
    main()

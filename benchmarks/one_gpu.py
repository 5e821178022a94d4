"""Steps of one GPU, measured beside what is predicted for it: seconds, and bytes of memory.

    python benchmarks/one_gpu.py --cluster dgx-h100 [--only gpt llama] [--rounds 7] [--json FILE] [--runs FOLDER] [--dry]

In: models of the registry at sizes that fill one GPU, and the cluster whose device is at hand. Each is planned for one device,
run, and timed: two steps to warm up, then three times `--rounds` steps that are called one behind the other, as a training
loop calls them, and waited for together; then `--rounds` steps that are waited for one by one. One more step is looked into by
JAX's profiler. Tokens are drawn at random from the whole vocabulary: where all rows of a gradient are added to a few, as those
of bytes are, GPUs take many times as long. Out: per model the predicted and the measured milliseconds of a step in a loop,
their ratio, those of one that is waited for and those in which the GPU computes; the bytes that XLA says its program needs, and
those of the plan; the mean and the largest error. `--runs` keeps the recordings, which `autopar calibrate --from` reads.
`--dry` plans alone, on any machine. What can go wrong: no GPU, which is said; a model that does not fit, which is named and
ends nothing; another GPU than the cluster's, whose name is printed first.
"""

from __future__ import annotations

import os

os.environ["AUTOPAR_CACHE"] = "off"

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import autopar
from autopar.commands.arguments.subject import Subject, find_shapes
from autopar.execution.one_mesh import CompiledStep
from autopar.files.whole_file import save
from autopar.models import registry
from autopar.plan import Plan

WARM_UPS, SERIES = 2, 3
BF16 = {"dtype": "bfloat16"}
TEXT = {"vocab": 32768, "dropout": 0.0}
CASES: Mapping[str, tuple[str, Mapping[str, int | float | bool | str]]] = {
    "gpt": ("gpt", {"layers": 8, "hidden": 2048, "heads": 16, "seq": 1024, "batch": 16, **TEXT, **BF16}),
    "gpt dropout": (
        "gpt",
        {"layers": 4, "hidden": 2048, "heads": 16, "seq": 1024, "batch": 16, "vocab": 32768, **BF16},
    ),
    "gpt wide": ("gpt", {"layers": 2, "hidden": 6144, "heads": 48, "seq": 1024, "batch": 8, **TEXT, **BF16}),
    "gpt float32": ("gpt", {"layers": 4, "hidden": 1024, "heads": 16, "seq": 1024, "batch": 8, **TEXT}),
    "gpt remat": (
        "gpt",
        {"layers": 8, "hidden": 2048, "heads": 16, "seq": 1024, "batch": 16, "remat": True, **TEXT, **BF16},
    ),
    "gpt small": ("gpt", {"layers": 4, "hidden": 256, "heads": 4, "seq": 128, "batch": 8, **TEXT, **BF16}),
    "llama": (
        "llama",
        {"layers": 4, "hidden": 2048, "heads": 16, "kv_heads": 8, "ffn": 5632, "seq": 2048, "batch": 8, **TEXT, **BF16},
    ),
    "llama fused": (
        "llama",
        {
            "layers": 4,
            "hidden": 2048,
            "heads": 16,
            "kv_heads": 8,
            "ffn": 5632,
            "seq": 2048,
            "batch": 8,
            "fused_attention": True,
            **TEXT,
            **BF16,
        },
    ),
    "bert": (
        "bert",
        {"layers": 12, "hidden": 1024, "heads": 16, "seq": 512, "batch": 32, "vocab": 30528, "dropout": 0.0, **BF16},
    ),
    "t5": (
        "t5",
        {
            "layers": 4,
            "hidden": 1024,
            "heads": 16,
            "seq": 512,
            "target_seq": 256,
            "batch": 32,
            "vocab": 32128,
            "dropout": 0.0,
            **BF16,
        },
    ),
    "moe": (
        "moe",
        {
            "layers": 4,
            "hidden": 1024,
            "heads": 16,
            "seq": 1024,
            "batch": 8,
            "experts": 8,
            "group": 1024,
            **TEXT,
            **BF16,
        },
    ),
    "wide_resnet": ("wide_resnet", {"depth": 50, "base_channels": 160, "image_size": 224, "batch": 8, **BF16}),
    "wide_resnet float32": ("wide_resnet", {"depth": 50, "image_size": 224, "batch": 32}),
    "unet": ("unet", {"image_size": 64, "base_channels": 256, "batch": 64, **BF16}),
    "mlp": ("mlp", {"hidden": 8192, "inputs": 1024, "batch": 8192, "layers": 6, **BF16}),
}


MEAN_ERROR = 0.10
"""The most that predictions may be off in the mean."""


def plan(name: str, cluster: str) -> tuple[registry.BuiltModel, autopar.ParallelStep, Subject, Plan]:
    """The model of a case, its step for one device, and the plan of that."""
    model, sizes = CASES[name]
    built = registry.build(model, **sizes)
    subject = find_shapes(built)
    step = autopar.parallelize(built.train_step, devices=1, cluster=cluster, num_microbatches=1, recompute="none")
    planned = step.plan(subject.state, subject.batch)
    assert isinstance(planned, Plan)
    return built, step, subject, planned


def planned_figures(planned: Plan) -> dict[str, Any]:
    """What a plan says of a step."""
    return {
        "predicted_s": planned.step_s,
        "planned_bytes": planned.peak_bytes,
        "flops": planned.flops,
        "at_peak_s": planned.at_peak_s,
        "planning_s": planned.planning_s,
    }


def random_tokens(batch: Any, vocab: int) -> Any:
    """A batch with whole numbers drawn from all of a vocabulary; one without a vocabulary stays as it is."""
    drawn = np.random.default_rng(0)

    def replaced(leaf: np.ndarray) -> np.ndarray:
        is_text = vocab and np.issubdtype(leaf.dtype, np.integer)
        return drawn.integers(0, vocab, leaf.shape, dtype=leaf.dtype) if is_text else leaf

    return jax.tree.map(replaced, batch)


def run(name: str, cluster: str, rounds: int, runs: Path | None) -> dict[str, Any]:
    """Plan a case, run it, and look into one step; what was found, in seconds and bytes."""
    built, step, subject, planned = plan(name, cluster)
    batch = jax.device_put(random_tokens(next(built.data(0)), getattr(built.config, "vocab", 0)))
    state = step.init_state(built.create_state, jax.random.key(0))
    begun = time.perf_counter()
    compiled = step.compile(subject.state, subject.batch)
    assert isinstance(compiled, CompiledStep)
    memory = compiled.memory_analysis()
    compiling_s = time.perf_counter() - begun
    for _ in range(WARM_UPS):
        state, _metrics = jax.block_until_ready(step(state, batch))
    in_loop_s, waited_s = [], []
    for _ in range(SERIES):
        begun = time.perf_counter()
        for _ in range(rounds):
            state, _metrics = step(state, batch)
        jax.block_until_ready(state)
        in_loop_s.append((time.perf_counter() - begun) / rounds)
    for _ in range(rounds):
        begun = time.perf_counter()
        state, _metrics = jax.block_until_ready(step(state, batch))
        waited_s.append(time.perf_counter() - begun)
    with autopar.record(step) as recording:
        state, _metrics = jax.block_until_ready(step(state, batch))
    if runs is not None:
        recording.save(runs / f"{name.replace(' ', '_')}.json")
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return planned_figures(planned) | {
        "measured_s": statistics.median(in_loop_s),
        "waited_s": statistics.median(waited_s),
        "busy_s": recording.compare()["compute"].measured_s,
        "needed_bytes": kept + memory.temp_size_in_bytes,
        "compiling_s": compiling_s,
    }


def error_of(found: Mapping[str, Any]) -> float | None:
    """By which share the prediction is off; None if nothing was measured."""
    return found["predicted_s"] / found["measured_s"] - 1 if "measured_s" in found else None


def table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row for each case."""
    made = Table(
        "model",
        "predicted ms",
        "measured ms",
        "error",
        "waited ms",
        "busy ms",
        "planned GB",
        "needed GB",
        "error",
        "MFU",
        box=None,
    )
    for name, one in found.items():
        if "failed" in one:
            made.add_row(name, one["failed"])
            continue
        error, measured_s = error_of(one), one.get("measured_s")
        cells = [f"{1e3 * one['predicted_s']:.2f}"]
        cells += [f"{1e3 * measured_s:.2f}", f"{error:+.1%}"] if measured_s and error is not None else ["", ""]
        cells += [f"{1e3 * one['waited_s']:.2f}" if "waited_s" in one else ""]
        cells += [f"{1e3 * one['busy_s']:.2f}" if one.get("busy_s") else "", f"{one['planned_bytes'] / 1e9:.2f}"]
        if "needed_bytes" in one:
            share = one["planned_bytes"] / one["needed_bytes"] - 1
            cells += [f"{one['needed_bytes'] / 1e9:.2f}", f"{share:+.1%}", f"{one['mfu']:.1%}"]
        made.add_row(name, *cells)
    return made


def main() -> int:
    """Run the cases, and print and write what was found; 1 if the mean error is above the target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cluster", required=True, help="whose device is at hand, such as dgx-h100")
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--runs", type=Path, help="keep the recordings in this folder")
    parser.add_argument("--dry", action="store_true", help="plan alone")
    options = parser.parse_args()
    if not options.dry and jax.default_backend() != "gpu":
        parser.error(f"JAX sees no GPU but {jax.devices()[0].device_kind}; --dry plans alone")
    if options.runs is not None:
        options.runs.mkdir(parents=True, exist_ok=True)
    print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}; predictions for {options.cluster}", flush=True)
    found: dict[str, dict[str, Any]] = {}
    for name in options.only:
        try:
            if options.dry:
                found[name] = planned_figures(plan(name, options.cluster)[-1])
            else:
                found[name] = run(name, options.cluster, options.rounds, options.runs)
                found[name]["mfu"] = found[name]["at_peak_s"] / found[name]["measured_s"]
        except (jax.errors.JaxRuntimeError, autopar.AutoparError) as error:
            found[name] = {"failed": str(error).splitlines()[0][:80]}
        print(name, found[name], flush=True)
        gc.collect()
        jax.clear_caches()
        if options.json:
            save(options.json, json.dumps(found, indent=1))
    Console(width=130).print(table(found))
    errors = [abs(error) for one in found.values() if "failed" not in one and (error := error_of(one)) is not None]
    if errors:
        print(
            f"mean error {statistics.fmean(errors):.1%}, at most {max(errors):.1%}, target {MEAN_ERROR:.0%} in the mean"
        )
    return int(
        any("failed" in one for one in found.values()) or (bool(errors) and statistics.fmean(errors) > MEAN_ERROR)
    )


if __name__ == "__main__":
    sys.exit(main())

"""Alpa's published runs (OSDI 2022, p3.16xlarge) as training jobs.

In: the yardstick's tables of configurations, found plans and results. Out: for each result a `PublishedRun`: the job that was
run and what was measured. Alpa's plans give each stage a logical mesh of its own; microbatches of the runs with one kind of
parallelism, which the tables leave out, are those of its published experiment scripts. Conventions of the source: FLOPs of a
GPT as in the yardstick; of a mixture of experts those of 1,024 sequences, from its own latency and TFLOP/s; of a residual
network those that XLA counts, about 2.87 forward passes (the stem has no gradient of its input) and one more if recomputed.
"""

from __future__ import annotations

import csv
import dataclasses
import re
from pathlib import Path

from autopar.cost_model.residual_network import ResidualNetworkShape
from autopar.cost_model.training_job import StageLayout, TrainingJob
from autopar.cost_model.transformer import TransformerShape

_FOUND = {"gpt": "gpt", "moe": "moe", "wresnet": "wide_resnet"}
_SIZES = {
    "gpt": {1: "350M", 2: "760M", 4: "1.3B", 8: "2.6B", 16: "6.7B", 32: "15B", 64: "39B"},
    "moe": {1: "380M", 2: "690M", 4: "1.3B", 8: "2.4B", 16: "10B", 32: "27B", 64: "70B"},
    "wresnet": {1: "250M", 2: "500M", 4: "1B", 8: "2B", 16: "4B", 32: "6.8B", 64: "13B"},
}
# Runs with parallelism inside operators only: data ranks, tensor (or expert) ranks, microbatches of the full batch.
_INTRA_ONLY = {
    "gpt": {
        1: (1, 1, 64),
        2: (2, 1, 64),
        4: (4, 1, 64),
        8: (4, 2, 32),
        16: (2, 8, 64),
        32: (4, 8, 128),
        64: (2, 32, 512),
    },
    "moe": {
        1: (1, 1, 32),
        2: (2, 1, 32),
        4: (4, 1, 16),
        8: (8, 1, 16),
        16: (16, 1, 32),
        32: (32, 1, 32),
        64: (64, 1, 256),
    },
}


@dataclasses.dataclass(frozen=True)
class PublishedRun:
    """A run: what was measured is None where it was not published; `ran_out` says that it did not fit."""

    id: str
    model: str
    method: str
    devices: int
    job: TrainingJob | None
    tflops_per_device: float | None
    step_s: float | None
    peak_mem_gib: float | None
    ran_out: bool


def end_to_end(folder: Path) -> list[PublishedRun]:
    """Every row of the end-to-end table; `job` is None for methods whose plans are not known."""
    configs = {(row["family"], row["name"]): row for row in _records(folder / "alpa_configs.csv")}
    plans = {(row["family"], int(row["devices"])): row for row in _records(folder / "alpa_found_plans.csv")}
    runs = []
    for row in _records(folder / "alpa_osdi22_e2e.csv"):
        devices, model, method = (
            int(row["hosts"]) * int(row["gpus_per_host"]),
            row["model"],
            row["method"].split(".")[-1],
        )
        config = configs[_FOUND[model], _SIZES[model][devices]]
        job = _job_of(method, model, devices, config, plans[_FOUND[model], devices])
        tflops, step = float(row["tflops_per_gpu"]), float(row["mean_latency_s"] or 0)
        memory = float(row["peak_mem_GB"]) if row["peak_mem_GB"] else None
        runs.append(
            PublishedRun(
                f"{model}-{method}-{devices}", model, method, devices, job,
                tflops if tflops > 0 else None, step if step > 0 else None, memory, tflops < 0,
            )
        )  # fmt: skip
    return runs


def _records(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _job_of(method: str, model: str, devices: int, config: dict[str, str], plan: dict[str, str]) -> TrainingJob | None:
    shape = shape_of(config)
    batch = int(config["batch"])
    if method == "auto":
        return _with_stages(shape, batch, devices, int(plan["microbatches"]), _stages(plan, len(shape.blocks)))
    if method == "inter_only":
        layers = _balanced(len(shape.blocks), min(devices, len(shape.blocks)))
        return _with_stages(shape, batch, devices, batch // 4, tuple(StageLayout(n, 1, 1) for n in layers))
    if method == "intra_only" and model in _INTRA_ONLY:
        dp, tp, microbatches = _INTRA_ONLY[model][devices]
        return _with_stages(shape, batch, devices, microbatches, (StageLayout(len(shape.blocks), dp, tp),))
    return None


def _balanced(blocks: int, stages: int) -> list[int]:
    """As even as can be; stages with one block less stand at both ends, where the embedding and the head are."""
    few, more = blocks // stages, blocks % stages
    before = (stages - more) // 2
    return [few] * before + [few + 1] * more + [few] * (stages - more - before)


def shape_of(config: dict[str, str]) -> TransformerShape | ResidualNetworkShape:
    """The model of a configuration; experts are eight times as wide as hidden, dispatched in groups by one-hot products."""
    hidden, layers = int(config["hidden_or_channels"]), int(config["layers"])
    if config["family"] == "wide_resnet":
        return ResidualNetworkShape(layers, hidden, int(config["width_factor"]), int(config["seq_or_image"]), 1024)
    moe = config["family"] == "moe"
    return TransformerShape(
        family="moe" if moe else "gpt",
        layers=layers,
        hidden=hidden,
        heads=int(config["heads"]),
        kv_heads=int(config["heads"]),
        ffn_hidden=(8 if moe else 4) * hidden,
        vocab=int(config["vocab"]),
        seq_len=int(config["seq_or_image"]),
        experts=int(config["experts"]) if moe else 1,
        expert_group=int(config["expert_group"]) if moe else 0,
    )


def _stages(plan: dict[str, str], blocks: int) -> tuple[StageLayout, ...]:
    """ "2+2+4", "(2x1)+(2x1)+(4x1)" or "(1x2)*2" as stages; Alpa's groups of layers are all of one size but for remainders."""
    groups = _expanded(plan["auto_layers_per_stage"])
    meshes = [tuple(map(int, re.findall(r"\d+", text))) for text in _expanded(plan["logical_meshes"])]
    counts = [int(text) for text in groups]
    return tuple(
        StageLayout(count * blocks // sum(counts), data, tensor)
        for count, (data, tensor) in zip(counts, meshes, strict=True)
    )


def _expanded(text: str) -> list[str]:
    parts: list[str] = []
    for part in text.split("+"):
        word, _, times = part.partition("*")
        parts += [word] * int(times or 1)
    return parts


def _with_stages(
    shape: TransformerShape | ResidualNetworkShape,
    batch: int,
    devices: int,
    microbatches: int,
    layouts: tuple[StageLayout, ...],
) -> TrainingJob:
    images = isinstance(shape, ResidualNetworkShape)
    moe = not images and shape.experts > 1
    return TrainingJob(
        shape=shape,
        devices=devices,
        global_batch=batch,
        microbatch=max(1, batch // microbatches),
        data_ranks=1,
        tensor_ranks=1,
        stages=len(layouts),
        virtual_stages=1,
        expert_ranks=max(layout.data_ranks for layout in layouts) if moe else 1,
        zero_stage=1,
        recompute="full",
        precision="fp32" if images else "fp16",
        accumulate_fp32=False,
        optimizer="momentum" if images else "adam",
        stage_layouts=layouts,
    )

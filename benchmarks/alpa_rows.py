"""Alpa's published runs (OSDI 2022, p3.16xlarge) as training jobs.

In: the yardstick's tables of configurations, found plans and results. Out: for each result a `PublishedRun`: the job that was
run and what was measured. Alpa's plans give each stage a logical mesh of its own; microbatches of the runs with one kind of
parallelism, which the tables leave out, and the optimizers (Adam for GPT, Adafactor for experts, momentum for images) are
those of its published scripts. What can go wrong: results in TFLOP/s count FLOPs in the source's way, see `measured_s`; a method
whose plans are not known has no job.
"""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from autopar.simulate.closed_forms.layer_split import Recompute
from autopar.simulate.closed_forms.residual_network import ResidualNetworkShape
from autopar.simulate.closed_forms.training_job import StageLayout, TrainingJob
from autopar.simulate.closed_forms.transformer_shape import TransformerShape

_FOUND = {"gpt": "gpt", "moe": "moe", "wresnet": "wide_resnet"}
_SIZES = {
    "gpt": {1: "350M", 2: "760M", 4: "1.3B", 8: "2.6B", 16: "6.7B", 32: "15B", 64: "39B"},
    "moe": {1: "380M", 2: "690M", 4: "1.3B", 8: "2.4B", 16: "10B", 32: "27B", 64: "70B"},
    "wresnet": {1: "250M", 2: "500M", 4: "1B", 8: "2B", 16: "4B", 32: "6.8B", 64: "13B"},
}
_ALIKE = 0.25
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
    "wresnet": {1: (1, 1, 48), 2: (2, 1, 32), 4: (4, 1, 32), 8: (8, 1, 48), 16: (2, 8, 64)},
}


# The ablation of parallelism inside operators: hidden (or channels), experts; 8 layers, 8 sequences of 1,024, or 32 images.
_ABLATION = {
    "gpt": {1: (2048, 1), 2: (3072, 1), 4: (4096, 1), 8: (5760, 1)},
    "moe": {1: (1024, 8), 2: (1280, 16), 4: (1536, 16), 8: (1536, 32)},
    "wresnet": {1: (160, 1), 2: (224, 1), 4: (320, 1), 8: (448, 1)},
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


def ablation(folder: Path) -> dict[tuple[str, int], dict[str, float | None]]:
    """(model, devices) -> method -> measured seconds of its fastest mesh, None if it ran out of memory."""
    found: dict[tuple[str, int], dict[str, float | None]] = {}
    for row in _records(folder / "alpa_osdi22_intra_ablation.csv"):
        methods = found.setdefault((row["model"], int(row["hosts"]) * int(row["gpus_per_host"])), {})
        method, step = row["method"].split(".")[-1], float(row["mean_latency_s"])
        best = methods.get(method)
        methods[method] = min(step, best or step) if step > 0 else best
    return found


def ablation_jobs(model: str, devices: int, method: str) -> list[TrainingJob]:
    """What a method may choose from; the fastest that fits is what it does.

    Its ZeRO 2 scatters gradients after all of them are there, which keeps what ZeRO 1 keeps; the heuristic splits the largest
    dimension of every parameter, which is tensor parallelism; automatic sharding may take any mesh, ZeRO and expert ranks.
    """
    base = _ablation_base(model, devices)
    experts = base.shape.experts if isinstance(base.shape, TransformerShape) else 1
    pairs = [(devices // tp, tp) for tp in range(1, devices + 1) if devices % tp == 0]
    plain = dataclasses.replace(base, data_ranks=devices, microbatch=base.global_batch // devices)
    tensor = dataclasses.replace(
        base, tensor_ranks=devices, microbatch=base.global_batch, sequence_parallel=model == "wresnet" and devices > 1
    )
    match method:
        case "data_parallel":
            return [plain]
        case "zero_2":
            return [dataclasses.replace(plain, zero_stage=1)]
        case "zero_3":
            return [dataclasses.replace(plain, zero_stage=3)]
        case "heuristic":
            return [tensor]
    return [
        dataclasses.replace(
            base, data_ranks=dp, tensor_ranks=tp, microbatch=base.global_batch // dp, zero_stage=zero, expert_ranks=ep
        )
        for dp, tp in pairs
        for zero in (1, 3)
        for ep in ({1, dp} if experts % dp == 0 and experts > 1 else {1})
    ]


def _ablation_base(model: str, devices: int) -> TrainingJob:
    size, experts = _ABLATION[model][devices]
    if model == "wresnet":
        shape: TransformerShape | ResidualNetworkShape = ResidualNetworkShape(
            depth=50, channels=size, width_factor=2, image_size=224, classes=1024
        )
    else:
        moe = model == "moe"
        heads = {"gpt": size // 128 if size < 5760 else 40, "moe": {1024: 32, 1280: 40, 1536: 24}.get(size, 32)}[model]
        vocab, wide = (51200, 8) if moe else (25600, 4)
        group = 1024 if moe else 0
        shape = TransformerShape(
            family="moe" if moe else "gpt",
            layers=8,
            hidden=size,
            heads=heads,
            kv_heads=heads,
            ffn_hidden=wide * size,
            vocab=vocab,
            seq_len=1024,
            experts=experts,
            expert_group=group,
        )
    job = _with_stages(shape, 32 if model == "wresnet" else 8, devices, 1, ())
    recompute: Recompute = "none" if model == "wresnet" else "full"
    return dataclasses.replace(job, devices=devices, stages=1, expert_ranks=1, zero_stage=0, recompute=recompute)


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
    if method == "intra_only" and devices in _INTRA_ONLY[model]:
        dp, tp, microbatches = _INTRA_ONLY[model][devices]
        job = _with_stages(shape, batch, devices, microbatches, (StageLayout(len(shape.blocks), dp, tp),))
        return dataclasses.replace(job, recompute="none") if model == "wresnet" else job
    if method == "ppdp":
        return _with_stages(
            shape, batch, devices, int(plan["microbatches"]), (StageLayout(len(shape.blocks), devices, 1),)
        )
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
        return ResidualNetworkShape(
            depth=layers,
            channels=hidden,
            width_factor=int(config["width_factor"]),
            image_size=int(config["seq_or_image"]),
            classes=1024,
        )
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
    moe = isinstance(shape, TransformerShape) and shape.experts > 1
    return TrainingJob(
        shape=shape,
        devices=devices,
        global_batch=batch,
        microbatch=max(1, batch // microbatches),
        data_ranks=1,
        tensor_ranks=1,
        stages=len(layouts),
        virtual_stages=1,
        expert_ranks=max((layout.data_ranks for layout in layouts), default=1) if moe else 1,
        zero_stage=1,
        recompute="full",
        precision="fp32" if images else "fp16",
        accumulate_fp32=False,
        optimizer="momentum" if images else "adafactor" if moe else "adam",
        stage_layouts=layouts,
    )


def measured_s(run: PublishedRun, runs: Sequence[PublishedRun]) -> float | None:
    """Seconds per step of a run, from its TFLOP/s if it gives no latency; None if it ran out of memory or has no job.

    A GPT's FLOPs are the yardstick's formula. Those of experts, which count gating and dispatch, are the product of TFLOP/s and
    latency of another run of the same model, where that is within a quarter of the formula (its largest model was run with
    less than the full batch). Those of a residual network are as XLA counts them, see `xla_convolution_flops`.
    """
    if run.ran_out or run.job is None:
        return None
    if run.step_s is not None or run.tflops_per_device is None:
        return run.step_s
    flops = run.job.model_flops / 1e12
    if isinstance(run.job.shape, ResidualNetworkShape):
        passes = 3 + (run.job.recompute == "full")
        flops = xla_convolution_flops(run.job.shape, run.job.global_batch, passes) / 1e12
    for other in runs:
        if (
            run.model == "moe" == other.model
            and other.devices == run.devices
            and other.step_s
            and other.tflops_per_device
        ):
            implied = other.step_s * other.tflops_per_device * other.devices
            flops = implied if abs(implied / flops - 1) < _ALIKE else flops
    return flops / run.tflops_per_device / run.devices


def xla_convolution_flops(shape: ResidualNetworkShape, images: int, passes: int) -> float:
    """FLOPs of a residual network as XLA's cost analysis counts them: taps that fall on padding are left out.

    `passes`: 3 for forward and both gradients, 4 with recomputation; the stem's input has no gradient. Of the published runs with
    a latency and up to 16 devices, the product of TFLOP/s and latency is within 0.01 % of this.
    """
    stem = _taps(shape.image_size, 7, 2) * 3 * shape.channels
    total = float(stem * (passes - 1))
    for block in shape.blocks:
        sizes = (block.size, block.size, block.size // block.stride, block.size)
        strides = (1, block.stride, 1, block.stride)
        for conv, size, stride in zip(block.convolutions, sizes, strides, strict=False):
            total += passes * conv.ci * conv.co * _taps(size, conv.k, stride)
    head = shape.blocks[-1].outgoing * shape.classes
    return 2.0 * images * (total + passes * head)


def _taps(size: int, window: int, stride: int) -> int:
    """Pairs of a result's position and a tap of the square window that lies on the image, which is padded to be covered."""
    results = -(-size // stride)
    before = max((results - 1) * stride + window - size, 0) // 2
    line = sum(0 <= at * stride + tap - before < size for at in range(results) for tap in range(window))
    return line**2

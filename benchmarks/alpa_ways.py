"""How Alpa's models could be run on a number of devices: by our plan, by the plan that Alpa found, and by classic plans.

In: a case, one of Alpa's 21 end-to-end runs. Out: names of ways with the arguments of `parallelize` that fix them. What a way
leaves open is searched, so that it is the best of its kind: of Alpa's plan the layouts within a stage and the layer where a
stage ends, of a classic plan the microbatches and what is recomputed. All are priced by one cost model on one cluster. What
can go wrong: a way that no such model can take, such as more stages than layers; planning says so.
"""

from __future__ import annotations

import csv
import dataclasses
import fnmatch
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from alpa_rows import PublishedRun, end_to_end, measured_s
from hand_plans import megatron
from jax.sharding import PartitionSpec

import autopar
from autopar.commands.arguments.subject import Subject

DATA = Path(__file__).parent / "data"
CLUSTER = "p3.16xlarge"
DEVICES = (1, 2, 4, 8, 16, 32, 64)
FAMILIES = ("gpt", "moe", "wide_resnet")
_OF_RUNS = {"gpt": "gpt", "moe": "moe", "wide_resnet": "wresnet"}
OURS, ALPAS = "autopar", "Alpa's plan"
NO_LIMIT_BYTES = 2**50
_CONVOLUTIONS: Mapping[str, tuple[str | None, ...]] = {
    "*/conv_mid/kernel": (None, None, None, "model"),
    "*/norm_mid/*": ("model",),
    "*/conv_out/kernel": (None, None, "model", None),
}
"""How a block of a residual network is split by channels: the widened ones, in Megatron's way."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a number of devices, with what Alpa's authors measured.

    Attributes:
        name: such as `gpt-8`.
        family: as in the tables.
        devices: V100s.
        size: the name of the model's size.
        row: of the table of configurations.
        microbatches: of Alpa's plan.
        stages: Alpa's logical mesh of each stage, ranks of data and of tensor parallelism.
        alpa_s: seconds per step that Alpa was measured to take.
        tflops: TFLOP/s per device of that run, in the way in which its authors count.
    """

    name: str
    family: str
    devices: int
    size: str
    row: Mapping[str, str]
    microbatches: int
    stages: tuple[tuple[int, int], ...]
    alpa_s: float
    tflops: float

    def tflops_at(self, step_s: float) -> float:
        """TFLOP/s per device of a step of so many seconds, counted as in Alpa's."""
        return self.tflops * self.alpa_s / step_s


def cases() -> list[Case]:
    """Alpa's end-to-end runs under its own plans, from the fewest devices to the most."""
    runs = end_to_end(DATA)
    rows = _records("alpa_configs.csv")
    found = [_case(run, runs, rows) for run in runs if run.method == "auto"]
    return sorted(found, key=lambda case: (case.devices, FAMILIES.index(case.family)))


def _case(run: PublishedRun, runs: list[PublishedRun], rows: list[dict[str, str]]) -> Case:
    assert run.job is not None
    assert run.tflops_per_device is not None
    family = next(name for name, of_run in _OF_RUNS.items() if of_run == run.model)
    alpa_s = measured_s(run, runs)
    assert alpa_s is not None
    size = _size(family, run.devices, rows)
    found = next(
        r for r in _records("alpa_found_plans.csv") if (r["family"], int(r["devices"])) == (family, run.devices)
    )
    return Case(
        name=f"{family}-{run.devices}",
        family=family,
        devices=run.devices,
        size=size["name"],
        row=size,
        microbatches=int(found["microbatches"]),
        stages=tuple((layout.data_ranks, layout.tensor_ranks) for layout in run.job.stage_layouts),
        alpa_s=alpa_s,
        tflops=run.tflops_per_device,
    )


def _size(family: str, devices: int, rows: list[dict[str, str]]) -> dict[str, str]:
    """The size that a family has on a number of devices: the table lists them in order, the GPTs from the second on."""
    listed = [row for row in rows if row["family"] == family]
    return listed[DEVICES.index(devices) + (family == "gpt")]


def _records(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def ways(case: Case, subject: Subject) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of ways, ours and Alpa's first, with the arguments of `parallelize` that fix them."""
    yield OURS, {}
    yield ALPAS, alpas_way(case)
    devices = case.devices
    if devices == 1:
        return
    mesh = {"mesh_shape": {"data": devices}}
    yield "data parallel", {**mesh, "constraints": autopar.data_parallel()}
    yield "ZeRO-2", {**mesh, "constraints": autopar.zero2()}
    yield "ZeRO-3", {**mesh, "constraints": autopar.zero3()}
    for tensor, stages in megatron_sizes(devices):
        yield f"Megatron {tensor} x {stages}", megatron_way(subject, devices, tensor, stages)
    yield "intra-op only", {"num_stages": 1}
    yield "inter-op only", {"num_stages": devices, "schedule": "1f1b"}


def alpas_way(case: Case) -> dict[str, Any]:
    """Alpa's number of stages, their meshes, its microbatches; each layer is recomputed, under 1F1B.

    It has no memory limit, for it ran: Alpa's authors measured it on this machine.
    """
    fixed: dict[str, Any] = {
        "num_microbatches": case.microbatches,
        "recompute": "layer",
        "memory_limit_bytes": NO_LIMIT_BYTES,
    }
    meshes = [{"data": data, "model": tensor} for data, tensor in case.stages]
    if len(meshes) == 1:
        return {**fixed, "mesh_shape": meshes[0], "num_stages": 1}
    return {**fixed, "mesh_shape": meshes, "num_stages": len(meshes), "schedule": "1f1b"}


def megatron_sizes(devices: int) -> list[tuple[int, int]]:
    """(tensor ranks, stages) of Megatron's plans: tensor ranks within a node; the rest are stages, or half of them data ranks."""
    widest = min(8, devices)
    found = [(widest, devices // widest), (max(1, widest // 4), devices // widest), (2, devices // 2)]
    return list(dict.fromkeys((tensor, stages) for tensor, stages in found if stages <= 16 and tensor > 1))


def megatron_way(subject: Subject, devices: int, tensor: int, stages: int) -> dict[str, Any]:
    """Megatron's layouts on `tensor` neighbours of each stage, the other devices of a stage data parallel."""
    data = devices // tensor // stages
    whole = {"state/params/*": autopar.Replicated()}
    layouts = megatron(subject, tensor) or convolutions(subject, tensor)
    if data == 1:
        mesh, rules = {"model": tensor}, [whole, {"batch/*": autopar.Replicated()}, layouts]
    else:
        mesh, rules = {"data": data, "model": tensor}, [autopar.data_parallel("data"), whole, layouts]
    fixed: dict[str, Any] = {"mesh_shape": mesh, "constraints": rules, "num_stages": stages}
    return {**fixed, "schedule": "1f1b"} if stages > 1 else fixed


def convolutions(subject: Subject, ways_: int) -> dict[str, PartitionSpec]:
    """The layouts of a residual network's kernels and norms that are split by channels."""
    params: Any = subject.state
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path({"state": {"params": params.params}}):
        name = "/".join(entry.key for entry in path)
        for glob, axes in _CONVOLUTIONS.items():
            if fnmatch.fnmatch(name, f"state/params/{glob}") and leaf.shape[axes.index("model")] % ways_ == 0:
                found[name] = PartitionSpec(*axes)
    return found


def is_classic(way: str) -> bool:
    """Whether a way is neither ours nor Alpa's."""
    return way not in (OURS, ALPAS)

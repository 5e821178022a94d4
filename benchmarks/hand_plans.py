"""Is the plan that autopar finds ever slower than one that an engineer would write down? Ours against hand plans, case by case.

    python benchmarks/hand_plans.py [--only gpt-v100 ...] [--open-plans FOLDER] [--planning-seconds 60] [--json FILE]

In: the cases of `planning_ordinary.py`, or with `--small` a few that take seconds. Each is planned with everything open,
unless the folder holds CASE.json (`planning_ordinary.py --plans FOLDER` writes it), and then with its plan fixed by hand:
data parallel, ZeRO 2, ZeRO 3, Megatron's tensor parallelism of 2, 4 and 8 ways beside data parallelism (experts go where the
tensor ranks are), and 2, 4 and 8 stages with several numbers of microbatches. What a hand plan leaves open is searched, so
that it is the best of its kind. Out: the predicted step of each, the open step over it, and per case the open step over the
best hand plan's, which must be at most 1.00; exit status 1 if one is more. What does not fit the memory, or cannot be
planned, is shown as such. What can go wrong: a hand plan whose search the clock ends is worse than its kind can be; it is
marked `ended early`. Seconds are those of this process's processor.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["AUTOPAR_CACHE"] = "off"

import jax
from jax.sharding import PartitionSpec
from planning_ordinary import CASES, describe

import autopar
from autopar.commands.arguments.subject import Subject, find_subject
from autopar.commands.parser import read
from autopar.files.whole_file import save

SMALL = {
    "small-gpt": "gpt --layers 2 --hidden 64 --heads 4 --seq 16 --batch 16 --vocab 256 --cluster p3.16xlarge --devices 4",
    "small-moe": "moe --layers 2 --hidden 64 --heads 4 --seq 32 --batch 16 --cluster p3.16xlarge --devices 4",
    "small-unet": "unet --batch 16 --cluster p4d.24xlarge --devices 4",
}
"""To see in a minute or two whether this script runs."""
WAYS = (2, 4, 8)
"""Of tensor parallelism, and numbers of stages."""
TOLERANCE = 5e-4
"""Of the ratio that must be at most 1."""

MEGATRON: Mapping[str, tuple[str | None, ...]] = {
    "*/qkv/kernel": (None, None, "model", None),
    "*/qkv/bias": (None, "model", None),
    "*/query/kernel": (None, "model", None),
    "*/query/bias": ("model", None),
    "*/key/kernel": (None, "model", None),
    "*/key/bias": ("model", None),
    "*/value/kernel": (None, "model", None),
    "*/value/bias": ("model", None),
    "*/out/kernel": ("model", None, None),
    "*/up/kernel": (None, "model"),
    "*/up/bias": ("model",),
    "*/ffn/gate/kernel": (None, "model"),
    "*/down/kernel": ("model", None),
    "*/moe/up": ("model", None, None),
    "*/moe/down": ("model", None, None),
    "*/tokens/embedding": ("model", None),
    "*/embedding/head/kernel": (None, "model"),
}
"""How Megatron splits parameters; all others are whole."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One plan of a case.

    Attributes:
        name: what was fixed.
        step_s: predicted seconds per step; None if there is no plan.
        peak_bytes: of the device that needs most.
        cpu_s: seconds of the processor that planning took.
        wall_s: the same on the wall's clock.
        what: the plan in a few words, or why there is none.
    """

    name: str
    step_s: float | None
    peak_bytes: int
    cpu_s: float
    wall_s: float
    what: str


def hands(subject: Subject, devices: int, batch: int, per_stage: Sequence[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of hand plans, with the arguments of `parallelize` that fix them."""
    mesh = {"mesh_shape": {"data": devices}}
    yield "data parallel", {**mesh, "constraints": autopar.data_parallel()}
    yield "zero 2", {**mesh, "constraints": autopar.zero2()}
    yield "zero 3", {**mesh, "constraints": autopar.zero3()}
    for ways in WAYS:
        layouts = megatron(subject, ways)
        if layouts and devices % ways == 0:
            yield f"tensor {ways}", tensor_parallel(devices, ways, layouts, autopar.data_parallel)
            if ways < devices:
                yield f"tensor {ways}, zero 2", tensor_parallel(devices, ways, layouts, autopar.zero2)
    for stages in WAYS:
        counts = [stages * many for many in per_stage if batch % (stages * many) == 0]
        for microbatches in counts if devices % stages == 0 else []:
            yield f"{stages} stages x {microbatches}", {"num_stages": stages, "num_microbatches": microbatches}


def tensor_parallel(devices: int, ways: int, layouts: Mapping[str, PartitionSpec], preset: Any) -> dict[str, Any]:
    """Megatron's layouts on `ways` neighbours, and a preset of data parallelism over the rest."""
    whole = {"state/params/*": autopar.Replicated()}
    if ways == devices:
        return {"mesh_shape": {"model": ways}, "constraints": [whole, {"batch/*": autopar.Replicated()}, layouts]}
    mesh = {"data": devices // ways, "model": ways}
    return {"mesh_shape": mesh, "constraints": [preset("data"), whole, layouts]}


def megatron(subject: Subject, ways: int) -> dict[str, PartitionSpec]:
    """The layouts of `MEGATRON` that the step has leaves for, all of them divisible."""
    state: Any = subject.state
    shapes = {
        "/".join(str(key.key) for key in path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path({"state": {"params": state.params}})
    }
    found = {}
    for glob, axes in MEGATRON.items():
        matched = [shape for path, shape in shapes.items() if fnmatch.fnmatch(path, f"state/params/{glob}")]
        split = axes.index("model")
        if matched and all(len(shape) == len(axes) and shape[split] % ways == 0 for shape in matched):
            found[f"state/params/{glob}"] = PartitionSpec(*axes)
    return found


def plan(name: str, subject: Subject, wishes: Mapping[str, Any]) -> tuple[Row, str | None]:
    """Plan once; the row, and the plan as JSON."""
    started, started_cpu = time.perf_counter(), time.process_time()
    step_s, peak_bytes, text = None, 0, None
    try:
        found = autopar.parallelize(subject.step, **wishes).plan(subject.state, subject.batch)
        step_s, peak_bytes, text = found.step_s, peak_of(found), found.to_json()
        what = words(found)
    except autopar.OutOfMemoryError as error:
        what = f"does not fit: {str(error).splitlines()[0][:90]}"
    except autopar.AutoparError as error:
        what = f"{type(error).__name__}: {str(error).splitlines()[0][:110]}"
    row = Row(
        name=name,
        step_s=step_s,
        peak_bytes=peak_bytes,
        cpu_s=time.process_time() - started_cpu,
        wall_s=time.perf_counter() - started,
        what=what,
    )
    return row, text


def words(plan: autopar.Plan | autopar.PipelinePlan) -> str:
    """A plan in a few words."""
    return describe(json.loads(plan.to_json())) + (", ended early" if plan.ended_early else "")


def peak_of(plan: autopar.Plan | autopar.PipelinePlan) -> int:
    """Bytes of the device that needs most."""
    return plan.peak_bytes if isinstance(plan, autopar.Plan) else max(stage.peak_bytes for stage in plan.stages)


def open_row(name: str, subject: Subject, wishes: Mapping[str, Any], kept: Path | None) -> Row:
    """The plan with everything open: from the folder of kept plans, else planned, and kept there."""
    file = kept and kept / f"{name}.json"
    if file is not None and file.exists():
        found = autopar.plan_from_json(file.read_text())
        return Row(
            name="open", step_s=found.step_s, peak_bytes=peak_of(found), cpu_s=0.0, wall_s=0.0, what=words(found)
        )
    row, text = plan("open", subject, wishes)
    if file is not None and text is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        save(file, text)
    return row


def compare(name: str, arguments: str, given: argparse.Namespace) -> list[Row]:
    """Plan a case open and by hand, and print it row by row; the open one comes first."""
    options = read(["plan", *arguments.split()])
    subject = find_subject(options.model, options.sizes)
    wishes = {"devices": options.devices, "cluster": options.cluster, "planning_seconds": given.planning_seconds}
    print(f"\n{name}: {arguments}", flush=True)
    rows = [open_row(name, subject, wishes, given.open_plans)]
    print(line(rows[0], rows[0].step_s), flush=True)
    batch = jax.tree.leaves(subject.batch)[0].shape[0]
    for hand, fixed in hands(subject, options.devices, batch, given.per_stage):
        if given.hands and not any(fnmatch.fnmatch(hand, glob) for glob in given.hands):
            continue
        rows.append(plan(hand, subject, {**wishes, **fixed})[0])
        print(line(rows[-1], rows[0].step_s), flush=True)
    print(f"{name}: {verdict(rows)}", flush=True)
    return rows


def ratio(rows: Sequence[Row]) -> float | None:
    """The open step over that of the best hand plan; None without hand plans, infinite without an open one."""
    by_hand = [row.step_s for row in rows[1:] if row.step_s is not None]
    if not by_hand:
        return None
    return float("inf") if rows[0].step_s is None else rows[0].step_s / min(by_hand)


def verdict(rows: Sequence[Row]) -> str:
    """The ratio of a case in words."""
    found = ratio(rows)
    if found is None:
        return "no hand plan fits"
    best = min((row for row in rows[1:] if row.step_s is not None), key=lambda row: row.step_s or 0.0)
    return f"step / best hand = {found:.3f} (best: {best.name}){'  SLOWER' if found > 1 + TOLERANCE else ''}"


def line(row: Row, open_s: float | None) -> str:
    """One row of the table."""
    step = "-" if row.step_s is None else f"{1e3 * row.step_s:.2f} ms"
    over = "-" if row.step_s is None or open_s is None else f"{open_s / row.step_s:.3f}"
    clocks = f"{row.cpu_s:6.1f} s of processor ({row.wall_s:6.1f})"
    return f"  {row.name:20s} {step:>13}  open/this {over:>6}  {row.peak_bytes / 1e9:6.2f} GB  {clocks}  {row.what}"


def main() -> int:
    """Compare each case, and print the ratios once more at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*CASES, *SMALL], metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--small", action="store_true", help="small cases, to see whether it runs")
    parser.add_argument("--hands", nargs="+", metavar="GLOB", help="only these hand plans, such as 'zero *'")
    parser.add_argument("--per-stage", nargs="+", type=int, default=[2, 8], help="microbatches per stage")
    parser.add_argument("--open-plans", type=Path, help="a folder of open plans; those that it lacks are added")
    parser.add_argument("--planning-seconds", type=float, default=60.0, help="of each plan")
    parser.add_argument("--json", type=Path, help="write all figures here")
    given = parser.parse_args()
    found: dict[str, list[Row]] = {}
    for name in given.only or (SMALL if given.small else CASES):
        found[name] = compare(name, {**CASES, **SMALL}[name], given)
        if given.json:
            rows = {case: [dataclasses.asdict(row) for row in rows] for case, rows in found.items()}
            save(given.json, json.dumps(rows, indent=1))
    print()
    for name, rows in found.items():
        print(f"{name:16s} {verdict(rows)}")
    return 1 if any((ratio(rows) or 0.0) > 1 + TOLERANCE for rows in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

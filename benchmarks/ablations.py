"""What each part of the search is worth: one size of each of Alpa's families, planned with a part left out.

    python benchmarks/ablations.py [--only gpt-4 ...] [--ways 'without *'] [--planning-seconds 60] [--again] [--plot]

In: Alpa's models on 4 V100s of `p3.16xlarge` unless others are named. Out: for each a JSON file in `docs/benchmarks/ablations/`,
with a row for each way: what decides inside operators (data parallel, ZeRO-2, ZeRO-3, the largest dimension of each parameter, or
the integer program on one mesh), between them (one mesh, equal meshes under each schedule, or the search of stages), and the
whole search without one of its features. `--plot` draws steps over that of the whole search. What can go wrong: a feature that
this size does not need; its row then shows the same step. Equal operators and equal layers per stage cannot be asked for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib
from alpa_ways import OURS, Case
from hand_plans import Row
from jax.sharding import PartitionSpec
from matplotlib.figure import Figure
from weak_scaling import run_all

import autopar
from autopar.commands.arguments.subject import Subject
from autopar.files.whole_file import save

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "ablations"
CASES = ("gpt-4", "moe-4", "wide_resnet-4")
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")


def ablations(case: Case, subject: Subject) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of what decides, or is left out, with the arguments of `parallelize`; the whole search comes first."""
    yield OURS, {}
    line = {"mesh_shape": {"data": case.devices}, "num_stages": 1}
    yield "inside: data parallel", {**line, "constraints": autopar.data_parallel()}
    yield "inside: ZeRO-2", {**line, "constraints": autopar.zero2()}
    yield "inside: ZeRO-3", {**line, "constraints": autopar.zero3()}
    yield "inside: largest dimension", {**line, "constraints": largest_dimension(subject, case.devices)}
    yield "inside: integer program", {"num_stages": 1}
    for stages in (2, case.devices):
        for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1"):
            fixed = {"num_stages": stages, "mesh_shape": (case.devices // stages,), "schedule": schedule}
            yield f"between: {stages} equal meshes, {schedule}", fixed
    yield "without recomputation", {"recompute": "none"}
    yield "without recomputation per layer", {"recompute": "layer"}
    yield "without microbatches", {"num_microbatches": 1}
    yield "without stages", {"num_stages": 1}
    yield "without logical meshes", {"mesh_shape": (case.devices,)}
    for kind in KINDS[1:]:
        yield f"without {kind}", {"collectives": [one for one in KINDS if one != kind]}


def largest_dimension(subject: Subject, devices: int) -> Mapping[str, PartitionSpec]:
    """The largest dimension of every parameter that the devices divide, split over all of them."""
    state: Any = subject.state
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path({"state": {"params": state.params}}):
        sizes = [size if size % devices == 0 else 0 for size in leaf.shape]
        if any(sizes):
            axes: list[str | None] = [None] * len(sizes)
            axes[sizes.index(max(sizes))] = "data"
            found["/".join(entry.key for entry in path)] = PartitionSpec(*axes)
    return found


def draw(cases: Sequence[Case], known: Mapping[str, Mapping[str, Row]], folder: Path) -> None:
    """Write the picture and the table."""
    matplotlib.rc("svg", fonttype="none", hashsalt="ablations")
    shown = [case.name for case in cases if OURS in known.get(case.name, {})]
    names = list(dict.fromkeys(name for case in shown for name in known[case] if name != OURS))
    figure = Figure(figsize=(10, 1.2 + 0.22 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    height = 0.8 / max(1, len(shown))
    for number, case in enumerate(shown):
        ratios = [over_ours(known[case], name) or 0.0 for name in names]
        axes.barh([place + number * height for place in range(len(names))], ratios, height=0.9 * height, label=case)
    middle = 0.5 * height * (len(shown) - 1)
    axes.set_yticks([place + middle for place in range(len(names))], names)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("predicted step over that of the whole search; no bar: there is no such plan, or none fits")
    axes.set_xlim(0, 4)
    axes.legend(frameon=False)
    for kind in ("png", "svg"):
        figure.savefig(folder / f"ablations.{kind}", dpi=110, metadata={"Date": None} if kind == "svg" else None)
    lines = [f"| step over that of the whole search | {' | '.join(shown)} |", "|---" * (len(shown) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(_cell(known[case], name) for case in shown)} |" for name in names]
    save(folder / "ablations_table.md", "\n".join(lines) + "\n")


def over_ours(rows: Mapping[str, Row], name: str) -> float | None:
    """The step of a way over that of the whole search; None if one of them is missing."""
    step_s, ours_s = (rows[one].step_s if one in rows else None for one in (name, OURS))
    return step_s / ours_s if step_s and ours_s else None


def _cell(rows: Mapping[str, Row], name: str) -> str:
    ratio = over_ours(rows, name)
    return f"{ratio:.3f}" if ratio else "no plan" if name in rows else "-"


main = functools.partial(run_all, doc=__doc__, results=RESULTS, ways_of=ablations, draw=draw, only=CASES)

if __name__ == "__main__":
    sys.exit(main())

"""Draws what `weak_scaling.py` found: bars per case for each family, and our plan against the others.

In: the cases and their rows. Out: `weak_scaling.png` and `.svg` in a folder, and `weak_scaling_table.md` beside them. What can go
wrong: a case without rows; its place stays empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from alpa_ways import ALPAS, FAMILIES, OURS, Case, is_classic
from hand_plans import Row
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autopar.files.whole_file import save

Rows = Mapping[str, Row]
BARS = ("Alpa, measured", ALPAS, "best classic plan", OURS)
_COLOURS = ("#b0b0b0", "#e39b3c", "#5b8fc7", "#2f7d4f")
_TITLES = {"gpt": "GPT, float16", "moe": "GShard MoE, float16", "wide_resnet": "Wide-ResNet, float32"}


def draw(cases: Sequence[Case], known: Mapping[str, Rows], folder: Path) -> None:
    """Write the pictures and the table."""
    matplotlib.rc("svg", fonttype="none", hashsalt="weak scaling")
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    for axes, family in zip(figure.subplots(len(FAMILIES), 1), FAMILIES, strict=True):
        _draw_family(axes, [case for case in cases if case.family == family], known)
        axes.set_title(_TITLES[family], loc="left", fontsize=10)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(BARS), frameon=False)
    for kind in ("png", "svg"):
        figure.savefig(folder / f"weak_scaling.{kind}", dpi=110, metadata={"Date": None} if kind == "svg" else None)
    save(folder / "weak_scaling_table.md", table(cases, known))


def _draw_family(axes: Axes, cases: Sequence[Case], known: Mapping[str, Rows]) -> None:
    width = 0.8 / len(BARS)
    for number, (name, colour) in enumerate(zip(BARS, _COLOURS, strict=True)):
        heights = [tflops(case, known.get(case.name, {}), name) or 0.0 for case in cases]
        places = [place + (number - (len(BARS) - 1) / 2) * width for place in range(len(cases))]
        axes.bar(places, heights, width=0.92 * width, color=colour, label=name)
    axes.set_xticks(range(len(cases)), [f"{case.devices}\n{case.size}" for case in cases])
    axes.set_ylabel("TFLOP/s per V100")
    axes.spines[["top", "right"]].set_visible(False)


def tflops(case: Case, rows: Rows, bar: str) -> float | None:
    """The height of a bar; None if it is not known."""
    if bar == BARS[0]:
        return case.tflops
    row = best_classic(rows) if bar == "best classic plan" else rows.get(bar)
    return None if row is None or row.step_s is None else case.tflops_at(row.step_s)


def best_classic(rows: Rows) -> Row | None:
    """The fastest of the classic plans that fit; None if none is known."""
    known = [row for name, row in rows.items() if is_classic(name) and row.step_s is not None]
    return min(known, key=lambda row: row.step_s or 0.0, default=None)


def table(cases: Sequence[Case], known: Mapping[str, Rows]) -> str:
    """The steps of all cases, as Markdown."""
    lines = [
        "| case | size | autopar | its plan | GB | Alpa's plan / ours | Alpa, measured / ours | best classic / ours | "
        "planning, s of processor |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        rows = known.get(case.name, {})
        ours = rows.get(OURS)
        if ours is None or ours.step_s is None:
            outcome = "not planned yet" if ours is None else ours.what
            lines.append(f"| {case.name} | {case.size} | {outcome} | | | | | | |")
            continue
        alpas, classic = rows.get(ALPAS), best_classic(rows)
        cells = (
            case.name, case.size, f"{ours.step_s:.2f} s", ours.what, f"{ours.peak_bytes / 1e9:.1f}", _over(alpas, ours),
            f"{case.alpa_s / ours.step_s:.2f}", f"{_over(classic, ours)}{f' ({classic.name})' if classic else ''}",
            f"{ours.cpu_s:.0f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _over(row: Row | None, ours: Row) -> str:
    if row is None:
        return "-"
    return "no plan" if row.step_s is None or not ours.step_s else f"{row.step_s / ours.step_s:.2f}"

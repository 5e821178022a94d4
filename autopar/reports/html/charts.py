"""The charts of a page, drawn by matplotlib as SVG.

In: names and numbers. Out: SVG whose colours are the page's variables, so that one picture serves light and dark, and whose text
is text. What can go wrong: ids that two charts share; each chart is drawn under a name of its own.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, MultipleLocator

from autopar.explain.units import bytes_text, seconds_text

COLOURS: Mapping[str, str] = {
    "#010203": "var(--text)",
    "#010204": "var(--line)",
    "#0a0001": "var(--c1)",
    "#0a0002": "var(--c2)",
    "#0a0003": "var(--c3)",
    "#0a0004": "var(--c4)",
    "#0a0005": "var(--c5)",
    "#0a0006": "var(--c6)",
}
"""What stands for each colour of the page while matplotlib draws."""
TEXT, LINE, *SERIES = COLOURS
WIDE, NARROW = 9.6, 4.0
"""Inches of a chart in a wide and in a narrow window."""
_ENTRY, _CHARACTER = 0.4, 0.075
"""Inches of a legend's entry beside its text, and of a character."""
_BETWEEN_TICKS = 8.0
"""Pixels, of 72 to the inch, that lie at least between two labels of an axis; a browser's letters are wider than matplotlib's."""

Draw = Callable[[Axes], None]
Bar = tuple[str, Sequence[float]]
"""A row's name, and its parts in the order of the legend."""
Block = tuple[float, float, int]
"""Start and length in seconds, and the number of its series."""


def stacked_bars(
    name: str, rows: Sequence[Bar], legend: Sequence[str], *, limit: float | None = None, bytes_: bool = False
) -> str:
    """One horizontal bar per row, of parts that add up; `limit` is a line across. Seconds, or bytes."""

    def draw(axes: Axes) -> None:
        left = [0.0] * len(rows)
        for number, label in enumerate(legend):
            widths = [parts[number] for _, parts in rows]
            axes.barh(range(len(rows)), widths, left=left, height=0.62, color=SERIES[number % len(SERIES)], label=label)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(rows)), [row for row, _ in rows])
        axes.invert_yaxis()
        _units(axes, bytes_=bytes_)
        if limit is not None and limit < 3 * max(left, default=0.0):
            axes.axvline(limit, color=TEXT, linestyle="--", linewidth=1)
            axes.text(limit, -0.62, "limit", ha="right", va="bottom")

    return _both(name, draw, height=0.9 + 0.3 * len(rows), legend=legend)


def area(name: str, values: Sequence[float], *, limit: float | None = None, of: str = "step's operations") -> str:
    """Bytes over the step; `of`: what the axis below counts hundredths of."""

    def draw(axes: Axes) -> None:
        steps = [100 * number / max(len(values) - 1, 1) for number in range(len(values))]
        axes.fill_between(steps, values, step="mid", color=SERIES[0], alpha=0.85, linewidth=0)
        shown = [limit] if limit is not None and limit < 3 * max(values) else []
        highest = max([*values, *shown])
        axes.set_ylim(0, 1.05 * highest)
        axes.set_xlim(0, 100)
        axes.yaxis.set_major_locator(_binary_ticks(highest))
        axes.set_xlabel(f"% of the {of}")
        axes.yaxis.set_major_formatter(lambda value, _: bytes_text(max(value, 0)))
        axes.grid(axis="y", linewidth=0.5)
        for one in shown:
            axes.axhline(one, color=TEXT, linestyle="--", linewidth=1)
            axes.text(100, one, "limit", ha="right", va="bottom")

    return _both(name, draw, height=2.6)


def gantt(name: str, rows: Sequence[tuple[str, Sequence[Block]]], legend: Sequence[str]) -> str:
    """One row per mesh, with a block for each piece of work."""

    def draw(axes: Axes) -> None:
        for place, (_, blocks) in enumerate(rows):
            for number in sorted({block[2] for block in blocks}):
                spans = [(start, length) for start, length, series in blocks if series == number]
                axes.broken_barh(spans, (place - 0.4, 0.8), facecolors=SERIES[number % len(SERIES)], edgecolors="none")
        axes.set_yticks(range(len(rows)), [row for row, _ in rows])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        _units(axes, bytes_=False)
        for number, label in enumerate(legend):
            axes.plot([], [], color=SERIES[number % len(SERIES)], linewidth=6, label=label)

    return f'<div class="scrolled gantt">{_draw(name, draw, WIDE, 0.9 + 0.26 * len(rows), legend)}</div>'


def _thin_ticks(figure: Figure, axes: Axes) -> None:
    """Leave out every second tick across while labels come too close."""
    while True:
        figure.draw_without_rendering()
        low, high = axes.get_xlim()
        ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
        boxes = [
            label.get_window_extent() for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high
        ]
        between = _BETWEEN_TICKS * figure.dpi / 72
        if len(ticks) <= 2 or all(one.x1 + between <= next_.x0 for one, next_ in itertools.pairwise(boxes)):
            return
        axes.set_xticks(ticks[::2])


def _units(axes: Axes, *, bytes_: bool) -> None:
    text = bytes_text if bytes_ else seconds_text
    axes.xaxis.set_major_formatter(lambda value, _: text(max(value, 0)))
    most = axes.get_xlim()[1]
    axes.xaxis.set_major_locator(_binary_ticks(most) if bytes_ else MaxNLocator(5))
    axes.grid(axis="x", linewidth=0.5)
    axes.set_axisbelow(True)


def _binary_ticks(most: float) -> MultipleLocator:
    """About four ticks at round numbers of bytes."""
    return MultipleLocator(2 ** max(0, math.ceil(math.log2(max(most, 1) / 5))))


def _both(name: str, draw: Draw, *, height: float, legend: Sequence[str] = ()) -> str:
    """The chart for wide windows and the one for narrow ones; the page shows one of them."""
    wide = _draw(f"{name}-wide", draw, WIDE, height, legend)
    rows = [-(-len(legend) // _columns(legend, width)) if legend else 0 for width in (WIDE, NARROW)]
    narrow = _draw(f"{name}-narrow", draw, NARROW, height + 0.18 * (rows[1] - rows[0]), legend)
    return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'


def _draw(name: str, draw: Draw, width: float, height: float, legend: Sequence[str]) -> str:
    stream = io.StringIO()
    with matplotlib.rc_context():
        _settle(name)
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        if legend:
            figure.legend(
                loc="outside upper left",
                ncols=_columns(legend, width),
                frameon=False,
                handlelength=1.0,
                columnspacing=1.2,
            )
        _thin_ticks(figure, axes)
        figure.savefig(
            stream,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    return _as_part_of_a_page(stream.getvalue(), name)


def _settle(name: str) -> None:
    """Draw text as text, in the page's colours, with ids that follow from a chart's name."""
    matplotlib.rc("svg", fonttype="none", hashsalt=name)
    matplotlib.rc("font", size=9.0)
    matplotlib.rc("text", color=TEXT)
    matplotlib.rc("axes", edgecolor=LINE, labelcolor=TEXT)
    matplotlib.rc("axes.spines", top=False, right=False)
    matplotlib.rc("xtick", color=TEXT)
    matplotlib.rc("ytick", color=TEXT)
    matplotlib.rc("grid", color=LINE)


def _columns(legend: Sequence[str], width: float) -> int:
    """How many entries of a legend stand side by side: as many as its longest leaves room for."""
    return max(1, min(len(legend), int(width / (_ENTRY + _CHARACTER * max(map(len, legend))))))


def _as_part_of_a_page(svg: str, name: str) -> str:
    """The picture alone, in the page's colours and font, with ids of its own."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg role="img" aria-label="{name}" viewBox="\1">', svg, count=1
    )
    for sentinel, colour in COLOURS.items():
        svg = svg.replace(sentinel, colour)
    svg = re.sub(r"font: (\S+) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r'id="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(xlink:)?href="#([^"]+)"', rf'href="#{name}-\2"', svg)
    return re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)

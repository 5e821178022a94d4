"""A verification as a table: what differs first, then what is explained, then what matches.

In: a `Verification`. Out: text of at most `MOST_LINES` lines. Equal rows of several stages are one row. What can go wrong: more
rows than there is room for; a line tells how many are left out, and how many of these differ, and `full` gives each figure a row.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autopar.explain.paths import runs_of
from autopar.explain.tables import new_table
from autopar.explain.units import bytes_text
from autopar.verification import Verification, VerifiedRow

MOST_LINES, _WIDTH = 40, 118
_ORDER = ("differs", "unknown", "explained", "matches")
_COLUMNS = ("where", "what", "planned", "compiled", "verdict", "note")
_CUT_SHORT = ("what", "note")
"""Columns whose cells may lose their ends."""
_NOISE = 1.0
"""A result with a limit above its largest entry is made of rounding."""
_NOISE_TEXT = (
    "noise: roundings of the arguments move a result by more than its largest entry, so a match tells nothing of it"
)
_UNIT = "the largest difference of an entry, as a share of the result's largest entry"
_Row: TypeAlias = tuple[str, VerifiedRow]
"""Where a row holds, and the row."""


def page(verification: Verification, *, full: bool = False) -> str:
    """The verification in at most `MOST_LINES` lines, with a row of each topic at least; `full`: each figure has a row."""
    lines = [headline(verification), ""]
    ordered = sorted(verification.rows, key=lambda row: _ORDER.index(row.verdict))
    if full:
        every = [(_where(row, [] if row.stage is None else [row.stage]), row) for row in ordered]
        return "\n".join([*lines, *_lines_of(_table("", every)), *_unit_text(verification)])
    rows = _merged(ordered)
    together = [*_unit_text(verification), *_nearest_text(verification), *_together_text(verification, rows)]
    room = MOST_LINES - len(lines) - 2 - len(together)
    shown, left = (rows, []) if len(rows) <= room else _split(rows, room - 1)
    lines += _lines_of(_table("", shown))
    if left:
        bad = sum(row.verdict == "differs" for _, row in left)
        lines.append(f"... and {len(left)} more rows, {bad} of them different; verify --full lists all")
    return "\n".join([*lines, *together][:MOST_LINES])


def _split(rows: Sequence[_Row], room: int) -> tuple[list[_Row], list[_Row]]:
    """The rows that are shown and those that are left out: the first, but one of each topic."""
    first = {row.topic: number for number, (_, row) in reversed(list(enumerate(rows)))}
    kept = {*first.values()}
    others = [number for number in range(len(rows)) if number not in kept]
    kept |= {*others[: room - len(kept)]}
    return [rows[n] for n in sorted(kept)], [one for number, one in enumerate(rows) if number not in kept]


def _unit_text(verification: Verification) -> list[str]:
    """What the figures of values are, if there are any, and what noise is."""
    values = [row for row in verification.rows if row.unit == "error"]
    has_noise = any(is_noise for _, is_noise in _alike(values))
    return [*[f"values: {_UNIT}"][: len(values)], *[_NOISE_TEXT][:has_noise]]


def _nearest_text(verification: Verification) -> list[str]:
    """Which results the rows of several have their figures from."""
    groups = _alike(verification.rows).items()
    named = [
        f"{_nearest(some).what} (of {'noise' if noise else kind})"
        for (kind, noise), some in groups
        if noise or _has_nearest(some)
    ]
    return [f"the nearest to its limit: {', '.join(named)}"] if named else []


def _together_text(verification: Verification, rows: Sequence[_Row]) -> list[str]:
    """How the figures that the first line counts are so many rows; nothing if each has one."""
    figures = len(verification.rows)
    if figures == len(rows):
        return []
    are = f"{len(rows)} row{'s' * (len(rows) != 1)}"
    return [f"The {figures} figures are {are}: equal stages share one, and so do results of a type that match."]


def headline(verification: Verification) -> str:
    """Whether plan and program agree, in one line."""
    counts = {verdict: sum(row.verdict == verdict for row in verification.rows) for verdict in _ORDER}
    where = f"{verification.num_devices} {verification.platform} devices, JAX {verification.jax_version}"
    said = ", ".join(
        f"{count} {'match' if verdict == 'matches' else verdict}" for verdict, count in counts.items() if count
    )
    start = "Verified" if verification.ok else "NOT AS PLANNED"
    return f"{start}: {verification.step} as compiled for {where}: {said}"


def verified_table(verification: Verification) -> Table:
    """The rows as a table of a report."""
    rows = _merged(sorted(verification.rows, key=lambda row: _ORDER.index(row.verdict)))
    unit = "".join(f"; {text}" for text in _unit_text(verification))
    return _table(f"Verified against the compiled program{unit}", rows)


def _table(title: str, rows: Sequence[_Row]) -> Table:
    table = new_table(title, *_COLUMNS, numbers=("planned", "compiled"))
    for where, row in rows:
        planned, compiled = _figures(row)
        table.add_row(*map(Text, (where, row.what, planned, compiled, row.verdict, row.note)))
    return table


def _figures(row: VerifiedRow) -> tuple[str, str]:
    """Both figures as text; to the byte where people would read the same."""
    short = {"bytes": bytes_text, "flops": _flops_text, "error": _error_text}[row.unit]
    planned, compiled = ("-" if one is None else short(one) for one in (row.planned, row.compiled))
    if row.unit != "error" and planned == compiled and row.planned != row.compiled:
        return f"{row.planned:,.0f}", f"{row.compiled:,.0f}"
    return (f"<= {planned}" if row.unit == "error" and row.planned is not None else planned), compiled


def _flops_text(flops: float) -> str:
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if flops >= scale:
            return f"{flops / scale:,.2f} {unit}FLOP"
    return f"{flops:,.0f} FLOP"


def _error_text(error: float) -> str:
    return f"{error:.1e}" if error else "0"


def _merged(rows: Sequence[VerifiedRow]) -> list[_Row]:
    """Rows with where they hold; rows of several stages that are equal otherwise are one."""
    found: dict[VerifiedRow, list[int]] = {}
    for row in _without_matching_values(rows):
        found.setdefault(dataclasses.replace(row, stage=None), []).extend([] if row.stage is None else [row.stage])
    return [(_where(row, stages), row) for row, stages in found.items()]


def _without_matching_values(rows: Sequence[VerifiedRow]) -> Iterator[VerifiedRow]:
    """The rows with one for all results of a type that match, the one that is nearest to what is allowed; noise has its own."""
    yield from (row for row in rows if not _is_match_of_values(row))
    alike = _alike(rows)
    for (kind, is_noise), several in alike.items():
        every = "" if (kind, not is_noise) in alike else "all "
        nearest = _nearest(several)
        number = f"{every}{len(several)} results" if len(several) > 1 else "1 result" if is_noise else nearest.what
        note = "noise" if is_noise else "the nearest to its limit" if _has_nearest(several) else ""
        yield dataclasses.replace(nearest, what=f"{number} of {kind}", note=note)


def _is_match_of_values(row: VerifiedRow) -> bool:
    return row.topic == "values" and row.verdict == "matches"


def _alike(rows: Sequence[VerifiedRow]) -> dict[tuple[str, bool], list[VerifiedRow]]:
    """Results that match, by type and by whether they are noise."""
    alike: dict[tuple[str, bool], list[VerifiedRow]] = {}
    for row in filter(_is_match_of_values, rows):
        alike.setdefault((row.note.partition(",")[0], (row.planned or 0.0) > _NOISE), []).append(row)
    return alike


def _has_nearest(rows: Sequence[VerifiedRow]) -> bool:
    """Whether one of several is nearest to its limit; integers have no room."""
    return len(rows) > 1 and bool(rows[0].planned)


def _nearest(rows: Sequence[VerifiedRow]) -> VerifiedRow:
    """The one whose difference is the largest part of what is allowed."""
    return max(rows, key=lambda row: (row.compiled or 0.0) / (row.planned or 1.0))


def _where(row: VerifiedRow, stages: Sequence[int]) -> str:
    if not stages:
        return row.topic
    word = "mesh" if row.topic == "memory" else "stage"
    listed = f"{word} {stages[0]}" if len(stages) == 1 else f"{word}s {', '.join(map(str, _ranges(stages)))}"
    return listed.replace("meshs", "meshes")


def _ranges(numbers: Sequence[int]) -> list[str]:
    """Whole numbers in order as texts, neighbours as `0 to 3`."""
    return [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs_of(numbers)]


def _lines_of(table: Table) -> list[str]:
    """The table as lines, one for each row."""
    for column in table.columns:
        column.no_wrap, column.overflow = True, "ellipsis"
        if column.header not in _CUT_SHORT:
            column.min_width = max(len(str(cell)) for cell in (column.header, *column.cells))
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]

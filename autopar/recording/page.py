"""A recording as text.

In: what was recorded. Out: a table of measured beside predicted, who is slow, the operations that took longest. What can go
wrong: many stages; those that took as long as was said are left out of the page, and stand in `compare()`.
"""

from __future__ import annotations

import collections
import io
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autopar.explain.report import standard_output
from autopar.explain.tables import new_table
from autopar.explain.units import bytes_text, percent_text, seconds_text
from autopar.recording.compare import ComparedPart, Comparison, compare
from autopar.recording.recorded import KERNEL, Recorded
from autopar.recording.stragglers import find_stragglers

MOST_PARTS = 14
MOST_STRAGGLERS = 5
MOST_OPERATIONS = 8
"""How many rows and sentences of each kind a page has."""
MOST_LETTERS = 48
"""Of the name of an operation."""


def page(recorded: Recorded) -> str:
    """All that is to be said of a recording, as wide as the terminal: in at most 40 lines, if that has 120 columns."""
    return _text(
        [comparison_table(compare(recorded), most=MOST_PARTS), operations_table(recorded)], sentences(recorded)
    )


def comparison_text(comparison: Comparison) -> str:
    """Every part of a comparison."""
    return _text([comparison_table(comparison)], ())


def comparison_table(comparison: Comparison, *, most: int | None = None) -> Table:
    """A row for each part; of more than `most` those whose figures are furthest apart, by seconds, and the first."""
    table = new_table(
        "Measured beside predicted",
        "part",
        "predicted",
        "measured",
        "ratio",
        "",
        numbers=("predicted", "measured", "ratio"),
    )
    parts = comparison.parts
    chosen = _most_apart(parts, most) if most is not None and len(parts) > most else parts
    for part in chosen:
        ratio = "-" if part.ratio is None else f"{part.ratio:.2f}"
        table.add_row(*map(Text, (part.what, _seconds(part.predicted_s), _seconds(part.measured_s), ratio, part.note)))
    if len(chosen) < len(parts):
        table.add_row(f"... {len(parts) - len(chosen)} more", "", "", "", "run.compare() has all")
    return table


def operations_table(recorded: Recorded, *, most: int = MOST_OPERATIONS) -> Table:
    """The operations that took longest, over all devices and calls; in stages each with its task; the others as one row."""
    table = new_table(
        "The operations that took longest",
        "operation",
        "times",
        "seconds of a device",
        "bytes",
        "from",
        numbers=("times", "seconds of a device", "bytes"),
        aside=("from",),
    )
    total: dict[tuple[str, str], list[float]] = {}
    times: collections.Counter[tuple[str, str]] = collections.Counter()
    devices: dict[str, set[int]] = {}
    for one in recorded.operations:
        total.setdefault((one.task, one.name), []).append(one.seconds)
        times[one.task, one.name] += not one.goes_on
        devices.setdefault(one.task, set()).add(one.device)
    program = {(one.task, one.name): one for one in recorded.program}
    rows = {task: len(recorded.detailed) * len(numbers) for task, numbers in devices.items()}
    of_device = {key: sum(seconds) / rows[key[0]] for key, seconds in total.items()}
    ordered = sorted(of_device, key=lambda key: -of_device[key])
    for key in ordered[:most]:
        known = program[key]
        what = _shortened(f"{known.collective} {known.name}" if known.collective else known.name)
        cells = (
            f"{what} in {known.task.replace('_', ' ')}" if known.task else what,
            str(round(times[key] / rows[known.task])),
            seconds_text(of_device[key]),
            "-" if known.opcode == KERNEL else bytes_text(known.bytes),
            known.scope,
        )
        table.add_row(*map(Text, cells))
    if len(ordered) > most:
        left_s = sum(of_device[key] for key in ordered[most:])
        share = f"{percent_text(left_s, sum(of_device.values()))} of all operations' time"
        table.add_row(f"... {len(ordered) - most:,} more", "", seconds_text(left_s), "", share)
    return table


def sentences(recorded: Recorded) -> Iterator[str]:
    """Which calls were made, who is slow, and what is not known."""
    calls = recorded.calls
    numbers = ", ".join(map(str, recorded.detailed))
    looked = f"call{'s' * (len(recorded.detailed) > 1)} {numbers}" if numbers else "none"
    yield f"{len(calls)} call{'s' * (len(calls) != 1)} of {recorded.step} on {recorded.device_kind}; looked into: {looked}"
    slow = find_stragglers(recorded)
    for one in slow[:MOST_STRAGGLERS]:
        yield str(one)
    if len(slow) > MOST_STRAGGLERS:
        yield f"{len(slow) - MOST_STRAGGLERS} more take longer than their equals: run.stragglers() has all"
    for words in recorded.missing:
        yield f"not measured: {words}"


def _most_apart(parts: Sequence[ComparedPart], most: int) -> list[ComparedPart]:
    def apart_s(part: ComparedPart) -> float:
        return abs((part.measured_s or 0.0) - (part.predicted_s or 0.0))

    kept = {id(part) for part in (parts[0], *sorted(parts[1:], key=apart_s, reverse=True)[: most - 1])}
    return [part for part in parts if id(part) in kept]


def _shortened(name: str) -> str:
    """Kernels of libraries may have names of hundreds of letters, most of them arguments of templates."""
    return name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 3]}..."


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else seconds_text(seconds)


def _text(tables: Sequence[Table], said: Iterator[str] | Sequence[str]) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=standard_output().width, color_system=None)
    first = True
    for sentence in said:
        console.print(Text(sentence if first else f"- {sentence}"))
        first = False
    for table in tables:
        if table.row_count:
            console.print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())

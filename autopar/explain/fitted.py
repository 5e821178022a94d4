"""Texts and tables that fit their terminal without breaking words.

In: text such as `state/params/block_0/up`, or a table of rich, and a width in characters. Out: lines. Rich breaks at spaces,
between an amount and its unit too, and folds a longer word where the line ends; here a text is broken at spaces, a word that is
too long after slashes, commas and hyphens. In a table that is wider than the terminal, columns such as a leaf's path or a line of
source have a line of their own, and columns that say least are left out, which the last line tells. What can go wrong: a terminal
so narrow that a name exceeds it; it is folded.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, OverflowMethod, RenderResult
from rich.containers import Lines
from rich.table import Table
from rich.text import Text

GAP = 2
"""Spaces between columns."""
_LEAST_LEAD = 12
"""A first column that may have its own line has so many characters, at least, beside the others."""
_AMOUNT = re.compile(r"(\d) ((?:[KMGTP]iB|[num]s|B|s)\b)")
_GLUE = "\ue000"
"""Stands for the space between an amount and its unit, at which no line ends."""


class Cell(Text):
    """Text of a table's cell; see `wrapped`."""

    def wrap(
        self,
        console: Console,
        width: int,
        *,
        justify: JustifyMethod | None = None,
        overflow: OverflowMethod | None = None,
        tab_size: int = 8,
        no_wrap: bool | None = None,
    ) -> Lines:
        """The lines of the text in a width in characters; see `rich.text.Text.wrap`."""
        lines = (part for line in self.plain.split("\n") for part in wrapped(line, width))
        broken = self.blank_copy("\n".join(lines))
        return Text.wrap(broken, console, width, justify=justify, overflow=overflow, tab_size=tab_size, no_wrap=no_wrap)


def wrapped(text: str, width: int) -> list[str]:
    """The lines of a text: words whole if a line holds them, an amount with its unit."""
    lines = [""]
    for piece in _fitting(text, width):
        if lines[-1] and cell_len(lines[-1] + piece.rstrip(" ")) > width:
            lines.append("")
        lines[-1] += piece
        while cell_len(lines[-1].rstrip(" ")) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.rstrip(" ").replace(_GLUE, " ") for line in lines]


def pieces_of(text: str) -> list[str]:
    """The parts of a text at whose ends a line may end, without the spaces between."""
    return [piece.rstrip(" ") for word in _words(text) for piece in _parts(word)]


def _fitting(text: str, width: int) -> Iterator[str]:
    """The words of a text; of those that are too long their parts."""
    for word in _words(text):
        yield from [word] if cell_len(word.rstrip(" ")) <= width else _parts(word)


def _words(text: str) -> list[str]:
    """Words, each with the spaces behind it."""
    return re.findall(r"^ +|[^ ]+ *", _AMOUNT.sub(rf"\1{_GLUE}\2", text))


def _parts(word: str) -> list[str]:
    """A word in parts that end with slashes, commas, or hyphens between letters."""
    return re.findall(r".+?(?:[/,]+ *|(?<=[a-z])-(?=[a-z])|$)|.+", word)


class FittedTable(Table):
    """A table of a report. `aside`: columns that have a line of their own where it is narrow; `dropped`: those left out first."""

    aside: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table as rich draws it if it fits, or if its columns may be cut short; or else as `narrow_lines`."""
        columns = _columns_of(self)
        if (
            any(column.no_wrap for column in self.columns)
            or _width_of([column.natural for column in columns]) <= options.max_width
        ):
            yield from super().__rich_console__(console, options)
            return
        for line in wrapped(str(self.title or ""), options.max_width):
            yield Text(line, style=self.title_style or "")
        for line in narrow_lines(columns, options.max_width, aside=self.aside, dropped=self.dropped):
            yield Text(line)


@dataclasses.dataclass(frozen=True)
class _Column:
    """A header above cells, each a text."""

    header: str
    cells: tuple[str, ...]
    is_number: bool

    @property
    def natural(self) -> int:
        """Characters of its longest text."""
        return max(map(cell_len, (self.header, *self.cells)))

    @property
    def wide(self) -> int:
        """Characters of its longest cell, beside a header that is broken."""
        return max(self.least_header, *map(cell_len, self.cells), 1)

    @property
    def least(self) -> int:
        """Characters that its longest word needs."""
        words = [piece for cell in self.cells for piece in pieces_of(cell)]
        return max(self.least_header, *map(cell_len, words), 1)

    @property
    def least_header(self) -> int:
        """Characters that the longest word of the header needs."""
        return max(map(cell_len, self.header.split()), default=0)


def narrow_lines(
    columns: Sequence[_Column], width: int, *, aside: Sequence[str] = (), dropped: Sequence[str] = ()
) -> Iterator[str]:
    """The lines of a table that is wider than `width`."""
    left_out: list[str] = []
    lead, below, beside = _parted(columns, aside if _width_of([c.wide for c in columns]) > width else ())
    for name in dropped:
        if _width_of(_needs(lead, beside, wide=True)) <= width:
            break
        if any(column.header == name for column in beside):
            beside = [column for column in beside if column.header != name]
            left_out.append(name)
    inline = [*lead, *beside]
    widths = _shrunk(inline, width, is_led=bool(lead))
    yield from _row_lines([column.header for column in inline], inline, widths)
    if below:
        yield from _below([column.header for column in below], width)
    for number in range(len(columns[0].cells)):
        texts = [column.cells[number] for column in inline]
        if lead and cell_len(texts[0]) > widths[0]:
            yield from wrapped(texts[0], width)
            texts[0] = ""
        yield from _row_lines(texts, inline, widths)
        yield from _below([column.cells[number] for column in below], width)
    if left_out:
        yield from wrapped(f"(not shown in {width} columns: {', '.join(left_out)})", width)


def _columns_of(table: Table) -> list[_Column]:
    return [
        _Column(str(column.header), tuple(str(cell) for cell in column.cells), column.justify == "right")
        for column in table.columns
    ]


def _parted(columns: Sequence[_Column], aside: Sequence[str]) -> tuple[list[_Column], list[_Column], list[_Column]]:
    """The first column, if it may have a line of its own; the others that may; those that stay side by side."""
    lead = [column for column in columns[:1] if column.header in aside]
    below = [column for column in columns[1:] if column.header in aside]
    return lead, below, [column for column in columns if column not in lead and column not in below]


def _needs(lead: Sequence[_Column], beside: Sequence[_Column], *, wide: bool) -> list[int]:
    first = [max(_LEAST_LEAD, column.least_header) for column in lead]
    return [*first, *(column.wide if wide else column.least for column in beside)]


def _width_of(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * max(0, len(widths) - 1)


def _shrunk(inline: Sequence[_Column], width: int, *, is_led: bool) -> list[int]:
    """Widths that fit: as wide as the cells, then the widest narrower, down to their words; at last words are folded."""
    widths = [column.wide for column in inline]
    floors = _needs(inline[:1], inline[1:], wide=False) if is_led else [column.least for column in inline]
    for least in (floors, [1] * len(inline)):
        while _width_of(widths) > width:
            able = [n for n in range(len(inline)) if widths[n] > least[n]]
            if not able:
                break
            most = 0 if is_led and 0 in able else max(able, key=lambda n: widths[n])
            widths[most] -= 1
    return widths


def _row_lines(texts: Sequence[str], columns: Sequence[_Column], widths: Sequence[int]) -> Iterator[str]:
    """A row, each text broken within its column."""
    cells = [wrapped(text, width) for text, width in zip(texts, widths, strict=True)]
    for number in range(max(map(len, cells))):
        parts = []
        for lines, column, width in zip(cells, columns, widths, strict=True):
            text = lines[number] if number < len(lines) else ""
            room = " " * (width - cell_len(text))
            parts.append(room + text if column.is_number else text + room)
        yield (" " * GAP).join(parts).rstrip()


def _below(texts: Iterable[str], width: int) -> Iterator[str]:
    """What stands below a row, set in by two."""
    text = "  ".join(text for text in texts if text)
    if text:
        yield from (f"  {line}" for line in wrapped(text, width - 2))

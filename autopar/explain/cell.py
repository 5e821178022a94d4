"""A cell of a table whose text is broken at spaces and after slashes.

In: text, such as `state/params/block_0/up`, and the width of its column. Out: lines. Rich breaks at spaces alone, and folds a
longer word where the column ends; here a path is broken between its names. What can go wrong: a name that is wider than the
column is folded as before.
"""

from __future__ import annotations

import re

from rich.cells import cell_len
from rich.console import Console, JustifyMethod, OverflowMethod
from rich.containers import Lines
from rich.text import Text


class Cell(Text):
    """Text whose paths are broken after slashes, where a line is too long."""

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
        broken = self.blank_copy("\n".join(_break(line, width) for line in self.plain.split("\n")))
        return Text.wrap(broken, console, width, justify=justify, overflow=overflow, tab_size=tab_size, no_wrap=no_wrap)


def _break(line: str, width: int) -> str:
    """A line with its paths cut after slashes where they exceed the width."""
    words = re.split(r"(\s+)", line)
    return "".join(word if cell_len(word) <= width else "\n".join(_lines_of(word, width)) for word in words)


def _lines_of(path: str, width: int) -> list[str]:
    """The names of a path, as many in each line as fit, each with its slash."""
    lines = [""]
    for name in re.findall(r"[^/]*/|[^/]+", path):
        if lines[-1] and cell_len(lines[-1] + name) > width:
            lines.append("")
        lines[-1] += name
    return lines

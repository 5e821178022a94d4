"""How commands print: JSON documents, and tables without lines."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from autopar.commands.terminal.documents import output_for_documents
from autopar.explain import standard_output


def print_json(value: object) -> None:
    """Print one JSON document on standard output."""
    output_for_documents().write(json.dumps(value, indent=1, allow_nan=False) + "\n")


def reports(*, as_json: bool) -> Console:
    """Where a command tells what goes on: standard output, or standard error if that is for one JSON document."""
    return Console(stderr=True) if as_json else standard_output()


def new_table(title: str, *columns: str, words: Sequence[str]) -> Table:
    """Make an empty table without lines; columns in `words` stand to the left, numbers to the right."""
    table = Table(
        title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right", overflow="fold")
    return table

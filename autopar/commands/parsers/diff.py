"""The arguments of `diff`."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.commands.arguments.checks import check_readable
from autopar.commands.parsers.printed import add_json

HELP = "say what differs between two plans that `plan -o` wrote"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `diff`."""
    parser.add_argument("before", metavar="BEFORE", type=Path, help="a plan in JSON")
    parser.add_argument("after", metavar="AFTER", type=Path, help="another one")
    parser.add_argument("--full", action="store_true", help="list every leaf and every collective that differs")
    add_json(parser, "tables")
    parser.set_defaults(check=_check)


def _check(options: argparse.Namespace) -> None:
    check_readable(options.before)
    check_readable(options.after)

"""The arguments of `explain` and `show`, and those of every report."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.commands.arguments.checks import check_readable, check_writable
from autopar.commands.parsers.printed import add_json

HELP = (
    "print a plan that `plan -o` wrote, or write its report as a page of HTML; with a model in place of the file, plan that as "
    "`plan` does, with the flags of `plan`"
)
HELP_OF_SHOW = "print a plan that `plan -o` wrote, as `explain` does"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `explain`."""
    parser.add_argument(
        "file",
        metavar="FILE",
        type=Path,
        help="a plan in JSON; or, of `explain`, a model with the flags of `autopar plan`, such as --devices N, --leaf PATH "
        "and --classic",
    )
    add_report(parser)
    add_json(parser, "a report")
    parser.set_defaults(check=_check)


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add how much a report holds, and where it goes."""
    parser.add_argument("--full", action="store_true", help="give each leaf, collective and stage a row")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the report as one page that needs nothing else"
    )


def _check(options: argparse.Namespace) -> None:
    check_readable(options.file)
    check_writable(options.html)

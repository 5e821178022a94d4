"""The arguments of `simulate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.commands.arguments.checks import check_simulate
from autopar.commands.parsers.printed import add_json

HELP = "predict published runs, or a saved plan on another cluster, and compare"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `simulate`."""
    parser.add_argument("--table", type=Path, metavar="FILE", help="runs as CSV, with the columns of published steps")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write each row's prediction as CSV")
    parser.add_argument(
        "--closed-form",
        action="store_true",
        help="predict rows by formulas alone, without planning the layers of the real models",
    )
    parser.add_argument("--plan", type=Path, metavar="FILE", help="a plan that `plan -o` wrote, to price on --cluster")
    parser.add_argument("--cluster", metavar="NAME|FILE", help="a preset or a cluster file, for --plan")
    parser.add_argument("--planned-for", metavar="NAME|FILE", help="the cluster of the plan, if it is no preset")
    add_json(parser, "tables")
    parser.set_defaults(check=check_simulate)

"""The arguments of `calibrate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.commands.arguments import values
from autopar.commands.parsers.printed import add_json

HELP = "measure the devices at hand and write a cluster file for `--cluster`"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `calibrate`."""
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("cluster.json"), metavar="FILE", help="default %(default)s"
    )
    parser.add_argument(
        "--seconds",
        type=values.positive,
        default=100,
        metavar="N",
        help="how long to take at the most, with compiling; what is left out for want of time is said; default %(default)s",
    )
    parser.add_argument(
        "--from",
        dest="runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="measure nothing: refit the cluster of recorded runs, files of `run.save` or `train --timeline`",
    )
    parser.add_argument(
        "--devices",
        type=values.positive,
        metavar="N",
        help="how many; default: all of the accelerators there are, or else 8 virtual ones of the CPU",
    )
    add_json(parser)

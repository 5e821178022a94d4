"""The arguments of `doctor`."""

from __future__ import annotations

import argparse

from autopar.commands.arguments import values
from autopar.commands.parsers.printed import add_json

HELP = "look whether autopar, JAX and the devices at hand work, and how they are priced"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor`."""
    parser.add_argument(
        "--devices",
        type=values.positive,
        metavar="N",
        help="how many; default: all of the accelerators there are, or else 8 virtual ones of the CPU",
    )
    add_json(parser, "a table")

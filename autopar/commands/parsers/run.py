"""The arguments of `run`."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.commands.arguments import values
from autopar.commands.arguments.checks import check_readable
from autopar.commands.parsers.printed import add_json
from autopar.commands.parsers.sizes import TRAINED_HELP

HELP = "make a few steps of a model, or of your own step, under a plan that `plan -o` wrote"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    parser.add_argument("file", metavar="FILE", type=Path, help="a plan in JSON")
    parser.add_argument(
        "model", metavar="MODEL", help=TRAINED_HELP.replace("right after the command", "after the plan")
    )
    parser.add_argument("--steps", type=values.positive, default=5, metavar="N", help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of parameters, dropout and data; default %(default)s")
    parser.add_argument("--compare-jit", action="store_true", help="run the same steps with jax.jit on one device")
    add_json(parser)
    parser.set_defaults(check=lambda options: check_readable(options.file))

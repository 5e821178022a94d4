"""The arguments of `train`."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.commands.arguments import values
from autopar.commands.arguments.checks import check_train
from autopar.commands.parsers.planning import add_planning
from autopar.commands.parsers.printed import add_json
from autopar.commands.parsers.sizes import TRAINED_HELP

HELP = "train a model on real data, or your own step, under a plan"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `train`."""
    parser.add_argument("model", metavar="MODEL", help=TRAINED_HELP)
    add_planning(parser, on_each_core=False)
    parser.add_argument(
        "--steps",
        type=values.positive,
        default=100,
        metavar="N",
        help="of the whole run, with --resume those before included; default %(default)s",
    )
    parser.add_argument("--seed", type=int, default=0, help="of parameters, dropout and data; default %(default)s")
    parser.add_argument("--log", type=Path, metavar="FILE", help="write step, loss and seconds as CSV")
    parser.add_argument(
        "--save-every", type=values.positive, metavar="N", help="save the state every N steps, and when the run ends"
    )
    parser.add_argument(
        "--wait-for-saves",
        action="store_true",
        help="make no step while the state is saved: a kill then costs N steps at most",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint, if there is one")
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path("checkpoints"),
        metavar="FOLDER",
        help="where they are; default %(default)s",
    )
    parser.add_argument("--compare-jit", action="store_true", help="run the same steps with jax.jit on one device")
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write a recording of the second step as a Chrome trace"
    )
    parser.add_argument("--full", action="store_true", help="give each leaf and collective of the plan a row")
    parser.set_defaults(check=check_train)
    add_json(parser)

"""The arguments of `rank`."""

from __future__ import annotations

import argparse

from autopar.commands.arguments import values
from autopar.commands.arguments.checks import check_planning
from autopar.commands.parsers.planning import add_planning
from autopar.commands.parsers.printed import add_json
from autopar.commands.parsers.sizes import STEPS_HELP
from autopar.errors import ArgumentError

HELP = "plan a step on several clusters and numbers of devices, and compare time, memory and price: which to rent"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rank`."""
    parser.add_argument("model", metavar="MODEL", help=STEPS_HELP)
    add_planning(parser, on_each_core=True, many=True)
    parser.add_argument(
        "--clusters",
        type=values.clusters,
        required=True,
        metavar="NAMES|FILES",
        help="presets or cluster files, such as p4d.24xlarge,dgx-h100; a file may state `usd_per_device_hour`",
    )
    parser.add_argument(
        "--devices",
        type=values.numbers,
        metavar="N,...",
        help="numbers of devices, each tried on each cluster; default 8",
    )
    parser.add_argument(
        "--nodes", type=values.numbers, metavar="N,...", help="numbers of machines, in place of --devices"
    )
    parser.set_defaults(check=_check)
    add_json(parser, "a table")


def _check(options: argparse.Namespace) -> None:
    check_planning(options)
    if options.devices is not None and options.nodes is not None:
        raise ArgumentError("--devices and --nodes say the same in two ways: give only one")

"""The arguments of `plan`."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.commands.arguments.checks import check_planning, check_writable
from autopar.commands.parsers.explain import add_report
from autopar.commands.parsers.planning import add_planning
from autopar.commands.parsers.printed import add_json
from autopar.commands.parsers.sizes import STEPS_HELP

HELP = "find a plan for a step, without any device, and print it"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan`."""
    parser.add_argument("model", metavar="MODEL", help=STEPS_HELP)
    add_planning(parser, on_each_core=True)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the plan as JSON")
    add_report(parser)
    parser.add_argument(
        "--leaf",
        metavar="PATH",
        help="instead of the report, tell why an array of the state or the batch, such as "
        "state/params/block_0/ffn/up/kernel, has its layout: what decides, and what each other layout would cost",
    )
    parser.add_argument(
        "--conflict",
        action="store_true",
        help="if nothing fits the memory, tell which of your flags leave no plan, and what it costs to give one of them up, "
        "to have more memory or more devices; half of --planning-seconds is for the plan, half for this",
    )
    add_json(parser, "a report")
    parser.add_argument(
        "--classic",
        action="store_true",
        help="also plan data parallel, ZeRO-2, ZeRO-3, tensor parallel and a pipeline, and compare them with the plan",
    )
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="also plan it with 1 GiB more memory per device, and with twice the bandwidth of each kind of link, to see "
        "what that would buy",
    )
    parser.set_defaults(check=_check)


def _check(options: argparse.Namespace) -> None:
    check_planning(options)
    check_writable(options.output, options.html)

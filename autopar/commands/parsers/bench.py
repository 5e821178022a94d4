"""The arguments of `bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.commands.arguments import values
from autopar.commands.arguments.checks import check_planning, check_readable
from autopar.commands.parsers.planning import add_planning
from autopar.commands.parsers.printed import add_json
from autopar.commands.parsers.sizes import TRAINED_HELP
from autopar.errors import ArgumentError

HELP = "measure the step of a plan beside jax.jit on one device, in turns"
_DECIDED_BY_THE_PLAN = (
    "devices",
    "nodes",
    "mesh",
    "stages",
    "microbatches",
    "zero",
    "memory_limit",
    "constraint",
    "data_parallel",
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `bench`."""
    parser.add_argument("model", metavar="MODEL", help=TRAINED_HELP)
    add_planning(parser, on_each_core=False)
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="measure this plan, which `plan -o` wrote, instead of searching one"
    )
    parser.add_argument(
        "--rounds",
        type=values.positive,
        default=15,
        metavar="N",
        help="steps of each that are timed, in turns, behind two that are not; default %(default)s",
    )
    parser.add_argument("--seed", type=int, default=0, help="of parameters, dropout and data; default %(default)s")
    add_json(parser)
    parser.set_defaults(check=_check)


def _check(options: argparse.Namespace) -> None:
    check_planning(options)
    if options.plan is None:
        return
    check_readable(options.plan)
    given = [name for name in _DECIDED_BY_THE_PLAN if getattr(options, name)]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ArgumentError(f"{flags} would decide what the plan of --plan has decided: give only one of them")

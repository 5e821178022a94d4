"""The arguments of `verify`."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.commands.arguments.checks import check_planning, check_writable
from autopar.commands.parsers.planning import add_planning
from autopar.commands.parsers.printed import add_json
from autopar.commands.parsers.sizes import STEPS_HELP
from autopar.errors import ArgumentError

HELP = "compile a step, and check the compiled programs against its plan: collectives, memory, operations, results"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `verify`."""
    parser.add_argument("model", metavar="MODEL", help=STEPS_HELP)
    add_planning(parser, on_each_core=True)
    parser.add_argument(
        "--compile-for",
        choices=("v100", "a100", "h100"),
        metavar="GPU",
        help="compile for GPUs of this kind, v100, a100 or h100, that need not be there: XLA's compiler is enough, from "
        "jax-cuda12-plugin, jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12; give their machine as --cluster",
    )
    parser.add_argument(
        "--values", action="store_true", help="also run one step, and compare its results with jax.jit on one device"
    )
    parser.add_argument("--full", action="store_true", help="give each figure a row")
    add_json(parser, "a table")
    parser.add_argument("--hlo", type=Path, metavar="FILE", help="write the compiled modules, as XLA prints them")
    parser.add_argument(
        "--program", type=Path, metavar="FILE", help="write what each device runs, as text with its collectives"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the plan's report as a page that says what was verified"
    )
    parser.set_defaults(check=_check)


def _check(options: argparse.Namespace) -> None:
    check_planning(options)
    if options.values and options.compile_for is not None:
        raise ArgumentError("--values runs the step, and nothing runs on devices that are only compiled for")
    check_writable(options.hlo, options.program, options.html)

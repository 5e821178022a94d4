"""The arguments of `rank` and `diff`. Nothing here imports JAX."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.commands.arguments import values
from autopar.commands.arguments.checks import check_readable


def add_rank(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rank` beyond the model and those of planning."""
    parser.add_argument(
        "--clusters",
        type=values.clusters,
        required=True,
        metavar="NAMES|FILES",
        help="presets or cluster files, such as p4d.24xlarge,dgx-h100; a file may state `usd_per_device_hour`",
    )
    parser.add_argument(
        "--devices", type=values.numbers, default=(8,), metavar="N,...", help="how many of each; default 8"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_run_rank)


def add_diff(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `diff`."""
    parser.add_argument("before", metavar="BEFORE", type=Path, help="a plan in JSON")
    parser.add_argument("after", metavar="AFTER", type=Path, help="another one")
    parser.add_argument("--full", action="store_true", help="list every leaf and every collective that differs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=_run_diff)


def _run_rank(options: argparse.Namespace) -> int:
    from autopar.commands.rank import rank

    return rank(options)


def _run_diff(options: argparse.Namespace) -> int:
    check_readable(options.before)
    check_readable(options.after)
    from autopar.commands.diff import diff

    return diff(options)

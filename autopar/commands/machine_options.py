"""The arguments of `calibrate`, `collectives` and `doctor`. Nothing here imports JAX."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.commands.arguments import values

_SIZES = (2**10, 2**16, 2**20, 2**24, 2**28)


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `calibrate`."""
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("cluster.json"), metavar="FILE", help="default %(default)s"
    )
    parser.add_argument(
        "--seconds", type=values.positive, default=100, metavar="N", help="how long to take; default %(default)s"
    )
    parser.add_argument("--devices", type=values.positive, metavar="N", help="how many; default: all, of a CPU 8")
    parser.set_defaults(run=_run_calibrate)


def add_collectives(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `collectives`."""
    parser.add_argument("--cluster", default="cpu", metavar="NAME|FILE", help="a preset or a file; default %(default)s")
    parser.add_argument(
        "--mesh",
        type=values.numbers,
        default=(8,),
        metavar="SIZES",
        help="a logical mesh, such as 8 or 4,8; the last axis joins neighbours; default 8",
    )
    parser.add_argument(
        "--bytes",
        type=values.byte_counts,
        default=_SIZES,
        metavar="SIZES",
        help="of the larger side on a device; default 1KiB,64KiB,1MiB,16MiB,256MiB",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=_run_collectives)


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor`."""
    parser.add_argument("--devices", type=values.positive, metavar="N", help="how many; default: all, of a CPU 8")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_run_doctor)


def _run_calibrate(options: argparse.Namespace) -> int:
    from autopar.commands.calibrate import calibrate

    return calibrate(options)


def _run_collectives(options: argparse.Namespace) -> int:
    from autopar.commands.collectives import collectives

    return collectives(options)


def _run_doctor(options: argparse.Namespace) -> int:
    from autopar.commands.doctor import doctor

    return doctor(options)

"""The arguments of `collectives`."""

from __future__ import annotations

import argparse

from autopar.commands.arguments import values
from autopar.commands.parsers.printed import add_json

HELP = "price every algorithm of each collective on a cluster, and say which wins"
_SIZES = (2**10, 2**16, 2**20, 2**24, 2**28)


def add(parser: argparse.ArgumentParser) -> None:
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
    add_json(parser, "tables")

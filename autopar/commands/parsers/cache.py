"""The arguments of `cache`."""

from __future__ import annotations

import argparse

from autopar.commands.parsers.printed import add_json

HELP = "list or remove the plans that are kept on disk for later runs"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cache`."""
    parser.add_argument(
        "action", choices=("list", "clear", "path"), help="list the plans, remove them all, or print where they are"
    )
    add_json(parser)

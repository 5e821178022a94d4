"""The arguments of `demo`."""

from __future__ import annotations

import argparse

from autopar.commands.arguments import values
from autopar.commands.parsers.printed import add_json

HELP = "train a small GPT on 8 virtual CPU devices, on one mesh and as a pipeline, and compare with jax.jit on one"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `demo`."""
    parser.add_argument("--steps", type=values.positive, default=80, metavar="N", help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="that the model computes in; default %(default)s",
    )
    add_json(parser)

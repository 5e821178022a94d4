"""`--json`, which every command that prints a result takes.

Standard output holds one document or nothing. A command that comes to a result prints it, as `COMMAND.schema.json` in
`autopar/commands/schemas` says. One that plans, and finds that nothing fits the memory, prints what is needed, as
`error.schema.json` says. One that ends without a result for another reason prints nothing there; standard error has its words.
"""

from __future__ import annotations

import argparse


def add_json(parser: argparse.ArgumentParser, instead_of: str = "text") -> None:
    """Add the flag; `instead_of` names what is printed without it."""
    parser.add_argument("--json", action="store_true", help=f"print one JSON document instead of {instead_of}")

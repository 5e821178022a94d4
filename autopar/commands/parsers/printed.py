"""`--json`, which every command that prints a result takes.

The documents follow `autopar/commands/schemas/COMMAND.schema.json`.
"""

from __future__ import annotations

import argparse


def add_json(parser: argparse.ArgumentParser, instead_of: str = "text") -> None:
    """Add the flag; `instead_of` names what is printed without it."""
    parser.add_argument("--json", action="store_true", help=f"print one JSON document instead of {instead_of}")

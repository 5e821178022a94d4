"""The pairwise choice problem: presolve, dual ascent, integer programs, memory prices. Imports nothing of autopar.

`to_pulp` writes any instance as a PuLP model, to be read. PuLP is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.solver.statement import to_pulp as to_pulp

__all__ = ["to_pulp"]


def __getattr__(name: str) -> object:
    """Import what is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("autopar.solver.statement"), name)
    globals()[name] = value
    return value

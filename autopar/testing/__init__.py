"""What autopar offers to tests: random strategies as an oracle for rules, and `autopar.testing.faults` for what goes wrong.

JAX is imported when an oracle is first used, so that faults alone cost no start.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.testing import faults as faults
    from autopar.testing.random_strategies import random_assignment as random_assignment
    from autopar.testing.random_strategies import run_with_random_strategies as run_with_random_strategies

__all__ = ["faults", "random_assignment", "run_with_random_strategies"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "faults":
        return importlib.import_module("autopar.testing.faults")
    return getattr(importlib.import_module("autopar.testing.random_strategies"), name)

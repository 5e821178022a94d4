"""Python's garbage collector in processes that run tests.

What is there when all tests are collected, JAX above all, stays; the collector need not walk over it again and again. Tests that
look for garbage collect it first.
"""

import gc

THRESHOLDS = (50_000, 20, 50)
"""Seventy times less often than usual: whole collections come after 50 million new objects, and at the end of a test file."""


def collect_seldom() -> None:
    """Keep what is there, and collect garbage seldom from now on."""
    leave_alone_what_lives()
    gc.set_threshold(*THRESHOLDS)


def leave_alone_what_lives() -> None:
    """Collect garbage; no later collection walks over the rest."""
    gc.collect()
    gc.freeze()

"""Which cases of a test run in `make test`.

A test with `@pytest.mark.sampled(EVERY)` has many cases of one kind. One in `EVERY` of them runs in `make test`, the others are
marked `sweep` and run in `make test-sweeps`. Which ones these are depends on the test's name and on nothing else: not always the
first and simplest, and the same in every process.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence

import pytest


def mark_sweeps(items: Sequence[pytest.Item]) -> None:
    """Mark the cases of sampled tests that `make test` leaves out; slow ones are left out anyway."""
    cases: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            cases[str(item.path), getattr(item, "originalname", item.name)].append(item)
    for (_, name), found in cases.items():
        mark = found[0].get_closest_marker("sampled")
        assert mark is not None
        kept = choose_cases(name, len(found), *mark.args)
        for number, item in enumerate(found):
            if number not in kept:
                item.add_marker("sweep")


def choose_cases(name: str, count: int, every: int) -> range:
    """The numbers of the cases of a test that run in `make test`: one at least, and one in `every`."""
    return range(zlib.crc32(name.encode()) % min(every, count), count, every)

"""Oracle: JAX's own harnesses of its primitives, about 5,500, and their gradients, are the same under random strategies.

The slow part runs every harness on one of the meshes, which its name picks, or with AUTOPAR_HARNESS_MESHES=all on all three;
the fast part, one harness of every group, of half of the groups in `make test`. Same is bit for bit but for numbers that round,
whose infinities and NaNs stand in the same places and whose error is at most `cases.RELATIVE` of the leaf's largest entry.
"""

import json
import re
from pathlib import Path

import jax
import pytest

from tests.harnesses.cases import NOT_RUN_BY_JAX, all_harnesses
from tests.harnesses.report import COUNTS
from tests.harnesses.selection import EVERY_MESH, names_by_group, on_meshes, one_of_every_group, run_lines

SLOW_PARTS = 30
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
LEAST_SPLITTING = 105
"""Groups in which some operation can be split; about 15 hold only operations that no mesh can split."""
MOST_NOT_RUN = 5
"""Harnesses of a part that JAX has on other platforms only; more would mean that little is compared."""


def assert_same(lines):
    """Every such harness is the same on its mesh."""
    found = run_lines(lines)
    problems = {name: text for name, text in found.items() if text != NOT_RUN_BY_JAX}
    assert not problems, "\n".join(f"{name}: {text}" for name, text in problems.items())
    assert len(found) <= MOST_NOT_RUN


@pytest.mark.sampled(2)
@pytest.mark.parametrize("half", [0, 1])
def test_a_harness_of_every_group_is_the_same_under_random_strategies(half):
    assert_same(on_meshes(one_of_every_group()[half::2]))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(SLOW_PARTS))
def test_every_harness_is_the_same_under_random_strategies(part):
    names = [harness.fullname for harness in all_harnesses()][part::SLOW_PARTS]
    assert_same(on_meshes(names, every=EVERY_MESH))


def test_all_harnesses_that_the_docs_count_are_equal_at_both_ends_of_jax():
    counts = json.loads(COUNTS.read_text(encoding="utf-8"))
    oldest, behind_newest = re.search(r'"jax>=0\.(\d+),<0\.(\d+)"', PYPROJECT.read_text(encoding="utf-8")).groups()
    assert {int(version.split(".")[1]) for version in counts} >= {int(oldest), int(behind_newest) - 1}
    for groups in counts.values():
        assert {name for name, count in groups.items() if count["equal"] != count["run"]} == set()
        assert sum(count["splits"] for count in groups.values()) >= LEAST_SPLITTING


def test_the_counts_of_the_installed_jax_are_of_all_its_harnesses():
    counts = json.loads(COUNTS.read_text(encoding="utf-8"))
    if jax.__version__ not in counts:  # a release behind those that were counted; the tests above run its harnesses
        pytest.skip(f"docs/coverage.md does not count the harnesses of JAX {jax.__version__}")
    counted = {name: count["harnesses"] for name, count in counts[jax.__version__].items()}
    assert counted == {name: len(names) for name, names in names_by_group().items()}

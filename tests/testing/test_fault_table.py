"""The table of docs/howto/faults.md and the tests are one list: tests marked `fault(row)` let the fault of a row happen.

What the row says it ends in, an error of autopar or an option, stands in one of its tests. `pytest -m fault` runs them.
"""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "howto" / "faults.md"
ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.+) \|$", re.MULTILINE)
WORDS = re.compile(r"`(\w+Error|--[a-z-]+)`")


class Marked(NamedTuple):
    """A test with the mark: its place, its source with decorators, whether all of its cases are slow."""

    place: str
    source: str
    is_slow: bool


@cache
def rows():
    """By number: (fault, what it ends in)."""
    return {int(number): (fault, end) for number, fault, end in ROW.findall(PAGE.read_text())}


@cache
def marked_tests():
    """By row: the tests that name it."""
    found = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "@pytest.mark.fault(" not in text:
            continue
        tree = ast.parse(text)
        are_slow = any(isinstance(node, ast.Assign) and is_slow_mark(node) for node in tree.body)
        for test in (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list):
            source = "\n".join(text.splitlines()[test.decorator_list[0].lineno - 1 : test.end_lineno])
            is_slow = are_slow or any(ast.unparse(mark) == "pytest.mark.slow" for mark in test.decorator_list)
            for row in numbers_of(test):
                found[row].append(Marked(f"{path.relative_to(ROOT)}::{test.name}", source, is_slow))
    return dict(found)


def is_slow_mark(node):
    return ast.unparse(node.targets[0]) == "pytestmark" and "pytest.mark.slow" in ast.unparse(node.value)


def numbers_of(test):
    """The rows that a test's mark names."""
    marks = [mark for mark in test.decorator_list if ast.unparse(mark).startswith("pytest.mark.fault(")]
    return [ast.literal_eval(row) for mark in marks for row in mark.args]


def test_rows_are_numbered_and_the_tests_know_no_others():
    assert list(rows()) == [*range(1, len(rows()) + 1)]
    assert len(rows()) == len(re.findall(r"^\| \d", PAGE.read_text(), re.MULTILINE))
    assert set(marked_tests()) <= set(rows())


@pytest.mark.parametrize("row", rows())
def test_each_row_has_a_test_in_every_run_that_finds_its_words(row):
    tests = marked_tests().get(row, [])
    assert any(not test.is_slow for test in tests), f"row {row}, {rows()[row][0]}: {[test.place for test in tests]}"
    for word in WORDS.findall(rows()[row][1]):
        assert any(word in test.source for test in tests), f"row {row}: no test finds {word}"


def test_the_number_of_rows_is_said_where_the_tests_are_described():
    assert f"Each of [{len(rows())} faults]" in (ROOT / "docs" / "inside" / "tests.md").read_text()

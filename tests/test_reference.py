"""The reference tells all: every public name is described, with its parameters, what it returns and what it raises."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator

import pytest

import autopar


def functions() -> Iterator[tuple[str, Callable[..., object]]]:
    """The public functions, and the public methods of public classes, those that they inherit from autopar's own among them."""
    for name in autopar.__all__:
        value = getattr(autopar, name)
        if not inspect.isclass(value):
            yield name, value
        elif not issubclass(value, Exception):
            for key, member in inspect.getmembers(value, inspect.isfunction):
                if not key.startswith("_") and member.__module__.startswith("autopar."):
                    yield f"{name}.{key}", member


FUNCTIONS = dict(functions())


def words_about(name: str) -> str:
    text = inspect.getdoc(FUNCTIONS[name])
    assert text, name
    return text


def test_every_public_class_and_error_is_described() -> None:
    for name in autopar.__all__:
        text = inspect.getdoc(getattr(autopar, name))
        assert text, name
        assert len(text.split()) > 5, (name, text)


def test_every_public_function_describes_its_parameters() -> None:
    for name, function in FUNCTIONS.items():
        parameters = inspect.signature(function).parameters.values()
        named = [p.name for p in parameters if p.name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        text = words_about(name)
        assert not [each for each in named if not re.search(rf"^    {each}: |`{each}`", text, re.MULTILINE)], name


def test_every_public_function_that_raises_says_so() -> None:
    for name, function in FUNCTIONS.items():
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        if any(isinstance(node, ast.Raise) for node in ast.walk(tree)):
            assert re.search(r"Raises|\w+Error\b", words_about(name)), name


def test_every_public_function_says_what_it_returns() -> None:
    for name in FUNCTIONS.keys() & {*autopar.__all__}:
        if inspect.signature(FUNCTIONS[name]).return_annotation not in (None, "None"):
            assert re.search(r"\n(Returns|Yields):\n", words_about(name)), name


def test_seconds_and_bytes_of_plans_are_named_by_their_unit() -> None:
    """A field that holds a time or a size ends in its unit, and one that does so is a number, or several."""
    for kind in (autopar.Plan, autopar.PipelinePlan):
        for name, annotation in inspect.get_annotations(kind).items():
            if re.search(r"(time|seconds|size|memory)$", name):
                pytest.fail(f"{kind.__name__}.{name} has no unit in its name")
            if re.search(r"_(s|bytes)$", name):
                assert re.match(r"(int|float|tuple\[(int|float))", str(annotation)), (kind.__name__, name, annotation)

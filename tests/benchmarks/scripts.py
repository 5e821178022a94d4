"""The scripts of `benchmarks/` as modules: they are no part of the package."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def load_script(name: str, patch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark as a module, which is known until `patch` is undone: dataclasses look their module up."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module

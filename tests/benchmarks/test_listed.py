"""The page of the benchmarks lists each file, and `--help` of a script says what it takes before it does anything."""

import ast
import os
import re
import subprocess
import sys

import pytest

from tests.benchmarks.scripts import SCRIPTS

TEXTS = {path.stem: path.read_text() for path in SCRIPTS.glob("*.py")}
STARTED = {name for name, text in TEXTS.items() if '__name__ == "__main__"' in text}
LISTED = dict(re.findall(r"^\| `(\w+)\.py` \| (.+?) \|", (SCRIPTS / "README.md").read_text(), re.MULTILINE))


def test_each_script_has_a_row_with_its_command_and_each_module_one_with_who_imports_it():
    assert LISTED.keys() == TEXTS.keys()
    for name, second in LISTED.items():
        if name in STARTED:
            assert f"python benchmarks/{name}.py" in second
        for other in [] if name in STARTED else re.findall(r"`(\w+)\.py`", second):
            assert re.search(rf"\b{name}\b", TEXTS[other]), f"{other} does not import {name}"


def test_what_a_script_does_stands_in_functions_that_are_called_behind_its_arguments():
    """So that `--help` runs nothing: at the top stand definitions, imports and constants, and arguments are read by argparse."""
    for name in STARTED:
        texts = [TEXTS[name], *(TEXTS[other] for other in TEXTS if f"from {other} import" in TEXTS[name])]
        assert any(".parse_args(" in text for text in texts), name
        loops = [node for node in ast.parse(TEXTS[name]).body if isinstance(node, ast.For | ast.While | ast.With)]
        assert not loops, name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sorted(STARTED))
def test_help_of_a_script_is_its_usage(name):
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SCRIPTS.parent), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), "--help"]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    assert printed.startswith(f"usage: {name}.py ")

"""Help and refusals come at once: no command that needs no plan imports JAX."""

import json
import subprocess
import sys

import pytest

from tests.commands.command_line import ROOT

WITHOUT_JAX = """
import contextlib, io, json, sys
from autopar.__main__ import main
answers = []
for command in sys.stdin.read().splitlines():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(command.split())
        except SystemExit as stopped:
            status = stopped.code
    large = {"jax", "flax", "optax", "pulp", "networkx"} & set(sys.modules)
    answers.append([status, out.getvalue(), err.getvalue(), sorted(large)])
print(json.dumps(answers))
"""
ANSWERED_AT_ONCE = {
    "--help": 0,
    "--version": 0,
    **{f"{name} --help": 0 for name in ("plan", "train", "show", "demo", "run", "bench", "calibrate")},
    "train t5 --help": 0,
    "plan gpt --layrs 3": 2,
    "plan gtp": 2,
    "plan gpt --mesh 2x": 2,
    "plan gpt --cluster nosuch": 2,
    "plan mlp -o nowhere/plan.json": 2,
    "show nosuch.json": 2,
    "simulate": 2,
    "simulate --table nosuch.csv": 2,
    "simulate --table rows.csv --cluster v100": 2,
    "simulate --plan plan.json": 2,
    "simulate --plan plan.json --cluster p3 --csv out.csv": 2,
}


@pytest.fixture(scope="module")
def answers():
    """Status, standard output and error, and the large packages that were imported, of each command; all in one process."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX],
        cwd=ROOT,
        input="\n".join(ANSWERED_AT_ONCE),
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(ANSWERED_AT_ONCE, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("command", ANSWERED_AT_ONCE)
def test_help_and_arguments_that_cannot_be_read_are_answered_without_importing_jax(command, answers):
    status, out, err, large = answers[command]
    assert (status, large) == (ANSWERED_AT_ONCE[command], []), err
    assert "Traceback" not in err
    assert out if status == 0 else err.startswith("autopar: ")

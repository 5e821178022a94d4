"""Commands run by the tests: in this process through `main`, or, where the environment matters, in one of their own."""

import os
import subprocess
import sys
from pathlib import Path

from autopar.__main__ import main
from autopar.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--layers", "1", "--hidden", "16", "--inputs", "16", "--batch", "16")
STAGES = ("--stages", "2", "--mesh", "1", "--microbatches", "4")
CLEAN_ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "AUTOPAR_CACHE": "off",
}


def run(*argv: str) -> int:
    return main([str(word) for word in argv])


def planned(tmp_path: Path, *argv: str) -> Plan:
    """The plan that `plan mlp ARGV -o` writes."""
    file = tmp_path / "plan.json"
    assert run("plan", "mlp", *SMALL, *argv, "-o", file) == 0
    return Plan.from_json(file.read_text())


def start(*argv: str, module: str = "autopar", stdin: int | None = None, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", module, *argv]
    pipe, env = subprocess.PIPE, CLEAN_ENVIRONMENT | environment
    return subprocess.Popen(command, cwd=ROOT, env=env, stdin=stdin, stdout=pipe, stderr=pipe, text=True)

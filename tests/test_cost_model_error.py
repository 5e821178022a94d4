"""What `benchmarks/cost_model_error.py` claims, as a test: its targets are met, but for the one that is known to be missed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "cost_model_error.py"
MISSED = {"Alpa wresnet auto: step time"}


@pytest.mark.slow
def test_the_cost_model_is_as_right_as_its_benchmark_says(tmp_path):
    out = tmp_path / "errors.json"
    root = str(SCRIPT.parent.parent)
    command = [sys.executable, str(SCRIPT), "--json", str(out)]
    environment = os.environ | {"PYTHONPATH": root}  # for a checkout that is not installed
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, env=environment)
    assert out.exists(), done.stderr
    results = {result["claim"]: result for result in json.loads(out.read_text(encoding="utf-8"))}
    assert len(results) == 19
    assert {claim for claim, result in results.items() if not result["met"]} <= MISSED
    assert results["Alpa wresnet auto: step time"]["mean"] < 0.25
    assert "6 of 6 runs out of memory flagged" in done.stdout

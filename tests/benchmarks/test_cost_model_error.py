"""What `benchmarks/cost_model_error.py` claims, as a test: its targets are met, and it says what was fitted on what."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from autopar.simulate.closed_forms.residual_network import ResidualNetworkShape
from tests.benchmarks.scripts import SCRIPTS, load_script

SCRIPT = SCRIPTS / "cost_model_error.py"
YARDSTICK = Path(__file__).parents[1] / "data" / "yardstick"


@pytest.fixture(scope="module")
def alpa_rows() -> Iterator[ModuleType]:
    """The benchmark's module of Alpa's runs, which is no part of the package."""
    with pytest.MonkeyPatch.context() as patch:
        yield load_script("alpa_rows", patch)


def test_flops_of_published_residual_networks_are_counted_as_xla_counted_them(alpa_rows):
    """Runs that give both TFLOP/s and seconds; the formula of whole windows is 4 % above them."""
    compared = 0
    for run in alpa_rows.end_to_end(YARDSTICK):
        if run.model == "wresnet" and run.job is not None and run.step_s and run.tflops_per_device:
            published = run.step_s * run.tflops_per_device * run.devices * 1e12
            counted = alpa_rows.xla_convolution_flops(run.job.shape, run.job.global_batch, 3)
            assert counted == pytest.approx(published, rel=1e-4), run.id
            assert run.job.model_flops / published == pytest.approx(1.045, abs=0.005)
            compared += 1
    assert compared == 5


def test_taps_on_padding_are_not_counted(alpa_rows):
    """A stem of 7x7, stride 2, on 32x32: 16 x 7 taps a line, of which 2, 1 and 3 fall outside; its input has no gradient."""
    narrow = ResidualNetworkShape(depth=26, channels=1, width_factor=1, image_size=32, classes=10)
    wider = ResidualNetworkShape(depth=26, channels=1, width_factor=1, image_size=32, classes=11)
    per_class = alpa_rows.xla_convolution_flops(wider, 1, 3) - alpa_rows.xla_convolution_flops(narrow, 1, 3)
    assert per_class == 3 * 2 * 32  # 4 x 8 channels of the last stage, three passes of one product
    again = alpa_rows.xla_convolution_flops(narrow, 1, 4) - alpa_rows.xla_convolution_flops(narrow, 1, 3)
    gradients = alpa_rows.xla_convolution_flops(narrow, 1, 3) - 2 * again
    stem = 2 * 3 * (16 * 7 - 2 - 3 - 1) ** 2
    assert again - gradients == stem


@pytest.mark.slow
def test_the_cost_model_is_as_right_as_its_benchmark_says(tmp_path):
    out = tmp_path / "errors.json"
    root = str(SCRIPT.parent.parent)
    command = [sys.executable, str(SCRIPT), "--json", str(out)]
    environment = os.environ | {"PYTHONPATH": root}  # for a checkout that is not installed
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, env=environment)
    assert out.exists(), done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert set(found) == {"plans", "closed form"}
    for results in found.values():
        assert len(results) == 19
        assert [result["claim"] for result in results if not result["met"]] == []
    assert done.stdout.count("6 of 6 runs out of memory flagged") == 2
    assert "Fitted, on the eight rows of Korthikanti (A100) alone" in done.stdout
    assert "With the overlap that dgx2-v100-32gb estimates instead of none" in done.stdout

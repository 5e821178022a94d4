"""Presets of Hopper against what their products took; the script's own sums."""

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from autopar.cost_model.hardware import preset
from tests.benchmarks.scripts import load_script

DATA = Path(__file__).parents[2] / "benchmarks" / "data"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        yield load_script("product_shapes", patch)


def rows(script, name):
    document = json.loads((DATA / name).read_text())
    return [(script.Shape(**row["shape"]), row["seconds"]) for row in document["rows"]]


@pytest.mark.parametrize(
    ("cluster", "measured"),
    [("dgx-h100", "products_h100.json"), ("a3-mega", "products_h100.json"), ("dgx-h200", "products_h200.json")],
)
def test_long_products_take_what_was_measured(script, cluster, measured):
    """Of a tenth of a millisecond and more; the curve is fitted to H100's, H200's are told by it."""
    device = preset(cluster).device
    found = {
        shape.label + shape.dtype: math.log(shape.predicted_s(device) / seconds)
        for shape, seconds in rows(script, measured)
        if seconds >= 1e-4 and not shape.window
    }
    assert len(found) > 30
    assert statistics.mean(map(abs, found.values())) < 0.06
    assert max(map(abs, found.values())) < 0.3


def test_a_convolution_is_counted_by_its_window(script):
    shape = script.Shape(group="", batch=2, m=8, n=16, k=4, window=3, stride=2)
    assert shape.operands == ((2, 8, 8, 4), (3, 3, 4, 16))
    assert shape.elements == (512, 576, 512)
    assert shape.flops == 2 * 512 * 4 * 9


def test_a_product_is_counted_by_its_sides(script):
    shape = script.Shape(group="", batch=3, m=8, n=16, k=4)
    assert shape.elements == (96, 192, 384)
    assert shape.flops == 2 * 3 * 8 * 16 * 4


def test_what_is_measured_is_a_positive_time_of_each_product(script):
    device = preset("dgx-h100").device
    for window, dtype in ((0, "bfloat16"), (3, "float32")):
        shape = script.Shape(group="", batch=2, m=8, n=16, k=4, window=window, dtype=dtype)
        assert 0 < script.measure(shape, device) < 1

"""Peaks of presets against what they are made of: matrix units, multiply-adds of each in a clock cycle, the clock."""

import pytest

from autopar.cost_model.hardware import preset


@pytest.mark.parametrize(
    ("name", "dtype", "units", "multiply_adds", "clock_hz"),
    [
        ("g4dn.12xlarge", "float16", 320, 64, 1.59e9),  # T4: Turing tensor cores
        ("p3.16xlarge", "float16", 640, 64, 1.53e9),  # V100 SXM2: Volta tensor cores
        ("v100-pcie", "float16", 640, 64, 1.38e9),
        ("dgx-a100-80gb", "bfloat16", 432, 256, 1.41e9),  # Ampere
        ("dgx-h100", "bfloat16", 528, 512, 1.83e9),  # Hopper
        ("dgx-h100", "float8", 528, 1024, 1.83e9),
        ("mi300x", "bfloat16", 304, 1024, 2.1e9),  # compute units of CDNA 3
        ("mi300x", "float32", 304, 128, 2.1e9),
        ("g2-standard-96", "bfloat16", 240, 128, 2.04e9),  # L4: Ada
    ],
)
def test_peaks_are_units_times_width_times_clock(name, dtype, units, multiply_adds, clock_hz):
    """To 4 %: data sheets count at another boost clock than the card lists."""
    assert preset(name).device.peak_of(dtype) == pytest.approx(2 * units * multiply_adds * clock_hz, rel=0.04)


def test_tpu_v7_is_what_its_documentation_says():
    """docs.cloud.google.com/tpu/docs/tpu7x: 2307 TFLOP/s in bfloat16, 192 GiB at 7380 GB/s."""
    device = preset("tpu-v7").device
    assert device.peak_of("bfloat16") == 2307e12
    assert device.memory_bytes == 192 * 2**30
    assert device.memory_bytes_per_s == 7380e9

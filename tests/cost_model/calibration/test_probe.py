"""The probe of products: what it says of a sample, and that it measures the devices at hand."""

import dataclasses

import jax
import pytest

from autopar.cost_model.calibration.cases import Case, Sample
from autopar.cost_model.calibration.probe import probe_products, speed_of
from autopar.cost_model.compute import matrix_product_s
from autopar.cost_model.hardware import PRESETS

DEVICE = dataclasses.replace(PRESETS["cpu"].device, launch_s=0.0)


def test_a_sample_that_takes_what_is_priced_is_as_fast_as_the_device():
    case = Case("product", (512, 256, 128))
    priced_s = sum(
        matrix_product_s(DEVICE, *sizes, dtype="float32", itemsize=4)
        for sizes in ((512, 256, 128), (512, 128, 256), (128, 256, 512))
    )
    speed = speed_of(Sample(case, 2 * priced_s, 1.0), DEVICE)
    assert speed.ratio == pytest.approx(0.5)
    assert speed.measured == pytest.approx(3 * 2 * 512 * 256 * 128 / (2 * priced_s))


def test_devices_at_hand_are_measured_whatever_the_cluster_says():
    slow = dataclasses.replace(DEVICE, peak_flops_per_s={"float32": DEVICE.peak_flops_per_s["float32"] / 1000})
    found = probe_products(jax.devices(), slow)
    assert found is not None
    assert found.ratio > 10, "far faster than a thousandth of any processor"
    assert 1e8 < found.measured < 1e15

"""What whole steps take beside their parts: rates of each model, and launches that several numbers of microbatches tell."""

import types

import pytest

from autopar.commands.machine.calibration_report import describe_steps
from autopar.commands.machine.whole_steps import WHOLE_STEPS_CPU, Beside, WholeStep, steps_left_out


def measured(model, microbatches, *, rest_s, launches_s, rates, launches, beside_s=2e-3):
    """A step on a machine whose rates and launches are slower than their parts say by these factors."""
    return WholeStep(
        name=f"{model} {microbatches}",
        model=model,
        step=lambda state, batch: (state, batch),
        state=0.0,
        batch=0.0,
        computed_s=rest_s + launches_s,
        launches_s=launches_s,
        beside_s=beside_s,
        times_s=[rates * rest_s + launches * launches_s + beside_s] * 3,
    )


def test_steps_of_one_model_in_few_and_many_microbatches_tell_launches_from_rates():
    few = measured("gpt", 1, rest_s=0.080, launches_s=0.001, rates=1.1, launches=5.0)
    many = measured("gpt", 8, rest_s=0.084, launches_s=0.006, rates=1.1, launches=5.0)
    other = measured("unet", 1, rest_s=0.030, launches_s=0.0005, rates=0.9, launches=5.0)
    found = Beside.of([few, many, other])
    assert found.launches == pytest.approx(5.0)
    assert found.rates == pytest.approx((1.1 * 0.9) ** 0.5)
    (said,) = describe_steps(found)
    assert "rates 0.99 times, launches 5.00 times (gpt 1 1.15, gpt 8 1.36, unet 1 0.97)" in said


def test_models_in_one_number_of_microbatches_have_one_factor_for_all_that_they_compute():
    steps = [
        measured(name, 1, rest_s=0.01, launches_s=0.01, rates=f, launches=f) for name, f in (("a", 1.0), ("b", 4.0))
    ]
    found = Beside.of(steps)
    assert (found.rates, found.launches) == pytest.approx((2.0, 2.0))
    assert Beside.of([]) == Beside({})
    assert list(describe_steps(Beside({}))) == []


def test_launches_that_would_be_negative_leave_one_factor_for_all():
    few = measured("gpt", 1, rest_s=0.080, launches_s=0.001, rates=1.2, launches=1.0)
    many = measured("gpt", 8, rest_s=0.084, launches_s=0.006, rates=1.0, launches=1.0)
    found = Beside.of([few, many])
    assert found.rates == found.launches == pytest.approx((few.ratio() * many.ratio()) ** 0.5)


def test_virtual_devices_measure_a_model_in_one_and_in_many_microbatches():
    counts = [microbatches for name, _, microbatches in WHOLE_STEPS_CPU if name == "gpt"]
    assert counts == [1, 8]
    devices = [types.SimpleNamespace(platform="cpu")]
    every = "whole steps of gpt in 8 microbatches"
    assert every in steps_left_out(devices * 8, {})
    assert every not in steps_left_out(devices * 16, {}), "half of the devices would have no example"

"""Calibration: fits find the figures that made the measurements, and the file they end in is a cluster that plans."""

import math
import warnings

import pytest

import autopar
from autopar.__main__ import main
from autopar.cost_model.calibrate import calibrated_cluster, nonnegative_fit, slowed
from autopar.cost_model.compute import matrix_product_s
from autopar.cost_model.hardware import load_cluster, preset
from autopar.cost_model.machine import Device, MatrixEfficiency
from autopar.cost_model.measurements import Case, Sample, cases_for, pointwise_equations
from autopar.errors import AutoparWarning
from autopar.models import registry

TRUE = Device(
    "made up",
    {"float32": 20e9},
    1e9,
    5e9,
    {"float32": MatrixEfficiency(1.0, (8.0, 16.0, 64.0))},
    launch_s=2e-6,
)
PER_KIND = {
    "all-reduce": (20e-6, 10e-6, 0.4e-9, 0.05e-9),
    "reduce-scatter": (0.0, 15e-6, 0.3e-9, 0.0),
    "all-gather": (50e-6, 0.0, 0.0, 0.1e-9),
    "all-to-all": (10e-6, 5e-6, 1e-9, 0.0),
    "collective-permute": (100e-6, 1e-6, 0.5e-9, 0.0),
}


def true_seconds(case: Case) -> float:
    """What a machine with these figures takes, by the formulas of the module's text."""
    match case.kind:
        case "product":
            m, n, k = case.sizes
            narrow = {"dtype": "float32", "itemsize": 0}
            return matrix_product_s(TRUE, m, n, k, **narrow) + matrix_product_s(TRUE, m, k, n, **narrow)
        case "pointwise":
            return pointwise_equations() * case.sizes[0] / 5e9
        case "operation":
            return 2e-6 * case.sizes[0]
        case "dispatch":
            return 50e-6 + 4e-6 * case.sizes[0]
    a, a1, b, b1 = PER_KIND[case.kind]
    n, size = case.sizes
    factor = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}.get(case.kind, (n - 1) / n)
    return a + a1 * n + (b + b1 * n) * factor * size


@pytest.fixture(scope="module")
def found():
    samples = [Sample(case, true_seconds(case), 1.0) for case in cases_for("cpu", 8)]
    return calibrated_cluster(samples, preset("cpu"), name="mine", device="made up", memory_bytes=3e9, devices=8)


def test_the_fit_finds_the_device_that_made_the_measurements(found):
    device = found.cluster.device
    assert device.peak_of("float32") == pytest.approx(20e9, rel=1e-3)
    assert device.efficiency_of("float32").half == (8.0, 16.0, 64.0)
    assert device.memory_bytes_per_s == pytest.approx(5e9, rel=1e-6)
    assert device.launch_s == pytest.approx(2e-6, rel=1e-6)
    assert (found.cluster.call_s, found.cluster.call_s_per_array) == pytest.approx((50e-6, 4e-6))
    assert max(found.errors.values()) < 1e-3


@pytest.mark.parametrize("kind", PER_KIND)
def test_the_fit_finds_each_collective_s_latencies_and_seconds_per_byte(found, kind):
    figures = found.cluster.tiers[0].measured[kind]
    assert (
        figures.latency_s,
        figures.latency_s_per_rank,
        figures.s_per_byte,
        figures.s_per_byte_per_rank,
    ) == pytest.approx(PER_KIND[kind], rel=1e-6, abs=1e-15)


def test_a_calibrated_cluster_predicts_the_measurements_it_was_made_of(found):
    for ranks in (2, 4, 8):
        costs = found.cluster.mesh_costs((8 // ranks, ranks))
        case = Case("all-to-all", (ranks, 2**16))
        assert costs.seconds("all-to-all", 2**16, (1,)) == pytest.approx(true_seconds(case))
        assert costs.best("all-to-all", 2**16, (1,)).algorithm == "measured"


def test_a_slowed_cluster_computes_longer_and_communicates_as_before(found):
    slow = slowed(found.cluster, 1.5)
    assert slow.device.flops_per_s_of("float32") == found.cluster.device.flops_per_s_of("float32") / 1.5
    assert slow.device.sustained_bytes_per_s == found.cluster.device.sustained_bytes_per_s / 1.5
    assert slow.operation_s == found.cluster.operation_s * 1.5
    assert slow.mesh_costs((8,)).seconds("all-reduce", 1e6, (0,)) == found.cluster.mesh_costs((8,)).seconds(
        "all-reduce", 1e6, (0,)
    )


def test_no_fitted_figure_is_negative_and_a_figure_that_would_be_is_left_out():
    (slope, constant), error = nonnegative_fit([(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)], [1.0, 3.0, 5.0])
    assert constant == 0.0  # the line through the points crosses zero at -1
    assert 1.0 < slope < 2.0
    assert 0.1 < error < 0.3


def test_on_a_cpu_small_sizes_are_measured_and_on_a_gpu_large_ones_and_all_formats():
    on_cpu, on_gpu = cases_for("cpu", 8), cases_for("gpu", 4)
    assert {case.dtype for case in on_cpu} == {"float32"}
    assert {case.dtype for case in on_gpu if case.kind == "product"} == {"bfloat16", "float16", "float32"}
    assert {case.sizes[0] for case in on_cpu if case.kind == "all-reduce"} == {2, 4, 8}
    assert max(math.prod(case.sizes) for case in on_gpu if case.kind == "product") == 8192**3
    assert not [case for case in cases_for("gpu", 1) if case.kind == "all-reduce"]


@pytest.mark.slow
def test_calibrate_writes_a_file_that_plans_and_that_parallelize_accepts(tmp_path, capsys):
    path = tmp_path / "here.json"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoparWarning)  # of a busy machine, which a test may well run on
        assert main(["calibrate", "-o", str(path), "--seconds", "1", "--devices", "2"]) == 0
    output = capsys.readouterr().out
    assert "wrote" in output
    assert "products, float32" in output
    cluster = load_cluster(path)
    assert cluster.name == "here"
    assert 1e8 < cluster.device.peak_of("float32") < 1e13
    assert all(0 < figures.s_per_byte + figures.latency_s < 1 for figures in cluster.tiers[0].measured.values())
    assert main(["plan", "mlp", "--cluster", str(path), "--devices", "2"]) == 0
    assert "cluster here" in capsys.readouterr().out
    model = registry.build("mlp")
    step = autopar.parallelize(model.train_step, devices=2, cluster=path)
    assert step.cluster() == cluster


def test_calibrate_says_when_the_folder_of_its_file_does_not_exist(tmp_path, capsys):
    assert main(["calibrate", "-o", str(tmp_path / "none" / "c.json")]) == 2
    assert "has to exist" in capsys.readouterr().err

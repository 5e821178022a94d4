"""Calibration: fits find the figures that made the measurements, and the file they end in is a cluster that plans."""

import dataclasses
import inspect
import json
import math
import platform
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.random import threefry2x32_p

import autopar
from autopar.__main__ import main
from autopar.cost_model.calibration import programs
from autopar.cost_model.calibration.cases import Case, Sample, cases_for
from autopar.cost_model.calibration.clocks import undisturbed_s
from autopar.cost_model.calibration.fit_cluster import MeasuredDevices, fit_cluster, slow_down
from autopar.cost_model.calibration.fits import nonnegative_fit
from autopar.cost_model.calibration.measure import measure
from autopar.cost_model.calibration.programs import pointwise_equations
from autopar.cost_model.calibration.tuning import TUNING
from autopar.cost_model.calibration.waiting import ranks_wait
from autopar.cost_model.compute import matrix_product_s, roofline_s
from autopar.cost_model.device import Device, MatrixEfficiency
from autopar.cost_model.hardware import load_cluster, preset
from autopar.errors import AutoparWarning
from autopar.models import registry
from autopar.rules.flops import number_format

TRUE = Device(
    name="made up",
    peak_flops_per_s={"float32": 20e9},
    memory_bytes=1e9,
    memory_bytes_per_s=5e9,
    matrix_efficiency={"float32": MatrixEfficiency(1.0, (8.0, 16.0, 64.0))},
    launch_s=2e-6,
    reorder_s_per_byte=0.7e-9,
    random_s_per_byte=3e-9,
    transpose_s_per_byte=2e-9,
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
            return sum(matrix_product_s(TRUE, *shape, **narrow) for shape in ((m, n, k), (m, k, n), (k, n, m)))
        case "reordered":
            examples, positions, heads, width = case.sizes
            wide = {"dtype": "float32", "itemsize": 4, "batch": examples * heads}
            scores_s = matrix_product_s(TRUE, positions, positions, width, **wide)
            mixtures_s = matrix_product_s(TRUE, positions, width, positions, **wide)
            return TUNING.repeats * (scores_s + mixtures_s + 0.7e-9 * 3 * 4 * math.prod(case.sizes))
        case "transposed":
            return TUNING.repeats * 2e-9 * 4 * math.prod(case.sizes)
        case "random":
            return TUNING.repeats * (2e-6 + case.sizes[0] / 5e9 + 3e-9 * case.sizes[0])
        case "pointwise":
            return pointwise_equations() * case.sizes[0] / 5e9
        case "operation":
            return 2e-6 * case.sizes[0]
        case "dispatch":
            arrays, *size = case.sizes
            return 50e-6 + 4e-6 * arrays + 0.3e-9 * 2 * arrays * sum(size)
        case "transfer":
            arrays, size = case.sizes
            return 70e-6 + 90e-6 * arrays + arrays * size / 4 / 3e9
    a, a1, b, b1 = PER_KIND[case.kind]
    n, size = case.sizes
    factor = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}.get(case.kind, (n - 1) / n)
    return a + a1 * n + (b + b1 * n) * factor * size


@pytest.fixture(scope="module")
def found():
    samples = [Sample(case, true_seconds(case), 1.0) for case in cases_for("cpu", 8)]
    return fit_cluster(samples, preset("cpu"), MeasuredDevices("made up", 8, 3e9), name="mine")


def test_the_fit_finds_the_device_that_made_the_measurements(found):
    device = found.cluster.device
    assert device.peak_of("float32") == pytest.approx(20e9, rel=1e-3)
    assert device.efficiency_of("float32").half == (8.0, 16.0, 64.0)
    assert device.memory_bytes_per_s == pytest.approx(5e9, rel=1e-6)
    assert device.launch_s == pytest.approx(2e-6, rel=1e-6)
    assert device.reorder_s_per_byte == pytest.approx(0.7e-9, rel=1e-2)
    assert device.random_s_per_byte == pytest.approx(3e-9, rel=1e-6)
    assert device.transpose_s_per_byte == pytest.approx(2e-9, rel=1e-6)
    assert (found.cluster.call_s, found.cluster.call_s_per_array) == pytest.approx((50e-6, 4e-6))
    assert found.cluster.call_s_per_byte == pytest.approx(0.3e-9)
    first = found.cluster.tiers[0]
    assert (first.latency_s, found.cluster.sent_s_per_array) == pytest.approx((70e-6, 90e-6))
    assert first.sustained_bytes_per_s == pytest.approx(3e9)
    sent_s = found.cluster.transfer_s(2**20, source=range(4), target=range(4, 8), arrays=3)
    assert sent_s == pytest.approx(70e-6 + 3 * 90e-6 + 2**18 / 3e9), "as a plan prices it"
    assert max(found.errors.values()) < 1e-3


GPU = dataclasses.replace(
    preset("dgx-h100").device,
    peak_flops_per_s={"bfloat16": 1e15, "float32": 1e15},
    matrix_efficiency={"bfloat16": MatrixEfficiency(1.0, preset("dgx-h100").device.efficiency_of("bfloat16").half)},
    memory_bytes_per_s=3e12,
    memory_efficiency=1.0,
    launch_s=1e-6,
    thread_blocks=None,
)


def seconds_on_gpu(case: Case) -> float:
    """What a GPU takes where a chain is one kernel; what fits into its caches is done in no time, but for the launch."""
    if case.kind == "product":
        return sum(matrix_product_s(GPU, *case.sizes, dtype="bfloat16", itemsize=0) for _ in range(3))
    if case.kind == "pointwise":
        return GPU.launch_s + (2 * case.sizes[0] / 3e12 if case.sizes[0] > 2**26 else 0.0)
    return {"operation": GPU.launch_s * case.sizes[0], "dispatch": 50e-6 + 4e-6 * case.sizes[0]}.get(case.kind, 1e-5)


@pytest.mark.parametrize("sizes", [[4096], [512, 4096], [4096, 512, 8192]])
def test_few_samples_of_a_gpu_tell_its_peak_and_its_bandwidth(sizes):
    cases = [Case("product", (size,) * 3, "bfloat16") for size in sizes]
    cases += [case for case in cases_for("gpu", 1) if case.kind != "product" or case.dtype == "float32"]
    samples = [Sample(case, seconds_on_gpu(case), 1.0) for case in cases]
    device = fit_cluster(samples, preset("dgx-h100"), MeasuredDevices("a GPU", 1, 8e10), name="mine").cluster.device
    assert (device.fuses, device.thread_blocks) == (True, preset("dgx-h100").device.thread_blocks)
    assert device.peak_of("bfloat16") == pytest.approx(1e15, rel=1e-6)
    assert device.efficiency_of("bfloat16").half == (64, 64, 100)
    assert device.sustained_bytes_per_s == pytest.approx(3e12, rel=1e-6)


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
    slow = slow_down(found.cluster, 1.5)
    assert slow.device.flops_per_s_of("float32") == found.cluster.device.flops_per_s_of("float32") / 1.5
    assert slow.device.sustained_bytes_per_s == found.cluster.device.sustained_bytes_per_s / 1.5
    assert slow.device.launch_s == found.cluster.device.launch_s * 1.5
    assert slow_down(found.cluster, 1.5, launches=4.0).device.launch_s == found.cluster.device.launch_s * 4.0
    assert slow.device.reorder_s_per_byte == found.cluster.device.reorder_s_per_byte * 1.5
    assert slow.device.random_s_per_byte == found.cluster.device.random_s_per_byte * 1.5
    assert slow.device.transpose_s_per_byte == found.cluster.device.transpose_s_per_byte * 1.5
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
    assert {case.dtype for case in on_cpu if case.kind != "random"} == {"float32"}
    assert {case.dtype for case in on_gpu if case.kind == "product"} == {
        "bfloat16",
        "float16",
        "tensorfloat32",
        "float32",
    }
    assert {case.sizes[0] for case in on_cpu if case.kind == "all-reduce"} == {2, 4, 8}
    assert max(math.prod(case.sizes) for case in on_gpu if case.kind == "product") == 8192**3
    assert not [case for case in cases_for("gpu", 1) if case.kind == "all-reduce"]


@pytest.mark.parametrize(
    ("platform", "dtype", "expected"),
    [
        ("cpu", "float32", "tensorfloat32"),
        ("gpu", "float32", "float32"),
        ("gpu", "tensorfloat32", "tensorfloat32"),
        ("gpu", "bfloat16", "bfloat16"),
    ],
)
def test_products_run_in_the_format_that_they_are_measured_for(platform, dtype, expected):
    """On a CPU as programs ask for them where they ask for nothing, which has one way alone."""
    case = Case("product", (8, 4, 2), dtype)
    body, shapes = programs._loop_body(case, 1, platform)
    operands = [jax.ShapeDtypeStruct(shape, case.element_type) for shape in shapes]
    products = [eqn for eqn in jax.make_jaxpr(body)(*operands).eqns if eqn.primitive.name == "dot_general"]
    assert [number_format(eqn) for eqn in products] == [expected] * 3


def test_a_product_pays_for_operands_in_another_order_and_for_random_bits_what_the_device_says():
    """0.7 ns for each of a thousand bytes copied, 3 ns for each drawn, beside the launch; a preset asks for neither."""
    given = {"flops": 0.0, "moved_bytes": 0.0, "dtype": "float32", "launched": True}
    assert roofline_s(TRUE, **given) == 2e-6
    assert roofline_s(TRUE, **given, reordered_bytes=1000.0) == pytest.approx(2e-6 + 0.7e-6)
    assert roofline_s(TRUE, **given, random_bytes=1000.0) == pytest.approx(2e-6 + 3e-6)
    plain = preset("dgx-a100").device
    assert roofline_s(plain, **given, reordered_bytes=1e9, random_bytes=1e9) == roofline_s(plain, **given)


def test_the_planner_counts_the_bytes_of_operands_that_are_copied_in_another_order():
    """Heads behind positions: both operands of the scores are copied, those of a plain product are not."""
    heads = jax.ShapeDtypeStruct((2, 16, 4, 8), "float32")
    plain = jax.ShapeDtypeStruct((64, 64), "float32")
    numbers = (((3,), (3,)), ((0, 2), (0, 2)))
    copied = _priced_s(lambda x, y: lax.dot_general(x, y, numbers), heads, reorder_s_per_byte=1.0)
    assert copied == pytest.approx(2 * 4 * 2 * 16 * 4 * 8, rel=1e-6)
    assert _priced_s(jnp.dot, plain, reorder_s_per_byte=1.0) < 1e-3


def test_random_bits_are_priced_by_the_bytes_that_are_drawn():
    key = jax.random.key(0)

    def noisy(x):
        return x + lax.bitcast_convert_type(jax.random.bits(key, (32, 32)), jnp.float32)

    drawn = _priced_s(noisy, jax.ShapeDtypeStruct((32, 32), "float32"), random_s_per_byte=1.0)
    assert drawn == pytest.approx(4 * 32 * 32, rel=0.01)


def test_the_two_words_of_a_random_number_are_one_draw():
    """As microbatches draw them, each its part of the whole batch's numbers."""

    def both(x):
        high, low = threefry2x32_p.bind(*(jnp.uint32(1), jnp.uint32(2)), x, x)
        return high ^ low

    drawn = _priced_s(both, jax.ShapeDtypeStruct((32, 32), "uint32"), random_s_per_byte=1.0)
    assert drawn == pytest.approx(4 * 32 * 32, rel=0.01)


def _priced_s(step, given, **figures):
    """Predicted seconds on one device of which only these figures cost anything worth mention."""
    sizes = {"memory_bytes": 1e9, "memory_bytes_per_s": 1e15}
    device = Device(name="made up", peak_flops_per_s={"float32": 1e15}, **sizes, **figures)
    cluster = dataclasses.replace(preset("cpu"), name="made up", device=device)
    args = [given] * len(inspect.signature(step).parameters) if step is not jnp.dot else [given, given]
    return autopar.parallelize(step, devices=1, cluster=cluster).plan(*args).step_s


def test_the_time_of_an_undisturbed_step_is_the_lower_decile():
    assert undisturbed_s([5.0, 1.0, 9.0, 2.0, *[7.0] * 11]) == 2.0
    assert undisturbed_s([3.0, 4.0]) == 3.0


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the option")
def test_a_process_asked_to_keep_freed_memory_takes_no_new_pages_for_a_buffer_of_the_same_size():
    """A process of its own, since the allocator cannot be asked to forget it."""
    source = """
import resource, numpy as np
from autopar.cost_model.calibration.clocks import keep_freed_memory
assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(4_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults(), faults())
"""
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    first, second = map(int, run.stdout.split())
    assert second < 100 < first, run.stderr


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["product", "reordered", "transposed", "random"])
def test_what_is_measured_is_measured(kind):
    """One case of a kind on two devices takes some time, and no more than all of it."""
    case = next(case for case in cases_for("cpu", 2) if case.kind == kind)
    samples = [event for event in measure(jax.devices()[:2], [case], seconds=0.5) if isinstance(event, Sample)]
    assert [sample.case for sample in samples] == [case] * 2  # a first result, and the last
    assert all(1e-7 < sample.seconds < 1.0 for sample in samples)


@pytest.mark.slow
def test_calibrate_writes_a_file_that_plans_and_that_parallelize_accepts(tmp_path, capsys):
    path = tmp_path / "here.json"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoparWarning)  # of a busy machine, which a test may well run on
        assert main(["calibrate", "-o", str(path), "--seconds", "60", "--devices", "4"]) == 0
    output = capsys.readouterr().out
    assert "wrote" in output
    assert "products, float32" in output
    cluster = load_cluster(path)
    waiting_s = {figures.waiting_s_per_rank for figures in cluster.tiers[0].measured.values()}
    tiers_source = json.loads(path.read_text())["sources"]["tiers"]
    if "collectives wait" in output:  # the machine was quiet
        assert ranks_wait(jax.devices()[:4])
        assert "4 all-reduces at once of 4 ranks" in output
        assert "waiting by the wall's clock" in tiers_source
        assert f"collectives wait {waiting_s.pop() * 1e6:.1f} n us" in output
        assert cluster.all_reduce_latency != preset("cpu").all_reduce_latency
    else:
        assert "waiting was not measured" in tiers_source
        assert (waiting_s, cluster.all_reduce_latency) == ({0.0}, preset("cpu").all_reduce_latency)
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

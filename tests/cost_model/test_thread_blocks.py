"""Whole waves of whole tiles: against tiles dealt out one by one, against NVIDIA's example, and by laws that a price keeps."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.cost_model.compute import roofline_s
from autopar.cost_model.device import MatrixEfficiency, fastest_device, slowest_device
from autopar.cost_model.hardware import PRESETS, preset
from autopar.cost_model.thread_blocks import ThreadBlocks

A100 = preset("dgx-a100-80gb").device
LARGE = ThreadBlocks(multiprocessors=108, tiles=((256, 128),), formats=("float16",))
"""NVIDIA's example: 256 x 128 tiles on A100."""
CUT = [cluster.device for cluster in PRESETS.values() if cluster.device.thread_blocks]
blocks = st.builds(
    ThreadBlocks,
    multiprocessors=st.integers(1, 9),
    tiles=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=3).map(tuple),
    step=st.integers(1, 5),
    formats=st.just(("float16",)),
)
sizes = st.integers(1, 40)


def dealt(one, m, n, k, batch):
    """Multiply-adds until all multiprocessors are free, over all of them: each takes the next tile when it has done one."""
    least = math.inf
    for rows, columns in one.tiles:
        corners = list(itertools.product(range(batch), range(0, m, rows), range(0, n, columns)))
        parts = 1
        while True:
            length = math.ceil(math.ceil(k / parts) / one.step) * one.step
            free_at = [0] * one.multiprocessors
            for _ in range(len(corners) * parts):
                first = free_at.index(min(free_at))
                free_at[first] += rows * columns * length
            least = min(least, max(free_at) * one.multiprocessors)
            if len(corners) * parts >= one.multiprocessors or k <= parts * one.step:
                break
            parts *= 2
    return least


@given(blocks, sizes, sizes, sizes, st.integers(1, 3))
def test_what_is_filled_is_what_tiles_dealt_out_one_by_one_leave(one, m, n, k, batch):
    assert one.filled(m, n, k, batch=batch) == pytest.approx(batch * m * n * k / dealt(one, m, n, k, batch))


@given(blocks, sizes, sizes, sizes, st.integers(1, 3))
def test_twice_as_large_a_product_never_takes_more_than_twice_as_long_nor_less_time(one, m, n, k, batch):
    """So larger microbatches cost nothing, and half the work on twice the ranks saves half at the most."""

    def seconds(*shape, batch):
        return batch * math.prod(shape) / one.filled(*shape, batch=batch)

    once = seconds(m, n, k, batch=batch)
    for twice in (
        seconds(2 * m, n, k, batch=batch),
        seconds(m, 2 * n, k, batch=batch),
        seconds(m, n, 2 * k, batch=batch),
        seconds(m, n, k, batch=2 * batch),
    ):
        assert twice <= 2 * once * (1 + 1e-9)
    if m > 1:
        assert seconds(m - 1, n, k, batch=batch) <= once * (1 + 1e-9)


def test_nvidia_s_example_of_wave_quantization():
    """1792 x 1792 has 7 x 14 tiles, less than one wave of 108; 1793 x 1793 has 8 x 15, and the second wave is nearly empty."""
    assert LARGE.filled(1792, 1792, 4096) == pytest.approx(98 / 108)
    assert LARGE.filled(1793, 1793, 4096) == pytest.approx((1793 / 1792) ** 2 * 98 / 108 / 2)


@pytest.mark.parametrize("device", CUT, ids=lambda device: device.name)
def test_what_a_device_reached_where_it_was_measured_stays_what_it_reaches(device):
    """The products of which presets state the speed have whole tiles, so that they are priced by the curve alone."""
    dtype = device.thread_blocks.formats[0]
    for size in (4096, 8192):
        known = device.peak_of(dtype) * device.efficiency_of(dtype).of(size, size, size)
        assert device.product_flops_per_s(dtype, size, size, size) == pytest.approx(known, rel=2e-2)
        assert device.padding_s(dtype, size, size, size) == 0


@given(st.sampled_from(CUT), st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 3000))
@settings(deadline=None)
def test_a_product_takes_no_less_than_by_its_curve_and_than_its_tiles(device, m, n, k):
    dtype = device.thread_blocks.formats[0]
    rate = device.product_flops_per_s(dtype, m, n, k)
    assert rate <= device.peak_of(dtype) * device.efficiency_of(dtype).of(m, n, k)
    assert rate <= device.flops_per_s_of(dtype) * device.thread_blocks.filled(m, n, k)
    assert fastest_device([device, A100]).product_flops_per_s(dtype, m, n, k) * (1 + 1e-9) >= rate


@pytest.mark.parametrize("width", [64, 72, 80, 128, 192, 200])
def test_a_width_that_is_no_multiple_of_a_tile_takes_as_long_as_the_next_that_is(width):
    """Of the result: heads of 72 or 80 on 4,096 tokens are multiplied as heads of 128, if the curve tells none apart."""
    flat = dataclasses.replace(A100, matrix_efficiency={"float16": MatrixEfficiency(0.91)})

    def seconds(device, n):
        return 2 * 4096 * n * 16384 / device.product_flops_per_s("float16", 4096, n, 16384)

    whole = 64 * math.ceil(width / 64)
    assert seconds(flat, width) == pytest.approx(seconds(flat, whole))
    assert seconds(A100, width) >= seconds(flat, width)


def test_a_short_contraction_pays_for_a_whole_step_or_for_its_length_but_not_for_both():
    """Of 16 elements 64 are multiplied on H100, beside the 100 in which a product gets going."""
    h100 = preset("dgx-h100").device
    rate = h100.product_flops_per_s("bfloat16", 65536, 65536, 16)
    assert rate == pytest.approx(h100.peak_of("bfloat16") * 0.81 * 16 / (64 + 100), rel=1e-2)


def test_rows_that_do_not_begin_at_16_bytes_are_padded_first():
    """Half precision in multiples of 8 elements; both operands if the contracted dimension is not one, else the one concerned."""
    copied_s = {k: A100.padding_s("float16", 1024, 512, k) for k in (1024, 1023)}
    bandwidth = A100.sustained_bytes_per_s
    assert copied_s == pytest.approx({1024: 0.0, 1023: 2 * 2 * 1023 * (1024 + 512) / bandwidth})
    assert A100.padding_s("float16", 1023, 512, 1024, batch=3) == pytest.approx(3 * 2 * 2 * 1023 * 1024 / bandwidth)
    assert A100.padding_s("float32", 1023, 511, 1023) == 0
    h100 = preset("dgx-h100").device
    assert h100.padding_s("float8", 1032, 512, 1024) > 0 == h100.padding_s("bfloat16", 1032, 512, 1024)


def test_a_convolution_is_not_cut_as_a_product():
    """It has kernels of its own; as many channels go in and come out, whichever of the three convolutions of a layer it is."""
    plain = dataclasses.replace(A100, thread_blocks=None)
    pixels, channels, out = 9 * 57 * 57, 67, 131
    given = {"flops": 2.0 * pixels * 9 * channels * out, "moved_bytes": 1.0, "dtype": "float16", "launched": False}
    image, weights, result = pixels * channels, 9 * channels * out, pixels * out
    shapes = {
        (image, weights, result): (pixels, out, 9 * channels),
        (result, weights, image): (pixels, channels, 9 * out),
        (image, result, weights): (9 * channels, out, pixels),
    }
    for sizes, shape in shapes.items():
        found = roofline_s(A100, **given, sizes=sizes, convolves=True)
        assert found == roofline_s(plain, **given, sizes=sizes, convolves=True)
        rate = A100.peak_of("float16") * A100.efficiency_of("float16").of(*shape)
        assert found == pytest.approx(given["flops"] / rate)
    as_product = (pixels * 9 * channels, weights, result)
    assert roofline_s(A100, **given, sizes=as_product) > roofline_s(plain, **given, sizes=as_product)


def test_unlike_devices_in_lockstep_have_the_tiles_of_the_slower_one():
    v100, h100 = preset("p3dn.24xlarge").device, preset("dgx-h100").device
    assert slowest_device([A100, v100]).thread_blocks == v100.thread_blocks
    assert slowest_device([A100, h100]).thread_blocks == A100.thread_blocks
    assert slowest_device([A100, preset("cpu").device]).thread_blocks is None


@pytest.mark.parametrize("window", [1, 3])
def test_a_convolution_reaches_what_convolutions_reach(window):
    """Windows of one pixel as well, for which libraries choose among the same kernels."""
    v100, area = preset("p3.16xlarge").device, window**2
    given = {"flops": 2.0 * area * 64 * 96 * 6400, "moved_bytes": 1.0, "dtype": "float32", "launched": False}
    rate = v100.product_flops_per_s("float32", 6400, 96, area * 64, convolution=True)
    assert rate < v100.product_flops_per_s("float32", 6400, 96, area * 64)
    sizes = (6400 * 64, area * 64 * 96, 6400 * 96)
    assert roofline_s(v100, **given, sizes=sizes, convolves=True) == pytest.approx(given["flops"] / rate)


@pytest.mark.parametrize("odd", [1023, 1000])
def test_a_plan_pays_for_tiles_and_padding_in_its_own_seconds(odd):
    """What the planner minimises, and the report and `simulate` say: 1,023 columns are copied, 1,000 are multiplied as 1,024."""

    def compute_s(width):
        weight = jax.ShapeDtypeStruct((8192, width), jnp.float16)
        rows = jax.ShapeDtypeStruct((4096, 8192), jnp.float16)
        step = autopar.parallelize(lambda w, x: (w, x @ w), devices=1, cluster="dgx-a100-80gb")
        return step.plan(weight, rows).compute_s

    copied_s = A100.padding_s("float16", 4096, odd, 8192)
    assert (copied_s > 0) == (odd == 1023)
    as_whole = compute_s(1024) * odd / 1024
    assert compute_s(odd) > as_whole + copied_s
    assert compute_s(odd) < compute_s(1024) + copied_s

"""Images that are split by rows: convolutions and windows exchange borders with their neighbours and equal `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autopar
from autopar.layouts.mesh import LogicalMesh
from autopar.models import build
from autopar.rules.halos import Slide
from autopar.rules.table import entry_for, rule_for
from autopar.testing import run_with_random_strategies
from tests.oracles import assert_predicted_bytes_are_real, assert_same_as_jit, assert_trees_close

BY_NEIGHBOURS = ("collective-permute", "all-reduce")


@pytest.mark.sweep
def test_a_unet_whose_image_is_split_four_ways_equals_jit_and_sends_its_borders():
    model = build("unet", image_size=16, base_channels=4, groups=2, batch=4, levels=1, sgd=True)
    state, batch = jax.jit(model.create_state)(jax.random.key(0)), jax.device_put(next(model.data(0)))
    step = autopar.parallelize(
        model.train_step,
        devices=4,
        mesh_shape=(4,),
        constraints={"batch/*": P(None, "x")},
        collectives=BY_NEIGHBOURS,
        num_microbatches=1,
        num_stages=1,
        recompute="none",
    )
    compiled = step.compile(state, batch)
    borders = [item for item in compiled.plan.collectives if item.kind == "collective-permute"]
    assert {item.overlap for item in borders} == {"within"}
    first = 4 * 16 * 1 * 4  # one row of the images, float32
    assert sum(item.bytes == first for item in borders) >= 2
    assert_predicted_bytes_are_real(compiled)
    assert_same_as_jit(model.train_step, step, state, batch, steps=2, rtol_of_scale=1e-4)


SLIDES = {
    "3 of stride 1": (Slide(size=8, steps=8, stride=1, span=3, low=1), (1, 1)),
    "2 of stride 2": (Slide(size=8, steps=4, stride=2, span=2, low=0), (0, 0)),
    "3 of stride 2": (Slide(size=8, steps=4, stride=2, span=3, low=0), (0, 1)),
    "7 of stride 2": (Slide(size=16, steps=8, stride=2, span=7, low=2), (2, 3)),
    "2 over holes": (Slide(size=8, steps=16, stride=1, span=2, low=1, dilation=2), (0, 0)),
    "1 of stride 2": (Slide(size=8, steps=4, stride=2, span=1, low=0), (0, 0)),
}


@pytest.mark.parametrize("name", SLIDES)
def test_a_window_reaches_exactly_the_rows_that_it_looks_at(name):
    slide, reach = SLIDES[name]
    assert slide.lines_up
    for ways in (1, 2, 4):
        assert slide.reach(ways) == reach
        rows, steps = slide.size // ways, slide.steps // ways
        low, high = slide.padding(ways)
        local = [None] * low + [
            None if d % slide.dilation else d for d in range((rows + sum(reach) - 1) * slide.dilation + 1)
        ]
        local = local[-low:] if low < 0 else local
        local = local + [None] * high if high >= 0 else local[:high]
        assert len(local) == slide.stride * (steps - 1) + slide.span
        positions = [k + slide.stride * y - slide.low for y in range(steps) for k in range(slide.span)]
        looked = {p // slide.dilation for p in positions if p % slide.dilation == 0}
        assert min(looked) >= -reach[0]
        assert max(looked) < rows + reach[1]


NOT_IN_LINE = {
    "3 without padding": Slide(size=20, steps=18, stride=1, span=3, low=0),
    "3 with all padding": Slide(size=16, steps=18, stride=1, span=3, low=2),
    "5 of stride 2": Slide(size=18, steps=6, stride=2, span=7, low=-1),
    "2 of stride 3": Slide(size=12, steps=6, stride=2, span=4, low=1),
}


@pytest.mark.parametrize("name", NOT_IN_LINE)
def test_windows_that_do_not_line_up_have_on_each_device_the_rows_that_they_look_at(name):
    slide = NOT_IN_LINE[name]
    assert slide.may_be_divided
    for ways in (1, 2, 3, 6):
        if slide.size % ways or slide.steps % ways:
            continue
        (before, after), rows = slide.reach(ways), slide.size // ways
        for device in range(ways):
            held = range(device * rows - before, (device + 1) * rows + after)
            taken = held[before - slide.low + device * slide.shift(ways) :][: slide.rows(ways)]
            places = range(device * slide.steps // ways, (device + 1) * slide.steps // ways)
            assert [*taken] == sorted({p * slide.stride - slide.low + k for p in places for k in range(slide.span)})


def windowed(x, kernel, padding, **options):
    return lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def valid(x, kernel):
    return windowed(x, kernel, "VALID")


def convolved_without_padding(state, batch):
    """Two convolutions without padding: 24, 22 and 20 rows."""

    def loss(kernels):
        return (valid(jnp.tanh(valid(batch, kernels[0])), kernels[1]) ** 2).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))


def test_windows_without_padding_equal_jit_and_send_what_was_predicted():
    draw = np.random.default_rng(0)
    state = [draw.normal(size=(3, 1, *ends)).astype(np.float32) for ends in ((2, 3), (3, 2))]
    batch = draw.normal(size=(2, 24, 2, 2)).astype(np.float32)
    step = autopar.parallelize(
        convolved_without_padding,
        mesh_shape=(2,),
        constraints={"batch": P(None, "x")},
        collectives=BY_NEIGHBOURS,
        num_microbatches=1,
        recompute="none",
    )
    compiled = step.compile(state, batch)
    assert "collective-permute" in {item.kind for item in compiled.plan.collectives}
    assert_predicted_bytes_are_real(compiled)
    assert_same_as_jit(convolved_without_padding, step, state, batch, steps=1, rtol_of_scale=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(4))
def test_windows_without_padding_equal_jit_under_random_strategies(seed):
    draw = np.random.default_rng(seed)
    x, kernel = draw.normal(size=(2, 12, 6, 2)).astype(np.float32), draw.normal(size=(5, 3, 2, 2)).astype(np.float32)

    def run(x, kernel):
        pooled = lax.reduce_window(valid(x, kernel), -np.inf, lax.max, (1, 3, 1, 1), (1, 1, 1, 1), "VALID")
        return pooled, jax.value_and_grad(lambda *both: (valid(*both) ** 3).sum(), argnums=(0, 1))(x, kernel)

    actual = run_with_random_strategies(run, x, kernel, mesh_shape=(2, 2), seed=seed)
    assert_trees_close(actual, jax.jit(run)(x, kernel), rtol_of_scale=1e-5)


def test_rows_with_holes_that_do_not_line_up_stay_whole():
    shapes = np.ones((1, 8, 8, 1), np.float32), np.ones((3, 3, 1, 1), np.float32)
    (eqn,) = jax.make_jaxpr(lambda x, k: windowed(x, k, ((0, 0), (0, 0)), lhs_dilation=(2, 2)))(*shapes).jaxpr.eqns
    assert rule_for(eqn).together == ()


def test_what_is_sent_is_the_border_of_each_divided_dimension():
    """3 x 3 over 8 x 8 pixels of 2 channels: a row each way, then a column each way that has the neighbours' rows too."""
    shapes = np.ones((1, 8, 8, 2), np.float32), np.ones((3, 3, 2, 2), np.float32)
    (eqn,) = jax.make_jaxpr(
        lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    )(*shapes).jaxpr.eqns
    rule = rule_for(eqn)
    (high, _), (wide, _) = rule.together
    divided = entry_for(eqn).divided
    assert divided is not None
    axes = {factor: (axis,) for axis, group in enumerate(rule.together) for factor in group}
    assert {high, wide} <= axes.keys()
    exchanges = divided(eqn, rule, axes, LogicalMesh.of((2, 4))).exchanges
    pixel = 2 * 4
    assert [(e.axes, e.bytes) for e in exchanges] == [((0,), 2 * pixel)] * 2 + [((1,), (4 + 2) * pixel)] * 2

"""The residual network: parameters as published, shapes, and what BatchNorm remembers."""

import jax
import numpy as np
import pytest

from autopar.models import build
from autopar.models.sizes import BLOCKS_PER_STAGE


def parameter_count(**sizes):
    params = jax.eval_shape(build("wide_resnet", **sizes).create_state, jax.random.key(0)).params
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("depth", "width_factor", "published"),
    [(50, 1, 25_557_032), (50, 2, 68_883_240), (101, 1, 44_549_160), (101, 2, 126_886_696)],
)
def test_at_imagenet_sizes_there_are_as_many_parameters_as_published(depth, width_factor, published):
    sizes = {"depth": depth, "width_factor": width_factor, "base_channels": 64, "classes": 1000, "channels": 3}
    assert parameter_count(**sizes, image_size=224, imagenet_stem=True, batch=1) == published


@pytest.mark.sampled(4)
@pytest.mark.parametrize("depth", [11, 14, 20])
def test_parameters_are_those_of_the_blocks(depth):
    base, width_factor, channels = 4, 3, 2
    expected, incoming = 9 * channels * base + 2 * base, base
    for stage, blocks in enumerate(BLOCKS_PER_STAGE[depth]):
        outgoing, wide = 4 * base * 2**stage, width_factor * base * 2**stage
        expected += incoming * outgoing + 2 * outgoing  # the projection of the stage's first block
        for _ in range(blocks):
            expected += incoming * wide + 9 * wide**2 + wide * outgoing + 2 * (wide + wide + outgoing)
            incoming = outgoing
    expected += (incoming + 1) * 10
    assert parameter_count(depth=depth, base_channels=base, width_factor=width_factor, channels=channels) == expected


@pytest.mark.sweep
def test_running_statistics_move_a_tenth_of_the_way_to_those_of_the_batch(small):
    one = small("wide_resnet")
    state, batch = one.first_state, next(one.model.data(0))
    new_state, _ = one.train_step(one.state(), batch)
    stem = jax.lax.conv_general_dilated(
        batch["images"], state.params["stem"]["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    before, after = state.batch_stats["stem_norm"], new_state.batch_stats["stem_norm"]
    for statistic, of_batch in (("mean", stem.mean(axis=(0, 1, 2))), ("var", stem.var(axis=(0, 1, 2)))):
        np.testing.assert_allclose(after[statistic], 0.9 * before[statistic] + 0.1 * of_batch, rtol=1e-4, atol=1e-6)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), state.batch_stats, new_state.batch_stats)
    assert all(jax.tree.leaves(moved))


def test_evaluation_uses_the_running_statistics_and_so_treats_examples_one_by_one(small):
    one = small("wide_resnet")
    batch = next(one.model.data(0))
    halves = [{key: value[part] for key, value in batch.items()} for part in (slice(0, 8), slice(8, 16))]
    whole = one.eval_step(one.first_state, batch)
    parts = [one.eval_step(one.first_state, half) for half in halves]
    np.testing.assert_allclose(whole["loss"], (parts[0]["loss"] + parts[1]["loss"]) / 2, rtol=1e-5)


@pytest.mark.sweep
def test_the_imagenet_stem_quarters_the_image_and_has_a_max_pool_with_a_gradient():
    model = build("wide_resnet", image_size=32, imagenet_stem=True)
    state = jax.eval_shape(model.create_state, jax.random.key(0))
    jaxpr = str(jax.make_jaxpr(model.train_step)(state, model.batch_shape()))
    assert "reduce_window_max" in jaxpr
    assert "select_and_scatter_add" in jaxpr or "select_and_gather_add" in jaxpr
    assert state.params["stem"]["kernel"].shape == (7, 7, 1, 16)
    assert "f32[32,8,8,32]" in jaxpr

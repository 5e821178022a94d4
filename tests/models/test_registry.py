"""Every registered model builds, feeds itself, trains, keeps its state's structure, and refuses bad sizes in words."""

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from autopar.models import MODELS, build


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", MODELS)
def test_losses_fall_and_the_step_compiles_once_with_a_donated_state(small, name):
    one = small(name)
    state, losses = one.state(), []
    compiled_before = one.train_step._cache_size()
    for batch in itertools.islice(one.model.data(0), 25):
        state, metrics = one.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-5:]) < 0.93 * np.mean(losses[:3]), losses
    assert one.train_step._cache_size() - compiled_before <= 1
    assert int(state.step) == 25
    evaluated = one.eval_step(state, next(one.model.data(1)))
    assert float(evaluated["loss"]) < losses[0]
    assert 0 < float(evaluated["absolute_error" if name == "unet" else "accuracy"]) <= 1


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", MODELS)
def test_the_step_is_a_pure_function_of_state_and_batch(small, name):
    one = small(name)
    batch = next(one.model.data(0))
    first, second = (one.train_step(one.state(), batch) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_state_keeps_structure_shapes_dtypes_and_weak_types_and_is_float32(small, name):
    model = small(name).model
    state = jax.eval_shape(model.create_state, jax.random.key(0))
    new_state, metrics = jax.eval_shape(model.train_step, state, model.batch_shape())
    assert jax.tree.structure(state) == jax.tree.structure(new_state)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(new_state), strict=True):
        assert (before.shape, before.dtype, before.weak_type) == (after.shape, after.dtype, after.weak_type)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} == {"float32", "int32", "uint32"}
    assert {(metric.shape, str(metric.dtype)) for metric in metrics.values()} == {((), "float32")}


@pytest.mark.parametrize("sizes", [{}, {"batch": 6}])
@pytest.mark.parametrize("name", MODELS)
def test_batch_shape_matches_the_data(name, sizes):
    model = build(name, **sizes)
    batch = next(model.data(3))
    expected = {key: (struct.shape, struct.dtype) for key, struct in model.batch_shape().items()}
    assert {key: (value.shape, value.dtype) for key, value in batch.items()} == expected
    assert all(isinstance(value, np.ndarray) for value in batch.values())


@pytest.mark.parametrize("name", MODELS)
def test_data_depends_on_the_seed_only(name):
    model = build(name)
    first, again, other = (list(itertools.islice(model.data(seed), 3)) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True))
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(first[0]), jax.tree.leaves(first[1]), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_every_field_of_a_config_can_become_a_flag(name):
    for field in dataclasses.fields(MODELS[name].config):
        assert field.type in (int, float, bool, str)
        assert type(field.default) is field.type
        assert (field.type is str) == ("choices" in field.metadata)


@pytest.mark.parametrize(
    ("name", "sizes", "tokens"),
    [
        ("gpt", {"batch": 4, "seq": 8}, 32),
        ("moe", {}, 1024),
        ("mlp", {"batch": 5}, 5),
        ("wide_resnet", {"batch": 7}, 7),
        ("bert", {"batch": 4, "seq": 8}, 32),
        ("t5", {"batch": 4, "seq": 8, "target_seq": 6}, 56),
        ("llama", {"batch": 4, "seq": 8}, 32),
        ("unet", {"batch": 7}, 7),
        ("densenet", {"batch": 7}, 7),
    ],
)
def test_tokens_per_batch(name, sizes, tokens):
    assert build(name, **sizes).tokens_per_batch == tokens


def test_an_unknown_model_is_answered_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"no model named 'gtp' \(did you mean 'gpt'\?\); the models are mlp, gpt, gpt_scan"
    ):
        build("gtp")


def test_unknown_sizes_are_all_named_and_answered_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"no size named 'layer' \(did you mean 'layers'\?\), 'zzz'; its sizes are batch"
    ):
        build("gpt", layer=2, zzz=1)


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("gpt", {"hidden": 100, "heads": 3}, "hidden is 100 and heads is 3, but heads must divide hidden"),
        ("gpt", {"hidden": 0}, "hidden is 0, but must be more than 0"),
        ("gpt", {"dropout": 1.0}, "dropout is 1.0, but must be at least 0 and less than 1"),
        ("gpt", {"vocab": 128}, "vocab is 128, but the text is bytes and needs at least 256"),
        ("gpt", {"layers": 2.0}, "layers is 2.0, but must be of type int"),
        ("gpt", {"layers": True}, "layers is True, but must be of type int"),
        ("gpt", {"remat": 1}, "remat is 1, but must be of type bool"),
        ("gpt", {"learning_rate": float("nan")}, "learning_rate is nan, but must be finite"),
        ("gpt", {"weight_decay": -1.0}, "weight_decay is -1.0, but must be 0 or more"),
        ("gpt", {"batch": -1, "seq": 0}, "batch is -1, but must be more than 0; seq is 0, but must be more than 0"),
        ("moe", {"batch": 3, "seq": 10, "group": 8}, "batch .* seq is 30 and group is 8, but group must divide"),
        ("moe", {"experts": 1}, "experts is 1, but top-2 gating needs at least 2"),
        ("moe", {"layers": 1}, "layers is 1, but only every second layer is a mixture"),
        ("moe", {"scan_layers": True}, "scan_layers is True, but the layers of a mixture differ"),
        ("mlp", {"outputs": 0}, "outputs is 0, but must be more than 0"),
        ("wide_resnet", {"depth": 18}, "depth is 18, but must be one of 11, 14, 20, 26, 50, 101, 152"),
        ("wide_resnet", {"image_size": 12}, "image_size is 12, but digits are repeated to a multiple of 8"),
        ("wide_resnet", {"classes": 2}, "classes is 2, but the digits have 10"),
        ("bert", {"vocab": 258}, "vocab is 258, but bytes and marks need at least 259"),
        ("bert", {"seq": 1}, "seq is 1, but an example has two segments and needs at least 2"),
        ("t5", {"vocab": 258}, "vocab is 258, but bytes and marks need at least 259"),
        ("t5", {"buckets": 6}, "buckets is 6, but must be a multiple of 4"),
        (
            "t5",
            {"buckets": 8, "furthest": 4},
            "furthest is 4 and buckets is 8, but furthest must be over half of buckets",
        ),
        ("llama", {"heads": 4, "kv_heads": 3}, "heads is 4 and kv_heads is 3, but kv_heads must divide heads"),
        ("llama", {"hidden": 12, "heads": 4}, "hidden / heads is 3, but rotary positions turn pairs: it must be even"),
        ("llama", {"fused_attention": True, "dropout": 0.5}, "dropout is 0.5, but fused_attention has none"),
        ("unet", {"image_size": 8, "levels": 4}, "image_size is 8, but is halved 4 times: must be a multiple of 16"),
        ("unet", {"groups": 3}, "base_channels is 16 and groups is 3, but groups must divide base_channels"),
        (
            "densenet",
            {"image_size": 8, "blocks": 5},
            "image_size is 8, but is halved 4 times: must be a multiple of 16",
        ),
        ("densenet", {"layers": 2}, "layers is 2 and blocks is 3, but each block needs a layer"),
        ("densenet", {"groups": 3}, "growth is 8 and groups is 3, but groups must divide growth"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_their_numbers(name, sizes, words):
    with pytest.raises(ValueError, match=words):
        build(name, **sizes)


def test_an_int_is_accepted_where_a_float_is_meant():
    assert build("gpt", learning_rate=1).config.learning_rate == 1


def test_names_and_sizes_can_be_looked_up_and_refused_without_jax():
    program = """
import sys
from autopar.models import MODELS, build
assert MODELS["gpt"].config().hidden == 128
try:
    build("gpt", hidden=0)
except ValueError as error:
    assert "hidden is 0" in str(error)
assert not {"jax", "flax", "optax"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=True)

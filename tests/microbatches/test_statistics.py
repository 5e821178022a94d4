"""Batch normalisation with the statistics of each microbatch: the oracle computes the microbatches one by one in plain JAX."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen

import autopar
from autopar.errors import ArgumentError, AutoparWarning, UnsupportedProgramError
from autopar.microbatches.statistics import find_corrections, find_statistics, mark_statistics
from tests.microbatches.test_loop import traced_of
from tests.oracles import assert_trees_close

ROWS, WIDTH = 32, 8
BATCH = {
    "x": jax.random.normal(jax.random.key(0), (ROWS, WIDTH)) * jnp.linspace(0.5, 2, ROWS)[:, None],
    "mask": (jnp.arange(ROWS) % 3 > 0).astype(jnp.float32),
}


def state(layers=3):
    weights = jax.random.normal(jax.random.key(1), (layers, WIDTH, WIDTH)) / 2
    return {"weights": weights, "means": jnp.zeros((layers, WIDTH)), "scales": jnp.ones((layers, WIDTH))}


def normalised(x, scale):
    mean, var = x.mean(0), x.var(0)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale, mean


def one_after_another(params, x):
    means = []
    for weight, scale in zip(params["weights"], params["scales"], strict=True):
        x, mean = normalised(jnp.tanh(x @ weight), scale)
        means.append(mean)
    return x, jnp.stack(means)


def in_a_scan(params, x):
    def layer(x, each):
        return normalised(jnp.tanh(x @ each[0]), each[1])

    return jax.lax.scan(layer, x, (params["weights"], params["scales"]))


def of_flax(params, x):
    norm = linen.BatchNorm(use_running_average=False, use_bias=False)
    means = []
    for weight, scale in zip(params["weights"], params["scales"], strict=True):
        variables = {"params": {"scale": scale}, "batch_stats": {"mean": jnp.zeros(WIDTH), "var": jnp.ones(WIDTH)}}
        x, changed = norm.apply(variables, jnp.tanh(x @ weight), mutable=["batch_stats"])
        means.append(changed["batch_stats"]["mean"] * 100)
    return x, jnp.stack(means)


def make_step(forward, microbatches=1):
    """A train step of a masked mean; `microbatches` of the batch are computed one by one, and their statistics averaged."""

    def step(params, batch):
        count = batch["mask"].sum()

        def loss_of(params, part):
            out, means = forward(params, part["x"])
            return jnp.sum(part["mask"] * jnp.mean((out - part["x"]) ** 2, -1)) / count, means

        parts = jax.tree.map(lambda v: v.reshape(microbatches, -1, *v.shape[1:]), batch)
        each = [jax.tree.map(lambda v, i=i: v[i], parts) for i in range(microbatches)]
        results = [jax.value_and_grad(loss_of, has_aux=True)(params, part) for part in each]
        (loss, means), gradients = jax.tree.map(lambda *terms: sum(terms), *results)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        return {**new, "means": 0.9 * params["means"] + 0.1 * means / microbatches}, loss

    return step


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("forward", "way"),
    [
        (one_after_another, "mesh"),
        (in_a_scan, "stages"),
        pytest.param(one_after_another, "stages", marks=pytest.mark.slow),
        pytest.param(in_a_scan, "mesh", marks=pytest.mark.slow),
        pytest.param(of_flax, "mesh", marks=pytest.mark.slow),
        pytest.param(of_flax, "stages", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:.*of the forward work is one operation:autopar.AutoparWarning")
def test_microbatches_with_statistics_of_their_own_are_what_jax_computes_one_by_one(forward, way):
    options = {"mesh_shape": (2,)} if way == "mesh" else {"mesh_shape": (1,), "num_stages": 2}
    step = autopar.parallelize(make_step(forward), num_microbatches=4, batch_statistics="microbatch", **options)
    expected = jax.jit(make_step(forward, 4))(state(), BATCH)
    assert_trees_close(step(state(), BATCH), expected)
    assert step.last_plan().num_microbatches == 4


def test_in_one_microbatch_they_are_those_of_the_batch():
    step = autopar.parallelize(
        make_step(one_after_another), mesh_shape=(2,), num_microbatches=1, batch_statistics="microbatch"
    )
    assert_trees_close(step(state(), BATCH), jax.jit(make_step(one_after_another))(state(), BATCH))


def test_without_the_option_what_cannot_be_cut_names_it():
    for way in ({"mesh_shape": (2,)}, {"num_stages": 2}):
        with pytest.raises(UnsupportedProgramError, match=r"into 4 microbatches: .*batch_statistics='microbatch'"):
            autopar.parallelize(make_step(one_after_another), num_microbatches=4, **way).plan(state(2), BATCH)
    with pytest.raises(ArgumentError, match="batch_statistics='layer': one of 'batch', 'microbatch' is expected"):
        autopar.parallelize(batch_statistics="layer")


def test_what_is_computed_with_weights_that_were_just_updated_needs_no_statistic():
    def step(params, x):
        def loss(params):
            return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - x) ** 2)

        updated = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))
        return updated, loss(updated)

    traced = traced_of(step, {"w": jnp.eye(WIDTH), "b": jnp.ones(WIDTH)}, BATCH["x"])
    assert list(find_statistics(traced)) == []
    assert mark_statistics(traced) is traced


def corrected_step(ddof):
    def step(scale, x):
        def loss(scale):
            return jnp.mean(jnp.tanh(x / (1 + x.mean(0) + (x * scale).var(0, ddof=ddof))))

        return scale - 0.1 * jax.grad(loss)(scale), loss(scale)

    return step


def test_a_variance_that_is_corrected_for_the_whole_batch_is_told():
    scale, x = jnp.ones(WIDTH), BATCH["x"]
    assert {found[1:] for found in find_corrections(traced_of(corrected_step(1), scale, x))} == {(ROWS, ROWS - 1)}
    assert list(find_corrections(traced_of(corrected_step(0), scale, x))) == []
    options = {"mesh_shape": (1,), "batch_statistics": "microbatch"}
    with pytest.warns(AutoparWarning, match=r"divides a sum of 32 terms by 31, as var\(ddof=1\) does"):
        autopar.parallelize(corrected_step(1), num_microbatches=4, **options).plan(scale, x)
    autopar.parallelize(corrected_step(1), num_microbatches=1, **options).plan(scale, x)
    autopar.parallelize(corrected_step(0), num_microbatches=4, **options).plan(scale, x)

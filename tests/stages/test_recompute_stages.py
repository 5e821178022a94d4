"""Recomputation changes what stays between forward and backward, and no result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import autopar
from autopar.errors import ArgumentError
from autopar.pipeline_plan import plan_from_json
from tests.oracles import assert_same_as_jit

TWO_STAGES = {"devices": 4, "num_stages": 2, "num_microbatches": 4, "mesh_shape": (2,)}


def arguments(width=16, layers=4, batch=16):
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=(width, width)) / width**0.5, jnp.float32) for _ in range(layers)]
    return (weights, jax.random.key(1)), jnp.asarray(rng.normal(size=(batch, width)), jnp.float32)


def step(state, x):
    """A perceptron with dropout after every layer, whose masks come from a key in the state."""
    weights, key = state

    def loss(weights):
        h = x
        for number, w in enumerate(weights):
            h = jnp.tanh(h @ w)
            h = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, number), 0.7, h.shape), h / 0.7, 0)
        return jnp.mean(h**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return (jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), jax.random.fold_in(key, 7)), value


def planned(recompute, **options):
    return autopar.parallelize(step, recompute=recompute, **TWO_STAGES, **options).plan(*arguments())


def test_a_stage_that_recomputes_keeps_less_works_more_and_computes_the_same():
    before, after = planned("none"), planned("layer")
    assert (before.recompute, after.recompute) == (False, True)
    assert after.stages[0].peak_bytes < before.stages[0].peak_bytes
    assert after.stages[0].plan.compute_s > before.stages[0].plan.compute_s
    assert plan_from_json(after.to_json()) == after
    assert_same_as_jit(step, autopar.parallelize(step, recompute="layer", **TWO_STAGES), *arguments())


@pytest.mark.sweep
def test_a_plan_that_recomputes_can_be_used_again():
    restored = autopar.parallelize(step, plan=planned("layer"))
    assert_same_as_jit(step, restored, *arguments(), steps=1)


def test_what_needs_no_recomputation_does_none():
    assert not planned("auto").recompute


def test_only_known_kinds_of_recomputation_are_accepted():
    with pytest.raises(ArgumentError, match=r"recompute='some': one of 'auto', 'none', 'layer', 'named' is expected"):
        autopar.parallelize(step, recompute="some")


@pytest.mark.sweep
def test_stages_do_as_much_again_as_they_have_to():
    """Between the memory of all forward work and of none, half of it is done again, with the same results.

    In one schedule: another would keep fewer microbatches, and do nothing again.
    """
    arrays = arguments(width=16, layers=4, batch=2048)

    def plan(**options):
        parallel = autopar.parallelize(step, **TWO_STAGES, schedule="1f1b", **options)
        return parallel, parallel.plan(*arrays)

    (_, none), (_, everything) = plan(recompute="none"), plan(recompute="layer")
    assert everything.recomputed_shares == (1.0, 1.0)
    limits = np.linspace(everything.peak_bytes, none.peak_bytes, 5)[2:]
    found = []
    for limit in limits:
        try:
            found.append(plan(memory_limit_bytes=int(limit)))
        except autopar.OutOfMemoryError:
            continue
    shares = [one.recomputed_shares for _, one in found]
    assert (0.5, 0.5) in shares
    assert shares == sorted(shares, reverse=True), "more memory, less work"
    parallel, half = found[shares.index((0.5, 0.5))]
    assert none.step_s < half.step_s < everything.step_s
    assert everything.peak_bytes < half.peak_bytes < none.peak_bytes
    assert "backward repeats 50% of forward work" in autopar.explain.explain(half)
    assert plan_from_json(half.to_json()) == half
    assert_same_as_jit(step, parallel, *arrays)
    assert_same_as_jit(step, autopar.parallelize(step, plan=half), *arrays, steps=1)


@pytest.mark.sweep
def test_stages_keep_named_values():
    def named_step(weights, x):
        def loss(weights):
            h = x
            for w in weights:
                h = h + jnp.sin(checkpoint_name(jnp.tanh(h @ w), "layer"))
            return jnp.mean(h**2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    (weights, _), x = arguments(layers=4, batch=512)
    plans = {}
    for way in ("none", "named", "layer"):
        parallel = autopar.parallelize(named_step, recompute=way, **TWO_STAGES)
        plans[way] = parallel.plan(weights, x)
        assert_same_as_jit(named_step, parallel, weights, x)
    assert plans["none"].peak_bytes > plans["named"].peak_bytes > plans["layer"].peak_bytes
    work_s = {way: sum(stage.backward_s for stage in plan.stages) for way, plan in plans.items()}
    assert work_s["none"] <= work_s["named"] <= work_s["layer"]
    assert work_s["none"] < work_s["layer"]
    restored = autopar.parallelize(named_step, plan=plan_from_json(plans["named"].to_json()))
    assert_same_as_jit(named_step, restored, weights, x, steps=1)

"""Recomputation changes what stays between forward and backward, and no result."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import autopar
from autopar.cost_model.hardware import preset
from autopar.errors import ArgumentError
from autopar.models import registry
from autopar.pipeline_plan import plan_from_json
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.program import operands_of
from autopar.program.task_name import TaskName
from autopar.program.trace import trace
from autopar.stages.chain import forward_chain
from autopar.stages.cut import cut_stages
from autopar.stages.recompute_stages import recompute_in_backward
from autopar.stages.time_loops import make_time_loop
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


def scanned_step(state, x):
    """A perceptron whose layers are scanned, each with two products."""

    def layer(h, w):
        return jnp.tanh(jnp.tanh(h @ w) @ w.T), None

    value, gradients = jax.value_and_grad(lambda w: jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2))(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), value


def test_stages_of_scanned_layers_do_half_again():
    """Their scans are divided there: a scan is done again as a whole, and half of the stage was nothing."""
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=(8, 16, 16)) / 4, jnp.float32)
    batch = jnp.asarray(rng.normal(size=(2048, 16)), jnp.float32)

    def plan(**options):
        parallel = autopar.parallelize(scanned_step, **TWO_STAGES, schedule="1f1b", **options)
        return parallel, parallel.plan(weights, batch)

    (_, none), (_, everything) = plan(recompute="none"), plan(recompute="layer")
    assert (none.scan_cuts, everything.scan_cuts) == (((4,),), ((4,),))
    parallel, half = plan(memory_limit_bytes=(9 * none.peak_bytes + everything.peak_bytes) // 10)
    assert (half.recomputed_shares, half.scan_cuts) == ((0.5, 0.5), ((2, 4, 6),))
    assert everything.peak_bytes < half.peak_bytes < none.peak_bytes
    assert plan_from_json(half.to_json()) == half
    assert_same_as_jit(scanned_step, parallel, weights, batch)
    assert_same_as_jit(scanned_step, autopar.parallelize(scanned_step, plan=half), weights, batch, steps=1)


@pytest.mark.sweep
def test_stages_do_as_much_again_as_they_have_to():
    """Between the memory of all forward work and of none, half of it is done again, with the same results.

    In one schedule: another would keep fewer microbatches, and do nothing again. In stages of four layers: with two each, JAX
    0.12 keeps so little for backward that half of the work done again saves nothing.
    """
    arrays = arguments(width=16, layers=8, batch=2048)

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
    # A call pays for what is kept.
    uncalled = dataclasses.replace(preset("cpu"), call_s=0.0, call_s_per_array=0.0, call_s_per_byte=0.0)
    plans = {}
    for way in ("none", "named", "layer"):
        parallel = autopar.parallelize(named_step, recompute=way, cluster=uncalled, **TWO_STAGES)
        plans[way] = parallel.plan(weights, x)
        assert_same_as_jit(named_step, parallel, weights, x)
    assert plans["none"].peak_bytes > plans["named"].peak_bytes > plans["layer"].peak_bytes
    work_s = {way: sum(stage.backward_s for stage in plan.stages) for way, plan in plans.items()}
    assert work_s["none"] <= work_s["named"] <= work_s["layer"]
    assert work_s["none"] < work_s["layer"]
    restored = autopar.parallelize(named_step, plan=plan_from_json(plans["named"].to_json()))
    assert_same_as_jit(named_step, restored, weights, x, steps=1)


def wide_layers(weights, x):
    """Layers that hand on little of what they make."""

    def loss(weights):
        h = x
        for w in weights:
            h = h + jnp.tanh(jnp.tanh(jnp.tanh(h @ w) @ w) @ w)
        return jnp.mean(h**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def masked_layers(weights, x):
    """The same, each with a mask of its own, which depends on no example: cheap, and made in every task that reads it."""

    def loss(weights):
        h = x
        for number, w in enumerate(weights):
            mask = jnp.arange(x.shape[-1]) > number
            h = h + jnp.where(mask[None], jnp.tanh(jnp.tanh(jnp.where(mask[None], jnp.tanh(h @ w), 0) @ w) @ w), 0)
        return jnp.mean(h**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def backward_that_repeats(places_of, stages=2, step=wide_layers):
    """The backward of the first of equal stages of eight layers, and its stage's forward, not repeated.

    `places_of`: from the chain's length and the places of its products, three to a layer, to where layers begin.
    """
    (weights, _), x = arguments(layers=8)
    signature = CallSignature(step, (1,), (), "auto")
    loop = make_time_loop(trace(signature, bind_arguments(signature, (weights, x), {})), 4)
    chain = forward_chain(loop)
    products = [place for place, one in enumerate(chain) if one.equation.primitive is jax.lax.dot_general_p]
    cut = cut_stages(loop, products[:: 24 // stages][1:])
    again = recompute_in_backward(cut, (1.0,) * stages, layers=places_of(len(chain), products))
    return again.segments[TaskName("backward", 0)], cut.segments[TaskName("forward", 0)]


def most_repeated_at_once(backward, forward):
    """The most values of forward that were made again and are still to be read, over a backward."""
    repeated = {v for eqn in forward.equations for v in eqn.outvars}
    last = {v: place for place, eqn in enumerate(backward.equations) for v in operands_of(eqn)}
    alive, most = set(), 0
    for place, eqn in enumerate(backward.equations):
        alive |= {v for v in eqn.outvars if v in repeated and last.get(v, -1) > place}
        most = max(most, len(alive))
        alive = {v for v in alive if last[v] > place}
    return most


@pytest.mark.parametrize(("step", "kept"), [(wide_layers, 3), (masked_layers, 0)])
def test_a_backward_has_the_results_of_one_layer_at_a_time(step, kept):
    whole = backward_that_repeats(lambda length, products: (), step=step)
    by_layers = backward_that_repeats(lambda length, products: products[3::3], step=step)
    assert most_repeated_at_once(*by_layers) <= most_repeated_at_once(*whole) / 2
    assert len(by_layers[0].reads) == len(whole[0].reads) + kept, "three of four layers keep what they received"
    made = by_layers[0].made()
    assert len(made) == len(set(made)), "nothing is made twice"


@pytest.mark.parametrize("step", [wide_layers, masked_layers])
def test_each_layer_but_the_first_in_a_backward_waits_for_the_gradient_that_was_made_before(step):
    """It reads nothing of it, so XLA, which runs what is ready, would make all layers again at once."""
    backward, _ = backward_that_repeats(lambda length, products: products[3::3], step=step)
    place = {v: number for number, eqn in enumerate(backward.equations) for v in eqn.outvars}
    order = {eqn: number for number, eqn in enumerate(backward.equations)}
    assert len(set(backward.late.values())) == 3, "four layers"
    assert all(place[awaited] < order[eqn] for eqn, awaited in backward.late.items())


@pytest.mark.parametrize(("dropout", "part"), [(0.0, 0.6), (0.1, 0.9)])
def test_a_stage_of_masked_attention_needs_the_memory_of_one_layer(dropout, part):
    """With dropout, XLA makes the random bits of all layers at the beginning of forward, whatever backward does."""
    model = registry.build("gpt", layers=6, hidden=64, heads=4, seq=128, batch=32, vocab=256, dropout=dropout)
    state, batch = jax.eval_shape(model.create_state, jax.random.key(0)), model.batch_shape()
    options = {**TWO_STAGES, "schedule": "1f1b"}
    plans = {
        way: autopar.parallelize(model.train_step, recompute=way, **options).plan(state, batch)
        for way in ("none", "layer")
    }
    peaks = {way: [stage.plan.peak_bytes for stage in plan.stages] for way, plan in plans.items()}
    assert max(peaks["layer"]) < part * min(peaks["none"]), "of a microbatch"


def test_layers_that_hand_on_all_that_they_make_are_done_again_together():
    whole, _ = backward_that_repeats(lambda length, products: (), stages=8)
    by_operations, _ = backward_that_repeats(lambda length, products: range(1, length), stages=8)
    assert len(by_operations.reads) == len(whole.reads)


def test_what_a_loop_hands_on_is_kept_when_the_loop_is_done_again_for_its_other_results():
    """A backward reads nothing before it is made, also where one equation makes what is handed on and what is not."""

    def scanned(weights, x):
        def loss(weights):
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, jnp.stack(weights))
            return jnp.mean(jnp.tanh(h @ weights[0]) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    (weights, _), x = arguments()
    signature = CallSignature(scanned, (1,), (), "auto")
    loop = make_time_loop(trace(signature, bind_arguments(signature, (weights, x), {})), 4)
    length = len(forward_chain(loop))
    for place in range(1, length):
        again = recompute_in_backward(cut_stages(loop, []), (1.0,), layers=(place,))
        backward = again.segments[TaskName("backward", 0)]
        made = set(backward.reads)
        for eqn in backward.equations:
            early = {v for v in operands_of(eqn) if v in set(backward.made())} - made
            assert not early, f"layers begin at {place}: {eqn} reads what is not made yet"
            made |= set(eqn.outvars)


@pytest.mark.sweep
def test_stages_of_several_layers_need_the_memory_that_is_predicted():
    """XLA's own account of the tasks is not above the plan's, and does not come near that of all layers at once."""
    model = registry.build("gpt", layers=8, hidden=64, heads=4, batch=16, seq=128, vocab=256)
    shapes = jax.eval_shape(model.create_state, jax.random.key(0)), model.batch_shape()
    peaks = {}
    for way in ("none", "layer"):
        verification = autopar.parallelize(model.train_step, recompute=way, **TWO_STAGES).verify(*shapes)
        rows = [row for row in verification.rows if row.what == "peak"]
        assert all(row.compiled < 1.05 * row.planned for row in rows)
        assert not [row for row in verification.differing if row.what != "peak"]
        peaks[way] = rows[0].compiled
    assert peaks["layer"] < 0.6 * peaks["none"]

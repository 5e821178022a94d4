"""What broke when strangers' steps were cut into stages and microbatches, each with the settings that showed it."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import autopar
from autopar.microbatches.mixing import MixedExamples
from autopar.microbatches.phases import plan_time
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.trace import trace
from tests.oracles import assert_same_as_jit
from tests.test_strangers_programs import descend, noise

EXAMPLES, WIDTH = 16, 12


def layers(count=4):
    return [noise(WIDTH, WIDTH, seed=i, scale=0.35) for i in range(count)]


def batch():
    return {"x": noise(EXAMPLES, WIDTH), "y": noise(EXAMPLES, WIDTH, seed=1)}


def through(weights, h):
    for w in weights:
        h = jnp.tanh(h @ w)
    return h


def trained(loss_of):
    def step(weights, batch):
        loss, grads = jax.value_and_grad(loss_of)(weights, batch)
        return descend(weights, grads), loss

    return step


def in_stages(step, *, stages=2, microbatches=4, schedule="1f1b", **options):
    shape = {"mesh_shape": (1,)} | options
    return autopar.parallelize(step, num_stages=stages, num_microbatches=microbatches, schedule=schedule, **shape)


# --- control flow -----------------------------------------------------------------------------------------------------


def test_a_step_that_chooses_each_layer_by_a_cond_runs_in_microbatches():
    """The gradients of weights leave the branches as terms that the microbatches add up."""

    def loss_of(state, batch):
        h = batch["x"]
        for number, w in enumerate(state["weights"]):
            odd = (state["count"] + number) % 2 == 1
            h = lax.cond(odd, lambda h, w: jnp.tanh(h @ w), lambda h, w: h + 0.1 * jnp.tanh(h @ w), h, w)
        return jnp.mean((h - batch["y"]) ** 2)

    def step(state, batch):
        weights = state["weights"]
        loss, grads = jax.value_and_grad(lambda w: loss_of({**state, "weights": w}, batch))(weights)
        return {"weights": descend(weights, grads), "count": state["count"] + 1}, loss

    state = {"weights": layers(), "count": jnp.int32(0)}
    assert_same_as_jit(step, in_stages(step, schedule="zb-h1"), state, batch())


def test_an_update_that_a_cond_skips_by_handing_on_what_it_is_given():
    """That branch has no operation of its own."""

    def step(weights, batch):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((through(w, batch["x"]) - batch["y"]) ** 2))(weights)
        small = optax.tree.norm(grads) < batch["limit"]
        return lax.cond(small, descend, lambda w, _: w, weights, grads), (loss, small)

    allowed = {**batch(), "limit": jnp.float32(1e3)}
    skipped = {**batch(), "limit": jnp.float32(0.0)}
    assert_same_as_jit(step, in_stages(step), layers(), [allowed, skipped, allowed])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "scanned"])
def test_a_flag_of_the_state_that_becomes_a_constant(stacked):
    def loss_of(weights, batch):
        if not stacked:
            return jnp.mean((through(weights, batch["x"]) - batch["y"]) ** 2)
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"], weights)
        return jnp.mean((h - batch["y"]) ** 2)

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_of)(state["weights"], batch)
        rate = jnp.where(state["begun"], 0.1, 0.05)
        return {"weights": descend(state["weights"], grads, rate), "begun": True}, loss

    weights = jnp.stack(layers()) if stacked else layers()
    assert_same_as_jit(step, in_stages(step), {"weights": weights, "begun": jnp.array(False)}, batch())


def test_extremes_of_each_scanned_layer_among_the_metrics_do_not_keep_the_batch_together():
    """Their derivatives, which nobody takes, would need the largest value of all examples on every example."""
    table = noise(WIDTH, seed=3)

    def step(weights, batch):
        def loss_of(weights):
            def layer(h, w):
                h = h + jnp.tanh(h @ w)
                return h, {"largest": h.max(), "least": h.min(0), "any": jnp.any(h > 1), "unread": h * table}

            h, sizes = lax.scan(layer, batch["x"], weights)
            del sizes["unread"]
            return jnp.mean((h - batch["y"]) ** 2), sizes

        (loss, sizes), grads = jax.value_and_grad(loss_of, has_aux=True)(weights)
        return descend(weights, grads), (loss, sizes)

    assert_same_as_jit(step, in_stages(step), noise(6, WIDTH, WIDTH, scale=0.2), batch(), steps=2)


# --- where the examples are -------------------------------------------------------------------------------------------


def two_views(batch):
    return jnp.concatenate([batch["x"], batch["y"]])


def of_two_views(weights, batch):
    """The views are compared example by example, so a microbatch of the examples would do, but not of the rows."""
    first, second = jnp.split(through(weights, two_views(batch)), 2)
    return jnp.mean((first - second) ** 2)


def contrastive(weights, batch):
    h = through(weights, two_views(batch))
    return -jnp.mean(
        jax.nn.log_softmax(h @ h.T)[jnp.arange(2 * EXAMPLES), jnp.roll(jnp.arange(2 * EXAMPLES), EXAMPLES)]
    )


def time_first(weights, batch):
    h = jnp.stack([batch["x"], batch["y"], batch["x"]]).reshape(3 * EXAMPLES, WIDTH)
    return jnp.mean(through(weights, h).reshape(3, EXAMPLES, WIDTH).mean(0) ** 2)


def padded(weights, batch):
    h = through(weights, jnp.pad(batch["x"], ((0, 4), (0, 0))))[:EXAMPLES]
    return jnp.mean((h - batch["y"]) ** 2)


def one_after_another(weights, batch):
    return jnp.mean((lax.map(lambda x: through(weights, x), batch["x"]) - batch["y"]) ** 2)


def one_after_another_between_layers(weights, batch):
    h = lax.map(jnp.tanh, through(weights[:2], batch["x"]))
    return jnp.mean((through(weights[2:], h) - batch["y"]) ** 2)


def of_every_second(weights, batch):
    return jnp.mean((through(weights, batch["x"][::2]) - batch["y"][1::2]) ** 2)


def backwards(weights, batch):
    return jnp.mean((through(weights, batch["x"][::-1]) - batch["y"][::-1]) ** 2)


def mixed_up(weights, batch):
    """What is done with the batch alone, whatever it is, comes before the loop."""
    x, y = (0.7 * batch[k] + 0.3 * jnp.roll(batch[k], 1, axis=0) for k in "xy")
    return jnp.mean((through(weights, x) - y) ** 2)


def in_halves(weights, batch):
    halves = [through(weights, batch["x"][i : i + 8]) - batch["y"][i : i + 8] for i in (0, 8)]
    return sum(jnp.mean(half**2) for half in halves) / 2


def tiled(weights, batch):
    token = jnp.tile(weights[0][:1, None], (EXAMPLES, 1, 1))
    h = through(weights[1:], jnp.concatenate([token, batch["x"][:, None]], axis=1))
    return jnp.mean((h.mean(1) - batch["y"]) ** 2)


def named(weights, batch):
    return jnp.mean((checkpoint_name(through(weights, batch["x"]), "kept") - batch["y"]) ** 2)


def summed_into(weights, batch):
    h = through(weights, batch["x"]).at[:, jnp.arange(3)].subtract(0.5)
    return jnp.mean((h - batch["y"]) ** 2)


APART = [of_every_second, backwards, mixed_up, in_halves, tiled, named, summed_into]
TOGETHER = {
    of_two_views: r"split at .*of_two_views.* relates examples of the batch to each other",
    contrastive: r"dot_general at .*contrastive.* relates examples",
    time_first: r"reshape at .*time_first.* puts the examples behind another dimension",
    padded: r"slice at .*padded.* relates examples of the batch to each other",
    one_after_another: r"scan at .*one_after_another.* goes through the examples one after another; .*num_microbatches",
    one_after_another_between_layers: r"scan at .*between_layers.* goes through the examples one after another",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("loss_of", APART, ids=lambda f: f.__name__)
def test_steps_whose_examples_are_rearranged_first_run_in_microbatches(loss_of):
    step = trained(loss_of)
    assert_same_as_jit(step, in_stages(step), layers(), batch(), steps=2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("loss_of", TOGETHER, ids=lambda f: f.__name__)
def test_steps_whose_examples_stay_together_say_where_instead_of_running_their_loop_around_nothing(loss_of):
    step = trained(loss_of)
    on_one_mesh = autopar.parallelize(step, devices=2, num_microbatches=4, mesh_shape=(2,))
    for way in (on_one_mesh, in_stages(step)):
        with pytest.raises(
            autopar.UnsupportedProgramError, match=f"cannot be cut into 4 microbatches: {TOGETHER[loss_of]}"
        ):
            way.plan(layers(), batch())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "loss_of", [f for f in (*TOGETHER, *APART) if "one_after_another" not in f.__name__], ids=lambda f: f.__name__
)
def test_in_one_microbatch_all_of_them_have_stages_of_equal_work(loss_of):
    plan = in_stages(trained(loss_of), microbatches=1, mesh_shape=(1,)).plan(layers(), batch())
    forward = [stage.forward_s for stage in plan.stages]
    assert min(forward) > 0.2 * max(forward)


def test_a_look_at_a_few_examples_after_the_loop_does_not_keep_the_others_from_it():
    def step(weights, batch):
        def loss_of(weights):
            code = through(weights[:2], batch["x"])
            return jnp.mean((through(weights[2:], code) - batch["x"]) ** 2), code

        (loss, code), grads = jax.value_and_grad(loss_of, has_aux=True)(weights)
        return descend(weights, grads), {"loss": loss, "pictures": through(weights[2:], code[:2])}

    assert_same_as_jit(step, in_stages(step), layers(), {"x": noise(EXAMPLES, WIDTH)}, steps=2)


def with_correlations(loss_of):
    """A step whose metrics are small products over all examples, of values that the loop makes."""

    def step(weights, batch):
        (loss, code), grads = jax.value_and_grad(loss_of, has_aux=True)(weights, batch)
        errors = jnp.mean((code - batch["y"]) ** 2, axis=-1)
        metrics = {
            "loss": loss,
            "correlation": jnp.corrcoef(errors, batch["x"][:, 0]),
            "covariance": jnp.cov(code[:, :2], rowvar=False),
        }
        return descend(weights, grads), metrics

    return step


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", [{"mesh_shape": (2,)}, {"num_stages": 2, "mesh_shape": (1,)}], ids=str)
def test_a_correlation_among_the_metrics_does_not_keep_the_examples_together(options):
    def loss_of(weights, batch):
        code = through(weights, batch["x"])
        return jnp.mean((code - batch["y"]) ** 2), code

    step = with_correlations(loss_of)
    parallel = autopar.parallelize(step, num_microbatches=4, **options)
    assert_same_as_jit(step, parallel, layers(), batch(), steps=2)
    assert parallel.last_plan().num_microbatches == 4


def test_what_keeps_the_examples_together_is_named_and_not_a_correlation_that_comes_first():
    def normalised(h):
        return (h - h.mean(0)) / h.std(0)

    def loss_of(weights, batch):
        code = through(weights[:2], batch["x"])
        seen = jnp.corrcoef(lax.stop_gradient(code[:, 0]), batch["y"][:, 0])[0, 1]
        code = through(weights[2:], normalised(code))
        return jnp.mean((code - batch["y"]) ** 2), (code, seen)

    def step(weights, batch):
        (loss, (code, seen)), grads = jax.value_and_grad(loss_of, has_aux=True)(weights, batch)
        return descend(weights, grads), (loss, seen, jnp.corrcoef(code[:, 0], batch["y"][:, 0]))

    parallel = autopar.parallelize(step, devices=2, mesh_shape=(2,), num_microbatches=4)
    with pytest.raises(
        autopar.UnsupportedProgramError,
        match=r"into 4 microbatches: \w+ at .*normalised.* needs a value that is reduced",
    ):
        parallel.plan(layers(), batch())


def test_an_operation_without_a_rule_is_named_as_what_keeps_examples_together():
    def loss_of(weights, batch):
        h = through(weights, batch["x"])
        known = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(h.shape, h.dtype), lax.stop_gradient(h))
        return jnp.mean((through(weights, h + known) - batch["y"]) ** 2)

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="the step calls Python: pure_callback", category=autopar.AutoparWarning
        )
        with pytest.raises(
            autopar.UnsupportedProgramError, match=r"pure_callback at .* has no factor rule.*autopar\.register_rule"
        ):
            in_stages(trained(loss_of)).plan(layers(), batch())


def test_accumulation_by_hand_over_slices_is_cut_like_any_other_step():
    """Both halves are in the loop, so no more than a quarter of either is there at a time."""
    signature = CallSignature(trained(in_halves), (1,), (), "auto")
    step = trace(signature, bind_arguments(signature, (layers(), batch()), {}))
    plan = plan_time(step, 4)
    assert not isinstance(plan, MixedExamples)
    products = [eqn for eqn in plan.assignment.program.equations if eqn.primitive.name == "dot_general"]
    assert {plan.phases[eqn] for eqn in products} == {"body"}
    assert {plan.assignment.strategies[eqn].ways for eqn in products} == {4}


# --- what updates read ------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_a_sum_per_layer_that_two_updates_read_is_made_for_the_first():
    """The decoder's second update adds the terms up, after the first has sent them to the stage that joins all layers."""

    def step(weights, batch):
        def loss_of(weights):
            encoded, _ = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), batch["x"], weights["encoder"])

            def layer(h, w):
                mixed = jax.nn.softmax(h @ w["ask"] * encoded)
                return h + jnp.tanh(mixed @ w["answer"]), jnp.mean(h**2)

            decoded, sizes = lax.scan(layer, batch["y"], weights["decoder"])
            return jnp.mean((decoded - batch["y"]) ** 2) + 0.01 * sizes.sum(), sizes

        (loss, sizes), grads = jax.value_and_grad(loss_of, has_aux=True)(weights)
        return descend(weights, grads), (loss, sizes)

    decoder = {name: noise(6, WIDTH, WIDTH, seed=i, scale=0.2) for i, name in enumerate(["ask", "answer"])}
    weights = {"encoder": noise(5, WIDTH, WIDTH, scale=0.2), "decoder": decoder}
    parallel = in_stages(step, microbatches=2, mesh_shape=(2,), constraints=autopar.data_parallel())
    assert_same_as_jit(step, parallel, weights, batch(), steps=2, rtol_of_scale=2e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("is_trained", [False, True])
def test_a_mean_without_nans_of_sums_over_segments_through_which_no_gradient_goes_is_cut_into_stages(is_trained):
    def loss_of(weights, batch):
        h = through(weights, batch["x"])
        sums = jax.ops.segment_sum(h, jnp.arange(EXAMPLES) % 4, num_segments=4)
        return jnp.nanmean(lax.stop_gradient(sums)) + (jnp.mean(h**2) if is_trained else 0)

    assert_same_as_jit(trained(loss_of), in_stages(trained(loss_of), schedule="gpipe"), layers(2), batch())


def test_errors_that_only_pipelines_raise_are_public():
    assert issubclass(autopar.PipelineError, autopar.AutoparError)
    assert issubclass(autopar.ScheduleError, autopar.AutoparError)

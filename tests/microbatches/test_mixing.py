"""A step that cannot be cut into microbatches says which operation mixes examples, and why."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

from autopar.errors import UnsupportedProgramError
from autopar.microbatches import counts
from autopar.microbatches.counts import cut_into_microbatches
from autopar.microbatches.mixing import MixedExamples
from autopar.microbatches.phases import plan_time
from tests import zoo
from tests.microbatches.small_steps import linear, traced_of


def mixing(step, count, *args):
    """What is said of a step that mixes examples."""
    plan = plan_time(traced_of(step, *args), count)
    assert isinstance(plan, MixedExamples), "this step was cut into microbatches"
    return plan


def contrastive(weights, batch):
    def loss(weights):
        a, b = batch["x"] @ weights, batch["y"] @ weights
        return -jnp.mean(jax.nn.log_softmax(a @ b.T)[jnp.arange(8), jnp.arange(8)])

    return weights - 0.1 * jax.grad(loss)(weights)


def test_a_contrastive_loss_is_refused_at_the_product_that_mixes_examples():
    found = mixing(contrastive, 4, *linear())
    assert found.operation == "dot_general"
    assert "test_mixing.py" in found.source
    assert "relates examples of the batch to each other" in found.reason


def test_why_a_step_cannot_be_cut_is_found_once_for_each_number(monkeypatch):
    """Of steps asked for in stages it was found by the search over layers, and again for equal stages."""
    traced, asked = traced_of(contrastive, *linear()), []

    def counted(traced, count, **options):
        asked.append((count, options["late_sums"]))
        return plan_time(traced, count, **options)

    monkeypatch.setattr(counts, "plan_time", counted)
    found = [
        counts.plan_phases(traced, count, late_sums=late)
        for _ in range(2)
        for count in (2, 4)
        for late in (False, True)
    ]
    assert all(isinstance(one, MixedExamples) for one in found)
    assert found[:4] == found[4:]
    assert asked == [(2, False), (2, True), (4, False), (4, True)]
    counts.plan_phases(traced, 4, known={})
    assert len(asked) == 5, "of phases that are known it says nothing"
    counts.plan_phases(traced_of(contrastive, *linear()), 4)
    assert len(asked) == 6, "nor of another step"


def test_batch_normalisation_is_refused_at_the_operation_that_needs_the_mean():
    step, state, batch = zoo.build_resnet_block()
    found = mixing(step, 2, state, batch)
    assert "needs a value that is reduced over all examples" in found.reason
    assert "zoo.py" in found.source


def linen_norm(x):
    norm = linen.BatchNorm(use_running_average=False)
    return norm.apply(norm.init(jax.random.key(0), x), x, mutable=["batch_stats"])[0]


def nnx_norm(x):
    return nnx.BatchNorm(x.shape[-1], rngs=nnx.Rngs(0))(x)


def equinox_norm(x):
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(x.shape[-1], axis_name="examples", mode="batch")
    return jax.vmap(lambda one: norm(one, state)[0], axis_name="examples")(x)


def normed_by_the_batch(h):
    return jnp.tanh((h - h.mean(0)) / (1e-3 + h.std(0)))


def scaled_by_its_size(h):
    return h / (1 + jnp.sum(h**2))


def shown_to_python(h):
    jax.debug.callback(lambda size: None, jnp.sum(h**2))
    return jnp.tanh(h)


IN_EACH_ITERATION = {
    normed_by_the_batch: "sub needs a value that is reduced over all examples, on every example",
    scaled_by_its_size: "div needs a value that is reduced over all examples, on every example",
    shown_to_python: "observe needs a value that is reduced over all examples, on every example",
}


@pytest.mark.parametrize("cell", IN_EACH_ITERATION)
def test_what_mixes_examples_inside_of_a_scan_is_found_there(cell):
    """And not a product before it, which could be cut by itself."""

    def step(weights, batch):
        def loss_of(weights):
            first = batch["x"] @ weights @ weights.T
            layers = jnp.broadcast_to(weights @ weights.T, (3, len(weights), len(weights)))
            return jnp.mean(jax.lax.scan(lambda h, w: (cell(h @ w), None), first, layers)[0])

        return weights - 0.1 * jax.grad(loss_of)(weights)

    found = mixing(step, 4, *linear())
    assert f"{found.operation} {found.reason}" == IN_EACH_ITERATION[cell]
    assert cell.__name__ in found.source


def test_a_mean_that_one_layer_hands_to_the_next_is_found_where_it_is_used():
    """In the first iteration it is no mean of the batch yet."""

    def step(weights, batch):
        def layer(carry, w):
            h, mean = carry
            made = jnp.tanh(h @ w - mean)
            return (made, jnp.mean(made, 0)), None

        def loss_of(weights):
            layers = jnp.broadcast_to(weights, (3, *weights.shape))
            return jnp.mean(jax.lax.scan(layer, (batch["x"], jnp.zeros(6)), layers)[0][0])

        return weights - 0.1 * jax.grad(loss_of)(weights)

    found = mixing(step, 4, *linear())
    assert f"{found.operation} {found.reason}" == IN_EACH_ITERATION[normed_by_the_batch]


def test_a_sum_that_only_grows_is_passed_over_for_what_needs_it_whole():
    """Terms of a sum may be added to a start; their sine is not the sine of the sum."""

    def step(weights, batch):
        def layer(carry, w):
            h, total = carry
            h = jnp.tanh(h @ w)
            total = total + jnp.sum(h)
            return (h, total), jnp.sin(total)

        def loss_of(weights):
            layers = jnp.broadcast_to(weights, (3, *weights.shape))
            (h, _), sines = jax.lax.scan(layer, (batch["x"], jnp.zeros(())), layers)
            return jnp.mean(h) + jnp.sum(sines)

        return weights - 0.1 * jax.grad(loss_of)(weights)

    found = mixing(step, 4, *linear())
    assert found.operation in ("sin", "cos")
    assert found.reason == "needs a value that is reduced over all examples, in each iteration of a loop"


def in_half_precision(arguments):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), arguments)


def test_a_whole_gradient_that_a_branch_needs_is_no_matter_of_a_loop():
    def step(weights, batch):
        def loss_of(weights):
            h = batch["x"] @ weights
            h = jax.lax.cond(weights[0, 0] > 0, lambda h: h * jnp.exp(weights[0]), lambda h: h, h)
            return jnp.mean((h @ weights.T) ** 2)

        return weights - 0.1 * jax.grad(loss_of)(weights)

    found = mixing(step, 4, *in_half_precision(linear()))
    assert found.reason == "needs a value that is reduced over all examples, in a branch"


def test_a_whole_gradient_that_each_iteration_needs_is_found():
    """That of a large weight under `exp`, at all times: a stack of them would take more than what is read."""

    def step(weights, batch):
        def loss_of(weights):
            times = batch["x"][None, :, :1] * jnp.arange(6, dtype=jnp.bfloat16)[:, None, None]
            return jnp.mean(jax.lax.scan(lambda h, x: (jnp.tanh(h @ jnp.exp(weights) + x), None), batch["x"], times)[0])

        return weights - 0.1 * jax.grad(loss_of)(weights)

    found = mixing(step, 4, *in_half_precision(linear(width=60)))
    assert found.operation in ("mul", "dot_general")
    assert found.reason == "needs a value that is reduced over all examples, in each iteration of a loop"


@pytest.mark.parametrize("norm", [linen_norm, nnx_norm, equinox_norm])
def test_batch_normalisation_inside_a_library_is_called_by_its_name(norm):
    def step(weights, batch):
        gradient = jax.grad(lambda weights: jnp.mean((norm(batch["x"] @ weights) @ weights.T - batch["x"]) ** 2))(
            weights
        )
        return weights - 0.1 * gradient, 0.0

    found = mixing(step, 4, *linear())
    assert "(BatchNorm, whose statistics are of the whole batch" in found.reason


def test_a_step_that_mixes_examples_is_refused_with_the_line():
    step, state, batch = zoo.build_resnet_block()
    with pytest.raises(UnsupportedProgramError, match=r"cannot be cut into 2 microbatches: \w+ at .*zoo\.py"):
        cut_into_microbatches(traced_of(step, state, batch), 2)

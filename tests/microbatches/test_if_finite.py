"""Products in loops and branches take terms of a sum as if their other factor were finite, where nothing else cuts the step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.errors import UnsupportedProgramError
from autopar.microbatches import phases
from autopar.microbatches.phases import phases_of, plan_time
from autopar.microbatches.time_plan import TimePlan
from autopar.stages.split_scans import split_scans
from autopar.stages.time_loops import make_divided_loop
from tests.microbatches.gated_steps import (
    LOSSES,
    ONE_MESH,
    STAGES,
    arguments,
    behind_a_branch,
    descent,
    gated,
    layered,
    planned,
    rolled,
)
from tests.microbatches.small_steps import traced_of
from tests.oracles import assert_same_as_jit

# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [ONE_MESH, STAGES], ids=["microbatches", "stages"])
@pytest.mark.parametrize("name", LOSSES)
def test_results_are_those_of_jit(name, way):
    step = descent(LOSSES[name])
    parallel = autopar.parallelize(step, **way)
    assert_same_as_jit(step, parallel, *arguments(name), steps=2)
    assert parallel.last_plan().num_microbatches == 4
    assert parallel.last_plan().assumed_finite


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "way",
    [
        STAGES | {"schedule": "gpipe"},
        STAGES | {"schedule": "zb-h1"},
        STAGES | {"virtual_stages": 2, "schedule": "interleaved"},
        {"num_microbatches": 2, "mesh_shape": (2,)},
    ],
    ids=["gpipe", "zb-h1", "interleaved", "a mesh of two"],
)
@pytest.mark.parametrize("name", ["a rolled weight", "an ensemble"])
def test_results_are_those_of_jit_under_every_schedule(name, way):
    step = descent(LOSSES[name])
    parallel = autopar.parallelize(step, **way)
    assert_same_as_jit(step, parallel, *arguments(name), steps=2)
    assert parallel.last_plan().num_microbatches > 1
    assert parallel.last_plan().assumed_finite


def gated_sums(weights, batch):
    """Of each layer sums over examples, times an exponential; and a loop whose number of rounds depends on a weight."""

    def layer(x, w):
        total = jnp.sum(x, 0) * jnp.exp(w["g"])
        rounds = lax.while_loop(lambda c: c[0] < w["w"][0, 0], lambda c: (c[0] + 0.1, c[1] * w["w"][1]), (-1.0, total))
        return jnp.tanh(x @ w["w"]), (total, rounds[1])

    return jax.tree.map(lambda w: 0.9 * w, weights), lax.scan(layer, batch["x"], weights)[1]


@pytest.mark.parametrize("special", [200.0, np.inf, -np.inf, np.nan, 0.0])
def test_results_are_finite_where_those_of_jit_are(special):
    weights, batch = arguments()
    weights["g"] = weights["g"].at[1, 3].set(special).at[2, 5].set(special)
    expected = jax.jit(gated_sums)(weights, batch)
    parallel = autopar.parallelize(gated_sums, **ONE_MESH)
    actual = parallel.gather(parallel(jax.tree.map(jnp.copy, weights), batch))
    assert parallel.last_plan().assumed_finite
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(e))
        np.testing.assert_allclose(*(np.where(np.isfinite(e), x, 0) for x in (a, e)), rtol=1e-4, atol=1e-5)
    if special in (200.0, np.inf):
        assert np.isinf(expected[1][0][1, 3])
        assert np.isnan(actual[1][0][1, 3])  # terms of both signs


# --- what stays as it was ---------------------------------------------------------------------------------------------


def test_a_step_that_can_be_cut_otherwise_is_cut_as_before():
    traced = traced_of(descent(layered(gated)), *arguments())  # whose gates come after the scan
    plan = plan_time(traced, 4)
    strict = phases_of(traced, 4)
    assert not plan.is_of_finite
    assert plan.assumed_finite == ()
    assert plan.phases == strict.phases
    assert plan.assignment.strategies == strict.assignment.strategies


def gram(then, after):
    """Of each layer a function of a matrix product over examples."""

    def step(weights, batch):
        def layer(x, w):
            x = jnp.tanh(x @ w["w"])
            return x, after(then(x.T @ x, w))

        return jax.tree.map(lambda w: 0.9 * w, weights), lax.scan(layer, batch["x"], weights)[1]

    return step


IN_A_LOOP = "needs a value that is reduced over all examples, in each iteration of a loop"
REFUSED = {
    "a function of a sum": (gram(lambda s, w: s, jnp.tanh), "tanh"),
    "a gated sum, and a function of it": (gram(lambda s, w: s * jnp.exp(w["g"]), jnp.tanh), "mul"),
    "a sum times itself": (gram(lambda s, w: s, lambda s: s * s), "mul"),
    "a product of two sums": (gram(lambda s, w: s, lambda s: s @ s.T), "dot_general"),
    "a divisor": (gram(lambda s, w: jnp.exp(w["g"]) / s, lambda q: q), "div"),
    "a branch by a sum": (descent(layered(lambda x, w: lax.cond(jnp.sum(x) > 0, gated, rolled, x, w))), "gt"),
}


@pytest.mark.parametrize("way", [ONE_MESH, STAGES], ids=["microbatches", "stages"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_linear_in_no_sum_is_refused_for_the_reason_that_it_was(name, way):
    step, operation = REFUSED[name]
    strict = mixing_under_strict_rules(step)
    assert strict.operation == operation
    assert strict.reason == IN_A_LOOP
    with pytest.raises(UnsupportedProgramError) as caught:
        autopar.parallelize(step, **way).plan(*arguments())
    assert str(strict) in str(caught.value)


def mixing_under_strict_rules(step):
    traced = traced_of(step, *arguments())
    examples = phases._facts_of(traced).examples
    return phases.find_mixing(traced, phases_of(traced, 4), examples, allowed=0.01)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_refused(dtype):
    with pytest.raises(UnsupportedProgramError, match="in a branch"):
        autopar.parallelize(descent(behind_a_branch), **ONE_MESH).plan(*arguments(dtype=dtype))


@pytest.fixture
def attempts(monkeypatch):
    """Under which rules phases were sought: those of finite numbers or not."""
    asked, real = [], phases.phases_of

    def phases_of(*args, finite=False, **options):
        asked.append(finite)
        return real(*args, finite=finite, **options)

    monkeypatch.setattr(phases, "phases_of", phases_of)
    return asked


def normed(x, w):
    return jnp.tanh((x - x.mean(0)) / (1e-3 + x.std(0)) @ w["w"]) * jnp.exp(jnp.roll(w["g"], 1))


@pytest.mark.parametrize(
    ("step", "dtype", "expected"),
    [
        (descent(layered(gated)), jnp.float32, [False]),
        (descent(layered(rolled)), jnp.float32, [False, True]),
        (descent(layered(normed)), jnp.float32, [False]),
        (descent(behind_a_branch), jnp.bfloat16, [False]),
        (REFUSED["a function of a sum"][0], jnp.float32, [False]),
    ],
    ids=["needs none", "needs it", "batch normalisation", "half precision", "a function of a sum"],
)
def test_the_last_resort_is_sought_only_where_it_may_help(step, dtype, expected, attempts):
    plan_time(traced_of(step, *arguments(dtype=dtype)), 4)
    assert attempts == expected


def test_where_statistics_are_those_of_a_microbatch_nothing_is_taken_for_finite():
    """There the layers' gated sums are refused; the normalisation beside them is none of their business."""

    def step(weights, batch):
        def loss_of(w):
            x = batch["x"] @ w
            mean = x.mean(0)
            return jnp.mean(((x - mean) * lax.rsqrt(x.var(0) + 1e-3) - batch["y"]) ** 2), mean

        (_, mean), gradient = jax.value_and_grad(loss_of, has_aux=True)(weights["w"][0])
        new = {"w": weights["w"].at[0].add(-gradient), "g": weights["g"].at[0].add(mean)}
        return new, gated_sums(weights, batch)[1]

    options = ONE_MESH | {"batch_statistics": "microbatch"}
    with pytest.raises(UnsupportedProgramError, match=IN_A_LOOP):
        autopar.parallelize(step, **options).plan(*arguments())


# --- numbers of microbatches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late_sums", [False, True])
def test_another_number_is_sought_in_the_same_way(late_sums, attempts):
    traced = traced_of(descent(LOSSES["a rolled weight"]), *arguments())
    first = plan_time(traced, 4, late_sums=late_sums)
    attempts.clear()
    taken = plan_time(traced, 2, late_sums=late_sums, known=first.phases, like=first)
    assert attempts == []
    assert taken.is_of_finite
    assert taken.assumed_finite == first.assumed_finite
    other = plan_time(traced, 1, late_sums=late_sums, known=first.phases, like=first)
    assert attempts == [True]
    assert isinstance(other, TimePlan)
    assert plan_time(traced, 2, late_sums=late_sums, known=first.phases, finite=True).phases == first.phases


def test_a_step_of_split_scans_is_sought_in_the_way_of_the_whole(attempts):
    traced = traced_of(descent(LOSSES["a rolled weight"]), *arguments())
    loop = make_divided_loop(split_scans(traced, ((2,),)), 4)
    assert attempts == [False, True, True]
    assert loop.plan.assumed_finite


def test_as_many_microbatches_as_fit_the_memory_are_found():
    step, (weights, batch) = descent(LOSSES["a rolled weight"]), arguments()
    batch = {name: jnp.tile(x, (64, 1)) for name, x in batch.items()}
    free = autopar.parallelize(step, mesh_shape=(1,)).plan(weights, batch)
    assert (free.num_microbatches, free.assumed_finite) == (1, ())
    limited = autopar.parallelize(step, mesh_shape=(1,), memory_limit_bytes=6 * free.peak_bytes // 10)
    assert_same_as_jit(step, limited, weights, batch, steps=1)
    assert limited.last_plan().num_microbatches > 1
    assert limited.last_plan().assumed_finite


def test_numbers_of_microbatches_are_compared_in_stages():
    plan = planned("a rolled weight", num_stages=2, devices=4)
    assert {one.obstacle for one in plan.compared if one.num_microbatches > 1} == {""}


def test_few_products_take_terms_of_which_it_is_not_known_that_they_may():
    """The loss is divided by the number of examples that count after the loop, where it is finished."""

    def loss_of(weights, batch):
        counts = (batch["y"][:, 0] > 0).astype(jnp.float32)
        x = lax.scan(lambda x, w: (rolled(x, w), None), batch["x"], weights)[0]
        return jnp.sum(counts[:, None] * (x - batch["y"]) ** 2) / jnp.sum(counts)

    (product,) = plan_time(traced_of(descent(loss_of), *arguments()), 4).assumed_finite
    assert product.startswith("mul at ")
    assert "rolled" in product

"""Products in loops and branches take terms of a sum as if their other factor were finite, where nothing else cuts the step."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar import decide, explain
from autopar.errors import UnsupportedProgramError
from autopar.microbatches import phases
from autopar.microbatches.phases import phases_of, plan_time
from autopar.microbatches.time_plan import TimePlan
from tests.microbatches.small_steps import traced_of
from tests.oracles import assert_same_as_jit

LAYERS, ROWS, WIDTH = 4, 16, 8
ONE_MESH = {"num_microbatches": 4, "mesh_shape": (1,)}
STAGES = {"num_stages": 2, "num_microbatches": 4, "mesh_shape": (1,)}


def drawn(*shape, scale=0.3, dtype=jnp.float32):
    return jnp.asarray(scale * np.random.default_rng(sum(shape)).normal(size=shape), dtype)


def descent(loss_of):
    def step(weights, batch):
        loss, gradients = jax.value_and_grad(loss_of)(weights, batch)
        return jax.tree.map(lambda w, g: (w - 0.1 * g).astype(w.dtype), weights, gradients), loss

    return step


def layered(layer, wrap=lambda group: group, groups=LAYERS):
    """Layers in a scan; `groups` of them are wrapped together."""

    def loss_of(weights, batch):
        grouped = jax.tree.map(lambda w: w.reshape(groups, -1, *w.shape[1:]), weights)
        group = wrap(lambda x, ws: (lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0], None))
        return jnp.mean((lax.scan(group, batch["x"], grouped)[0] - batch["y"]) ** 2)

    return loss_of


def gated(x, w):
    return x + jnp.tanh(x @ w["w"]) * jnp.exp(w["g"])


def rolled(x, w):
    return x + jnp.tanh(x @ w["w"]) * jnp.exp(jnp.roll(w["g"], 2))


def over_a_norm(x, w):
    return x + jnp.tanh(x @ w["w"] / jnp.linalg.norm(w["w"])) * w["g"]


def looped(x, w):
    start = w["w"] / jnp.linalg.norm(w["w"])
    return x + jnp.tanh(x @ lax.fori_loop(0, 3, lambda i, m: 1.5 * m - 0.5 * m @ m.T @ m, start)) * w["g"]


def on_the_left(x, w):
    return x + jnp.tanh(jnp.exp(w["w"]) @ x.T).T * w["g"]


def convolved(x, w):
    kernel = jnp.exp(jnp.roll(w["w"][:3, :, None], 1, 1)) / 9
    numbers = ("NWC", "WIO", "NWC")
    return (
        x
        + jnp.tanh(lax.conv_general_dilated(x[..., None], kernel[:, :1], (1,), "SAME", dimension_numbers=numbers))[
            ..., 0
        ]
    )


def behind_a_branch(weights, batch):
    x = jnp.tanh(batch["x"] @ weights["w"][0])
    x = lax.cond(weights["g"][0, 0] > -9, lambda x: x * jnp.exp(weights["g"][0]), lambda x: x, x)
    return jnp.mean((x @ weights["w"][1] - batch["y"]) ** 2)


def ensemble(weights, batch):
    def one(weights):
        return lax.scan(lambda x, w: (gated(x, w), None), batch["x"], weights)[0]

    return jnp.mean((jax.vmap(one)(weights) - batch["y"]) ** 2)


LOSSES = {
    "a branch": behind_a_branch,
    "a rolled weight": layered(rolled),
    "a weight made by a loop": layered(looped),
    "checkpointed groups": layered(over_a_norm, jax.checkpoint, groups=2),
    "an ensemble": ensemble,
    "weights on the left": layered(on_the_left),
    "a kernel": layered(convolved),
}


def arguments(name="", dtype=jnp.float32):
    models = (3,) if name == "an ensemble" else ()
    weights = {"w": drawn(*models, LAYERS, WIDTH, WIDTH, dtype=dtype), "g": drawn(*models, LAYERS, WIDTH, dtype=dtype)}
    return weights, {"x": drawn(ROWS, WIDTH, dtype=dtype), "y": drawn(ROWS, WIDTH, scale=1.0, dtype=dtype)}


def planned(name, **options):
    return autopar.parallelize(descent(LOSSES[name]), **options).plan(*arguments(name))


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


def test_statistics_of_a_microbatch_are_no_factors_of_sums():
    def step(weights, batch):
        def layer(x, w):
            return x + jnp.tanh(autopar_norm(x @ w["w"])) * jnp.exp(jnp.roll(w["g"], 1))

        return descent(layered(layer))(weights, batch)

    def autopar_norm(x):
        return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3)

    options = ONE_MESH | {"batch_statistics": "microbatch"}
    with pytest.raises(UnsupportedProgramError):
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
    """The one outside of the branch comes after the loop."""

    def loss_of(weights, batch):
        return behind_a_branch(weights | {"w": jnp.exp(jnp.exp(weights["w"]) - 1)}, batch)

    plan = plan_time(traced_of(descent(loss_of), *arguments()), 4)
    assert len(plan.assumed_finite) == 1
    assert "behind_a_branch" in plan.assumed_finite[0]


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [ONE_MESH, STAGES], ids=["microbatches", "stages"])
def test_the_report_names_the_products_and_says_what_may_happen(way):
    plan = planned("a rolled weight", **way)
    (product,) = plan.assumed_finite
    assert product.startswith("mul at ")
    assert "test_if_finite.py" in product
    said = " ".join(explain.explain(plan).split())
    assert product in said
    assert "NaN in place of an infinity" in said
    strict = autopar.parallelize(descent(layered(gated)), **way).plan(*arguments())
    assert "NaN in place of an infinity" not in explain.explain(strict)


@pytest.mark.parametrize("way", [ONE_MESH, STAGES], ids=["microbatches", "stages"])
def test_a_plan_that_is_read_back_runs_in_the_same_way(way):
    plan = planned("a branch", **way)
    read = autopar.plan_from_json(plan.to_json())
    assert read == plan
    step = descent(behind_a_branch)
    parallel = autopar.parallelize(step, plan=read)
    assert_same_as_jit(step, parallel, *arguments(), steps=2)
    assert parallel.last_plan().assumed_finite == plan.assumed_finite != ()


@pytest.mark.parametrize("way", [ONE_MESH, STAGES], ids=["microbatches", "stages"])
def test_a_plan_that_was_written_before_is_read(way):
    fields = json.loads(planned("a branch", **way).to_json())
    assert fields.pop("assumed_finite")
    assert autopar.plan_from_json(json.dumps(fields)).assumed_finite == ()


@pytest.mark.parametrize("way", [ONE_MESH, STAGES], ids=["microbatches", "stages"])
def test_a_plan_of_the_cache_runs_in_the_same_way(way, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    plan = planned("a rolled weight", **way)
    monkeypatch.setattr(decide, "_search", None)
    step = descent(LOSSES["a rolled weight"])
    again = autopar.parallelize(step, **way)
    assert again.plan(*arguments()).assumed_finite == plan.assumed_finite != ()
    assert_same_as_jit(step, again, *arguments(), steps=2)

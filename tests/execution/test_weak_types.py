"""What began as a Python number gives way to other types, after any number of steps, as under `jax.jit`."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.execution.weak_types import keep_weak_types

WIDTH = 8


def loss_of(params, x):
    """A scan over layers, so that stages hold the weights in pieces."""

    def layer(x, p):
        return jnp.tanh(x @ p["w"]) * p["gain"].astype(x.dtype), None

    return jnp.mean((jax.lax.scan(layer, x, params)[0] - 1) ** 2)


def step(state, x):
    """Gradient descent; one leaf is returned as it is."""
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], x)
    params = jax.tree.map(lambda p, g: p - state["rate"] * g, state["params"], gradients)
    return {"params": params, "rate": state["rate"] * 0.5, "steps": state["steps"] + 1, "fixed": state["fixed"]}, loss


def first_state():
    """Weights in bfloat16, a stack of weakly typed gains, and Python numbers."""
    gain = jnp.broadcast_to(jnp.asarray(1.0), (4, WIDTH))
    assert gain.weak_type
    weights = jnp.stack([jnp.eye(WIDTH, dtype=jnp.bfloat16)] * 4)
    return {"params": {"w": weights, "gain": gain}, "rate": 0.5, "steps": 0, "fixed": 3.0}


X = np.ones((8, WIDTH), jnp.bfloat16)
WAYS = {"one mesh": {"mesh_shape": (4,)}, "loop": {"mesh_shape": (2,), "num_microbatches": 2}}
STAGES = {"mesh_shape": (2,), "num_stages": 2, "num_microbatches": 2}


def types(tree):
    return jax.tree.map(lambda x: (str(x.dtype), x.weak_type), tree)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", [*WAYS.values(), STAGES], ids=[*WAYS, "stages"])
def test_types_stay_as_weak_as_with_jit_and_nothing_is_planned_twice(way):
    parallel, run = autopar.parallelize(step, **way), jax.jit(step)
    state = reference = first_state()
    for _ in range(3):
        before = state
        state, loss = parallel(state, X)
        reference, expected = run(reference, X)
        assert types((state, loss)) == types((reference, expected))
        np.testing.assert_allclose(float(loss), float(expected), rtol=0.02)
    assert types(state)["params"] == {"w": ("bfloat16", False), "gain": ("float32", True)}
    assert types(state)["rate"] == ("float32", True)
    assert before["rate"].is_deleted(), "the memory of a weakly typed leaf is not used again"
    assert len(parallel._memory.programs) == 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", [WAYS["one mesh"], STAGES], ids=["one mesh", "stages"])
def test_a_plan_from_shapes_that_say_so_is_that_of_the_numbers_and_is_accepted_when_saved(way):
    weak = {
        "rate": jax.ShapeDtypeStruct((), jnp.float32, weak_type=True),
        "steps": jax.ShapeDtypeStruct((), jnp.int32, weak_type=True),
        "fixed": jax.ShapeDtypeStruct((), jnp.float32, weak_type=True),
    }
    parallel = autopar.parallelize(step, **way)
    plan = parallel.plan(first_state() | weak, X)
    assert plan is parallel.plan(first_state(), X)
    saved = autopar.plan_from_json(plan.to_json())
    state, _ = autopar.parallelize(step, plan=saved)(first_state(), X)
    assert types(state)["rate"] == ("float32", True)


def test_only_the_results_that_are_named_become_weak_and_the_program_stays_the_same():
    def double(x, y):
        return x * 2, (y + y, x)

    x, y = jnp.float32(3), jnp.ones(2, jnp.bfloat16)
    found = jax.jit(keep_weak_types(double, [False, True]))(x, y)
    assert types(found) == (("float32", False), (("bfloat16", True), ("float32", False)))
    np.testing.assert_array_equal(np.asarray(found[1][0], np.float32), [2, 2])
    texts = [jax.jit(f).lower(x, y).compile().as_text() for f in (double, keep_weak_types(double, [True, True, False]))]
    assert texts[0].split("ENTRY")[1].count(" = ") == texts[1].split("ENTRY")[1].count(" = ")
    assert keep_weak_types(double, [False, False, False]) is double


@pytest.mark.parametrize(
    ("given", "returned", "is_said"),
    [
        (0.5, lambda lr: lr * jnp.float32(0.9), True),
        (0.5, lambda lr: lr * 0.9, False),
        (jnp.float32(0.5), lambda lr: lr * 0.9, False),
        (jnp.float32(0.5), lambda lr: jnp.where(lr > 0, 0.1, 0.2), True),
    ],
)
def test_state_that_the_second_call_has_in_another_type_is_named(given, returned, is_said):
    step = autopar.parallelize(
        lambda state, x: ({"w": state["w"] * x.mean(), "lr": returned(state["lr"])}, x.sum()), devices=2, cluster="cpu"
    )
    state, batch = {"w": jnp.ones(8), "lr": given}, jnp.ones((4, 8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.plan(state, batch)
    said = [str(one.message) for one in caught if "planned and compiled again" in str(one.message)]
    assert len(said) == is_said
    assert all(one.startswith("state/lr is ") for one in said)

"""Modules have one name in a report: without the model's own, also of a stage that has one module, and once each."""

import re

import jax
import jax.numpy as jnp

import autopar
from autopar.compat import module_path
from autopar.explain import explain

WEIGHTS = {name: jax.ShapeDtypeStruct((64, 64), jnp.float32) for name in ("first_0", "second_1")}


def loss_of(weights, x):
    for name, weight in weights.items():
        with jax.named_scope(f"Model/{name}"), jax.named_scope(f"{name}._project/inner"):
            x = jnp.tanh(x @ weight)
    with jax.named_scope("Model"):
        return jnp.mean(x**2)


def train_step(weights, x):
    loss, gradients = jax.value_and_grad(loss_of)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def test_a_method_that_a_module_calls_is_no_module_in_it():
    made = jax.make_jaxpr(loss_of)(WEIGHTS, jax.ShapeDtypeStruct((16, 64), jnp.float32))
    paths = {module_path(eqn) for eqn in made.eqns}
    assert paths == {"Model/first_0/inner", "Model/second_1/inner", "Model"}


def test_a_module_in_a_module_of_its_name_stays():
    def nested(x):
        with jax.named_scope("block/block"):
            return jnp.tanh(x)

    assert module_path(jax.make_jaxpr(nested)(1.0).eqns[0]) == "block/block"


def test_a_stage_with_one_module_names_it_below_the_model_and_by_its_number():
    options = {"devices": 2, "cluster": "cpu", "num_stages": 2, "num_microbatches": 2, "schedule": "1f1b"}
    plan = autopar.parallelize(train_step, **options).plan(WEIGHTS, jax.ShapeDtypeStruct((256, 64), jnp.float32))
    scopes = [{tensor.scope for tensor in stage.plan.peak_tensors} for stage in plan.stages]
    assert "first_0/inner" in scopes[0]
    assert "second_1/inner" in scopes[1]
    assert not any("Model" in scope for stage in scopes for scope in stage)
    text = explain(plan)
    largest = text[text.index("The largest tensors at the peak") :]
    assert re.search(r"^0 .* first_0/inner$", largest, re.MULTILINE)
    assert "*/inner" not in largest
    assert "of backward" not in text, "a value that a stage is sent has no name of its own"


def test_weights_that_are_cast_and_gathered_before_the_loop_over_microbatches_name_their_modules():
    def in_half(weights, x):
        halves = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
        loss, gradients = jax.value_and_grad(loss_of)(halves, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss

    options = {"devices": 4, "cluster": "dgx-h100", "mesh_shape": (4,), "num_microbatches": 4}
    step = autopar.parallelize(in_half, constraints=autopar.zero3(params="weights/*"), **options)
    plan = step.plan(WEIGHTS, jax.ShapeDtypeStruct((256, 64), jnp.bfloat16))
    scopes = {item.scope for item in plan.collectives if item.kind == "all-gather"}
    assert scopes == {"first_0/inner", "second_1/inner"}

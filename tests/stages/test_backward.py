"""What is backward follows from data flow: JAX's names are the oracle where JAX made the derivative, and not needed otherwise."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.compat import name_stack, unknown_source
from autopar.errors import ArgumentError
from autopar.models.registry import build
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.program import operands_of
from autopar.program.trace import trace
from autopar.rules.table import entry_for
from autopar.stages.backward import find_backward
from autopar.stages.dependence import Dependence, kept_for_backward, takes_gradients
from tests import pipeline_steps, zoo
from tests.fast_part import on_the_diagonal
from tests.inter_op.test_search import arguments, traced_step
from tests.models.conftest import SIZES
from tests.oracles import assert_same_as_jit
from tests.stages import handmade_steps, scanned_steps

TRAINED = ("bert", "densenet", "gpt", "gpt_scan", "llama", "mlp", "moe", "t5", "unet", "wide_resnet")
RECOMPUTING = ("bert", "gpt", "gpt_scan", "llama", "moe", "t5")


def traced(example):
    """The traced step of (step, state, batch)."""
    step, state, batch = example
    signature = CallSignature(step, (1,), (), "auto")
    return trace(signature, bind_arguments(signature, (state, batch), {}))


def examples_of(module):
    """The names of the functions of a module that make a step."""
    return [
        name
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if inspect.getmodule(function) is module
        and all(p.default is not p.empty for p in inspect.signature(function).parameters.values())
        and isinstance(function(), tuple)
    ]


@functools.cache
def model_step(name, **sizes):
    """The train step of a model on shapes."""
    model = build(name, **SIZES[name] | sizes)
    return traced((model.train_step, jax.eval_shape(model.create_state, jax.random.key(0)), model.batch_shape()))


def named_backward(step):
    """The oracle: what JAX names transposed or recomputed, and what is computed from that."""
    found, behind = set(), set()
    for eqn in step.program.equations:
        stack = name_stack(eqn)
        if "transpose(" in stack or "rematted_computation" in stack or not behind.isdisjoint(operands_of(eqn)):
            found.add(eqn)
            behind.update(eqn.outvars)
    return found


def places(step, equations):
    """Which equations of a step these are, by number."""
    return {number for number, eqn in enumerate(step.program.equations) if eqn in equations}


def unnamed(step):
    """The step without names of JAX's."""
    equations = tuple(dataclasses.replace(eqn, source_info=unknown_source()) for eqn in step.program.equations)
    return dataclasses.replace(step, program=dataclasses.replace(step.program, equations=equations))


# --- as JAX names it --------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted(zoo.ZOO))
def test_in_the_zoo_backward_is_what_jax_transposed(name):
    step = traced(zoo.ZOO[name]())
    assert find_backward(step).equations == named_backward(step)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("module", [pipeline_steps, scanned_steps])
def test_in_steps_that_are_hard_to_cut_backward_is_what_jax_transposed(module):
    for name in examples_of(module):
        step = traced(getattr(module, name)())
        assert find_backward(step).equations == named_backward(step), name


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "sizes"),
    [(name, {}) for name in TRAINED] + [(name, {"remat": True}) for name in RECOMPUTING],
)
def test_in_the_models_backward_is_what_jax_transposed(name, sizes):
    step = model_step(name, **sizes)
    assert find_backward(step).equations == named_backward(step)


@pytest.mark.parametrize(
    "name",
    [
        "linearized",
        "own_derivatives",
        "balanced_experts",
        "only_sensitivities",
        "predictions",
        "pulled_back",
        "sensitivities",
        "several_losses",
        "two_backward_passes",
    ],
)
def test_where_jax_made_the_derivative_backward_is_what_it_transposed(name):
    step = traced(getattr(handmade_steps, name)())
    assert find_backward(step).equations == named_backward(step)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*sorted(zoo.ZOO), *(f"model {name}" for name in TRAINED)])
def test_without_names_only_the_first_derivatives_of_the_way_back_count_as_forward(name):
    step = model_step(name.removeprefix("model ")) if name.startswith("model ") else traced(zoo.ZOO[name]())
    blind = unnamed(step)
    named, found = places(step, named_backward(step)), places(blind, find_backward(blind).equations)
    heavy = places(step, {eqn for eqn in step.program.equations if eqn.regions or entry_for(eqn).heavy})
    assert len((named - found) & heavy) <= 1, "more than the first product of the way back counts as forward"
    assert not (found - named) & heavy, "forward work counts as backward"
    assert len(named - found) < 0.2 * len(named)
    assert len(blind.program.equations) == len(step.program.equations)


def test_the_users_scopes_do_not_matter_whatever_their_names():
    plain, confusing = (traced(getattr(handmade_steps, name)()) for name in ("by_hand", "confusing_scopes"))
    assert places(plain, find_backward(plain).equations) == places(confusing, find_backward(confusing).equations)
    assert not takes_gradients(traced(handmade_steps.evaluation_in_a_confusing_scope()))


# --- as data flow has it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "by_hand",
        "by_hand_scanned",
        "by_hand_with_norms",
        "by_hand_without_a_loss",
        "confusing_scopes",
        "only_sensitivities",
        "own_derivative_of_the_loss",
        "regression_by_hand",
        "returned_by_hand",
        "steps_within_the_loss",
        "summed_by_hand",
    ],
)
def test_a_step_with_a_backward_pass_takes_gradients(name):
    assert takes_gradients(traced(getattr(handmade_steps, name)()))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["gpt", "moe", "wide_resnet"])
def test_an_evaluation_takes_none(name):
    model = build(name)
    state = jax.eval_shape(model.create_state, jax.random.key(0))
    assert not takes_gradients(traced((model.eval_step, state, model.batch_shape())))


@pytest.mark.parametrize(
    "name", ["by_hand", "by_hand_with_norms", "by_hand_without_a_loss", "returned_by_hand", "summed_by_hand"]
)
def test_by_hand_forward_is_what_the_loss_needs_and_the_derivative_of_the_last_layer(name):
    """Per layer a product, a bias and tanh; one product and one sum make each gradient, and one more product its cotangent."""
    step = traced(getattr(handmade_steps, name)())
    kinds = Dependence.of_whole(step)
    heavy = [eqn for eqn in kinds.forward() if entry_for(eqn).heavy]
    assert len(heavy) == 4, "a product of each layer"
    products = [eqn for eqn in step.program.equations if eqn in kinds.backward and entry_for(eqn).heavy]
    assert len(products) == 4 + 3, (
        "a product for the gradient of each layer, and for the cotangent of each but the first"
    )


def test_gradients_are_known_with_their_weights():
    step = traced(pipeline_steps.clipped_adamw())
    paths = {v: leaf.path for v, leaf in zip(step.program.invars, step.inputs, strict=True)}
    sizes = dict(zip(step.program.invars, (leaf.shape for leaf in step.inputs), strict=True))
    found = find_backward(step).gradients
    assert {paths[w] for w in found.values()} == {f"state/0/{k}/{name}" for k in range(4) for name in "wb"}
    assert all(v.aval.size == sizes[w][0] * (sizes[w] + (1,))[1] for v, w in found.items())


def test_the_backward_of_one_loss_is_not_what_another_loss_needs():
    """Both passes through the discriminator are forward, although one of them is for the generator alone."""
    step = traced(handmade_steps.two_backward_passes())
    heavy = [eqn for eqn in Dependence.of_whole(step).forward() if entry_for(eqn).heavy]
    assert len(heavy) == (2 + 2) + 2 + (2 + 2), "the discriminator sees what is made twice and what is real once"


def test_derivatives_within_the_loss_are_forward():
    step = traced(handmade_steps.steps_within_the_loss())
    backward = find_backward(step).equations
    loss = step.program.outvars[-1]
    assert not any(loss in eqn.outvars for eqn in backward)
    assert any("transpose(" in name_stack(eqn) for eqn in step.program.equations if eqn not in backward)


# --- in stages --------------------------------------------------------------------------------------------------------


def in_stages(step, num_stages, **options):
    """The step as a pipeline of one device per stage."""
    return autopar.parallelize(step, num_stages=num_stages, mesh_shape=(1,), num_microbatches=4, **options)


WAYS_BACK = [
    "by_hand",
    "by_hand_scanned",
    "by_hand_with_norms",
    "by_hand_without_a_loss",
    "confusing_scopes",
    "linearized",
    "own_derivative_of_the_loss",
    "own_derivatives",
    "pulled_back",
    "summed_by_hand",
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "num_stages"), on_the_diagonal(WAYS_BACK, [2, 3]))
def test_whoever_wrote_the_backward_pass_it_runs_in_stages_of_1f1b(name, num_stages):
    step, state, batch = getattr(handmade_steps, name)()
    parallel = in_stages(step, num_stages, schedule="1f1b")
    assert_same_as_jit(step, parallel, state, batch)
    plan = parallel.last_plan()
    assert plan.schedule == "1f1b"
    assert all(any("w" in path.split("/")[-1] for path in stage.leaves) for stage in plan.stages), (
        "weights on every stage"
    )
    assert {transfer.what for transfer in plan.transfers} >= {"forward", "backward"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["by_hand", "own_derivatives"])
def test_a_backward_pass_by_hand_is_never_scheduled_as_inference(name):
    step, state, batch = getattr(handmade_steps, name)()
    assert in_stages(step, 2).plan(state, batch).schedule != "inference"
    with pytest.raises(ArgumentError, match="'inference' runs forward only, and this step computes gradients"):
        in_stages(step, 2, schedule="inference").plan(state, batch)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["balanced_experts", "sensitivities", "several_losses", "two_backward_passes"])
def test_backward_passes_of_other_kinds_run_in_stages(name):
    step, state, batch = getattr(handmade_steps, name)()
    parallel = in_stages(step, 2, schedule="1f1b")
    assert_same_as_jit(step, parallel, state, batch)


def test_what_is_kept_for_backward_grows_with_the_batch_and_is_less_where_forward_is_done_again():
    def step(block):
        def run(weights, x):
            def loss(weights):
                h = x
                for w in weights:
                    h = block(h, w)
                return jnp.mean(h**2)

            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

        return run

    def block(h, w):
        return jnp.tanh(jnp.sin(h @ w))

    def kept(block, batch):
        return kept_for_backward(traced_step(*arguments(32, layers=6, batch=batch), fun=step(block)))

    one_value = 8 * 32 * 4
    assert kept(block, 16) == 2 * kept(block, 8)
    assert (
        6 * one_value <= kept(jax.checkpoint(block), 8) <= 8 * one_value
    )  # what each block is given, and the loss's own
    assert kept(block, 8) >= 2 * kept(jax.checkpoint(block), 8)

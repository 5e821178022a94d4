"""A step that follows a pipelined one takes its state as it is: same stages, same layouts, nothing moved between meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import ArgumentError
from autopar.pipeline_plan import PipelinePlan
from tests import pipeline_steps
from tests.oracles import assert_trees_close
from tests.pipeline_steps import errors, forward, mean_error

MIXED = [(1,), (2,), (1,)]


def evaluate(state, batch):
    """The loss of the mean, the errors of the examples; takes the whole state and leaves the moments alone."""
    params, _ = state
    return {"loss": mean_error(params, batch), "errors": errors(params, batch)}


def host(tree):
    return jax.tree.map(np.asarray, tree)


def assert_takes_the_state_as_it_is(follower, undecorated, state, batch):
    """Right, on the host's batch, without moving an array between devices before the meshes start."""
    expected = jax.jit(undecorated)(host(state), batch)
    follower.compile(state, host(batch))
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        found = follower(state, host(batch))
    assert_trees_close(found, expected)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.fixture(scope="module")
def leader():
    """A train step with clipping and AdamW in three stages on meshes of one, two and one device, and a state of its own."""
    step, state, batch = pipeline_steps.clipped_adamw()
    parallel = autopar.parallelize(step, num_stages=3, mesh_shape=MIXED, num_microbatches=4)
    return parallel, parallel(state, batch)[0], batch


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("schedule", "num_microbatches"), [("auto", 2), ("inference", 8), ("gpipe", "auto")])
def test_an_evaluation_follows_with_a_schedule_and_microbatches_of_its_own(leader, schedule, num_microbatches):
    parallel, state, batch = leader
    follower = autopar.parallelize(evaluate, follow=parallel, schedule=schedule, num_microbatches=num_microbatches)
    assert_takes_the_state_as_it_is(follower, evaluate, state, batch)
    plan, leading = follower.last_plan(), parallel.last_plan()
    assert plan.schedule == ("inference" if schedule == "auto" else schedule)
    if num_microbatches == "auto":
        assert [one.num_microbatches for one in plan.compared] == [1, 2, 4, 8]
    else:
        assert plan.num_microbatches == num_microbatches
    assert [stage.plan.mesh_shape for stage in plan.stages] == MIXED
    assert [set(stage.leaves) for stage in plan.stages] == [set(stage.leaves) for stage in leading.stages]
    for stage, led in zip(plan.stages, leading.stages, strict=True):
        for path in stage.leaves:
            assert stage.plan.input(path).spec == led.plan.input(path).spec, path
    assert not any(transfer.what == "weights" for transfer in plan.transfers)


def test_a_step_that_uses_a_part_of_the_layers_leaves_the_others_where_they_are(leader):
    parallel, state, batch = leader

    for layers in (slice(2, 4), slice(0, 2)):

        def activations(state, batch, layers=layers):
            return forward(state[0][layers], batch["x"])

        follower = autopar.parallelize(activations, follow=parallel, num_microbatches=2)
        assert_takes_the_state_as_it_is(follower, activations, state, batch)


def test_another_train_step_follows_and_both_take_turns(leader):
    parallel, _, batch = leader

    def other(state, batch):
        params, moments = state
        loss, gradients = jax.value_and_grad(lambda p: jnp.sum(errors(p, batch) * batch["mask"]))(params)
        return (pipeline_steps.descended(params, gradients), moments), loss

    original = pipeline_steps.clipped_adamw()
    follower = autopar.parallelize(other, follow=parallel, num_microbatches=2, schedule="zb-h1")
    state, expected = original[1], original[1]
    for _ in range(2):
        for mine, undecorated in ((parallel, original[0]), (follower, other)):
            places = [leaf.sharding for leaf in jax.tree.leaves(state)]
            state = mine(state, batch)[0]
            expected = jax.jit(undecorated)(expected, batch)[0]
            assert_trees_close(state[0], expected[0])
    assert [leaf.sharding for leaf in jax.tree.leaves(state)] == places


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", [{"schedule": "1f1b"}, {"schedule": "interleaved", "virtual_stages": 2}])
def test_a_table_that_the_leader_lends_is_lent_again_and_virtual_stages_are_followed(options):
    step, state, batch = pipeline_steps.tied_weights()
    parallel = autopar.parallelize(step, num_stages=2, mesh_shape=(2,), num_microbatches=4, **options)
    state = parallel(state, batch)[0]

    def logits(state, batch):
        return forward(state["layers"], state["embed"][batch["tokens"]]) @ state["embed"].T

    follower = autopar.parallelize(logits, follow=parallel)
    assert_takes_the_state_as_it_is(follower, logits, state, batch)
    if options["schedule"] == "1f1b":
        lent = [(t.source, t.target) for t in follower.last_plan().transfers if t.what == "weights"]
        assert lent == [(0, 1)]


def test_layers_that_the_leader_scans_over_in_pieces_stay_in_pieces():
    def stacked():
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *pipeline_steps.layers())

    def through(params, x):
        return jax.lax.scan(lambda h, p: (jnp.tanh(h @ p["w"] + p["b"]), None), x, params)[0]

    def loss_of(params, batch):
        return jnp.mean((through(params, batch["x"]) - batch["y"]) ** 2)

    def predict(state, batch):
        return through(state, batch["x"])

    step, _, batch = pipeline_steps.trained_on(loss_of, stacked(), pipeline_steps.rows())
    parallel = autopar.parallelize(step, num_stages=2, mesh_shape=(1,), num_microbatches=4)
    state = parallel(stacked(), batch)[0]
    follower = autopar.parallelize(predict, follow=parallel, num_microbatches=2)
    assert_takes_the_state_as_it_is(follower, predict, state, batch)
    assert follower.last_plan().scan_cuts == parallel.last_plan().scan_cuts == ((2,),)


def test_the_plan_of_a_follower_can_be_used_again(leader):
    parallel, state, batch = leader
    plan = autopar.parallelize(evaluate, follow=parallel, num_microbatches=2).plan(state, batch)
    restored = autopar.parallelize(evaluate, plan=PipelinePlan.from_json(plan.to_json()))
    assert_takes_the_state_as_it_is(restored, evaluate, state, batch)


@pytest.mark.parametrize("options", [{"num_stages": 2}, {"mesh_shape": (2,)}, {"virtual_stages": 2}])
def test_stages_of_ones_own_are_refused_beside_those_that_are_followed(leader, options):
    parallel, state, batch = leader
    with pytest.raises(ArgumentError, match="takes over the stages of the step that it follows, 3 of them: leave out"):
        autopar.parallelize(evaluate, follow=parallel, **options).plan(state, batch)


def test_a_step_whose_arguments_have_other_names_is_refused_with_both(leader):
    parallel, state, batch = leader
    with pytest.raises(
        ArgumentError, match=r"keeps state/0/0/b, .*, \.\.\.; this one takes weights/0/0/b, .* name the"
    ):
        autopar.parallelize(lambda weights, batch: evaluate(weights, batch), follow=parallel).plan(state, batch)

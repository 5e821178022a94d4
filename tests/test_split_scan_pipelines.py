"""Scans over layers divided between stages, run: pipelines cut between layers, and one leaf to the user."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import autopar
from autopar.compat import name_stack
from autopar.errors import ArgumentError
from autopar.pipeline_plan import PipelinePlan
from autopar.program.loops import LoopEquation
from autopar.split_array import SplitArray
from autopar.stages.time_loops import make_divided_loop, make_time_loop
from tests.inter_op.test_search import two_nodes
from tests.oracles import assert_same_as_jit, assert_trees_close
from tests.pipeline_steps import WIDTH, rows, trained_on
from tests.stages import scanned_steps
from tests.stages.test_split_scans import cut_at, operations


def in_stages(step, num_stages=2, **options):
    """The step as a pipeline, the second stage on two devices if nothing else is said."""
    options.setdefault("mesh_shape", [(1,), (2,)] if num_stages == 2 else (1,))
    options.setdefault("num_microbatches", 4)
    return autopar.parallelize(step, num_stages=num_stages, **options)


# --- in pipelines -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "interleaved"])
@pytest.mark.parametrize("is_alone", [False, True])
def test_a_carry_that_adds_up_a_loss_goes_back_from_stage_to_stage(schedule, is_alone):
    """Its cotangent is a literal, which no operation makes."""

    def step(weights, x):
        def loss_of(weights):
            def layer(carry, w):
                h, penalty = carry
                h = jnp.tanh(h @ w)
                return (h, penalty + 0.01 * jnp.mean(h**2)), None

            (h, penalty), _ = lax.scan(layer, (x, 0.0), weights)
            return penalty if is_alone else jnp.mean(h**2) + penalty

        loss, gradient = jax.value_and_grad(loss_of)(weights)
        return weights - 0.1 * gradient, loss

    draw = np.random.default_rng(0)
    weights = jnp.asarray(draw.normal(size=(4, WIDTH, WIDTH)) / 3, jnp.float32)
    x = jnp.asarray(draw.normal(size=(16, WIDTH)), jnp.float32)
    virtual = 2 if schedule == "interleaved" else 1
    parallel = in_stages(step, mesh_shape=(1,), schedule=schedule, virtual_stages=virtual)
    assert_trees_close(parallel.gather(parallel(weights, x)), jax.jit(step)(weights, x))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "num_stages", "num_microbatches", "schedule", "virtual_stages"),
    [
        ("plain", 2, 4, "zb-h1", 1),
        ("plain", 4, 1, "gpipe", 1),
        ("clipped_adamw", 2, 4, "interleaved", 2),
        ("dropout", 2, 4, "1f1b", 1),
        ("carried_key", 2, 4, "gpipe", 1),
        ("recomputed", 2, 4, "1f1b", 1),
        ("shared_weights", 4, 4, "1f1b", 1),
        ("values_per_layer", 2, 4, "zb-h1", 1),
        ("encoder_and_decoder", 4, 4, "1f1b", 1),
        ("along_the_layers", 2, 4, "gpipe", 1),
        ("over_time", 2, 4, "1f1b", 1),
    ],
)
@pytest.mark.filterwarnings("ignore:.*of the forward work is one operation")
def test_a_pipeline_cut_between_scanned_layers_computes_what_jit_computes(
    name, num_stages, num_microbatches, schedule, virtual_stages
):
    step, state, batch = getattr(scanned_steps, name)()
    parallel = in_stages(
        step, num_stages, num_microbatches=num_microbatches, schedule=schedule, virtual_stages=virtual_stages
    )
    assert_same_as_jit(step, parallel, state, batch)
    assert any(parallel.last_plan().scan_cuts) == (name != "over_time")


def test_forward_and_backward_send_one_activation_between_stages_and_each_layer_lives_on_its_own():
    step, state, batch = scanned_steps.plain()
    plan = in_stages(step, mesh_shape=(1,)).plan(state, batch)
    sent = WIDTH * 4 * 8 // 4
    assert [(t.source, t.target, t.what, t.bytes) for t in plan.transfers] == [
        (0, 1, "forward", sent),
        (1, 0, "backward", sent),
    ]
    assert [stage.leaves for stage in plan.stages] == [
        ("state/b[0:3]", "state/w[0:3]"),
        ("state/b[3:5]", "state/w[3:5]"),
    ]


def test_recomputation_of_stages_goes_with_divided_scans():
    step, state, batch = scanned_steps.dropout()
    assert_same_as_jit(step, in_stages(step, recompute="layer"), state, batch)


def test_constraints_name_the_whole_leaf():
    step, state, batch = scanned_steps.plain()
    constraints = {"state/w": PartitionSpec(None, None, "x"), "state/b": autopar.Replicated()}
    plan = in_stages(step, mesh_shape=(2,), constraints=constraints).plan(state, batch)
    assert [plan.input(path).partition_spec for path in ("state/w[0:3]", "state/w[3:5]")] == [
        PartitionSpec(None, None, "x")
    ] * 2
    assert plan.input("state/w").path == "state/w[0:3]"
    assert [plan.stage_of(path) for path in ("state/w", "state/w[0:3]", "state/w[3:5]")] == [0, 0, 1]


# --- one leaf to the user ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    """A step in two stages, its first state, the batch, what one and two steps of jit give, and a fresh result of one step."""
    step, state, batch = scanned_steps.clipped_adamw()
    parallel = in_stages(step)
    once = jax.jit(step)(state, batch)
    twice = jax.jit(step)(once[0], batch)
    return parallel, state, batch, once, twice


def test_state_comes_back_in_pieces_that_read_as_one_array(trained):
    parallel, state, batch, once, _ = trained
    (params, _), _ = parallel(state, batch)
    w, expected = params["w"], np.asarray(once[0][0]["w"])
    assert isinstance(w, SplitArray)
    assert (w.shape, w.dtype, w.ndim, w.size, w.nbytes, len(w)) == ((5, 8, 8), np.float32, 3, 320, 1280, 5)
    assert repr(w) == "SplitArray(float32[5, 8, 8], dimension 0: 0:3 on device 0, 3:5 on devices 1, 2)"
    np.testing.assert_allclose(w, expected, atol=1e-5)
    np.testing.assert_allclose(w[4, :, 0], expected[4, :, 0], atol=1e-5)
    np.testing.assert_allclose(w * 2 - np.ones(8), expected * 2 - 1, atol=1e-5)
    np.testing.assert_allclose(jnp.ones(8) + w, expected + 1, atol=1e-5)
    np.testing.assert_allclose(jnp.asarray(w).sum(), expected.sum(), atol=1e-4)
    assert (w == np.asarray(w)).all()
    assert len(list(w)) == 5
    assert {device.id for device in w.sharding.device_set} == {0, 1, 2}


def test_state_in_pieces_is_taken_back_without_copies_and_consumed(trained):
    parallel, state, batch, _, twice = trained
    state, _ = parallel(state, batch)
    pieces = [piece for leaf in jax.tree.leaves(state) if isinstance(leaf, SplitArray) for piece in leaf.pieces]
    assert_trees_close(parallel(state, batch), twice)
    assert all(piece.is_deleted() for piece in pieces)
    assert repr(state[0]["b"]) == "SplitArray(float32[5, 8], dimension 0: 0:3 deleted, 3:5 deleted)"
    with pytest.raises(ArgumentError, match="state/0/b, state/0/w"):
        parallel(state, batch)


def test_returned_gradients_stay_with_their_layers_and_what_has_another_shape_is_one_array():
    step, state, batch = scanned_steps.returned_gradients()
    parallel = in_stages(step)
    _, found = parallel(state, batch)
    assert (
        repr(found["gradients"]["w"])
        == "SplitArray(float32[5, 8, 8], dimension 0: 0:3 on device 0, 3:5 on devices 1, 2)"
    )
    assert isinstance(found["gradients"]["b"], SplitArray)
    assert isinstance(found["norms"], jax.Array)
    assert isinstance(found["half"], jax.Array)
    assert_trees_close(found, jax.jit(step)(state, batch)[1])
    joined = operations(cut_at((step, state, batch), 2), "concatenate")
    assert sorted(kind for kind, _ in joined) == ["float32[5,4,8]", "float32[5]"]


@pytest.mark.parametrize("kind", ["gathered", "pickled", "numpy", "copied", "cut elsewhere"])
def test_other_forms_of_the_state_are_accepted(trained, kind):
    parallel, state, batch, once, twice = trained
    state, _ = parallel(state, batch)
    forms = {
        "gathered": parallel.gather,
        "pickled": lambda tree: pickle.loads(pickle.dumps(tree)),
        "numpy": jax.device_get,
        "copied": lambda tree: jax.tree.map(jnp.copy, tree),
        "cut elsewhere": functools.partial(jax.tree.map, cut_after_one),
    }
    saved = forms[kind](state)
    assert_trees_close(saved, once[0])
    assert_trees_close(parallel(saved, batch), twice)


def cut_after_one(leaf):
    """A stack in other pieces."""
    return SplitArray([jnp.asarray(leaf)[:1], jnp.asarray(leaf)[1:]]) if isinstance(leaf, SplitArray) else leaf


def test_a_step_on_one_mesh_takes_the_state_of_a_pipeline(trained):
    parallel, state, batch, _, twice = trained
    state, _ = parallel(state, batch)
    alone = autopar.parallelize(scanned_steps.clipped_adamw()[0], devices=jax.devices()[:2])
    assert_trees_close(alone(state, batch), twice)


def test_gathered_state_is_of_ordinary_arrays_on_one_device(trained):
    parallel, state, batch, once, _ = trained
    state, _ = parallel(state, batch)
    gathered = parallel.gather(state)
    assert {type(leaf) for leaf in jax.tree.leaves(gathered)} == {type(jnp.zeros(1))}
    assert {tuple(leaf.devices()) for leaf in jax.tree.leaves(gathered)} == {(jax.devices()[0],)}
    assert_trees_close(gathered, once[0])


def test_the_first_state_is_made_in_pieces(trained):
    parallel, state, batch, once, _ = trained
    parallel.plan(state, batch)
    made = parallel.init_state(lambda: scanned_steps.clipped_adamw()[1])
    assert isinstance(made[0]["w"], SplitArray)
    assert made[0]["w"].bounds == (0, 3, 5)
    assert_trees_close(made, state)
    assert_trees_close(parallel(made, batch), once)


def test_a_saved_plan_divides_the_scan_where_it_was(trained):
    parallel, state, batch, once, _ = trained
    plan = parallel.plan(state, batch)
    read = autopar.plan_from_json(plan.to_json())
    assert read == plan
    assert read.scan_cuts == ((3,),)
    assert_trees_close(autopar.parallelize(scanned_steps.clipped_adamw()[0], plan=read)(state, batch), once)


@pytest.mark.sweep
def test_a_search_for_stages_cuts_between_scanned_layers_and_keeps_as_few_pieces_as_it_needs():
    def loss_of(weights, batch):
        return jnp.mean(
            lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"] @ jnp.ones((WIDTH, 256)), weights)[0] ** 2
        )

    weights = jnp.asarray(np.random.default_rng(0).normal(size=(4, 256, 256)) / 16, jnp.float32)
    step, weights, batch = trained_on(loss_of, weights, rows())
    parallel = autopar.parallelize(step, devices=jax.devices()[:4], cluster=two_nodes(), num_microbatches=4)
    plan = parallel.plan(weights, batch)
    assert isinstance(plan, PipelinePlan)
    pieces = [leaf for stage in plan.stages for leaf in stage.leaves if leaf.startswith("state[")]
    assert len(pieces) == len(plan.scan_cuts[0]) + 1 == plan.num_stages
    assert_same_as_jit(step, parallel, weights, batch)


def test_parts_of_an_operation_are_in_the_phase_of_the_whole_and_keep_its_source():
    split = cut_at(scanned_steps.clipped_adamw(), 2)
    loop, whole = make_divided_loop(split, 4), make_time_loop(split.whole, 4)
    assert {loop.plan.phases[part] == whole.plan.phases[origin] for part, origin in split.origins.items()} == {True}
    assert {part.source_info is origin.source_info for part, origin in split.origins.items()} == {True}
    assert not any("autopar" in name_stack(eqn) for eqn in split.step.program.walk())
    pieces = [eqn for eqn in split.step.program.equations if isinstance(eqn, LoopEquation)]
    assert [split.origins[eqn].params["reverse"] for eqn in pieces] == [False, False, True, True]

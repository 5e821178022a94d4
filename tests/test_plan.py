"""A plan as data: JSON and back, the same program without solving, shardings for jax.jit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import ArgumentError, Plan, PlanError
from autopar.intra_op import mesh_search
from autopar.plan import no_leaf
from tests import zoo
from tests.oracles import assert_trees_close

MESH = {"data": 2, "model": 4}
CONSTRAINTS = [
    autopar.data_parallel("data"),
    {"state/params/up": P(None, "model"), "state/params/down": P("model", None)},
]


def make_state():
    draw = zoo.Draw(0)
    return {"params": {"up": draw.weight(16, 64), "down": draw.weight(64, 16)}, "count": jnp.int32(0)}


def make_batch(examples=16):
    draw = zoo.Draw(1)
    return {"x": draw.weight(examples, 16), "y": draw.weight(examples, 16)}


def train_step(state, batch):
    def loss_of(params):
        return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradients)
    return {"params": params, "count": state["count"] + 1}, {"loss": loss}


@pytest.fixture(scope="module")
def plan():
    """The Megatron plan of a two-layer perceptron, on a mesh of 2 x 4."""
    step = autopar.parallelize(train_step, devices=8, mesh_shape=MESH, constraints=CONSTRAINTS)
    return step.plan(make_state(), make_batch())


# --- data -------------------------------------------------------------------------------------------------------------


def test_json_and_back_is_the_same_plan(plan):
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text
    assert hash(Plan.from_json(text)) == hash(plan)


def test_a_plan_is_frozen(plan):
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.peak_bytes = 0


def test_partition_specs_are_by_path_and_as_constrained(plan):
    assert dict(plan.partition_specs()) == {
        "state/count": P(),
        "state/params/down": P("model", None),
        "state/params/up": P(None, "model"),
        "batch/x": P("data", None),
        "batch/y": P("data", None),
    }


def test_a_value_is_found_by_path_with_its_role_shape_and_bytes(plan):
    up = plan.input("state/params/up")
    assert (up.role, up.shape, up.dtype, up.spec) == ("state", (16, 64), "float32", ((), ("model",)))
    assert up.bytes_per_device == 16 * 64 * 4 // 4
    assert plan.output("output/0/params/up").spec == up.spec
    assert plan.output("output/1/loss").shape == ()


def test_a_path_that_there_is_not_names_the_nearest(plan):
    with pytest.raises(PlanError, match="no leaf 'params/up'; there are state/params/up, "):
        plan.input("params/up")
    with pytest.raises(PlanError, match="no leaf 'loss_value'; there are output/1/loss, "):
        plan.output("loss_value")


def test_of_many_paths_the_nearest_are_named_one_of_each_argument_and_how_to_see_all():
    many = [f"state/params/layer_{n}/{name}" for n in range(9) for name in ("up", "down")]
    told = str(no_leaf("batch/x", [*many, "state/count", "batch/tokens"]))
    assert "the nearest of 20 are batch/tokens, state/" in told
    assert "`plan.show(full=True)`" in told
    assert str(no_leaf("params/layer_7/down", many)).startswith(
        "no leaf 'params/layer_7/down'; the nearest of 18 are state/params/layer_7/down, "
    )


def test_the_collectives_of_tensor_and_data_parallelism_are_there_with_their_bytes(plan):
    sums = sorted((c.axes, c.bytes) for c in plan.collectives if c.kind == "all-reduce" and c.bytes > 4)
    activation, gradient = 8 * 16 * 4, 16 * 64 * 4 // 4
    assert sums == [(("data",), gradient), (("data",), gradient), (("model",), activation)]
    assert plan.step_s == plan.compute_s + plan.comm_s
    assert plan.is_optimal


def test_the_meshes_that_were_compared_are_listed_and_the_best_was_taken():
    plan = autopar.parallelize(train_step, devices=8, cluster="dgx-a100").plan(make_state(), make_batch())
    assert (8,) in {c.mesh_shape for c in plan.candidates}
    assert plan.step_s == pytest.approx(min(c.step_s for c in plan.candidates if c.step_s is not None), rel=1e-6)
    left_off = [c for c in plan.candidates if c.step_s is None]
    assert all(c.at_least_s > 0.997 * plan.step_s for c in left_off)


# --- used again -------------------------------------------------------------------------------------------------------


def test_a_plan_from_a_file_gives_the_same_program_without_solving(monkeypatch):
    solved = autopar.parallelize(train_step, mesh_shape=(2, 4))
    plan = solved.plan(make_state(), make_batch())

    def no_solver(*args, **kwargs):
        raise AssertionError("the solver was asked")

    monkeypatch.setattr(mesh_search, "ChoiceProblem", no_solver)
    restored = autopar.parallelize(train_step, plan=Plan.from_json(plan.to_json()))
    texts = [step.compile(make_state(), make_batch()).as_text() for step in (solved, restored)]
    assert texts[0] == texts[1]
    assert restored.last_plan() == plan
    for ours, theirs in zip(
        jax.tree.leaves(restored(make_state(), make_batch())),
        jax.tree.leaves(solved(make_state(), make_batch())),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["gpt", "moe"])
def test_a_plan_of_a_model_gives_the_same_results_when_used_again(name):
    step, state, batch = zoo.ZOO[name]()
    solved = autopar.parallelize(step, mesh_shape=(4,), devices=4, donate_argnums=())
    plan = solved.plan(state, batch)
    restored = autopar.parallelize(step, plan=Plan.from_json(plan.to_json()), donate_argnums=())
    assert_trees_close(restored(state, batch), solved(state, batch), rtol_of_scale=0)


def test_a_plan_for_other_shapes_is_refused(plan):
    with pytest.raises(PlanError, match="made for another step"):
        autopar.parallelize(train_step, plan=plan).plan(make_state(), make_batch(32))


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"num_stages": 2}, r"num_stages=2: the plan has one mesh of \(2, 4\), 1 microbatches .*leave out plan="),
        ({"mesh_shape": (8,)}, r"mesh_shape=\(8,\): the plan has one mesh of \(2, 4\)"),
        ({"num_microbatches": 4, "num_stages": 2}, "num_stages=2, num_microbatches=4: the plan has one mesh"),
    ],
)
def test_wishes_that_a_given_plan_does_not_meet_are_refused(plan, wishes, words):
    with pytest.raises(ArgumentError, match=words):
        autopar.parallelize(train_step, plan=plan, **wishes).plan(make_state(), make_batch())


def test_wishes_that_a_given_plan_meets_may_stand_beside_it(plan):
    for wishes in ({"mesh_shape": (2, 4)}, {"mesh_shape": MESH, "num_stages": 1}, {"schedule": "1f1b"}):
        step = autopar.parallelize(train_step, plan=plan, num_microbatches=1, recompute="none", **wishes)
        assert step.plan(make_state(), make_batch()).strategies == plan.strategies


# --- the second back end ----------------------------------------------------------------------------------------------


def test_jit_by_plan_has_the_plans_shardings_and_jits_results(plan):
    sharded = autopar.plain_jit(plan, train_step)
    new, metrics = sharded(make_state(), make_batch())
    assert_trees_close((new, metrics), jax.jit(train_step)(make_state(), make_batch()))
    for name in ("up", "down"):
        sharding = new["params"][name].sharding
        assert sharding.spec == plan.input(f"state/params/{name}").partition_spec
        assert sharding.mesh.axis_names == ("data", "model")
    assert sharded.__name__ == "train_step"
    again, _ = sharded(new, batch=make_batch())
    assert int(again["count"]) == 2


def test_jit_by_plan_can_be_lowered_from_shapes(plan):
    text = (
        autopar.plain_jit(plan, train_step)
        .lower(*jax.eval_shape(lambda: (make_state(), make_batch())))
        .compile()
        .as_text()
    )
    assert "all-reduce" in text


def test_jit_by_plan_donates_what_it_is_told_to(plan):
    kept, given = autopar.plain_jit(plan, train_step), autopar.plain_jit(plan, train_step, donate_argnums=(0,))
    first, _ = kept(make_state(), make_batch())
    second, _ = kept(first, make_batch())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    given(second, make_batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(second))


def test_jit_by_plan_on_chosen_devices_with_static_and_keyword_arguments():
    def step(state, batch, power, *, rate):
        return state - rate * jnp.mean(batch**power), {"used": power}

    arguments = (jnp.ones((8, 8)), jnp.ones((8, 8)) * 2)
    step_plan = autopar.parallelize(step, static_argnums=2, mesh_shape=(4,), devices=4).plan(*arguments, 3, rate=0.5)
    sharded = autopar.plain_jit(step_plan, step, static_argnums=(2,), devices=jax.devices()[4:])
    actual, used = sharded(*arguments, 3, rate=0.5)
    assert set(actual.sharding.device_set) == set(jax.devices()[4:])
    assert (float(actual[0, 0]), int(used["used"])) == (-3.0, 3)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["gpt", "moe"])
def test_jit_by_plan_computes_what_jit_computes(name):
    step, state, batch = zoo.ZOO[name]()
    plan = autopar.parallelize(step, mesh_shape=(4,), devices=4).plan(state, batch)
    assert_trees_close(
        autopar.plain_jit(plan, step)(state, batch), jax.jit(step)(state, batch), adam_lr=None, rtol_of_scale=1e-4
    )


def test_jit_by_plan_refuses_leaves_that_the_plan_has_not_or_has_otherwise(plan):
    state = make_state() | {"extra": jnp.ones(3)}
    words = (
        r"argument state/extra is float32\[3\], planned nothing of this path; argument batch/x is float32\[24, 16\], "
    )
    with pytest.raises(PlanError, match=words):
        autopar.plain_jit(plan, lambda state, batch: train_step(state, batch))(state, make_batch(24))


def test_jit_by_plan_needs_enough_devices(plan):
    with pytest.raises(autopar.ArgumentError, match=r"mesh \(2, 4\) needs 8 devices, there are 2 "):
        autopar.plain_jit(plan, train_step, devices=jax.devices()[:2])

"""A plan as data: JSON and back, errors of files that are none, the same program without solving, shardings for jax.jit."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import PipelinePlan, Plan, PlanError
from autopar.intra_op import mesh_search
from autopar.pipeline_plan import StagePlan, TransferPlan
from autopar.plan import Alternative
from tests import zoo
from tests.oracles import assert_trees_close
from tests.plan_examples import BATCH, collective, leaf, plan_of

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


STAGE = StagePlan(
    stage=0,
    mesh=0,
    first_device=0,
    leaves=("state/params/up",),
    forward_s=1e-3,
    backward_s=2e-3,
    once_s=0.0,
    microbatches_in_flight=2,
    peak_bytes=2**20,
    plan=plan_of(leaf("state/params/up", (8, 8)), BATCH, collectives=(collective("all-reduce", "x"),)),
)
PIPELINE = PipelinePlan(
    fingerprint="f",
    cluster="cpu",
    num_microbatches=4,
    schedule="1f1b",
    virtual_stages=1,
    cuts=(7,),
    stages=(STAGE, dataclasses.replace(STAGE, stage=1, mesh=1, first_device=8)),
    transfers=(TransferPlan(source=0, target=1, what="forward", bytes=1024, count=4, predicted_s=1e-3),),
    step_s=0.02,
    bubble=0.25,
    memory_limit_bytes=None,
    planning_s=1.5,
    scan_cuts=((2,),),
    compared=(Alternative(num_stages=2, num_microbatches=4, schedule="1f1b", step_s=0.02),),
)


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
    with pytest.raises(PlanError, match=r"no leaf 'params/up'; there are state/params/up$"):
        plan.input("params/up")
    with pytest.raises(PlanError, match="no leaf 'loss_value'; there are output/0/count, "):
        plan.output("loss_value")


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


# --- what is no plan --------------------------------------------------------------------------------------------------


def changed(plan, **fields):
    return json.dumps(json.loads(plan.to_json()) | fields)


def test_text_that_is_not_json_is_no_plan():
    with pytest.raises(PlanError, match="not a plan: invalid JSON: Expecting value"):
        Plan.from_json("plan")


@pytest.mark.parametrize("text", ["[]", "{}", "3", '{"mesh_shape": [8]}'])
def test_json_without_a_version_is_no_plan(text):
    with pytest.raises(PlanError, match="a JSON object with a 'version' is expected"):
        Plan.from_json(text)


def test_a_plan_of_another_version_says_to_plan_again(plan):
    with pytest.raises(PlanError, match="plan of version 99, this autopar reads version 1: plan again"):
        Plan.from_json(changed(plan, version=99))


def test_missing_and_unknown_fields_are_listed_together(plan):
    fields = json.loads(changed(plan, colour="red"))
    del fields["choices"], fields["inputs"]
    with pytest.raises(PlanError, match=r"missing fields \['choices', 'inputs'\], unknown fields \['colour'\]"):
        Plan.from_json(json.dumps(fields))


def test_fields_of_a_nested_value_are_checked_too(plan):
    fields = json.loads(plan.to_json())
    del fields["inputs"][0]["spec"]
    fields["inputs"][0]["layout"] = []
    with pytest.raises(PlanError, match=r"inputs: missing fields \['spec'\], unknown fields \['layout'\]"):
        Plan.from_json(json.dumps(fields))
    with pytest.raises(PlanError, match="inputs: a list of objects is expected"):
        Plan.from_json(changed(plan, inputs=3))


WRONG_VALUES = [
    ({"choices": "all"}, 'choices: a list of values is expected, not "all"'),
    ({"choices": [0, 1.5]}, r"choices: a whole number is expected, not 1\.5"),
    ({"choices": [True]}, "choices: a whole number is expected, not true"),
    ({"inputs": [3]}, "inputs: an object is expected, not 3"),
    ({"inputs": None}, "inputs: a list of objects is expected, not null"),
    ({"cluster": 8}, "cluster: text is expected, not 8"),
    ({"comm_s": "fast"}, 'comm_s: a number is expected, not "fast"'),
    ({"memory_limit_bytes": []}, r"memory_limit_bytes: a whole number is expected, not \[\]"),
    ({"recompute": 1}, "recompute: true or false is expected, not 1"),
    ({"axis_names": [["x"]]}, r'axis_names: text is expected, not \["x"\]'),
]


@pytest.mark.parametrize(("fields", "words"), WRONG_VALUES)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_field(plan, fields, words):
    with pytest.raises(PlanError, match=f"not a plan of version 1: {words}"):
        Plan.from_json(changed(plan, **fields))


def test_what_is_left_out_of_a_plan_has_its_default(plan):
    fields = json.loads(plan.to_json())
    for name in ("recompute", "compared", "unlimited_s"):
        del fields[name]
    assert Plan.from_json(json.dumps(fields)) == dataclasses.replace(plan, unlimited_s=0.0)


# --- the plan of a pipeline -------------------------------------------------------------------------------------------


def changed_pipeline(**fields):
    return json.dumps(json.loads(PIPELINE.to_json()) | fields)


def in_pipeline(name, **fields):
    """The text of a pipeline whose first stage or transfer has other fields."""
    first, *others = json.loads(PIPELINE.to_json())[name]
    return changed_pipeline(**{name: [first | fields, *others]})


def test_the_plan_of_a_pipeline_is_read_back_as_it_was():
    for read in (PipelinePlan.from_json, autopar.plan_from_json):
        assert read(PIPELINE.to_json()) == PIPELINE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (changed_pipeline(transfers=[{"source": 0}]), "transfers: missing fields .*'bytes', 'count'.* unknown fields"),
        (changed_pipeline(transfers=[7]), "transfers: an object is expected, not 7"),
        (changed_pipeline(transfers="none"), "transfers: a list of objects is expected"),
        (in_pipeline("transfers", bytes="many"), 'transfers: bytes: a whole number is expected, not "many"'),
        (in_pipeline("transfers", colour="red"), r"transfers: missing fields \[\], unknown fields \['colour'\]"),
        (in_pipeline("stages", leaves=3), "stages: leaves: a list of values is expected, not 3"),
        (in_pipeline("stages", plan=None), "stages: plan: an object is expected, not null"),
        (changed_pipeline(compared=[{}]), r"compared: missing fields \['num_microbatches', 'num_stages'\]"),
        (changed_pipeline(stages=None), "stages: a list of objects is expected, not null"),
    ],
)
def test_a_pipeline_with_a_part_that_is_none_is_refused_by_the_name_of_the_field(text, words):
    for read in (PipelinePlan.from_json, autopar.plan_from_json):
        with pytest.raises(PlanError, match=f"not a pipeline plan of version 1: {words}"):
            read(text)


def test_a_pipeline_with_a_stage_planned_by_another_version_says_to_plan_again():
    stage = json.loads(PIPELINE.to_json())["stages"][0]["plan"] | {"version": 99}
    with pytest.raises(PlanError, match="plan of version 99, this autopar reads version 1: plan again"):
        PipelinePlan.from_json(in_pipeline("stages", plan=stage))


def test_no_change_of_one_value_ends_in_another_error_than_a_plan_error():
    """Every value anywhere in the file is replaced by one of each JSON type: it is read or refused, nothing else."""

    def paths(value, path=()):
        yield path
        for key, item in (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        ):
            yield from paths(item, (*path, key))

    text = PIPELINE.to_json()
    refused = 0
    for path in paths(json.loads(text)):
        for other in (None, True, -1, 0.5, "text", [], {}, [[]]):
            fields = json.loads(text)
            if not path:
                fields = other
            else:
                functools.reduce(lambda value, key: value[key], path[:-1], fields)[path[-1]] = other
            try:
                autopar.plan_from_json(json.dumps(fields))
            except PlanError:
                refused += 1
    assert refused > 1000


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

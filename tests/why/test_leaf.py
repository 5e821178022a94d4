"""Why a leaf has its layout: every price that is named is that of the plan which constraints give."""

import copy
import dataclasses
import pickle
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.__main__ import main
from autopar.errors import OutOfMemoryError, PlanError
from autopar.explain.units import seconds_text
from autopar.layouts.constraints import Constraints
from autopar.layouts.mesh import LogicalMesh
from autopar.layouts.moves import all_layouts
from autopar.why import leaf as leaves
from autopar.why.report import leaf_text

SIZES = {"up": (64, 256), "down": (256, 64)}
PATH = "state/params/layer_0/up"


def train_step(state, batch):
    def loss_of(params):
        x = batch["x"]
        for number, layer in enumerate(params.values()):
            with jax.named_scope(f"layer_{number}"):
                x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradients)}, loss


def shapes(layers: int = 2):
    params = {f"layer_{n}": {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in SIZES.items()} for n in range(layers)}
    batch = {name: jax.ShapeDtypeStruct((32, 64), jnp.float32) for name in ("x", "y")}
    return {"params": params}, batch


SETTINGS = {"devices": 4, "cluster": "p3.16xlarge", "plan_cache": False}
MODES = {
    "one mesh": {"mesh_shape": (2, 2), "num_microbatches": 1, "recompute": "none"},
    "stages": {
        "mesh_shape": [(2,), (2,)], "num_stages": 2, "num_microbatches": 4, "schedule": "1f1b", "virtual_stages": 1,
        "recompute": "none",
    },
}  # fmt: skip


def planned(layers: int = 2, **changes):
    return autopar.parallelize(train_step, **{**SETTINGS, **changes}).plan(*shapes(layers))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", MODES)
def test_each_layout_costs_what_the_plan_costs_in_which_a_constraint_forces_it(mode):
    plan = planned(**MODES[mode])
    answer = plan.why(PATH).answer
    assert answer.leaf == plan.input(PATH)
    assert answer.step_s == plan.step_s
    own = plan if isinstance(plan, autopar.Plan) else plan.stages[plan.stage_of(PATH)].plan
    mesh = LogicalMesh(own.mesh_shape, own.axis_names)
    every = {layout.spec(mesh) for layout in all_layouts(SIZES["up"], mesh, ())}
    assert {other.spec for other in answer.others} == every - {answer.leaf.spec}
    assert answer.not_tried == 0
    for other in answer.others:
        spec = dataclasses.replace(answer.leaf, spec=other.spec).partition_spec
        forced = planned(**MODES[mode], constraints={PATH: spec})
        assert forced.input(PATH).spec == other.spec
        assert forced.step_s - plan.step_s == pytest.approx(other.step_s - answer.step_s, rel=1e-9, abs=1e-15)
        assert forced.peak_bytes == other.peak_bytes
        assert other.step_s >= answer.step_s * (1 - 1e-9)
        assert sum(one.seconds for one in other.adds) == pytest.approx(other.step_s - answer.step_s, abs=1e-15)
    assert [other.step_s for other in answer.others] == sorted(other.step_s for other in answer.others)


def test_what_decides_is_the_collective_that_the_next_best_layout_adds():
    text = str(planned(**MODES["one mesh"]).why(PATH))
    assert text.splitlines()[0].startswith(f"{PATH}, float32(64, 256): [")
    assert "What decides: " in text
    assert "layer_" in text.split("What decides: ")[1].splitlines()[0]
    assert "chosen" in text


def test_a_constraint_that_decides_is_named_with_what_it_costs():
    rules = {"state/params/*/up": autopar.Replicated(), "state/params/*/down": autopar.Replicated()}
    plan = planned(**MODES["one mesh"], constraints=rules)
    free = planned(**MODES["one mesh"], constraints={"state/params/*/down": autopar.Replicated()})
    answer = plan.why(PATH).answer
    assert answer.decides.startswith("the constraint on 'state/params/*/up'")
    assert ("which costs nothing" in answer.decides) == (free.step_s >= plan.step_s * (1 - 1e-9))
    preset = planned(**MODES["one mesh"], constraints=autopar.zero3()).why(PATH).answer
    assert "zero3" in preset.decides


@pytest.mark.parametrize("ended_early", [False, True])
def test_a_faster_layout_that_the_search_left_is_told_with_its_gain_and_how_to_pin_it(ended_early):
    plan = dataclasses.replace(planned(**MODES["one mesh"]), ended_early=ended_early)
    other = leaves.LayoutPrice(spec=(("x",), ()), step_s=0.996 * plan.step_s, peak_bytes=2**20)
    question = SimpleNamespace(plan=plan, settings=SimpleNamespace(constraints=Constraints()))
    less = f"{seconds_text(0.004 * plan.step_s)} (0.4%)"
    decides = leaves._what_decides(question, plan.input(PATH), [other])
    assert decides.endswith(f"[x, -] takes {less} less; constraints={{'{PATH}': P('x', None)}} pins it")
    left = "the search leaves plans that are faster by less than its gap, which the plan states: "
    assert decides.startswith("the clock ended the search" if ended_early else left)
    answer = leaves.LeafAnswer(
        leaf=plan.input(PATH), step_s=plan.step_s, peak_bytes=2**20, others=(other,), not_tried=0, decides=decides
    )
    row = next(line for line in leaf_text(answer).splitlines() if line.startswith("[x, -]"))
    assert f" {less} less " in row


@pytest.mark.sweep
def test_layouts_that_do_not_fit_the_memory_are_told_as_such():
    with pytest.raises(OutOfMemoryError) as caught:
        planned(1, **MODES["one mesh"], memory_limit_bytes=80_000)
    limit = caught.value.needed_bytes
    tight = planned(1, **MODES["one mesh"], memory_limit_bytes=limit).why(PATH).answer
    impossible = [other for other in tight.others if other.step_s is None]
    assert {other.problem for other in impossible} == {"does not fit the memory"}
    assert ((), ()) in {other.spec for other in impossible}, "whole, it needs most"
    assert all(other.peak_bytes <= limit for other in tight.others if other.step_s is not None)
    for other in impossible:
        spec = dataclasses.replace(tight.leaf, spec=other.spec).partition_spec
        with pytest.raises(OutOfMemoryError):
            planned(1, **MODES["one mesh"], memory_limit_bytes=limit, constraints={PATH: spec})


def test_more_layouts_than_there_is_time_for_are_counted(monkeypatch):
    monkeypatch.setattr(leaves, "MOST_TRIED", 2)
    answer = planned(**MODES["one mesh"]).why(PATH).answer
    assert (len(answer.others), answer.not_tried > 0) == (2, True)
    assert "more layouts were not tried" in str(planned(**MODES["one mesh"]).why(PATH))


def test_a_scalar_has_no_other_layout():
    def step(state, batch):
        return {"w": state["w"] - jnp.mean(batch @ state["w"]), "n": state["n"] + 1}

    state = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32), "n": jax.ShapeDtypeStruct((), jnp.int32)}
    batch = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    plan = autopar.parallelize(step, **SETTINGS, mesh_shape=(4,)).plan(state, batch)
    assert "it has no other layout on this mesh" in str(plan.why("state/n"))


@pytest.mark.sweep
def test_a_plan_of_a_file_has_to_meet_its_step_before_it_is_asked():
    plan = planned(**MODES["one mesh"])
    read = autopar.plan_from_json(plan.to_json())
    assert read == plan
    with pytest.raises(PlanError, match=r"parallelize\(step, plan=plan\)\.plan\(state, batch\) gives one"):
        read.why(PATH)
    known = autopar.parallelize(train_step, **SETTINGS, plan=read).plan(*shapes())
    assert [o.step_s for o in known.why(PATH).answer.others] == [o.step_s for o in plan.why(PATH).answer.others]
    with pytest.raises(PlanError, match="no leaf 'state/params/nothing'"):
        plan.why("state/params/nothing")


def test_of_a_pipeline_the_leaves_of_all_stages_are_named_where_there_is_no_such_leaf():
    with pytest.raises(PlanError, match="no leaf 'batch/z'; there are batch/x, batch/y, state/params/layer_0/up, "):
        planned(**MODES["stages"]).why("batch/z")


def test_copies_pickles_and_json_hold_no_question():
    plan = planned(**MODES["one mesh"])
    for other in (copy.deepcopy(plan), copy.copy(plan), pickle.loads(pickle.dumps(plan)), dataclasses.replace(plan)):
        assert other == plan
        with pytest.raises(PlanError):
            other.why(PATH)
    assert "_asked" not in plan.to_json()


def test_the_command_line_asks_of_a_leaf_and_explain_takes_a_model(capsys):
    model = ["mlp", "--layers", "1", "--hidden", "32", "--devices", "2", "--mesh", "2", "--no-plan-cache"]
    for command in ("plan", "explain"):
        assert main([command, *model, "--leaf", "state/params/Dense_0/kernel"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("state/params/Dense_0/kernel, float32(32, 32): ")
        assert "The layouts it could have" in out
    assert main(["explain", *model, "--leaf", "state/params/Dense_9/kernel"]) == 2
    assert "no leaf 'state/params/Dense_9/kernel'; the nearest of " in capsys.readouterr().err

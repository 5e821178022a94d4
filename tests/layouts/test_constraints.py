"""Constraints as allowed layouts of each leaf, exhaustively on small leaves, and as plans that obey them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import ConstraintError, Replicated, Split, data_parallel, zero1, zero2, zero3
from autopar.layouts.allowed import allowed_layouts, batch_axes, layouts_for
from autopar.layouts.constraints import as_constraints
from autopar.layouts.mesh import LogicalMesh
from tests.oracles import assert_same_as_jit, census

MESH_SHAPE = {"data": 2, "model": 4}
MESH = LogicalMesh.of(MESH_SHAPE)


@dataclasses.dataclass(frozen=True)
class Leaf:
    path: str
    role: str
    shape: tuple[int, ...]
    use: str | None = None


KERNEL = Leaf(path="state/params/kernel", role="state", shape=(8, 12))
BIAS = Leaf(path="state/params/bias", role="state", shape=(12,))
MOMENT = Leaf(path="state/opt_state/mu/kernel", role="state", shape=(8, 12))
COUNT = Leaf(path="state/count", role="state", shape=())
TOKENS = Leaf(path="batch/tokens", role="batch", shape=(16, 10))
RATE = Leaf(path="rate", role="other", shape=())
LEAVES = (KERNEL, BIAS, MOMENT, COUNT, TOKENS, RATE)


def specs(layouts, mesh=MESH):
    """Layouts as text such as `data,model|-`, to compare as sets."""
    if layouts is None:
        return None
    return {"|".join(",".join(axes) or "-" for axes in layout.spec(mesh)) for layout in layouts}


def allowed(constraints, leaves=LEAVES, mesh=MESH):
    found = allowed_layouts(leaves, mesh, as_constraints(constraints))
    return {leaf.path: specs(layouts, mesh) for leaf, layouts in zip(leaves, found, strict=True)}


# --- one layout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (P(), "-|-"),
        (P("data"), "data|-"),
        (P(None, "model"), "-|model"),
        (P("model", "data"), "model|data"),
        (P(("data", "model")), "data,model|-"),
        (P(("model", "data"), None), "model,data|-"),
    ],
    ids=str,
)
def test_a_partition_spec_allows_that_layout_alone(spec, expected):
    assert specs(layouts_for(spec, KERNEL, MESH)) == {expected}


def test_replicated_allows_no_axis_and_replicated_over_an_axis_all_layouts_without_it():
    assert specs(layouts_for(Replicated(), KERNEL, MESH)) == {"-|-"}
    assert specs(layouts_for(Replicated(("data",)), KERNEL, MESH)) == {"-|-", "model|-", "-|model"}
    assert specs(layouts_for(Replicated(("model",)), KERNEL, MESH)) == {"-|-", "data|-", "-|data"}


def test_split_takes_every_way_that_cuts_the_leaf_into_the_most_parts():
    assert specs(layouts_for(Split(), KERNEL, MESH)) == {"data,model|-", "data|model", "model|data"}
    assert specs(layouts_for(Split(("data",)), KERNEL, MESH)) == {"data|-", "-|data"}


def test_split_of_a_leaf_that_all_axes_do_not_divide_takes_the_most_parts_there_are():
    assert specs(layouts_for(Split(), BIAS, MESH)) == {"model"}
    assert specs(layouts_for(Split(), Leaf(path="w", role="state", shape=(6,)), MESH)) == {"data"}
    assert specs(layouts_for(Split(), Leaf(path="w", role="state", shape=(5, 7)), MESH)) == {"-|-"}
    assert specs(layouts_for(Split(), COUNT, MESH)) == {""}


def test_axes_of_size_one_split_nothing():
    mesh = LogicalMesh.of({"data": 8, "model": 1})
    assert specs(layouts_for(P("data", "model"), KERNEL, mesh), mesh) == {"data|-"}
    assert specs(layouts_for(Replicated(("data",)), KERNEL, mesh), mesh) == {"-|-"}


def test_a_dimension_without_elements_is_whole_whatever_is_asked_for():
    empty = dataclasses.replace(TOKENS, shape=(0, 12))
    assert specs(layouts_for(P("data", "model"), empty, MESH)) == {"-|model"}
    assert allowed(data_parallel(), leaves=(empty,)) == {TOKENS.path: {"-|-"}}


# --- presets and their order ------------------------------------------------------------------------------------------


def test_data_parallel_over_all_axes_fixes_state_and_batch_and_nothing_else():
    assert allowed(data_parallel()) == {
        KERNEL.path: {"-|-"},
        BIAS.path: {"-"},
        MOMENT.path: {"-|-"},
        COUNT.path: {""},
        TOKENS.path: {"data,model|-"},
        RATE.path: None,
    }


def test_data_parallel_over_one_axis_leaves_the_other_to_the_search():
    found = allowed(data_parallel("data"))
    assert found[KERNEL.path] == {"-|-", "model|-", "-|model"}
    assert found[TOKENS.path] == {"data|-"}


def test_zero2_splits_the_optimizer_state_and_zero3_the_parameters_too():
    two, three = allowed(zero2()), allowed(zero3())
    split = {"data,model|-", "data|model", "model|data"}
    assert (two[MOMENT.path], two[KERNEL.path], two[BIAS.path]) == (split, {"-|-"}, {"-"})
    assert (three[MOMENT.path], three[KERNEL.path], three[BIAS.path]) == (split, split, {"model"})
    assert two[TOKENS.path] == three[TOKENS.path] == {"data,model|-"}


def test_zero_stages_find_the_optimizer_state_by_a_glob_of_the_users():
    assert allowed(zero2(optimizer="*/mu/*"))[MOMENT.path] == {"data,model|-", "data|model", "model|data"}


def test_zero_stages_go_by_the_use_of_a_leaf_and_by_its_name_where_no_use_is_known():
    leaves = (
        dataclasses.replace(KERNEL, path="state/0/up", use="parameter"),
        dataclasses.replace(KERNEL, path="state/opt_state/ema", use="parameter"),
        dataclasses.replace(MOMENT, path="state/1/up", use="optimizer"),
        dataclasses.replace(KERNEL, path="state/params/frozen"),
        dataclasses.replace(KERNEL, path="state/averages"),
        TOKENS,
    )
    whole, split = {"-|-"}, {"data,model|-", "data|model", "model|data"}
    assert list(allowed(zero2(), leaves).values())[:-1] == [whole, whole, split, whole, whole]
    assert list(allowed(zero3(), leaves).values())[:-1] == [split, split, split, split, whole]


def test_the_last_rule_that_matches_holds_and_globs_cross_slashes():
    found = allowed([data_parallel("data"), {"*kernel": P(None, "model")}, {"state/opt*": P("model")}])
    assert found[KERNEL.path] == {"-|model"}
    assert found[MOMENT.path] == {"model|-"}
    assert found[BIAS.path] == {"-", "model"}


def test_lists_nest_and_none_is_no_constraint():
    nested = allowed([[data_parallel("data")], [{"rate": P()}, None]])
    assert nested[TOKENS.path] == {"data|-"}
    assert allowed(None) == dict.fromkeys(leaf.path for leaf in LEAVES)


def test_a_batch_leaf_without_dimensions_is_replicated_by_data_parallel():
    leaf = Leaf(path="batch/temperature", role="batch", shape=())
    assert allowed(data_parallel(), leaves=(leaf,)) == {leaf.path: {""}}


def examples(constraints, leaves=LEAVES, mesh=MESH):
    return {
        leaves[i].path: mesh.names(axes) for i, axes in batch_axes(leaves, mesh, as_constraints(constraints)).items()
    }


def test_presets_say_which_axes_split_the_examples_and_later_rules_take_it_back():
    assert examples(data_parallel("data")) == {TOKENS.path: ("data",)}
    assert examples(zero3()) == {TOKENS.path: ("data", "model")}
    assert examples([data_parallel(), data_parallel("model")]) == {TOKENS.path: ("model",)}
    assert examples([data_parallel(), {"batch/*": P("data")}]) == {}
    assert examples({"batch/*": P("data")}) == {}
    assert examples(data_parallel("data"), mesh=LogicalMesh.of({"data": 1, "model": 8})) == {TOKENS.path: ()}


def test_examples_are_found_through_reshapes_loops_and_branches():
    """However cheap splitting the examples over both axes would be: every product has them."""

    def fun(x, w):
        def layer(carry, _):
            return jnp.tanh(carry.reshape(64, 4, 16).reshape(-1, 16) @ w).reshape(64, 64), carry.sum()

        y, _ = jax.lax.scan(layer, x, None, length=3)
        y = jax.lax.cond(w.sum() > 0, lambda a: a * 2, lambda a: a, y)
        return jax.lax.while_loop(lambda a: a[1] < 3, lambda a: (jnp.sin(a[0]), a[1] + 1), (y, 0))[0]

    forced = autopar.parallelize(
        fun, devices=8, mesh_shape=MESH_SHAPE, batch_argnums=(0,), constraints=data_parallel("data"), cluster="cpu"
    )
    x, w = jnp.ones((64, 64)), jnp.ones((16, 16))
    step = forced.plan(x, w)
    assert step.input("x").spec == (("data",), ())
    assert "model" not in step.outputs[0].spec[0]


def test_an_operation_that_needs_all_examples_still_runs_under_data_parallelism():
    step = autopar.parallelize(
        lambda x: jnp.sort(x, axis=0) * 2, mesh_shape=(8,), batch_argnums=(0,), constraints=data_parallel()
    )
    x = jax.random.normal(jax.random.key(0), (16, 4))
    assert jnp.array_equal(step(x), jnp.sort(x, axis=0) * 2)


def test_data_parallelism_needs_a_batch():
    with pytest.raises(ConstraintError, match="matches no batch leaf of the step's arguments; there are: none"):
        allowed(data_parallel(), leaves=(KERNEL,))


def test_axes_that_the_mesh_lacks_are_one_sentence_however_many_leaves_match():
    leaves = [Leaf(path=f"state/params/{n}", role="state", shape=(8, 8)) for n in range(9)]
    with pytest.raises(ConstraintError) as error:
        allowed([{"state/params/*": P("tensor", None)}, {"state/params/1": Split(("x", "data"))}], leaves=leaves)
    assert str(error.value) == (
        "the constraint on state/params/* names mesh axis 'tensor'; the constraint on state/params/1 names mesh axis 'x'; the "
        "mesh has data, model: use these names, or give it your own, as with mesh_shape={'data': 2, 'model': 4}"
    )


def test_of_many_leaves_that_cannot_meet_a_constraint_five_are_named():
    leaves = [Leaf(path=f"state/params/{n}", role="state", shape=(8,)) for n in range(9)]
    with pytest.raises(ConstraintError) as error:
        allowed({"state/params/*": P("data", None)}, leaves=leaves)
    lines = str(error.value).splitlines()
    assert [line.partition("entries, ")[2][:14] for line in lines[:5]] == [f"state/params/{n}" for n in range(5)]
    assert lines[5:] == ["... and 4 more leaves of 'state/params/*'"]


# --- plans obey -------------------------------------------------------------------------------------------------------


def make_state():
    kernels = jax.random.normal(jax.random.key(0), (2, 16, 16)) / 4
    params = {"up": kernels[0], "down": kernels[1]}
    return {"params": params, "opt_state": jax.tree.map(jnp.zeros_like, params), "count": jnp.int32(0)}


def make_batch():
    x, y = jax.random.normal(jax.random.key(1), (2, 16, 16))
    return {"x": x, "y": y}


def train_step(state, batch):
    def loss_of(params):
        return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["opt_state"], gradients)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"params": params, "opt_state": momentum, "count": state["count"] + 1}, loss


CASES = {
    "data_parallel": data_parallel(),
    "data_parallel over one axis": data_parallel("data"),
    "zero1": zero1(),
    "zero2": zero2(),
    "zero3": zero3(),
    "zero3 over one axis": zero3("model"),
    "specs": {"state/params/up": P("model", "data"), "batch/x": P(None, "data")},
    "a preset and a spec": [data_parallel("data"), {"*/up": P(None, "model"), "*/down": P("model")}],
    "replicated": {"*": Replicated()},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("constraints", CASES.values(), ids=CASES.keys())
def test_plans_obey_their_constraints_and_compute_the_same(constraints):
    step = autopar.parallelize(train_step, mesh_shape=MESH_SHAPE, constraints=constraints)
    assert_same_as_jit(train_step, step, make_state(), make_batch(), steps=2)
    plan = step.last_plan()
    legal = allowed_layouts([Leaf(v.path, v.role, v.shape) for v in plan.inputs], MESH, as_constraints(constraints))
    for value, layouts in zip(plan.inputs, legal, strict=True):
        assert layouts is None or value.spec in {layout.spec(MESH) for layout in layouts}, value


def test_state_leaves_that_return_keep_the_layout_they_came_in():
    plan = autopar.parallelize(train_step, devices=8, mesh_shape=MESH_SHAPE, constraints=zero3()).plan(
        make_state(), make_batch()
    )
    for value in plan.inputs:
        if value.role == "state":
            assert plan.output(value.path.replace("state", "output/0", 1)).spec == value.spec


def test_zero3_holds_an_eighth_of_the_state_and_zero2_an_eighth_of_the_optimizers():
    def bytes_of(constraints, part):
        plan = autopar.parallelize(train_step, devices=8, mesh_shape=(8,), constraints=constraints).plan(
            make_state(), make_batch()
        )
        return sum(value.bytes_per_device for value in plan.inputs if f"/{part}/" in value.path)

    whole = 2 * 16 * 16 * 4
    assert (bytes_of(zero1(), "params"), bytes_of(zero1(), "opt_state")) == (whole, whole // 8)
    assert (bytes_of(zero2(), "params"), bytes_of(zero2(), "opt_state")) == (whole, whole // 8)
    assert (bytes_of(zero3(), "params"), bytes_of(zero3(), "opt_state")) == (whole // 8, whole // 8)


def test_a_preset_that_leaves_kinds_of_collectives_out_does_so_among_others():
    assert as_constraints([data_parallel(), zero1("data"), {"*/up": P()}, zero2()]).without == ("reduce-scatter",)
    assert as_constraints([data_parallel(), zero3()]).without == ()
    plan = autopar.parallelize(
        train_step, devices=8, mesh_shape=MESH_SHAPE, constraints=[zero1("data"), {"*/down": P("model")}]
    ).plan(make_state(), make_batch())
    assert plan.input("state/params/down").spec == (("model",), ())
    assert "reduce-scatter" not in {one.kind for one in plan.collectives}


def test_leaves_that_all_examples_share_have_no_examples_to_split():
    leaves = (TOKENS, Leaf(path="batch/of_class", role="batch", shape=(16,)))
    found = batch_axes(leaves, MESH, data_parallel(), shared={1})
    assert found == {0: (0, 1)}
    whole = allowed_layouts(leaves, MESH, data_parallel("data"), shared={1})
    assert [specs(layouts) for layouts in whole] == [{"data|-"}, {"-"}]


# --- kinds of collectives ---------------------------------------------------------------------------------------------


def squared_weights(w, batch):
    """Where nothing is split by weights, only their gradient has to be summed."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ jnp.tanh(w @ w)) ** 2))(w)
    return w - gradient, loss


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kinds", [("all-reduce",), ("all-reduce", "all-gather"), ("all-reduce", "all-to-all")])
def test_a_plan_has_no_other_collectives_than_are_allowed(kinds):
    """All-reduces alone do here on one axis of devices, and on no mesh of two, where the product of weights would be split."""
    w, batch = jnp.ones((4, 4)) / 4, {"x": jnp.linspace(-1, 1, 32).reshape(8, 4)}
    step = autopar.parallelize(squared_weights, collectives=kinds, constraints=data_parallel())
    assert_same_as_jit(squared_weights, step, w, batch)
    assert {c.kind for c in step.last_plan().collectives} <= set(kinds)
    assert census(step.compile(w, batch)).kinds() <= set(kinds)


def test_collectives_that_bring_values_nowhere_are_refused_with_all_meshes_that_were_tried():
    step = autopar.parallelize(squared_weights, collectives=(), constraints=data_parallel())
    with pytest.raises(ConstraintError, match=r"on mesh \(8,\), \(2, 4\), .*allowed \(none\) cannot bring every value"):
        step.plan(jnp.ones((4, 4)), {"x": jnp.ones((8, 4))})

"""Layouts that a step asks for where it computes: the shards of its program have them, and its numbers are those of jit."""

import inspect
import itertools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.compat import make_mesh
from autopar.errors import ConstraintError
from autopar.layouts.asked import AskedLayout
from autopar.layouts.mesh import LogicalMesh
from tests.oracles import assert_same_as_jit

PARAMS = {name: jax.random.normal(jax.random.key(i), (16, 16)) / 4 for i, name in enumerate(("up", "down"))}
BATCH = {"x": jax.random.normal(jax.random.key(2), (32, 16))}


def make_step(ask):
    def step(params, batch):
        def loss_of(params):
            hidden = ask(jnp.tanh(batch["x"] @ params["up"]))
            return jnp.mean((hidden @ params["down"]) ** 2), hidden

        (loss, hidden), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), (loss, hidden)

    return step


def asks_for(spec):
    return lambda x: jax.lax.with_sharding_constraint(x, spec)


def named(x):
    return checkpoint_name(x, "hidden")


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(getattr(inner, "jaxpr", inner))


def local_shapes(step, primitive):
    """The shapes that the operands of a primitive have on a device, in the program that is compiled."""
    compiled = step.compile(PARAMS, BATCH)
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in compiled.traced.inputs]
    found = [eqn for eqn in equations(jax.make_jaxpr(compiled._run)(*shapes).jaxpr) if eqn.primitive.name == primitive]
    assert found
    return {eqn.invars[0].aval.shape for eqn in found}


def mesh_of(**sizes):
    return make_mesh(np.array(jax.devices()[: math.prod(sizes.values())]).reshape(*sizes.values()), tuple(sizes))


BY_NAME = {
    "one axis": (P(None, "x"), {"mesh_shape": (8,)}, (32, 2)),
    "whole": (P(), {"mesh_shape": (8,)}, (32, 16)),
    "two axes": (P("data", "model"), {"mesh_shape": {"data": 2, "model": 4}}, (16, 4)),
    "both along one dimension": (P(None, ("data", "model")), {"mesh_shape": {"data": 2, "model": 4}}, (32, 2)),
    "other than the examples": (P(None, "x"), {"mesh_shape": (8,), "constraints": autopar.data_parallel()}, (32, 2)),
    "microbatches": (P(None, "x"), {"mesh_shape": (8,), "num_microbatches": 4}, (8, 2)),
    "a mesh with two axes is found": (P("x", "y"), {"devices": 4}, (16, 8)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("spec", "settings", "shape"), BY_NAME.values(), ids=BY_NAME.keys())
def test_a_step_names_axes_of_the_plans_mesh(spec, settings, shape):
    step = autopar.parallelize(make_step(asks_for(spec)), **settings)
    assert_same_as_jit(make_step(lambda x: x), step, PARAMS, BATCH, steps=1)
    assert local_shapes(step, "constrain") == {shape}


@pytest.mark.parametrize("mesh_shape", [(2, 4), (2, 2, 2), {"model": 2, "data": 4}])
def test_axes_of_the_users_mesh_stand_for_those_of_the_plans_that_divide_as_much(mesh_shape):
    spec = NamedSharding(mesh_of(data=2, model=4), P("data", "model"))
    step = autopar.parallelize(make_step(asks_for(spec)), mesh_shape=mesh_shape)
    step.plan(PARAMS, BATCH)
    assert local_shapes(step, "constrain") == {(16, 4)}


def test_a_mesh_that_is_current_gives_names_and_sizes():
    step = autopar.parallelize(make_step(asks_for(P("model", "data"))), mesh_shape=(2, 4))
    with jax.set_mesh(mesh_of(data=2, model=4)):
        step.plan(PARAMS, BATCH)
    (planned,) = (program.planned for program in step._memory.programs.values())
    asked = [eqn for eqn in planned.traced.program.walk() if eqn.primitive.name == "constrain"]
    assert [planned.assignment.strategies[eqn].outputs[0].dims for eqn in asked] == [((1,), (0,))] * len(asked) != []


def test_unconstrained_dimensions_are_searched():
    step = autopar.parallelize(
        make_step(asks_for(P(P.UNCONSTRAINED, "y"))), mesh_shape=(2, 4), constraints=autopar.data_parallel("x")
    )
    assert local_shapes(step, "constrain") == {(16, 4)}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", [{"num_stages": 2}, {"num_stages": 1}])
def test_layouts_hold_in_stages_and_inside_of_scans(number):
    def scanned(ask):
        def step(params, x):
            def loss_of(params):
                out, _ = jax.lax.scan(lambda x, w: (ask(jnp.tanh(x @ w)), None), x, params)
                return jnp.mean(out**2)

            loss, gradients = jax.value_and_grad(loss_of)(params)
            return params - 0.1 * gradients, loss

        return step

    stack, x = jnp.stack([*PARAMS.values()] * 2), BATCH["x"]
    step = autopar.parallelize(scanned(asks_for(P(None, "x"))), mesh_shape=(2,), num_microbatches=4, **number)
    assert_same_as_jit(scanned(lambda x: x), step, stack, x, steps=2)
    plan = step.last_plan()
    stages = [stage.plan for stage in plan.stages] if number["num_stages"] == 2 else [plan]
    assert all(any(c.operand.startswith("float32[8,16]") for c in stage.collectives) for stage in stages)


def test_constraints_hold_for_named_values_and_results():
    for glob, primitive, shape in (("value/hid*", "name", (32, 2)), ("output/1/1", None, None)):
        step = autopar.parallelize(make_step(named), mesh_shape=(8,), constraints={glob: P(None, "x")})
        assert_same_as_jit(make_step(named), step, PARAMS, BATCH, steps=1)
        if primitive:
            assert local_shapes(step, primitive) == {shape}
        else:
            assert step(PARAMS, BATCH)[1][1].sharding.shard_shape((32, 16)) == (32, 2)


def test_a_glob_of_arguments_alone_leaves_results_free():
    constraints = [autopar.data_parallel(), {"*": autopar.Replicated()}]
    step = autopar.parallelize(make_step(named), mesh_shape=(8,), constraints=constraints)
    assert step.plan(PARAMS, BATCH).input("batch/x").spec == ((), ())
    assert local_shapes(step, "name") != {(32, 16)}


def asks_elsewhere(x):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh_of(a=2, b=4), P("a")))


REFUSED = {
    "no such axis": (asks_for(P("q")), {"mesh_shape": (8,)}, ("axis that no mesh has", "P('q',)", "The mesh has x")),
    "other sizes": (
        asks_elsewhere,
        {"mesh_shape": (8,)},
        (
            f"{Path(__file__).name}:{inspect.getsourcelines(asks_elsewhere)[1] + 1}",
            "on a mesh {'a': 2, 'b': 4}",
            "Give mesh_shape={'a': 2, 'b': 4}",
        ),
    ),
    "an axis of another shape": (asks_for(P("y")), {"mesh_shape": [(2,), (2, 2)]}, ("has no axis 'y'",)),
    "too few examples": (
        asks_for(P("x")),
        {"mesh_shape": (8,), "num_microbatches": 8},
        ("splits dimension 0 of a value of shape (4, 16) 8 ways", "a microbatch has fewer examples"),
    ),
    "no such value": (
        named,
        {"mesh_shape": (8,), "constraints": {"value/hide": P()}},
        ("'value/hide' matches no result and no named value of the step; there are: value/hidden",),
    ),
    "new state": (
        named,
        {"mesh_shape": (8,), "constraints": {"output/0/up": P("x")}},
        ("output/0/up is one on the new params/up", "constrain 'params/up'"),
    ),
}


@pytest.mark.parametrize(("ask", "settings", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_is_refused_with_a_way_out(ask, settings, words):
    with pytest.raises(ConstraintError) as caught:
        autopar.parallelize(make_step(ask), **settings).plan(PARAMS, BATCH)
    assert all(word in str(caught.value) for word in words), caught.value


def test_axes_stand_for_runs_of_axes_with_their_product_and_no_others():
    """All meshes of up to three axes of sizes 1, 2 and 4 against all of two: brute force over where the runs end."""
    for theirs in itertools.product((1, 2, 4, 8), repeat=2):
        asked = AskedLayout((("a",), ("b",)), tuple(zip("ab", theirs, strict=True)))
        for rank in (1, 2, 3):
            for ours in itertools.product((1, 2, 4), repeat=rank):
                ends = [n for n in range(rank + 1) if (math.prod(ours[:n]), math.prod(ours[n:])) == theirs]
                mesh = LogicalMesh.of(ours)
                if mesh.size == 1:
                    assert asked.layouts((8, 8), mesh, source="")[0].sharded_axes == ()
                elif not ends:
                    with pytest.raises(ConstraintError, match="no axes of the plan's mesh"):
                        asked.layouts((8, 8), mesh, source="")
                else:
                    (layout,) = asked.layouts((8, 8), mesh, source="")
                    runs = (range(ends[0]), range(ends[0], rank))
                    assert layout.dims == tuple(tuple(a for a in run if ours[a] > 1) for run in runs)

"""Scans over layers divided between stages: the same function in pieces, and one leaf to the user."""

import functools
import pickle
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import autopar
from autopar import stacks
from autopar.compat import Literal, name_stack
from autopar.constraints import whole_path
from autopar.errors import ArgumentError
from autopar.evaluate import bound
from autopar.merged_scans import merged
from autopar.pipeline_plan import PipelinePlan
from autopar.split_array import SplitArray, in_pieces, joined
from autopar.split_scans import split_scans
from autopar.stacks import cuts_for_stages, every_layer, find_stacks
from autopar.stages import forward_chain
from autopar.staging import divided_loop, time_loop
from autopar.trace import CallSignature, bind_arguments, trace
from tests import scanned_steps
from tests.oracles import assert_same_as_jit, assert_trees_close
from tests.pipeline_steps import ROWS, WIDTH, rows, trained_on
from tests.scanned_steps import LAYERS
from tests.test_stage_search import two_nodes


def traced(step, state, batch):
    """The traced step."""
    signature = CallSignature(step, (1,), (), "auto")
    return trace(signature, bind_arguments(signature, (state, batch), {}))


def evaluated(split, state, batch):
    """What a divided step computes, equation by equation."""
    step = split.step

    def run(inputs):
        values = dict(zip(step.program.invars, inputs, strict=True))

        def read(atom):
            return jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else values[atom]

        for eqn in step.program.equations:
            values.update(zip(eqn.outvars, bound(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in step.program.outvars]

    leaves = in_pieces(jax.tree.leaves((state, batch)), split.inputs)
    flat = joined(jax.jit(run)([*leaves, *step.constants]), split.outputs)
    return jax.tree.unflatten(split.whole.out_tree, flat)


def assert_same_function(example, split):
    """The divided step computes what the step does."""
    step, state, batch = example
    assert_trees_close(evaluated(split, state, batch), jax.jit(step)(state, batch), rtol_of_scale=tolerance(example))


def tolerance(example):
    """Sums of bfloat16 in another order differ by more."""
    step, state, batch = example
    return 3e-2 if "bf16" in str(jax.make_jaxpr(step)(state, batch)) else 1e-5


def cut_at(example, *cuts):
    """The example's step divided, its first stack at these layers."""
    step = traced(*example)
    return split_scans(step, (cuts, *(() for _ in find_stacks(step)[1:])))


def operations(split, name):
    """What operations of one kind give, in order: (type, is it of the backward pass)."""
    return [
        (eqn.outvars[0].aval.str_short(), "transpose(" in name_stack(eqn))
        for eqn in split.step.program.equations
        if eqn.primitive.name == name
    ]


def in_stages(step, num_stages=2, **options):
    """The step as a pipeline, the second stage on two devices if nothing else is said."""
    options.setdefault("mesh_shape", [(1,), (2,)] if num_stages == 2 else (1,))
    options.setdefault("num_microbatches", 4)
    return autopar.parallelize(step, num_stages=num_stages, **options)


# --- which dimensions count layers ------------------------------------------------------------------------------------


def test_what_is_stacked_is_found_through_casts_gradients_and_optimizers():
    step = traced(*scanned_steps.clipped_adamw())
    (stack,) = find_stacks(step)
    assert stack.length == LAYERS
    assert [eqn.params["reverse"] for eqn in stack.scans] == [False, True]
    paths = {leaf.path: stack.dims.get(v) for leaf, v in zip(step.inputs, step.program.invars, strict=True)}
    held = {path for path, dim in paths.items() if dim == 0}
    assert held == {f"state/{part}/{leaf}" for part in ("0", "1/1/0/mu", "1/1/0/nu") for leaf in ("w", "b")}
    outputs = [leaf.path for leaf, v in zip(step.outputs, step.program.outvars, strict=True) if v in stack.dims]
    assert len(outputs) == len(held)


def test_a_transposed_stack_counts_layers_along_its_second_dimension():
    step = traced(*scanned_steps.along_the_layers())
    (stack,) = find_stacks(step)
    assert {leaf.path: stack.dims.get(v) for leaf, v in zip(step.inputs, step.program.invars, strict=True)} == {
        "state/best": 0,
        "state/params/b": 0,
        "state/params/w": 1,
        "state/scale": 0,
        "batch/mask": None,
        "batch/x": None,
        "batch/y": None,
        "constant/0": 0,
        "constant/1": 0,
    }


@pytest.mark.parametrize("make", [scanned_steps.over_time, scanned_steps.single_layer], ids=lambda make: make.__name__)
def test_scans_over_time_and_over_one_layer_are_no_stacks(make):
    assert find_stacks(traced(*make())) == ()


def test_of_nested_scans_only_the_outer_is_divided():
    (stack,) = find_stacks(traced(*scanned_steps.nested()))
    assert stack.length == 3
    assert [eqn.loop.trips for eqn in stack.scans] == [3, 3]


# --- where to cut -----------------------------------------------------------------------------------------------------


def test_stages_of_equal_work_begin_between_layers():
    step = traced(*scanned_steps.plain())
    assert cuts_for_stages(step, 1) == ()
    assert cuts_for_stages(step, 2) in (((2,),), ((3,),))
    assert cuts_for_stages(step, 5) == ((1, 2, 3, 4),)


def test_two_stacks_of_equal_work_are_cut_between_for_two_stages_and_inside_for_four():
    step = traced(*scanned_steps.encoder_and_decoder())
    assert cuts_for_stages(step, 2) == ((), ())
    assert cuts_for_stages(step, 4) == ((2,), (2,))


def test_the_users_boundaries_say_where_stages_begin_and_no_scan_is_divided():
    def loss_of(params, batch):
        x = autopar.layer_boundary(scanned_steps.through(params, batch["x"]))
        return scanned_steps.error(scanned_steps.through(params, x), batch)

    step, state, batch = trained_on(loss_of, scanned_steps.stacked(), rows())
    assert cuts_for_stages(traced(step, state, batch), 4) == ((),)


def test_single_layers_are_merged_to_the_pieces_that_stages_need():
    step = traced(*scanned_steps.values_per_layer())
    split = split_scans(step, every_layer(step))
    assert split.cuts == ((1, 2, 3, 4),)
    loop = divided_loop(split, 4)
    chain = forward_chain(loop)
    coarse, again, cuts = merged(split, loop, (2, 3))
    assert coarse.cuts == ((2, 3),)
    merged_chain = forward_chain(again)
    assert [merged_chain[c].cut_bytes for c in cuts] == [chain[c].cut_bytes for c in (2, 3)]
    lengths = [link.equation.params["length"] for link in merged_chain if link.equation.loop is not None]
    assert lengths == [2, 1, 2]


def test_long_stacks_are_offered_in_groups_of_layers(monkeypatch):
    step = traced(*scanned_steps.values_per_layer())
    monkeypatch.setattr(stacks, "MOST_PIECES", 2)
    assert every_layer(step) == ((3,),)
    monkeypatch.setattr(stacks, "MOST_PIECES", 3)
    assert every_layer(step) == ((2, 4),)


def test_layers_that_run_from_the_last_to_the_first_are_merged_likewise():
    """The first stage has the last of five layers."""

    def loss_of(params, batch):
        x, _ = lax.scan(lambda x, p: (scanned_steps.block(x, p), None), batch["x"], params, reverse=True)
        return scanned_steps.error(x, batch)

    step = traced(*trained_on(loss_of, scanned_steps.stacked(), rows()))
    split = split_scans(step, every_layer(step))
    loop = divided_loop(split, 4)
    scans = [place for place, link in enumerate(forward_chain(loop)) if link.equation.loop is not None]
    coarse, again, cuts = merged(split, loop, (scans[1],))
    assert coarse.cuts == ((4,),)
    chain = forward_chain(again)
    assert [chain[c].equation.params["length"] for c in cuts] == [4]


# --- the same function ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", scanned_steps.ALL, ids=lambda make: make.__name__)
def test_a_step_in_pieces_computes_the_same(make):
    example = make()
    step = traced(*example)
    draw = random.Random(make.__name__)
    stacks = find_stacks(step)
    assert stacks
    cuts = tuple(tuple(sorted(draw.sample(range(1, s.length), draw.randint(1, s.length - 1)))) for s in stacks)
    assert_same_function(example, split_scans(step, cuts))


@pytest.mark.parametrize("seed", range(6))
def test_a_random_scan_in_random_pieces_computes_the_same(seed):
    example, length = random_scan(random.Random(seed))
    draw = random.Random(seed + 100)
    cuts = sorted(draw.sample(range(1, length), draw.randint(1, length - 1)))
    assert_same_function(example, cut_at(example, *cuts))


def random_scan(draw):
    """A step with a scan of a random body, direction and length, and random operations on what is stacked."""
    length, reverse, unroll = draw.randint(2, 6), draw.random() < 0.5, draw.choice([1, 2])
    functions = [jnp.tanh, jnp.sin, lambda x: x * 0.5, jax.checkpoint(lambda x: jnp.cos(x) * x)]
    inner = [draw.choice(functions) for _ in range(draw.randint(1, 3))]
    on_stack = draw.choice([lambda y: y, lambda y: y / 2 + 1, lambda y: y * y.sum(axis=1, keepdims=True)])
    reduction = draw.choice(
        [
            jnp.sum,
            jnp.max,
            lambda y: jnp.mean(y, axis=0).sum(),
            lambda y: jnp.sort(y, axis=0)[0].sum(),
            lambda y: y[-1, 0],
        ]
    )

    def loss_of(params, batch):
        def layer(carried, p):
            x, total = carried
            x = x @ p["w"] + params["shared"]
            for function in inner:
                x = function(x)
            return (x, total + x.mean()), x.mean(axis=0)

        start = (batch["x"], jnp.float32(0))
        (x, total), ys = lax.scan(layer, start, params["layers"], reverse=reverse, unroll=unroll)
        return jnp.mean((x - batch["y"]) ** 2) + 0.1 * total + 0.1 * reduction(on_stack(ys))

    layers = {"w": 0.5 * scanned_steps.stacked(length)["w"]}
    return trained_on(loss_of, {"layers": layers, "shared": jnp.full(WIDTH, 0.1)}, rows()), length


def test_nothing_stacked_is_joined_or_cut_in_an_ordinary_step():
    split = cut_at(scanned_steps.clipped_adamw(), 2, 3)
    assert not {"concatenate", "slice", "dynamic_slice"} & {eqn.primitive.name for eqn in split.step.program.equations}
    scans = [eqn for eqn in split.step.program.equations if eqn.loop is not None]
    assert [(eqn.params["length"], eqn.params["reverse"]) for eqn in scans] == [
        *((length, False) for length in (2, 1, 2)),
        *((length, True) for length in (2, 1, 2)),
    ]


def test_only_keys_made_whole_are_cut_for_dropout():
    assert operations(cut_at(scanned_steps.raw_key_dropout(), 2), "slice")[-2:] == [
        ("uint32[2,2]", False),
        ("uint32[3,2]", False),
    ]


def test_only_operations_between_layers_see_them_all_at_once():
    # A sum along the layers, a sort of all entries, and a result of the step that has an entry per layer.
    joined = [kind for kind, _ in operations(cut_at(scanned_steps.along_the_layers(), 3), "concatenate")]
    assert joined == ["float32[5,8]", "float32[40]", "float32[5]"]


def test_the_gradient_of_a_shared_weight_is_summed_in_each_piece_and_added_up_once():
    split = cut_at(scanned_steps.shared_weights(), 2)
    backward = [eqn for eqn in split.step.program.equations if eqn.loop is not None and eqn.params["reverse"]]
    late, early = backward
    handed_on = [v for v in early.invars if v in set(late.outvars)]
    assert handed_on == [late.outvars[1]]
    assert [v.aval.shape for v in late.outvars] == [(WIDTH, WIDTH), (ROWS, WIDTH), (3, WIDTH), (3, WIDTH, WIDTH)]


def test_a_sum_that_forward_carries_along_goes_with_the_activation():
    split = cut_at(scanned_steps.carried_sum(), 2)
    early, late = [e for e in split.step.program.equations if e.loop is not None and not e.params["reverse"]]
    handed_on = [v.aval.shape for v in late.invars if v in set(early.outvars)]
    assert handed_on == [(ROWS, WIDTH), ()]


def test_a_stack_that_the_user_sees_is_one_leaf_and_its_pieces_have_paths():
    split = cut_at(scanned_steps.plain(), 2)
    assert [leaf.path for leaf in split.step.inputs[:4]] == [
        "state/b[0:2]",
        "state/b[2:5]",
        "state/w[0:2]",
        "state/w[2:5]",
    ]
    assert split.step.state_of_output == (0, 1, 2, 3, None)
    assert [whole_path(leaf.path) for leaf in split.step.inputs[:5]] == ["state/b"] * 2 + ["state/w"] * 2 + [
        "batch/mask"
    ]
    assert whole_path("state/w[:, :, 3:5]") == "state/w"
    assert split.whole.inputs[0].path == "state/b"


def test_keys_of_layers_are_one_array_because_no_numpy_array_stands_for_pieces_of_them():
    split = cut_at(scanned_steps.keys_per_layer(), 2)
    assert [pieces.bounds for pieces in split.inputs[:3]] == [(), (0, 2, 5), (0, 2, 5)]
    assert [leaf.path for leaf in split.step.inputs[:2]] == ["state/keys", "state/params/b[0:2]"]


def test_without_cuts_the_step_is_as_it_was():
    step = traced(*scanned_steps.plain())
    assert split_scans(step, ((),)).step is step


# --- in pipelines -----------------------------------------------------------------------------------------------------


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
    loop, whole = divided_loop(split, 4), time_loop(split.whole, 4)
    assert {loop.plan.phases[part] == whole.plan.phases[origin] for part, origin in split.origins.items()} == {True}
    assert {part.source_info is origin.source_info for part, origin in split.origins.items()} == {True}
    assert not any("autopar" in name_stack(eqn) for eqn in split.step.program.walk())
    pieces = [eqn for eqn in split.step.program.equations if eqn.loop is not None]
    assert [split.origins[eqn].params["reverse"] for eqn in pieces] == [False, False, True, True]

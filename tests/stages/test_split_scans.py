"""Scans over layers divided: which dimensions count layers, where to cut, and the same function in pieces."""

import random

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import autopar
from autopar.compat import Literal, name_stack
from autopar.layouts.allowed import whole_path
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.evaluate import bind_equation
from autopar.program.loops import LoopEquation
from autopar.program.task_name import TaskName
from autopar.program.trace import trace
from autopar.split_array import cut_leaves, join_leaves
from autopar.stages.chain import forward_chain
from autopar.stages.cut import cut_stages
from autopar.stages.recompute_stages import recompute_in_backward
from autopar.stages.rejoin_scans import rejoin_scans
from autopar.stages.scan_stacks import cuts_for_stages, every_layer, find_stacks
from autopar.stages.split_scans import split_scans
from autopar.stages.time_loops import make_divided_loop, make_loops
from autopar.stages.tuning import Tuning
from tests.oracles import assert_trees_close
from tests.pipeline_steps import ROWS, WIDTH, rows, trained_on
from tests.stages import scanned_steps
from tests.stages.scanned_steps import LAYERS


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
            values.update(zip(eqn.outvars, bind_equation(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in step.program.outvars]

    leaves = cut_leaves(jax.tree.leaves((state, batch)), split.inputs)
    flat = join_leaves(jax.jit(run)([*leaves, *step.constants]), split.outputs)
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
    loop = make_divided_loop(split, 4)
    chain = forward_chain(loop)
    coarse, again, cuts = rejoin_scans(split, loop, (2, 3))
    assert coarse.cuts == ((2, 3),)
    merged_chain = forward_chain(again)
    assert [merged_chain[c].cut_bytes for c in cuts] == [chain[c].cut_bytes for c in (2, 3)]
    lengths = [link.equation.params["length"] for link in merged_chain if isinstance(link.equation, LoopEquation)]
    assert lengths == [2, 1, 2]


def test_pieces_are_the_scans_of_what_is_cut_forward_and_backward():
    step = traced(*scanned_steps.encoder_and_decoder())
    split = split_scans(step, ((2,), ()))
    assert len(split.pieces) == 4
    assert make_divided_loop(split, 4).pieces == make_loops(split, 2)(4).pieces == split.pieces
    assert not split_scans(step, ()).pieces


def test_a_scan_is_divided_where_the_share_of_a_stage_ends_that_is_done_again():
    """A scan is done again as a whole or not at all. Of two layers half is one, of three half is two."""
    step = traced(*scanned_steps.plain())
    split = split_scans(step, every_layer(step))
    loop = make_divided_loop(split, 4)
    cut = [place for place, link in enumerate(forward_chain(loop)) if isinstance(link.equation, LoopEquation)][2]
    divided = {shares: rejoin_scans(split, loop, (cut,), shares) for shares in ((0.0, 1.0), (0.5, 0.0), (0.5, 0.5))}
    assert {shares: coarse.cuts for shares, (coarse, _, _) in divided.items()} == {
        (0.0, 1.0): ((2,),),
        (0.5, 0.0): ((1, 2),),
        (0.5, 0.5): ((1, 2, 4),),
    }
    coarse, again, cuts = divided[0.5, 0.5]
    for shares, expected in ((0.5, 0.0), ((1, 2),)), ((0.0, 1.0), ((2,),)):
        other, other_loop, other_cuts = rejoin_scans(coarse, again, cuts, shares)
        assert other.cuts == expected, "what is in pieces is put together again, or divided further"
        chain = forward_chain(other_loop)
        assert chain[other_cuts[0]].equation.params["length"] == 3
    whole = split_scans(step, ())
    assert rejoin_scans(whole, make_divided_loop(whole, 4), (1,), (1.0, 0.0))[0] is whole


def test_what_is_done_again_of_scans_is_a_share_of_their_work():
    step = traced(*scanned_steps.plain())
    split = split_scans(step, ((2, 4),))
    loop = make_divided_loop(split, 4)
    cut = cut_stages(loop, ())
    again = recompute_in_backward(cut, (0.5,))
    before, after = (set(one.segments[TaskName("backward", 0)].reads) for one in (cut, again))
    scans = [link.equation for link in forward_chain(loop) if isinstance(link.equation, LoopEquation)]
    assert {scan.params["length"] for scan in scans if before.intersection(scan.outvars) - after} == {2}
    assert {scan.params["length"] for scan in scans if after.intersection(scan.outvars)} == {2, 1}


def test_what_is_put_together_has_the_phases_that_its_layers_had():
    """In 64 microbatches the embedding's gradient is best made after the loop, in 2 within it."""

    def loss_of(params, batch):
        x = params["table"][batch["tokens"]]
        x, _ = lax.scan(lambda x, p: (scanned_steps.block(x, p), None), x, params["layers"])
        return jnp.mean(x**2)

    params = {"table": jnp.ones((16, 8)), "layers": scanned_steps.stacked()}
    step = traced(*trained_on(loss_of, params, {"tokens": jnp.zeros((64, 4), jnp.int32)}))
    split = split_scans(step, every_layer(step))

    def sums_in_loop(loop):
        return {v.aval.shape for eqn in loop.plan.of_phase("body") for v in eqn.outvars} & {(16, 8)}

    own, taken = make_divided_loop(split, 64), make_loops(split, 2)(64)
    assert sums_in_loop(own) != sums_in_loop(taken)
    for loop in (own, taken):
        _, again, _ = rejoin_scans(split, loop, ())
        assert again.plan.taken_from == loop.plan.taken_from
        assert sums_in_loop(again) == sums_in_loop(loop)


def test_long_stacks_are_offered_in_groups_of_layers():
    step = traced(*scanned_steps.values_per_layer())
    assert every_layer(step, tuning=Tuning(most_pieces=2)) == ((3,),)
    assert every_layer(step, tuning=Tuning(most_pieces=3)) == ((2, 4),)


def test_layers_that_run_from_the_last_to_the_first_are_merged_likewise():
    """The first stage has the last of five layers."""

    def loss_of(params, batch):
        x, _ = lax.scan(lambda x, p: (scanned_steps.block(x, p), None), batch["x"], params, reverse=True)
        return scanned_steps.error(x, batch)

    step = traced(*trained_on(loss_of, scanned_steps.stacked(), rows()))
    split = split_scans(step, every_layer(step))
    loop = make_divided_loop(split, 4)
    scans = [place for place, link in enumerate(forward_chain(loop)) if isinstance(link.equation, LoopEquation)]
    coarse, again, cuts = rejoin_scans(split, loop, (scans[1],))
    assert coarse.cuts == ((4,),)
    chain = forward_chain(again)
    assert [chain[c].equation.params["length"] for c in cuts] == [4]
    assert rejoin_scans(split, loop, (scans[2],), (0.5, 0.0))[0].cuts == ((3, 4),), (
        "of the last two layers the last comes first"
    )


# --- the same function ------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("make", scanned_steps.ALL, ids=lambda make: make.__name__)
def test_a_step_in_pieces_computes_the_same(make):
    example = make()
    step = traced(*example)
    draw = random.Random(make.__name__)
    stacks = find_stacks(step)
    assert stacks
    cuts = tuple(tuple(sorted(draw.sample(range(1, s.length), draw.randint(1, s.length - 1)))) for s in stacks)
    assert_same_function(example, split_scans(step, cuts))


@pytest.mark.sampled(4)
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
    scans = [eqn for eqn in split.step.program.equations if isinstance(eqn, LoopEquation)]
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
    backward = [eqn for eqn in split.step.program.equations if isinstance(eqn, LoopEquation) and eqn.params["reverse"]]
    late, early = backward
    handed_on = [v for v in early.invars if v in set(late.outvars)]
    assert handed_on == [late.outvars[1]]
    assert [v.aval.shape for v in late.outvars] == [(WIDTH, WIDTH), (ROWS, WIDTH), (3, WIDTH), (3, WIDTH, WIDTH)]


def test_a_sum_that_forward_carries_along_goes_with_the_activation():
    split = cut_at(scanned_steps.carried_sum(), 2)
    early, late = [e for e in split.step.program.equations if isinstance(e, LoopEquation) and not e.params["reverse"]]
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

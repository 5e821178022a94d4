"""How a report names what a plan does: data, tensor, expert parallel, sharded; and that it names nothing else."""

import dataclasses

import jax
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.explain import explain, findings
from autopar.explain.strategies import traffic
from autopar.models.registry import build
from tests.plan_examples import (
    ALL_WHOLE,
    BATCH,
    DOWN,
    UP,
    WHOLE_BATCH,
    collective,
    leaf,
    plan_of,
)

IDLE_Y = "nothing is split over y and no collective runs over it: its devices repeat the same work"

SHARDED = [leaf(UP, (32, 64), (("x",), ())), leaf(DOWN, (64, 32), (("x",), ()))]
EXPERTS = (8, 32, 64), (("x",), (), ())
ROUTER = leaf("state/params/gate/kernel", (32, 8))


def test_a_split_batch_and_whole_parameters_are_data_parallel():
    plan = plan_of(leaf(UP, (32, 32)), BATCH, collectives=(collective("all-reduce", "x", count=3),))
    assert findings(plan) == (
        f"data parallel over x, 2 ways: the batch split by example, {ALL_WHOLE}",
        IDLE_Y,
    )


def test_collectives_are_summed_for_each_combination_of_axes():
    both = dataclasses.replace(collective("all-reduce", "x", count=3), axes=("x", "y"))
    items = (both, collective("all-gather", "y", count=2), collective("all-reduce", "y"), both)
    assert traffic(plan_of(BATCH, collectives=items)) == (
        "collectives over x and y: 6 all-reduce, 6.0 KiB; 6.00 ms in all, and compute takes 100 ms",
        "collectives over y: 2 all-gather, 2.0 KiB; 1 all-reduce, 1.0 KiB; 3.00 ms in all, and compute takes 100 ms",
    )
    assert "- collectives over y: 2 all-gather" in explain(plan_of(BATCH, collectives=items))


def test_a_step_without_parameters_can_be_data_parallel():
    assert findings(plan_of(BATCH))[0] == "data parallel over x, 2 ways: the batch split by example"


def test_axes_that_split_the_batch_together_are_one_finding():
    batch = leaf("batch/tokens", (16, 64), (("x", "y"), ()), role="batch")
    both = dataclasses.replace(collective("all-reduce", "x", operand="float32[32,32]"), axes=("x", "y"))
    assert findings(plan_of(leaf(UP, (32, 32)), batch, collectives=(both,))) == (
        f"data parallel over x and y, 8 ways: the batch split by example, {ALL_WHOLE}",
    )


def test_a_batch_of_which_only_some_inputs_are_split_says_so():
    plan = plan_of(leaf(UP, (32, 32)), BATCH, leaf("batch/mask", (16,), role="batch"))
    assert "1 of 2 batch inputs split by example" in findings(plan)[0]


def test_split_parameters_beside_a_whole_batch_are_tensor_parallel():
    parameters = (
        leaf(UP, (32, 32), ((), ("y",))),
        leaf(DOWN, (32, 32), (("y",), ())),
        leaf("state/params/up/bias", (32,), (("y",),)),
        leaf("state/params/norm/scale", (32,)),
    )
    found = findings(plan_of(*parameters, BATCH, collectives=(collective("all-reduce", "y", count=2),)))
    assert found == (
        "data parallel over x, 2 ways: the batch split by example, 4 of 4 parameters (100% of their bytes) replicated",
        "tensor parallel over y, 4 ways: 3 of 4 parameters (98% of their bytes) split, "
        "of them 1 of one dimension, 1 by column, 1 by row; the batch is not split by example",
    )


def test_parameters_split_as_the_batch_and_gathered_are_fully_sharded():
    moved = (
        collective("all-gather", "x", operand="float32[32,64]"),
        collective("all-gather", "x", operand="float32[32,64]"),
        collective("reduce-scatter", "x"),
    )
    assert findings(plan_of(*SHARDED, BATCH, collectives=moved)) == (
        "fully sharded (FSDP, ZeRO-3) over x, 2 ways: the batch and 2 of 2 parameters (100% of their bytes) split",
        IDLE_Y,
    )


def test_parameters_of_a_scan_may_be_gathered_one_layer_at_a_time():
    stacked = leaf("state/params/blocks/up", (12, 32, 64), ((), ("x",), ()))
    each = collective("all-gather", "x", operand="float32[32,64]", count=12)
    assert findings(plan_of(stacked, BATCH, collectives=(each,)))[0].startswith("fully sharded")
    once = dataclasses.replace(each, count=1)
    assert findings(plan_of(stacked, BATCH, collectives=(once,)))[0].startswith("tensor parallel")


def test_parameters_whose_activations_are_gathered_are_tensor_parallel_and_not_fully_sharded():
    gathered = collective("all-gather", "x", operand="float32[16,64,32]", count=4)
    found = findings(plan_of(*SHARDED, leaf("state/params/norm", (32,)), BATCH, collectives=(gathered,)))
    assert found[:2] == (
        "data parallel over x, 2 ways: the batch split by example, 1 of 3 parameters (1% of their bytes) replicated",
        "tensor parallel over x, 2 ways: 2 of 3 parameters (99% of their bytes) split, of them 2 by row",
    )


def test_one_small_gathered_parameter_does_not_make_a_plan_fully_sharded():
    parameters = (leaf(UP, (128, 128)), leaf("state/params/embedding", (16, 128), (("x",), ())))
    gathered = collective("all-gather", "x", operand="float32[16,128]")
    found = findings(plan_of(*parameters, BATCH, collectives=(gathered,)))
    assert not any("FSDP" in sentence for sentence in found)
    assert "1 of 2 parameters (89% of their bytes) replicated" in found[0]


def test_optimizer_leaves_split_alone_are_zero_1_or_2():
    inputs = (leaf(UP, (32, 32)), leaf("state/opt_state/0/mu/up/kernel", (32, 32), (("x",), ())), BATCH)
    moved = (collective("reduce-scatter", "x"), collective("all-gather", "x"))
    assert findings(plan_of(*inputs, collectives=moved)) == (
        f"data parallel over x, 2 ways: the batch split by example, {ALL_WHOLE}",
        "optimizer state sharded (ZeRO-1/2) over x, 2 ways: 1 of 1 optimizer leaves (100% of their bytes) split, "
        "their parameters are not",
        IDLE_Y,
    )


@pytest.mark.parametrize(("path", "router"), [("state/params/moe/up", ()), ("state/params/layer/wi", (ROUTER,))])
def test_experts_split_as_the_batch_with_all_to_all_are_expert_parallel(path, router):
    moments = leaf("state/opt_state/0/mu/" + path.removeprefix("state/params/"), *EXPERTS)
    rest = leaf("state/params/norm/scale", (32,))
    moved = (collective("all-to-all", "x", count=4, operand="float32[8,4,16,32]"), collective("all-reduce", "x"))
    found = findings(plan_of(leaf(path, *EXPERTS), moments, rest, *router, BATCH, collectives=moved))
    assert found[0].startswith("data parallel over x")
    assert found[1:] == (
        f"expert parallel over x, 2 ways: {path} split along the first dimension",
        IDLE_Y,
    )


@pytest.mark.parametrize(
    ("path", "kind"), [("state/params/moe/up", "all-reduce"), ("state/params/attention/out/kernel", "all-to-all")]
)
def test_without_all_to_all_or_any_sign_of_experts_a_split_first_dimension_is_not_expert_parallel(path, kind):
    found = findings(plan_of(leaf(path, *EXPERTS), BATCH, collectives=(collective(kind, "x"),)))
    assert not any("expert" in sentence for sentence in found)
    assert found[0].startswith("tensor parallel over x, 2 ways: 1 of 1 parameters")


def test_an_input_split_along_another_dimension_is_told_with_the_dimension():
    batch = leaf("batch/tokens", (16, 64), (("x",), ("y",)), role="batch")
    found = findings(plan_of(leaf(UP, (32, 32)), batch))
    assert found[1] == "inputs split over y, 4 ways, along dimension 1: batch/tokens"


def test_optimizer_state_split_over_an_axis_of_its_own_is_told():
    found = findings(plan_of(leaf(UP, (32, 32)), leaf("state/opt_state/mu/up/kernel", (32, 32), (("y",), ())), BATCH))
    assert found[1] == ("1 of 1 optimizer leaves (100% of their bytes) are split over y, 4 ways; parameters are not")


def test_an_axis_of_one_device_is_not_spoken_of():
    assert len(findings(plan_of(BATCH, mesh_shape=(2, 1)))) == 1


@pytest.mark.parametrize("path", ["state/params/mu/kernel", "state/w"])
def test_a_leaf_below_params_or_a_state_without_any_counts_as_parameters(path):
    found = findings(plan_of(leaf(path, (32, 32), ((), ("y",))), WHOLE_BATCH))
    assert any(sentence.startswith("tensor parallel over y, 4 ways: 1 of 1 parameters") for sentence in found)


def test_a_kernel_of_attention_is_no_expert_though_another_matrix_has_as_many_columns_as_it_has_rows():
    """The first dimension of a query kernel is the width of the model, which many matrices have as columns."""
    query = leaf("state/params/attention/query", (32, 8, 4), (("x",), (), ()))
    moved = (collective("all-to-all", "x", operand="float32[16,64,32]"),)
    found = findings(plan_of(query, leaf(DOWN, (64, 32)), BATCH, collectives=moved))
    assert not any("expert" in sentence for sentence in found)
    assert found[1].endswith("split, of them 1 along the first of more dimensions")


def test_experts_are_parallel_only_if_an_all_to_all_moves_something_by_expert():
    moved = (collective("all-to-all", "x", operand="float32[16,64,32]"),)
    found = findings(plan_of(leaf("state/params/moe/up", *EXPERTS), BATCH, collectives=moved))
    assert not any("expert parallel" in sentence for sentence in found)


@pytest.mark.parametrize(("rows", "begins"), [(4, "1 of 2 parameters (3% of"), (16, "tensor parallel over y, 4 ways")])
def test_a_few_split_bytes_are_told_and_do_not_make_a_plan_tensor_parallel(rows, begins):
    few = leaf("state/params/small", (rows, 32), ((), ("y",)))
    found = findings(plan_of(leaf(UP, (128, 32)), few, WHOLE_BATCH))
    assert next(sentence for sentence in found if "of them 1 by column" in sentence).startswith(begins)


@pytest.mark.parametrize(
    ("spec", "how"),
    [
        (((), (), (), ("x",)), "along the last of more dimensions"),
        (((), (), ("x",), ()), "along an inner dimension"),
        ((("x",), (), (), ()), "along the first of more dimensions"),
    ],
)
def test_a_kernel_of_a_convolution_is_split_along_a_dimension_that_is_told(spec, how):
    found = findings(plan_of(leaf("state/params/conv/kernel", (4, 4, 16, 32), spec), WHOLE_BATCH))
    assert f"of them 1 {how}; the batch is not split by example" in found[0]


EXPERTS_APART = {"state/params/*/moe/up": P("x"), "state/params/*/moe/down": P("x"), "batch/*": P("x")}
OUTPUTS_APART = {"state/params/*/up/kernel": P(None, "x")}
REAL = {
    "gpt": ({"layers": 1, "hidden": 32, "seq": 16, "batch": 8}, OUTPUTS_APART, {"tensor"}),
    "moe": ({"layers": 2, "hidden": 512, "heads": 8, "seq": 256, "batch": 64}, EXPERTS_APART, {"expert"}),
    "wide_resnet": ({"base_channels": 8, "width_factor": 1, "image_size": 8, "batch": 8}, {}, {"data"}),
    "unet": ({"base_channels": 8}, {}, {"data"}),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", REAL)
def test_plans_of_models_are_called_what_they_are(name):
    sizes, constraints, expected = REAL[name]
    model = build(name, **sizes)
    given = [constraints] if constraints else autopar.data_parallel()
    shapes = jax.eval_shape(model.create_state, jax.random.key(0)), model.batch_shape()
    settings = {"mesh_shape": {"x": 8}, "devices": 8, "cluster": "dgx-a100-80gb", "num_microbatches": 1}
    plan = autopar.parallelize(model.train_step, constraints=given, recompute="none", **settings).plan(*shapes)
    found = findings(plan)
    called = {sentence.partition(" parallel over ")[0] for sentence in found if " parallel over " in sentence}
    assert expected <= called
    assert ("expert" in called) == (name == "moe")
    assert ("tensor" in called) == (name == "gpt")
    assert any(sentence.startswith("fully sharded (FSDP, ZeRO-3)") for sentence in found) == (name == "moe")
    for sentence in found:
        if sentence.startswith("tensor parallel"):
            assert int(sentence.partition("(")[2].partition("%")[0]) >= 5

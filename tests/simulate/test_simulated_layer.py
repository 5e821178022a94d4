"""A row's parts, built from `models/` and planned under the row's plan as constraints, against their closed forms."""

import csv
import dataclasses
from collections import Counter
from pathlib import Path

import jax
import pytest
from jax.sharding import PartitionSpec as P

from autopar.__main__ import main
from autopar.cost_model.hardware import preset
from autopar.layouts.allowed import allowed_layouts
from autopar.layouts.constraints import Constraints, Rule, SplitBatch
from autopar.layouts.mesh import LogicalMesh
from autopar.plan import CollectivePlan
from autopar.simulate.closed_forms.job_prediction import Part, predict, predict_with
from autopar.simulate.closed_forms.layer_split import LayerSplit
from autopar.simulate.closed_forms.operations import Exchange, MatrixProduct, Work
from autopar.simulate.closed_forms.prices import InTraining, StagePrices
from autopar.simulate.closed_forms.residual_network import BlockSplit, ResidualNetworkShape, bottleneck_work
from autopar.simulate.closed_forms.training_job import TrainingJob
from autopar.simulate.closed_forms.transformer import block_work, head_work
from autopar.simulate.closed_forms.transformer_shape import TransformerShape
from autopar.simulate.model_parts import PartStep, UnbuildablePart, part_step
from autopar.simulate.part_plans import PlannedPart, exchanges_of
from autopar.simulate.planned_parts import PartPlanner, planned_prediction
from autopar.simulate.rows import Row, read_table
from tests.run_tables import FAMILIES, GOOD, SMALL_PLAN, json_of, table

YARDSTICK = Path(__file__).parents[1] / "data" / "yardstick" / "published_steps.csv"
CLUSTER = preset("dgx-a100-80gb")
LOOP = dataclasses.replace(CLUSTER, device=dataclasses.replace(CLUSTER.device, sustained={}))
"""Where products reach in training what they reach in a loop of their own, as in the planner's account."""
HIDDEN, SEQ, SAMPLES, DATA, TENSOR = 4096, 1024, 4, 2, 4
SHAPE = TransformerShape(
    family="gpt", layers=1, hidden=HIDDEN, heads=32, kv_heads=32, ffn_hidden=4 * HIDDEN, vocab=51200, seq_len=SEQ
)
SPLIT = LayerSplit(samples=SAMPLES, tensor_ranks=TENSOR)
BOUNDARY = 2 * SAMPLES * SEQ * HIDDEN


def job(split: LayerSplit, *, zero_stage: int = 0, precision: str = "fp16") -> TrainingJob:
    """A job of one stage whose parts are split so."""
    return TrainingJob(
        shape=SHAPE, devices=DATA * split.tensor_ranks, global_batch=SAMPLES * DATA, microbatch=SAMPLES, data_ranks=DATA,
        tensor_ranks=split.tensor_ranks, stages=1, virtual_stages=1, zero_stage=zero_stage, precision=precision,
    )  # fmt: skip


def planned(kind: str, split: LayerSplit, *, zero_stage: int = 0) -> PlannedPart:
    return PartPlanner().plan(
        CLUSTER, Part(kind=kind, shape=SHAPE, split=split, data_ranks=DATA), job(split, zero_stage=zero_stage)
    )


def listed(work: Work) -> Counter[tuple[str, float]]:
    """Kind and bytes of the exchanges of a closed form."""
    operations = (*work.forward, *work.recomputed, *work.backward)
    return Counter((op.kind, op.full_bytes) for op in operations if isinstance(op, Exchange))


def exchanged(part: PlannedPart) -> Counter[tuple[str, float]]:
    return Counter({(exchange.kind, exchange.full_bytes): count for exchange, count in part.exchanges})


def test_a_planned_layer_under_sequence_parallelism_communicates_as_megatron_does():
    """Four reduce-scatters, six gathers: what was gathered forward is gathered again backward, for only parts are kept."""
    split = dataclasses.replace(SPLIT, sequence_parallel=True)
    found = exchanged(planned("plain", split))
    assert found == {("all-gather", BOUNDARY): 6, ("reduce-scatter", BOUNDARY): 4}
    assert found == listed(block_work(SHAPE, split))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_shards_of_gradients_that_change_places_are_no_work_of_a_microbatch(zero_stage):
    """The tensor ranks' collectives alone, as without ZeRO; when gradients meet, the closed form says."""
    split = dataclasses.replace(SPLIT, sequence_parallel=True)
    assert exchanged(planned("plain", split, zero_stage=zero_stage)) == listed(block_work(SHAPE, split))


def test_all_of_a_layer_again_has_the_kernel_of_fused_attention_again():
    """Four passes of the whole layer in plan and closed form: the kernel's forward products run twice, its backward once."""
    split = dataclasses.replace(SPLIT, fused_attention=True, recompute="full")
    part, fused = (
        Part(kind="plain", shape=SHAPE, split=split, data_ranks=DATA),
        dataclasses.replace(job(split), fused_attention=True),
    )
    closed = block_work(SHAPE, split)
    work = PartPlanner().timing(CLUSTER, fused)(part, closed)
    batches = [op.batch * split.tensor_ranks for op in _compute(work) if isinstance(op, MatrixProduct)]
    assert batches == [2 * SAMPLES * 32, 2 * SAMPLES * 32, 5 * SAMPLES * 32]
    assert sorted(batches) == sorted(op.batch * TENSOR for op in _compute(closed) if _is_kernel(op))


def _is_kernel(operation: object) -> bool:
    return isinstance(operation, MatrixProduct) and operation.batch > 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_full_recomputation_keeps_is_a_layers_input_as_it_is_split(sequence_parallel):
    split = dataclasses.replace(SPLIT, recompute="full", sequence_parallel=sequence_parallel)
    expected = BOUNDARY / (TENSOR if sequence_parallel else 1)
    assert block_work(SHAPE, split).kept_bytes == expected
    assert planned("plain", split).kept_bytes == pytest.approx(expected, rel=0.01)


def test_without_it_each_sum_is_an_all_reduce():
    """Tokens are not split between tensor ranks even where that would be faster: the row's plan says so."""
    found = exchanged(planned("plain", SPLIT))
    assert found == listed(block_work(SHAPE, SPLIT)) == {("all-reduce", BOUNDARY): 4}


def test_tensor_ranks_do_not_gather_parameters_where_that_would_be_cheaper_than_to_gather_tokens():
    """Many tokens and a small hidden size: the free planner would bring the weights to the tokens."""
    shape = dataclasses.replace(SHAPE, seq_len=4096, hidden=512, ffn_hidden=2048)
    split = LayerSplit(samples=8, tensor_ranks=2, sequence_parallel=True, fused_attention=True)
    many = dataclasses.replace(job(split), shape=shape, devices=2, data_ranks=1, global_batch=8, microbatch=8)
    found = exchanged(PartPlanner().plan(CLUSTER, Part(kind="plain", shape=shape, split=split, data_ranks=1), many))
    boundary = 2 * 8 * 4096 * 512
    assert found == {("all-gather", boundary): 6, ("reduce-scatter", boundary): 4}


def test_tokens_change_places_between_expert_ranks_and_weights_stay():
    shape = dataclasses.replace(SHAPE, family="moe", experts=8, expert_group=SEQ)
    split = LayerSplit(samples=SAMPLES, expert_ranks=4)
    experts = dataclasses.replace(job(split), shape=shape, devices=4, data_ranks=4, expert_ranks=4)
    found = exchanged(PartPlanner().plan(CLUSTER, Part(kind="expert", shape=shape, split=split, data_ranks=4), experts))
    assert {kind for kind, _ in found} == {"all-to-all"}
    assert sum(found.values()) == 4
    assert all(size == pytest.approx(2 * BOUNDARY, rel=0.02) for _, size in found)


def test_the_planners_contractions_take_what_the_closed_forms_products_take():
    """One roofline prices both, with a launch for each; recomputation adds all of a forward pass."""
    part, again = planned("plain", SPLIT), planned("plain", dataclasses.replace(SPLIT, recompute="full"))
    products = [op for op in _compute(block_work(SHAPE, SPLIT)) if isinstance(op, MatrixProduct)]
    in_a_loop = StagePrices(
        cluster=LOOP, dtype="float16", element_bytes=2, mesh=(1, DATA, 1, 1, TENSOR), reached=InTraining()
    )
    assert part.work.contraction_s == pytest.approx(sum(map(in_a_loop.product_s, products)), rel=0.03)
    assert again.work.contraction_s / part.work.contraction_s == pytest.approx(4 / 3, rel=0.02)


def _compute(work: Work) -> tuple[object, ...]:
    return (*work.forward, *work.recomputed, *work.backward)


def test_gradients_of_a_planned_layer_are_reduced_once_over_data_ranks():
    """Parameters of the closed form, two bytes each: the planner sums before it widens them for the accumulators."""
    assert planned("plain", SPLIT).gradient_bytes == pytest.approx(2 * block_work(SHAPE, SPLIT).parameters, rel=0.01)
    alone = dataclasses.replace(SPLIT, tensor_ranks=1)
    assert planned("head", alone).gradient_bytes == pytest.approx(2 * head_work(SHAPE, alone).parameters, rel=0.01)


def test_collectives_are_a_microbatchs_or_a_steps_by_what_they_move():
    """Gradients over data ranks and small sums over tensor ranks are a step's; the rest, as priced, is a microbatch's."""
    gradients = [jax.ShapeDtypeStruct((64, 256), "float32"), jax.ShapeDtypeStruct((256,), "float32")]

    def collective(kind: str, axes: tuple[str, ...], size: int, operand: str) -> CollectivePlan:
        return CollectivePlan(
            kind=kind, axes=axes, bytes=size, count=2.0, operand=operand, source="a line", predicted_s=0.5
        )

    found, reduced = exchanges_of(
        [
            collective("all-reduce", ("data",), 65536, "float16[64,256]"),
            collective("all-gather", ("data", "tensor"), 65536, "float32[64,256]"),
            collective("all-reduce", ("tensor",), 1024, "float32[256]"),
            collective("reduce-scatter", ("tensor",), 8192, "float16[8,16,32]"),
            collective("all-gather", ("data",), 4096, "float16[8,16,16]"),
            collective("all-to-all", ("expert",), 2048, "float16[4,16,16]"),
        ],
        gradients,
    )
    assert reduced == 131072
    assert {(one.kind, one.group, one.full_bytes, one.seconds, count) for one, count in found} == {
        ("reduce-scatter", "tensor", 8192, 0.5, 2),
        ("all-gather", "data", 4096, 0.5, 2),
        ("all-to-all", "expert", 2048, 0.5, 2),
    }


def test_a_kernel_that_fuses_attention_replaces_what_touches_the_scores():
    """Hidden states as long as they are wide look like scores, and are none: every product of the linear layers stays."""
    shape = dataclasses.replace(SHAPE, hidden=SEQ, ffn_hidden=4 * SEQ)
    split = dataclasses.replace(SPLIT, tensor_ranks=1, fused_attention=True)
    part, fused = (
        Part(kind="plain", shape=shape, split=split, data_ranks=1),
        dataclasses.replace(job(split), shape=shape, fused_attention=True),
    )
    found = PartPlanner().plan(CLUSTER, part, fused)
    in_a_loop = StagePrices(cluster=LOOP, dtype="float16", element_bytes=2, mesh=(1, 1, 1, 1, 1), reached=InTraining())
    closed = block_work(shape, split)
    linear = [op for op in _compute(closed) if isinstance(op, MatrixProduct) and op.batch == 1.0]
    assert len(linear) == 12
    assert found.work.contraction_s == pytest.approx(sum(map(in_a_loop.product_s, linear)), rel=0.02)
    assert found.scores_bytes == 0.0
    work = PartPlanner().timing(CLUSTER, fused)(part, closed)
    kernels = [op for op in (*work.forward, *work.backward) if isinstance(op, MatrixProduct)]
    assert [kernel.batch for kernel in kernels] == [2 * SAMPLES * 32, 5 * SAMPLES * 32]


def stated(step: PartStep) -> dict[str, tuple[tuple[str, ...], ...]]:
    """The one layout that the constraints leave each leaf of the step's state."""
    mesh = LogicalMesh.of(step.axes)

    @dataclasses.dataclass(frozen=True)
    class Leaf:
        path: str
        shape: tuple[int, ...]
        role: str = "state"

    leaves = [
        Leaf(path="state/" + jax.tree_util.keystr(path, simple=True, separator="/"), shape=leaf.shape)
        for path, leaf in jax.tree_util.tree_flatten_with_path(step.state)[0]
    ]
    allowed = allowed_layouts(leaves, mesh, step.constraints)
    return {
        leaf.path: layouts[0].spec(mesh)
        for leaf, layouts in zip(leaves, allowed, strict=True)
        if layouts is not None and len(layouts) == 1
    }


def test_a_rows_plan_is_stated_on_every_leaf():
    split = dataclasses.replace(SPLIT, sequence_parallel=True)
    plain = stated(
        part_step(Part(kind="plain", shape=SHAPE, split=split, data_ranks=DATA), zero_stage=0, precision="fp16")
    )
    zero3 = stated(
        part_step(Part(kind="plain", shape=SHAPE, split=split, data_ranks=DATA), zero_stage=3, precision="fp16")
    )
    assert plain["state/taken/x"] == plain["state/given/x"] == (("data",), ("tensor",), ())
    assert plain["state/params/attention/qkv/kernel"] == ((), (), ("tensor",), ())
    assert plain["state/params/attention/out/kernel"] == (("tensor",), (), ())
    assert plain["state/params/ffn/up/kernel"] == ((), ("tensor",))
    assert plain["state/grads/ffn/down/kernel"] == (("tensor",), ())
    assert plain["state/params/ffn_norm/scale"] == ((),)
    assert zero3["state/params/ffn/up/kernel"] == (("data",), ("tensor",))
    assert zero3["state/grads/ffn/down/kernel"] == (("tensor", "data"), ())
    assert zero3["state/params/ffn_norm/scale"] == (("data",),)
    step = part_step(Part(kind="plain", shape=SHAPE, split=split, data_ranks=DATA), zero_stage=0, precision="fp16")
    assert len(plain) == len(jax.tree.leaves(step.state)) - 1  # but for the key of the dropout


def test_experts_stand_on_an_axis_of_their_own():
    shape = dataclasses.replace(SHAPE, family="moe", experts=8, expert_group=SEQ)
    split = dataclasses.replace(SPLIT, expert_ranks=2, tensor_ranks=2)
    step = part_step(Part(kind="expert", shape=shape, split=split, data_ranks=4), zero_stage=0, precision="bf16")
    assert step.axes == {"data": 2, "expert": 2, "tensor": 2}
    layouts = stated(step)
    assert layouts["state/params/moe/up"] == (("expert",), (), ("tensor",))
    assert layouts["state/taken/x"] == (("data", "expert"), (), ())


def test_a_leading_dimension_may_be_split_with_the_rest():
    """`SplitBatch.rest` states the other dimensions."""

    @dataclasses.dataclass(frozen=True)
    class Leaf:
        path: str = "batch/x"
        role: str = "batch"
        shape: tuple[int, ...] = (8, 16, 4)

    mesh = LogicalMesh.of({"data": 2, "tensor": 4})
    rule = Rule(glob="batch/*", layout=SplitBatch(("data",), P("tensor", None)))
    ((layout,),) = (found for found in allowed_layouts([Leaf()], mesh, Constraints((rule,))) if found)
    assert layout.spec(mesh) == (("data",), ("tensor",), ())


def test_a_bottleneck_is_planned_as_the_published_network_has_it():
    """One without a stride: where there is one, the planner counts the zeros between an input's gradients as work."""
    block = ResidualNetworkShape(depth=50, channels=160, width_factor=2, image_size=224, classes=1024).blocks[1]
    split = BlockSplit(samples=16)
    part = Part(
        kind=block,
        shape=ResidualNetworkShape(depth=50, channels=160, width_factor=2, image_size=224, classes=1024),
        split=split,
        data_ranks=2,
    )
    images = TrainingJob(
        shape=part.shape,
        devices=2,
        global_batch=32,
        microbatch=16,
        data_ranks=2,
        tensor_ranks=1,
        stages=1,
        virtual_stages=1,
        precision="fp32",
        optimizer="momentum",
    )
    cluster = preset("p3.16xlarge")
    found = PartPlanner().plan(cluster, part, images)
    work = bottleneck_work(block, split)
    assert found.gradient_bytes == pytest.approx(4 * work.parameters, rel=0.02)
    in_a_loop = StagePrices(
        cluster=cluster, dtype="float32", element_bytes=4, mesh=(1, 2, 1, 1, 1), reached=InTraining()
    )
    products = [op for op in _compute(work) if isinstance(op, MatrixProduct)]
    assert found.work.contraction_s == pytest.approx(sum(map(in_a_loop.product_s, products)), rel=0.03)
    assert found.exchanges == ()


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "gpt" else pytest.mark.slow) for name in FAMILIES]
)
def test_the_planner_and_the_closed_form_are_near_each_other_for_every_family(family, tmp_path, capsys):
    large = {
        "hidden": "2048",
        "heads": "16",
        "kv_heads": "16",
        "ffn_hidden": "8192",
        "seq_len": "1024",
        "recompute": "full",
    }
    own = FAMILIES[family] | ({"ffn_hidden": "5632"} if family == "llama" else {})
    row = GOOD | SMALL_PLAN | ({} if family == "wide_resnet" else large) | {"family": family} | own
    status, found, errors = json_of(["--table", str(table(tmp_path / "rows.csv", row))], capsys)
    assert (status, errors) == (0, "")
    (priced,) = found["rows"]
    assert priced["not_planned"] == ""
    assert abs(priced["apart"]) < 0.15
    assert priced["predicted_step_s"] == pytest.approx(priced["closed_form_step_s"] * (1 + priced["apart"]))
    assert found["summary"]["planned"] == 1


def test_equal_layers_of_several_rows_are_planned_once():
    planner = PartPlanner()
    rows = {row.id: row for row in read_table(YARDSTICK) if isinstance(row, Row)}
    for name in ("korth-175B-full", "korth-175B-selective", "korth-175B-full"):
        row = rows[name]
        found, note = planned_prediction(planner, row.cluster, predict(row.cluster, row.job).job)
        assert note == ""
        assert found is not None
        assert found.step.step_s == pytest.approx(row.step_s, rel=0.2)
    assert planner.plans == 6  # two kinds of layer, embedding and head, each of two rows


def test_the_closed_form_alone_plans_nothing(tmp_path, capsys):
    rows = table(tmp_path / "rows.csv", GOOD)
    _, found, _ = json_of(["--table", str(rows), "--closed-form"], capsys)
    assert found["summary"]["planned"] == 0
    assert "closed_form_step_s" not in found["rows"][0]


def test_a_part_that_models_cannot_build_leaves_the_closed_form_and_says_why(tmp_path, capsys):
    grouped = GOOD | {"id": "grouped", "kv_heads": "8"}
    odd = GOOD | {"id": "odd", "ffn_hidden": "32768"}
    rows = table(tmp_path / "rows.csv", grouped, odd)
    status, found, _ = json_of(["--table", str(rows)], capsys)
    assert status == 0
    notes = [row["not_planned"] for row in found["rows"]]
    assert "column 'kv_heads' is 8: models/ builds a gpt with as many as heads = 96" in notes[0]
    assert (
        "column 'ffn_hidden' is 32768: models/ builds a gpt whose feed-forward is a multiple of hidden = 12288"
        in notes[1]
    )
    assert [row["apart"] for row in found["rows"]] == [None, None]
    assert all(row["predicted_step_s"] == row["closed_form_step_s"] for row in found["rows"])
    assert main(["simulate", "--table", str(rows)]) == 0
    assert "models/ builds a gpt" in capsys.readouterr().out


def test_a_stem_alone_is_no_part_to_plan():
    shape = ResidualNetworkShape(depth=50, channels=160, width_factor=2, image_size=224, classes=1024)
    with pytest.raises(UnbuildablePart, match="a residual network's stem has a closed form only"):
        part_step(
            Part(kind="stem", shape=shape, split=BlockSplit(samples=4), data_ranks=1), zero_stage=0, precision="fp32"
        )


def test_the_closed_form_is_what_a_timing_that_changes_nothing_gives():
    with YARDSTICK.open(encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == 39
    row = next(row for row in read_table(YARDSTICK) if isinstance(row, Row) and row.id == "sc21-1008.0B")
    found = predict(row.cluster, row.job)
    assert predict_with(row.cluster, found.job, lambda part, work: work).step == found.step


@pytest.mark.slow
def test_plans_hold_over_the_published_table(capsys):
    _, found, _ = json_of(["--table", str(YARDSTICK)], capsys)
    assert found["summary"]["planned"] == 39
    assert found["summary"]["mean_apart"] < 0.04
    errors: dict[str, list[float]] = {}
    for row in found["rows"]:
        errors.setdefault(row["source"], []).append(abs(row["error"]))
    means = {source: sum(found) / len(found) for source, found in errors.items()}
    assert means["Korthikanti 2022"] < 0.03
    assert means["Megatron-LM SC21 Table 1"] < 0.08
    assert means["Megatron-Core r0.8 README"] < 0.10
    assert means["Megatron-LM 2020 TP scaling"] < 0.10

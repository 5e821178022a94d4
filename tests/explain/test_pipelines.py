"""What the report of a pipeline says: stages, bubble, bottleneck, what crosses between meshes."""

import dataclasses
import math

from autopar.explain import explain
from autopar.explain.stages import devices_text
from autopar.explain.units import seconds_text
from autopar.pipeline_plan import PipelinePlan, StagePlan, TransferPlan
from autopar.plan import ValuePlan
from tests.plan_examples import (
    ALL_WHOLE,
    BATCH,
    leaf,
    plan_of,
    rows_of,
)

LAYER, NORM, HEAD = "state/params/block_{}/up", "state/params/norm/scale", "state/params/head"
SENT = "received float32[16,64] of forward 0"


def stage_of(number: int, *inputs: ValuePlan, forward_s: float = 1e-3, mesh_shape=(2, 4), **changes) -> StagePlan:
    """A stage on a mesh of its own with axes x and y; the leaves of its state live there."""
    base = StagePlan(
        stage=number,
        mesh=number,
        first_device=number * math.prod(mesh_shape),
        leaves=tuple(value.path for value in inputs if value.role == "state"),
        forward_s=forward_s,
        backward_s=2 * forward_s,
        once_s=0.5e-3,
        microbatches_in_flight=2 - number % 2,
        peak_bytes=(3 - number) * 2**30,
        plan=plan_of(*inputs, mesh_shape=mesh_shape),
    )
    return dataclasses.replace(base, **changes)


def pipeline_of(*stages: StagePlan, transfers: tuple[TransferPlan, ...] = (), **changes) -> PipelinePlan:
    base = PipelinePlan(
        fingerprint="f",
        trail="",
        cluster="cpu",
        num_microbatches=4,
        schedule="1f1b",
        virtual_stages=1,
        cuts=(7,),
        stages=stages,
        transfers=transfers,
        step_s=0.02,
        bubble=0.25,
        memory_limit_bytes=12 * 2**30,
        planning_s=1.5,
    )
    return dataclasses.replace(base, **changes)


def test_devices_of_equal_stages_that_lie_apart_are_told_apart():
    alike = [stage_of(n, BATCH, first_device=first, mesh_shape=(2,)) for n, first in enumerate((0, 2, 8))]
    assert devices_text(alike) == "0-3,8-9"
    assert devices_text(alike[:1]) == "0-1"
    single = stage_of(0, BATCH, first_device=4, mesh_shape=(1,))
    assert devices_text([single, single]) == "4"


def two_stages(**second) -> tuple[StagePlan, StagePlan]:
    first = [leaf(LAYER.format(n), (32, 32)) for n in range(2)]
    then = [leaf(LAYER.format(n), (32, 32)) for n in range(2, 4)]
    return stage_of(0, *first, BATCH), stage_of(1, *then, leaf(NORM, (32,)), **second)


TRANSFERS = (
    TransferPlan(source=0, target=1, what="forward", bytes=1024, count=4, predicted_s=1e-3),
    TransferPlan(source=1, target=0, what="backward", bytes=2048, count=4, predicted_s=2e-3),
    TransferPlan(source=0, target=1, what="update", bytes=4, count=1, predicted_s=1e-6),
    TransferPlan(source=0, target=1, what="weights", bytes=512, count=1, predicted_s=1e-4),
)


def test_the_header_of_a_pipeline_states_stages_schedule_bubble_and_memory():
    text = explain(pipeline_of(*two_stages()))
    assert text.startswith(
        "2 stages x 8 devices (16 devices) on cluster cpu\n"
        "4 microbatches, schedule 1f1b\n"
        "predicted step 20.0 ms, bubble 25.0%; peak memory 3.0 GiB per device of 12.0 GiB (25%)\n"
        "compute 100 ms on the slowest stage; communication 100 ms in all stages\n"
        "planned in 1.50 s, not proven optimal: no bound on the best plan is known\n"
    )
    bounded = explain(pipeline_of(*two_stages(), lower_bound_s=0.016))
    assert (
        "planned in 1.50 s, not proven optimal: another plan, in stages or on one mesh, could save at most 20.0% of the step "
        "under the cost model" in bounded
    )
    assert "3.0 GiB per device, no limit" in explain(pipeline_of(*two_stages(), memory_limit_bytes=None))
    repeating = (dataclasses.replace(stage, recomputed_share=1.0) for stage in two_stages())
    again = explain(pipeline_of(*repeating, recompute=True))
    assert "\n4 microbatches, schedule 1f1b, backward repeats forward work\n" in again


def test_one_microbatch_is_written_in_the_singular():
    text = explain(pipeline_of(*two_stages(), num_microbatches=1))
    assert "\n1 microbatch, schedule 1f1b\n" in text


def test_the_header_tells_meshes_of_different_sizes_and_stages_that_share_a_mesh():
    sizes = [stage_of(n, mesh_shape=shape) for n, shape in enumerate(((1, 1), (1, 2), (2, 2)))]
    assert explain(pipeline_of(*sizes)).startswith("3 stages on 1 + 2 + 4 devices (7 devices) on cluster cpu\n")
    shared = [stage_of(n, mesh=n % 2, mesh_shape=(1, 1)) for n in range(4)]
    text = explain(pipeline_of(*shared, virtual_stages=2, schedule="interleaved"))
    assert text.startswith("4 stages on 2 meshes (2 virtual stages each) x 1 device (2 devices) on cluster cpu\n")


def test_the_bubble_is_told_in_seconds_of_the_busiest_mesh():
    text = explain(pipeline_of(*two_stages(forward_s=2e-3)))
    assert (
        "- the bubble costs 6.00 ms per step: the busiest mesh waits that long for others, and works 24.0 ms; " in text
    )
    assert "more microbatches make it smaller" in text
    none = explain(pipeline_of(*two_stages(forward_s=2e-3), bubble=0.0))
    assert "- no bubble: the busiest mesh works 24.0 ms per step without waiting" in none


def test_the_bottleneck_is_the_mesh_with_most_work_and_balance_is_said():
    text = explain(pipeline_of(*two_stages(forward_s=2e-3)))
    assert (
        "- stage 1 is the bottleneck: 6.00 ms of work per microbatch, 2.0 times as much as stage 0 with 3.00 ms" in text
    )
    balanced = explain(pipeline_of(*two_stages(forward_s=1.01e-3)))
    assert "- the stages are balanced: from 3.00 ms to 3.03 ms of work per microbatch" in balanced
    shared = [stage_of(n, mesh=n % 2, forward_s=1e-3 * (1 + n % 2)) for n in range(4)]
    assert (
        "- mesh 1 (stages 1 and 3) is the bottleneck: 12.0 ms of work per microbatch, 2.0 times as much as "
        "mesh 0 (stages 0 and 2) with 6.00 ms"
    ) in explain(pipeline_of(*shared, virtual_stages=2, schedule="interleaved"))


def test_the_fullest_mesh_and_the_longest_update_are_named():
    text = explain(pipeline_of(*two_stages(once_s=1e-3)))
    assert ["once per step, such as the update, on stage 1", "1.00 ms"] in rows_of(text, "Time of the step")
    assert (
        "- stage 0 needs the most memory: 3.0 GiB per device, with the activations of 2 microbatches in flight" in text
    )


def test_what_crosses_is_summed_by_the_pass_that_reads_it():
    text = explain(pipeline_of(*two_stages(), transfers=TRANSFERS))
    assert (
        "- the meshes send each other per step: 4.0 KiB for forward passes; 8.0 KiB for backward passes; 4 B once, for the "
        "update; 512 B once, for shared weights\n"
    ) in text
    assert "- the meshes send each other nothing" in explain(pipeline_of(*two_stages()))


def test_the_table_of_stages_says_where_what_lives():
    rows = rows_of(explain(pipeline_of(*two_stages())), "Stages (forward and backward per microbatch)")
    assert rows == [
        ["0", "0", "0-7", "x=2, y=4", "2", "block_{0,1}", "1.00 ms", "2.00 ms", "500 us", "100 ms", "2", "3.0 GiB"],
        [
            "1",
            "1",
            "8-15",
            "x=2, y=4",
            "3",
            "block_{2,3}, norm",
            "1.00 ms",
            "2.00 ms",
            "500 us",
            "100 ms",
            "1",
            "2.0 GiB",
        ],
    ]


def test_a_module_on_two_stages_lives_there_in_part_and_a_state_without_params_by_its_first_names():
    head = stage_of(0, leaf(f"{HEAD}/kernel", (32, 8)), leaf(LAYER.format(0), (32, 32)), mesh_shape=(1, 1))
    rest = stage_of(1, leaf(f"{HEAD}/bias", (8,)), mesh_shape=(1, 1))
    bare = stage_of(2, leaf("state/w", (2,)), leaf("state/v", (2,)), mesh_shape=(1, 1))
    rows = rows_of(explain(pipeline_of(head, rest, bare, stage_of(3))), "Stages (forward and backward per microbatch)")
    assert [row[5] for row in rows] == ["block_0, head (part)", "head (part)", "w, v", "-"]
    assert [row[2] for row in rows] == ["0", "1", "2", "24-31"]


def test_the_table_of_transfers_holds_each_and_their_sum():
    rows = rows_of(explain(pipeline_of(*two_stages(), transfers=TRANSFERS)), "Transfers between meshes per step")
    assert rows == [
        ["stage 0", "stage 1", "forward", "4", "1.0 KiB", "4.0 KiB", "1.00 ms", "4.00 ms"],
        ["stage 1", "stage 0", "backward", "4", "2.0 KiB", "8.0 KiB", "2.00 ms", "8.00 ms"],
        ["stage 0", "stage 1", "update", "1", "4 B", "4 B", "1.00 us", "1.00 us"],
        ["stage 0", "stage 1", "shared weights", "1", "512 B", "512 B", "100 us", "100 us"],
        ["all", "10", "12.5 KiB", "12.1 ms"],
    ]
    assert "Transfers" not in explain(pipeline_of(*two_stages()))


def test_each_stage_has_its_own_strategies_and_what_it_receives_forward_is_its_batch():
    sent = dataclasses.replace(leaf(SENT, (16, 64), (("x",), ()), role="other"), from_forward=True)
    first = stage_of(0, leaf(LAYER.format(0), (32, 32), ((), ("y",))), BATCH)
    text = explain(pipeline_of(first, stage_of(1, leaf(LAYER.format(1), (32, 32)), sent)))
    assert "- stage 0: tensor parallel over y, 4 ways: 1 of 1 parameters (100% of their bytes) split" in text
    assert f"- stages 0 to 1: data parallel over x, 2 ways: the batch split by example, {ALL_WHOLE}" in text


def test_leaves_that_a_stage_reads_of_other_meshes_are_told_and_are_not_its_parameters():
    borrowed = leaf(LAYER.format(0), (32, 32))
    sent = dataclasses.replace(leaf(SENT, (16, 64), (("x",), ()), role="other"), from_forward=True)
    second = stage_of(1, leaf(LAYER.format(1), (32, 32)), borrowed, sent)
    second = dataclasses.replace(second, leaves=(LAYER.format(1),))
    text = explain(pipeline_of(stage_of(0, borrowed, BATCH), second))
    assert (
        "- stage 1: reads 1 leaf of other meshes, 4.0 KiB per device, once per step: state/params/block_0/up\n" in text
    )
    assert f"- stages 0 to 1: data parallel over x, 2 ways: the batch split by example, {ALL_WHOLE}" in text
    assert "- stage 0: reads" not in text
    on_one_mesh = dataclasses.replace(second, mesh=0)
    assert "of other meshes" not in explain(pipeline_of(stage_of(0, borrowed, BATCH), on_one_mesh, virtual_stages=2))


def test_full_adds_the_tables_of_each_stage():
    plan = pipeline_of(*two_stages())
    text = explain(plan, full=True)
    first, second = text.split("\nStage 0: mesh x=2, y=4\n")[1].split("\nStage 1: mesh x=2, y=4\n")
    assert [row[0] for row in rows_of(first, "Parameters and state")] == [LAYER.format(0), LAYER.format(1), "all"]
    assert [row[0] for row in rows_of(second, "Parameters and state")][-2:] == [NORM, "all"]
    assert "\nParameters and state\n" not in explain(plan), "one table holds those of all stages"


def test_a_picture_of_the_schedule_is_printed_as_it_is_given():
    picture = "mesh 0 | F0 [bold] " + "F1 " * 60 + "\n"
    title = "Schedule: F0 is the forward of microbatch 0 (columns are not to scale)"
    assert f"\n{title}\n{picture.rstrip()}\n" in explain(pipeline_of(*two_stages()), schedule_grid=picture)
    assert "Schedule" not in explain(pipeline_of(*two_stages()))


def test_the_letters_in_a_picture_of_the_schedule_are_explained():
    picture = "mesh 0 | F0 .  B0 -  W0\n"
    text = explain(pipeline_of(*two_stages(), virtual_stages=2), schedule_grid=picture)
    assert (
        " Schedule: F0 is the forward of microbatch 0, B0 its backward, W0 its weight gradient, F0b its forward on the mesh's "
        "second stage, - goes on, . waits (columns are not to scale) "
    ) in " ".join(text.split())


def test_microbatches_on_one_mesh_are_told():
    assert "(8 devices) on cluster cpu, in 4 microbatches\n" in explain(plan_of(BATCH, num_microbatches=4))
    assert "microbatches" not in explain(plan_of(BATCH))


def test_the_stages_between_which_microbatches_go_from_node_to_node_are_told():
    stages = tuple(stage_of(n, mesh_shape=(2, 2)) for n in range(4))
    sent = [dataclasses.replace(TRANSFERS[0], source=n, target=n + 1, what="forward") for n in range(3)]
    sent[1] = dataclasses.replace(sent[1], predicted_s=20e-3)
    plan = pipeline_of(*stages, transfers=tuple(sent), cluster="p3.16xlarge")
    said = (
        "- the devices are 2 nodes of 8: from stage 1 to 2 activations go from node to node, which takes 20.0 ms each time, and "
        f"within one {seconds_text(TRANSFERS[0].predicted_s)}\n"
    )
    assert said in explain(plan)
    assert "node to node" not in explain(dataclasses.replace(plan, cluster="a file of mine"))

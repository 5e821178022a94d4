"""The search over stages: layers are planned once, one mesh stays a candidate, and what is chosen runs like jit."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.cost_model.hardware import preset
from autopar.errors import ArgumentError, OutOfMemoryError
from autopar.inter_op.candidates.timetables import Timetable
from autopar.inter_op.candidates.tuning import TUNING
from autopar.inter_op.plan_pipeline import PipelineWishes
from autopar.inter_op.plan_stage import plan_program
from autopar.inter_op.plan_stages import StageRequest, plan_stages
from autopar.inter_op.planned_layers import PlannedLayers
from autopar.inter_op.search import search_stages
from autopar.inter_op.search_pipeline import search_pipeline
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.request import PlanRequest
from autopar.layouts.constraints import Constraints
from autopar.layouts.mesh import LogicalMesh
from autopar.pipeline_plan import PipelinePlan, plan_from_json
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.trace import trace
from autopar.schedules.schedules import NAMED_SCHEDULES, TRAINING
from autopar.solver.budget import Budget
from autopar.stages.chain import forward_chain
from autopar.stages.cut import cut_stages
from autopar.stages.even_cuts import boundaries
from autopar.stages.split_scans import split_scans
from autopar.stages.time_loops import make_loops, make_time_loop
from tests.fast_part import on_the_diagonal
from tests.oracles import assert_same_as_jit


def two_nodes(devices_per_node=2):
    """A machine of small nodes with a slow network between them."""
    machine = preset("p3.16xlarge")
    inner, *outer = machine.tiers
    return dataclasses.replace(
        machine, name="two nodes", tiers=(dataclasses.replace(inner, devices=devices_per_node), *outer)
    )


def step(weights, x):
    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def arguments(width, layers=4, batch=8):
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=(width, width)) / width**0.5, jnp.float32) for _ in range(layers)]
    return weights, jnp.asarray(rng.normal(size=(batch, width)), jnp.float32)


def traced_step(weights, x, fun=step):
    signature = CallSignature(fun, (1,), (), "auto")
    return trace(signature, bind_arguments(signature, (weights, x), {}))


def request_on(machine, limit=None, processes=1):
    return PlanRequest(
        meshes=(),
        cluster=machine,
        memory_limit_bytes=limit,
        constraints=Constraints(),
        options=PlannerOptions(),
        processes=processes,
    )


class CountingPlanner:
    """Plans as usual, and keeps what it was asked to plan: programs, and the meshes for each."""

    def __init__(self):
        self.asked = []

    def __call__(self, program, request):
        self.asked.append((program, request.meshes))
        return plan_program(program, request)

    @property
    def sizes(self):
        """The numbers of devices on which something was planned."""
        return {mesh.size for _, meshes in self.asked for mesh in meshes}


def searched(width, devices, machine, limit=None, batch=8, budget=None, **options):
    split = split_scans(traced_step(*arguments(width, batch=batch)), ())
    request = dataclasses.replace(request_on(machine, limit), budget=budget or Budget())
    options = {"timetables": [Timetable(4, "1f1b")], **options}
    loop_of = make_loops(split, max(2, options["timetables"][0].microbatches))  # a loop also of one, as beside others
    return search_stages(loop_of, request, devices=devices, **options)


def test_the_chosen_stages_use_all_devices_and_cut_between_layers():
    found = searched(64, 4, two_nodes())
    assert sum(found.sizes) == 4
    assert len(found.cuts) == len(found.sizes) - 1
    assert list(found.cuts) == sorted(set(found.cuts))
    chain = forward_chain(found.loop)
    assert {chain[cut].cut_bytes for cut in found.cuts} == {4 * 8 * 64}, "what one layer hands to the next"
    for size, meshes in zip(found.sizes, found.meshes, strict=True):
        assert {mesh.size for mesh in meshes} == {size}


def test_a_given_number_of_stages_is_kept():
    found = searched(64, 4, two_nodes(), num_stages=2)
    assert len(found.sizes) == 2
    assert [stage.first_layer for stage in found.choice.stages] == [0, found.choice.stages[0].end_layer]


def test_weights_that_one_device_cannot_hold_are_cut_and_too_small_a_limit_names_the_stage():
    with pytest.raises(OutOfMemoryError, match=r"stage 0, layers 0 to \d+ on a submesh of .*, needs [\d,]+ bytes"):
        searched(64, 4, two_nodes(), limit=1000)


def test_across_nodes_the_faster_of_one_mesh_and_stages_is_taken_and_runs_like_jit():
    weights, x = arguments(256)
    options = {"devices": jax.devices()[:4], "cluster": two_nodes(), "num_microbatches": 4}
    parallel = autopar.parallelize(step, **options)
    plan = parallel.plan(weights, x)
    assert plan.step_s <= autopar.parallelize(step, **options, num_stages=1).plan(weights, x).step_s
    assert isinstance(plan, PipelinePlan), (
        "a layer's gradients of 256 KB cost more over the slow network than activations"
    )
    assert plan_from_json(plan.to_json()) == plan
    assert_same_as_jit(step, parallel, weights, x)


def test_stages_that_are_equal_are_planned_once_and_run_like_jit():
    planner = CountingPlanner()
    weights, x = arguments(32, layers=4)
    wanted = StageRequest(meshes=((LogicalMesh.of((1,)),),) * 4, num_stages=4, num_microbatches=4)
    staged = plan_stages(traced_step(weights, x), wanted, request_on(preset("cpu")), planner=planner)
    planned = [program.step.fingerprint for program, _ in planner.asked]
    assert len(planned) == len(set(planned)) == 3, "the first, one of the two in the middle, the last"
    parallel = autopar.parallelize(step, devices=4, num_stages=4, num_microbatches=4, mesh_shape=[(1,)] * 4)
    plan = parallel.plan(weights, x)
    assert [stage.plan.fingerprint for stage in plan.stages] == [stage.plan.fingerprint for stage in staged.stages]
    assert [stage.leaves for stage in plan.stages] == [(f"weights/{i}",) for i in range(4)]
    assert_same_as_jit(step, parallel, weights, x)


def test_the_search_recomputes_where_activations_alone_are_too_large():
    traced = traced_step(*arguments(16, layers=4, batch=4096))

    def found(limit, *shares):
        return search_stages(
            lambda count: make_time_loop(traced, count),
            request_on(two_nodes(), limit),
            devices=4,
            timetables=[Timetable(4, "gpipe")],
            num_stages=2,
            shares=shares,
        )

    def fits(limit):
        try:
            found(limit, 0.0)
        except OutOfMemoryError:
            return False
        return True

    free = found(None, 0.0, 0.5, 1.0)
    assert free.shares == (0.0, 0.0)
    assert found(None, 1.0).choice.step_s > free.choice.step_s, "backward takes a forward more"
    need = max(stage.peak_bytes for stage in free.choice.stages) / TUNING.room
    limit = next(int(need * part) for part in np.arange(1.0, 0.1, -0.02) if not fits(int(need * part)))
    all_of_it, some_of_it = found(limit, 0.0, 1.0), found(limit, 0.0, 0.5, 1.0)
    assert any(all_of_it.shares)
    assert any(some_of_it.shares)
    assert all_of_it.choice.step_s >= some_of_it.choice.step_s > free.choice.step_s
    assert sum(some_of_it.shares) < sum(all_of_it.shares), "half of it is enough somewhere"


def test_a_submesh_of_several_nodes_is_planned_only_where_it_may_pay():
    """Even perfect division over two nodes gains less than the slow network costs; then four devices are never planned."""
    planner = CountingPlanner()
    assert searched(64, 4, two_nodes(), num_stages=2, planner=planner).sizes == (2, 2)
    assert planner.sizes == {1, 2}


def test_devices_that_no_dimension_can_use_are_not_planned_for():
    """Three divides no dimension of this step: a layer on six devices is a layer on two."""
    planner = CountingPlanner()
    found = searched(64, 6, preset("cpu"), planner=planner)
    assert planner.sizes >= {1, 2}
    assert all(size % 3 for size in planner.sizes)
    assert sum(found.sizes) == 6
    planner = CountingPlanner()
    searched(96, 6, preset("cpu"), planner=planner)
    assert any(size % 3 == 0 for size in planner.sizes)


def test_a_layer_that_can_use_more_devices_than_the_repeated_one_is_planned_on_them():
    """Three divides the last layer's width alone: the others are planned on two of six devices."""
    weights, x = arguments(64, layers=6)
    traced = traced_step([*weights, jnp.ones((64, 96), jnp.float32)], x)
    request = request_on(preset("cpu"))
    tables = [Timetable(4, "1f1b")]
    found = search_stages(lambda m: make_time_loop(traced, m), request, devices=6, timetables=tables)
    assert sum(found.sizes) == 6
    with pytest.raises(ArgumentError, match="No choice of stages is left"):
        search_stages(lambda m: make_time_loop(traced, m), request, devices=6, timetables=tables, num_stages=2)


def test_a_layer_that_repeats_decides_on_which_meshes_the_others_are_planned():
    planner = CountingPlanner()
    traced = traced_step(*arguments(64, layers=8, batch=4096))
    search_stages(
        lambda m: make_time_loop(traced, m),
        request_on(preset("cpu")),
        devices=4,
        timetables=[Timetable(4, "1f1b")],
        tuning=dataclasses.replace(TUNING, same_meshes=0.5),
        planner=planner,
    )
    shapes = {}
    for program, meshes in planner.asked:
        shapes.setdefault(program.stage, []).append({mesh.shape for mesh in meshes if mesh.size == 4})
    asked = {stage: max(of, key=len) for stage, of in shapes.items()}
    (common,) = [stage for stage, of in asked.items() if len(of) > 1]
    assert asked[common] >= {(4,), (2, 2)}
    assert common not in (0, max(asked)), "the first and the last are of their own kind"
    assert all(len(of) == 1 for stage, of in asked.items() if stage != common)


def test_a_submesh_of_several_nodes_is_chosen_where_communication_is_free():
    """One stage has no bubble. A search that the clock ends first chooses among what is planned, not among estimates."""
    machine = two_nodes()
    free = tuple(dataclasses.replace(tier, latency_s=0.0, bytes_per_s=1e18) for tier in machine.tiers)
    machine = dataclasses.replace(machine, tiers=free)
    assert searched(512, 4, machine, batch=8192).sizes == (4,)
    assert set(searched(512, 4, machine, batch=8192, budget=Budget(seconds=0)).sizes) <= {1, 2}


def timetables_of(counts):
    shapes = (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2))
    return [Timetable(m, name, v) for m in counts for name, v in shapes if v == 1 or m % 2 == 0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("sizes", "num_stages"), on_the_diagonal([(64, 8), (1024, 1024)], [None, 2]))
def test_the_search_over_timetables_finds_what_a_search_of_each_alone_finds(sizes, num_stages):
    """Alone, each number of microbatches is planned in full; together, some are only estimated."""
    width, batch = sizes
    tables = timetables_of((4, 1, 2, 8))
    alone = {t: searched(width, 4, two_nodes(), batch=batch, timetables=[t], num_stages=num_stages) for t in tables}
    least_s = min(found.choice.step_s for found in alone.values())
    found = searched(width, 4, two_nodes(), batch=batch, timetables=tables, num_stages=num_stages)
    assert found.choice.step_s <= least_s * (1 + TUNING.worth)
    assert found.choice.step_s == pytest.approx(alone[found.timetable].choice.step_s, rel=0.02)


def test_other_numbers_of_microbatches_are_planned_on_few_submeshes():
    planner = CountingPlanner()
    searched(64, 4, two_nodes(), timetables=timetables_of((4, 1, 2, 8)), num_stages=2, planner=planner)
    planned = [(program.cut.loop.plan.microbatches, meshes[0].size) for program, meshes in planner.asked]
    sizes = {m: {size for count, size in planned if count == m} for m, _ in planned}
    assert sizes[4] == {1, 2}
    assert len(sizes) < 4, "not every number is planned"
    assert all(len(of) == 1 for m, of in sizes.items() if m != 4)


def test_layers_are_planned_first_in_a_number_of_microbatches_that_may_fit():
    """Of the usual number, in which not even the layers that repeat fit, nothing but these is planned."""

    def found(limit, *counts, planner=plan_program):
        tables = [Timetable(count, "1f1b") for count in counts]
        traced = traced_step(*arguments(16, layers=8, batch=4096))
        loop_of = make_loops(split_scans(traced, ()), counts[0])
        request = request_on(two_nodes(), limit)
        return search_stages(loop_of, request, devices=4, timetables=tables, planner=planner)

    free = found(None, 16)
    limit = int(1.1 * max(stage.peak_bytes for stage in free.choice.stages) / TUNING.room)
    with pytest.raises(OutOfMemoryError):
        found(limit, 2)
    planner = CountingPlanner()
    both = found(limit, 2, 16, planner=planner)
    asked = {(program.cut.loop.plan.microbatches, program.stage) for program, _ in planner.asked}
    assert len([stage for count, stage in asked if count == 2]) == 1
    assert len([stage for count, stage in asked if count == 16]) > 1
    assert both.timetable.microbatches == 16
    assert both.choice.step_s == found(limit, 16).choice.step_s


def test_a_number_in_which_the_step_cannot_be_cut_is_left_out():
    traced, request = traced_step(*arguments(64)), request_on(two_nodes())
    tables = [Timetable(m, "1f1b") for m in (4, 3)]
    found = search_stages(
        lambda count: make_time_loop(traced, count), request, devices=4, timetables=tables, num_stages=2
    )
    assert found.timetable == Timetable(4, "1f1b")
    assert [one.num_microbatches for one in found.compared] == [4]


@pytest.mark.sweep
@pytest.mark.parametrize("counts", [(2, 8), pytest.param((1, 2, 4, 8), marks=pytest.mark.slow)])
def test_across_nodes_the_chosen_timetable_is_near_the_best_by_hand_and_says_what_it_beat(counts):
    weights, x = arguments(256, layers=8, batch=32)

    def planned(**options):
        options = {"devices": jax.devices()[:4], "cluster": two_nodes(), **options}
        return autopar.parallelize(step, **options).plan(weights, x)

    plan = planned()
    by_hand = [
        planned(num_stages=p, num_microbatches=m, schedule=s) for p in (2, 4) for m in counts for s in ("1f1b", "zb-h1")
    ]
    assert isinstance(plan, PipelinePlan)
    assert plan.step_s <= 1.05 * min(one.step_s for one in by_hand), "stages by the sum of their layers"
    assert {one.num_microbatches for one in plan.compared} >= {1, 2, 4, 8}
    assert {one.schedule for one in plan.compared} - {""} == {s for s in TRAINING if NAMED_SCHEDULES[s].is_compared}


def test_transfers_take_what_the_cluster_says_of_meshes_of_their_size():
    weights, x = arguments(64)
    machine = two_nodes()
    plan = autopar.parallelize(step, devices=4, cluster=machine, num_stages=2, num_microbatches=4).plan(weights, x)
    assert plan.transfers
    for transfer in plan.transfers:
        assert transfer.predicted_s == plan.transfer_s(transfer, machine)
        assert transfer.predicted_s == machine.transfer_s(transfer.bytes, source=range(2), target=range(2, 4))


@pytest.mark.sweep
def test_the_sum_of_its_layers_is_near_what_a_stage_takes_as_a_whole():
    # Compute counts more than latencies, and than what a layer's layouts move that do not suit the next one.
    traced = traced_step(*arguments(1024, batch=8192))
    found = search_pipeline(traced, PipelineWishes(num_stages=1), request_on(two_nodes()), devices=4)
    for by_layers_s, stage in zip(found.by_layers_s, found.pipeline.staged.stages, strict=True):
        assert by_layers_s == pytest.approx(stage.forward_s + stage.backward_s, rel=0.02)


def test_a_pipeline_says_that_the_clock_ended_the_search():
    request = dataclasses.replace(request_on(two_nodes()), budget=Budget(seconds=0))
    found = search_pipeline(traced_step(*arguments(256)), PipelineWishes(num_stages=1), request, devices=4)
    assert (found.pipeline.plan.ended_early, found.pipeline.plan.not_compared) == (True, ("other stages",))


def tied_step(weights, x):
    """Four layers between a matrix and the same one transposed, clipped by the norm of all gradients."""

    def loss(weights):
        shared, *layers = weights
        h = x @ shared
        for w in layers:
            h = jnp.tanh(h @ w)
        return jnp.mean((h @ shared.T) ** 2)

    gradients = jax.grad(loss)(weights)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
    return [w - 0.1 * g / jnp.maximum(norm, 1.0) for w, g in zip(weights, gradients, strict=True)]


def traced_tied_step(width, batch, layers=5):
    return traced_step(*arguments(width, layers=layers, batch=batch), fun=tied_step)


def test_what_layers_send_once_a_step_is_what_the_stages_made_of_them_send():
    loop = make_time_loop(traced_tied_step(8, 8), 4)
    places = boundaries(forward_chain(loop)) or tuple(range(1, len(forward_chain(loop)), 2))
    layers = PlannedLayers(loop, places, request_on(two_nodes()))
    end = len(layers)
    assert layers.sent_once_bytes[0, end] == 0
    for first, second in itertools.combinations(range(1, end), 2):
        cut = cut_stages(loop, (places[first - 1], places[second - 1]))
        sent, received = [0, 0, 0], [0, 0, 0]
        for v in dict.fromkeys(v for v, _ in cut.lent()):
            sent[cut.homes[v]] += 4 * v.aval.size
        for name, segment in cut.segments.items():
            foreign = [v for v in segment.reads if v in cut.made_by and cut.made_by[v].stage != name.stage]
            received[name.stage] += sum(4 * v.aval.size for v in foreign if name.kind == "update")
        assert sent[0] == 256
        assert received[0] >= 256
        for stage, (begin, stop) in enumerate(((0, first), (first, second), (second, end))):
            assert layers.sent_once_bytes[begin, stop] == pytest.approx(max(sent[stage], received[stage]), abs=4 * end)


def test_the_search_counts_what_tied_weights_send():
    traced, request = traced_tied_step(1024, 2048, layers=9), request_on(two_nodes())
    found = search_stages(lambda m: make_time_loop(traced, m), request, devices=4, timetables=[Timetable(4, "1f1b")])
    wishes = PipelineWishes(num_stages=1, num_microbatches=4, schedule="1f1b")
    plan = search_pipeline(traced, wishes, request, devices=4).pipeline.plan
    assert len(found.sizes) == plan.num_stages > 1
    assert found.choice.step_s == pytest.approx(plan.step_s, rel=0.1)
    sent_s = max(t.predicted_s for t in plan.transfers if t.what == "weights")
    assert sent_s > 0.14 * plan.step_s

"""On small random mixed clusters the stages are the best of all: every share of the layers, every submesh, every order of kinds.

The costs are the planner's own. Once they are those of the search, sums of layers: all ranges of layers are planned on all
submeshes, and every assignment is priced by the formulas of the papers. And once every assignment is planned as a whole, beside
one mesh on each kind and one mesh over all kinds.
"""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest

import autopar
from autopar.cost_model.device import Device, slowest_device
from autopar.cost_model.machine import Cluster, NodeKind
from autopar.cost_model.tiers import Tier
from autopar.errors import OutOfMemoryError
from autopar.inter_op.candidates.timetables import Timetable
from autopar.inter_op.candidates.tuning import TUNING
from autopar.inter_op.costs_by_kind import KindsInOrder
from autopar.inter_op.describe_pipeline import describe_pipeline
from autopar.inter_op.dynamic_program.kinds import devices_of, kinds_of
from autopar.inter_op.dynamic_program.problem import CostTable, StageProblem
from autopar.inter_op.dynamic_program.submeshes import kind_of, size_of, submeshes
from autopar.inter_op.plan_pipeline import schedule_for
from autopar.inter_op.plan_stage import KnownStages
from autopar.inter_op.plan_stages import StageRequest, plan_stages
from autopar.inter_op.search import search_stages
from autopar.intra_op.request import logical_meshes
from autopar.layouts.mesh import LogicalMesh
from autopar.pipeline_plan import PipelinePlan
from autopar.schedules.in_flight import InFlight
from autopar.stages.split_scans import split_scans
from autopar.stages.time_loops import make_loops
from tests import pipeline_steps
from tests.inter_op.dynamic_program.brute_force import fits, step_s
from tests.inter_op.dynamic_program.test_choose_stages import chosen_of
from tests.inter_op.test_search import request_on, traced_step

NODES = [((1, 2), (1, 2)), ((1, 2), (1, 4)), ((2, 2), (1, 2)), ((1, 1), (1, 2), (1, 1)), ((1, 4), (1, 1))]
"""(nodes, devices in each) of every kind."""
TIMETABLE = Timetable(4, "1f1b")


def random_cluster(rng, nodes, memory_bytes):
    """Kinds of up to eight times the speed of each other, with links from far slower than compute to far faster."""
    kinds = []
    for number, ((count, devices), memory) in enumerate(zip(nodes, memory_bytes, strict=True)):
        device = Device(
            name=f"device {number}",
            peak_flops_per_s={"float32": float(rng.uniform(1e7, 8e7))},
            memory_bytes=memory,
            memory_bytes_per_s=1e12,
        )
        speed = float(10 ** rng.uniform(6, 11))
        inside = Tier(name="inside", devices=devices, topology="switch", latency_s=1e-8, bytes_per_s=speed)
        kinds.append(NodeKind(f"kind{number}", count, device, (inside,)))
    between = Tier(name="between", devices=None, topology="switch", latency_s=1e-7, bytes_per_s=1e9)
    weakest = slowest_device([kind.device for kind in kinds])
    return Cluster(name="random", device=weakest, tiers=(kinds[0].tiers[0], between), node_kinds=tuple(kinds))


def random_step(rng, layers):
    """A step of products of random widths."""
    widths = [pipeline_steps.WIDTH, *(8 * int(n) for n in rng.integers(1, 5, layers - 1)), pipeline_steps.WIDTH]
    weights = [
        {"w": pipeline_steps.normal(rng, a, b), "b": pipeline_steps.normal(rng, b)}
        for a, b in itertools.pairwise(widths)
    ]
    return pipeline_steps.trained_on(pipeline_steps.mean_error, weights, pipeline_steps.rows())


def options_of(order):
    """All submeshes of these kinds."""
    return tuple((*one, kind.number) for kind in order for one in submeshes(*kind.part[:2]))


def fillings(parts, options):
    """Every sequence of options that fills one part after the other, as numbers of options."""

    def fill(part, left):
        if left == 0:
            yield ()
        for z, option in enumerate(options):
            if kind_of(option) == kind_of(part) and size_of(option) <= left:
                yield from ((z, *rest) for rest in fill(part, left - size_of(option)))

    for along in itertools.product(*(list(fill(part, size_of(part))) for part in parts)):
        yield tuple(itertools.chain(*along))


def assignments(parts, options, layers):
    """Every [(first layer, end layer, option), ...]: all layers in order, on submeshes that fill the parts in order."""
    for chosen in fillings(parts, options):
        for cuts in itertools.combinations(range(1, layers), len(chosen) - 1):
            spans = itertools.pairwise((0, *cuts, layers))
            yield [(i, j, z) for (i, j), z in zip(spans, chosen, strict=True)]


def problem_of(order, known):
    """What the search chooses from, with every layer planned on every submesh of its kind."""
    for kind in order:
        while known[kind.number].plan_more(TIMETABLE.microbatches, submeshes(*kind.part[:2])):
            pass
    limits = {kind.number: kind.request.memory_limit_bytes or math.inf for kind in order}
    first = limits[order[0].number]
    options = options_of(order)
    rows = {field.name: [] for field in dataclasses.fields(CostTable)}
    for option in options:  # a byte is a part of its own kind's memory
        own = submeshes(*next(kind.part[:2] for kind in order if kind.number == kind_of(option)))
        table = known[kind_of(option)].table(TIMETABLE.microbatches, own)
        limit = limits[kind_of(option)]
        for name, figures in rows.items():
            scale = first / limit if "bytes" in name and math.isfinite(limit) else 1.0
            figures.append(scale * getattr(table, name)[own.index(option[:2])])
    return StageProblem(
        costs=CostTable(**{name: np.stack(figures) for name, figures in rows.items()}),
        options=options,
        cluster=(1, 1),
        microbatches=TIMETABLE.microbatches,
        memory_bytes=TUNING.room * first,
        parts=tuple(kind.part for kind in order),
    )


@pytest.mark.sampled(10)
@pytest.mark.parametrize("memory_bytes", [math.inf, 6e3], ids=["memory without limit", "little memory"])
@pytest.mark.parametrize("seed", range(10))
def test_the_search_finds_the_best_of_all_assignments_of_layers_to_unlike_submeshes(seed, memory_bytes):
    """In every order of kinds. With little memory most choices fit in no stages, some in others than without a limit."""
    rng = np.random.default_rng(seed)
    nodes = NODES[seed % len(NODES)]
    cluster = random_cluster(rng, nodes, [memory_bytes * float(rng.uniform(0.5, 2.0)) for _ in nodes])
    step, state, batch = random_step(rng, 5)
    traced, request = traced_step(state, batch, step), request_on(cluster)
    if math.isfinite(memory_bytes):
        request = dataclasses.replace(request, memory_limit_bytes=int(cluster.usable_memory_bytes))
    loop_of, known = make_loops(split_scans(traced, ()), TIMETABLE.microbatches), {}
    for order in itertools.permutations(kinds_of(request)):
        search = functools.partial(search_stages, loop_of, request, devices=devices_of(order), timetables=[TIMETABLE])
        try:
            choice = search(kinds=KindsInOrder(order, known)).choice
        except OutOfMemoryError:
            choice = None
        problem = problem_of(order, known)
        all_of_them = assignments(problem.parts, problem.options, problem.layers)
        left = [stages for stages in all_of_them if fits(problem, stages)]
        assert bool(left) == (choice is not None)
        if choice is not None:
            best_s = min(step_s(problem, stages) for stages in left)
            assert step_s(problem, chosen_of(choice)) == pytest.approx(best_s, rel=1e-9)
            assert choice.step_s == pytest.approx(best_s, rel=1e-9)


def planned_as_wholes(traced, request, order, stages, places, known):
    """Seconds of a step in these stages on these kinds of node, each planned as a whole."""
    schedule, options = schedule_for(TIMETABLE, len(stages)), options_of(order)
    by_number = {kind.number: kind for kind in order}
    sizes = [size_of(options[z]) for _, _, z in stages]
    wanted = StageRequest(
        meshes=tuple(logical_meshes(size) if size > 1 else (LogicalMesh.of((1,)),) for size in sizes),
        num_stages=len(stages),
        num_microbatches=TIMETABLE.microbatches,
        in_flight=InFlight(schedule),
        cuts=tuple(places[i - 1] for i, _, _ in stages[1:]),
        known=known,
        kinds=tuple(by_number[kind_of(options[z])] for _, _, z in stages),
    )
    return describe_pipeline(traced, plan_stages(traced, wanted, request), schedule, request).plan.step_s


def all_in_stages_s(traced, request):
    """Seconds of a step in every assignment of its layers to two stages or more, on some kinds of node or all, in every order."""
    kinds, costs, known = kinds_of(request), {}, KnownStages()
    loop_of = make_loops(split_scans(traced, ()), TIMETABLE.microbatches)
    search_stages(loop_of, request, devices=4, timetables=[TIMETABLE], kinds=KindsInOrder(kinds, costs))
    places = costs[0].of(TIMETABLE.microbatches).places
    for order in (order for count in (1, 2) for order in itertools.permutations(kinds, count)):
        for stages in assignments(tuple(kind.part for kind in order), options_of(order), len(places) + 1):
            if len(stages) > 1:
                yield planned_as_wholes(traced, request, order, stages, places, known)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("seed", "spans"), [(0, False), (1, False), (2, True), (3, False), (4, True), (5, True)])
def test_the_plan_is_the_best_of_all_ways_and_one_mesh_spans_kinds_only_where_that_wins(seed, spans):
    """The ways: stages, each planned as a whole; one mesh on the nodes of one kind; and one on all devices, as the slowest."""
    rng = np.random.default_rng(seed)
    cluster = random_cluster(rng, NODES[0], [math.inf] * 2)
    step, state, batch = random_step(rng, 3)
    in_stages_s = min(all_in_stages_s(traced_step(state, batch, step), request_on(cluster)))
    given = {"num_microbatches": TIMETABLE.microbatches, "recompute": "none"}

    def on_one_mesh_s(machine, devices):
        parallel = autopar.parallelize(step, devices=devices, cluster=machine, num_stages=1, **given)
        return parallel.plan(state, batch).step_s

    alone_s = min(on_one_mesh_s(cluster.of_kind(kind.name), 2) for kind in cluster.node_kinds)
    together_s = on_one_mesh_s(dataclasses.replace(cluster, node_kinds=()), 4)
    assert (together_s < min(in_stages_s, alone_s)) == spans
    parallel = autopar.parallelize(step, devices=4, cluster=cluster, schedule=TIMETABLE.schedule, **given)
    plan = parallel.plan(state, batch)
    assert plan.step_s == pytest.approx(min(in_stages_s, alone_s, together_s), rel=1e-9)
    if spans:
        assert (plan.num_devices, plan.node_kind) == (4, "")
    else:
        stages = plan.stages if isinstance(plan, PipelinePlan) else [plan]
        assert {one.node_kind for one in stages} <= {kind.name for kind in cluster.node_kinds}

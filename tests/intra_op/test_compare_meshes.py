"""Meshes are left only where that is right, side by side or one after the other, with time and without."""

import dataclasses
import itertools
import math

import pytest

from autopar.cost_model.hardware import find_cluster
from autopar.inter_op.attempts import Slower
from autopar.inter_op.one_mesh import plan_on_one_mesh
from autopar.intra_op import compare_meshes, mesh_search
from autopar.intra_op.compare_meshes import MeshComparison
from autopar.intra_op.lowering.named_strategies import choose_by_name
from autopar.intra_op.memory_limit import choose_within_limit
from autopar.intra_op.mesh_search import MeshSearch
from autopar.intra_op.planner import plan_step, plan_way
from autopar.intra_op.request import distinct_meshes, logical_meshes
from autopar.intra_op.restore import restore
from autopar.intra_op.shared_search import Beaten, SharedSearch
from autopar.intra_op.tuning import Tuning
from autopar.intra_op.worth import Worth
from autopar.layouts.mesh import LogicalMesh
from autopar.progress import listening
from autopar.solver.budget import SECONDS_PER_UNIT, Budget, LateError
from tests.inter_op.test_search import arguments, request_on, traced_step, two_nodes

EVERY = Tuning(worth=-1.0, repaid_in_steps=10**12)
"""Every mesh is planned."""


def question(width=64, batch=512, *, devices=8, limit=None, **changes):
    """A step and a request on all meshes."""
    request = request_on(two_nodes(devices // 2), limit)
    return traced_step(*arguments(width, batch=batch)), dataclasses.replace(
        request, meshes=logical_meshes(devices), **changes
    )


def test_meshes_are_left_by_the_same_bounds_where_every_step_takes_long_to_be_called():
    """All steps are called, on whichever mesh: what a call takes is in the bounds as in the steps, once."""
    step, request = question(width=512, batch=512)
    slow = dataclasses.replace(request.cluster, call_s=1.0, call_s_per_array=0.01)
    call_s = slow.dispatch_s(len(step.inputs))
    assert call_s > 1.0
    plan, called = (plan_step(step, dataclasses.replace(request, cluster=one)).plan for one in (request.cluster, slow))
    assert called.step_s == pytest.approx(plan.step_s + call_s)
    bounds, with_call = ({c.mesh_shape: c.at_least_s for c in p.candidates if c.step_s is None} for p in (plan, called))
    assert bounds
    assert with_call == pytest.approx({shape: bound_s + call_s for shape, bound_s in bounds.items()})


@pytest.mark.parametrize(("width", "batch"), [(64, 4096), (512, 512)])
def test_of_the_first_way_bounds_have_the_call_once_too(width, batch):
    step, request = question(width, batch)
    slow = dataclasses.replace(request.cluster, call_s=1.0)
    plan, called = (
        plan_way(step, dataclasses.replace(request, cluster=cluster), SharedSearch()).plan
        for cluster in (request.cluster, slow)
    )
    bounds, with_call = ({c.mesh_shape: c.at_least_s for c in p.candidates if c.step_s is None} for p in (plan, called))
    assert bounds
    assert with_call == pytest.approx({shape: bound_s + 1.0 for shape, bound_s in bounds.items()})


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("width", "batch"), [(16, 4096), (64, 512), (512, 8), (512, 512)])
def test_no_mesh_that_is_left_would_have_won(width, batch):
    step, request = question(width, batch)
    best = plan_step(step, request).plan
    every = plan_step(step, dataclasses.replace(request, tuning=EVERY)).plan
    assert best.step_s <= every.step_s * (1 + request.tuning.worth)
    known = {one.mesh_shape: one.step_s for one in every.candidates}
    for one in best.candidates:
        if one.step_s is None and known[one.mesh_shape] is not None:
            assert one.at_least_s <= known[one.mesh_shape] * (1 + 1e-9)


def test_several_processes_find_the_plan_of_one():
    step, request = question(tuning=Tuning(large=0))
    alone, several = (plan_step(step, dataclasses.replace(request, processes=p)).plan for p in (1, 3))
    assert (several.equations, several.mesh_shape) == (alone.equations, alone.mesh_shape)
    assert several.step_s == alone.step_s


def test_a_way_that_cannot_win_is_not_planned():
    step, request = question()
    best = plan_step(step, request).plan
    best_s, search = best.step_s, MeshSearch(step, LogicalMesh.of(best.mesh_shape), request)
    numbers, inputs = choose_by_name(search.graph, best), restore(step, best, request).assignment.inputs
    for number, node in enumerate(search.graph.nodes):
        if node.input_number is not None:
            numbers[number] = [s.outputs[0] for s in node.choices.strategies].index(inputs[node.input_number])
    objective_s = search.problem.costs.value(numbers)
    assert objective_s == pytest.approx(best_s, rel=0.1)
    for part in (0.0, 0.5, 0.999):
        found = plan_way(step, request, SharedSearch(best_s=part * best_s))
        assert isinstance(found, Beaten)
        assert found.at_least_s <= objective_s
    assert not isinstance(plan_way(step, request, SharedSearch(best_s=1.01 * best_s)), Beaten)


def test_of_the_first_way_a_mesh_is_bounded_once_and_that_bounds_what_is_minimised(monkeypatch):
    """A bound of every step is one of the objective, which pays for each reader of a value."""
    step, request = question()
    expected = {mesh: MeshSearch(step, mesh, request).at_least_s for mesh in request.meshes[:2]}
    monkeypatch.delattr(MeshSearch, "at_least_s")
    shared = SharedSearch()
    best = plan_way(step, request, shared).plan
    assert best.lower_bound_s <= best.step_s
    for mesh, bound_s in expected.items():
        assert shared.least_s[mesh] > 0.9 * bound_s
        assert shared.at_least_s[mesh] >= min(shared.least_s[mesh], best.step_s)


def test_a_first_plan_does_not_wait_for_a_bound(monkeypatch):
    step, request = question()
    order, plan, find_work = [], MeshSearch.plan, compare_meshes.find_work

    def noted(name, function):
        def note(*args, **options):
            order.append(name)
            return function(*args, **options)

        return note

    monkeypatch.setattr(MeshSearch, "plan", noted("plan", plan))
    monkeypatch.setattr(MeshSearch, "least_s", noted("bound", MeshSearch.least_s))
    monkeypatch.setattr(compare_meshes, "find_work", noted("bound", find_work))
    assert plan_way(step, request, SharedSearch()).plan.lower_bound_s > 0
    assert order[0] == "plan"
    assert "bound" in order


@pytest.mark.parametrize("least_gain", [0.0, 0.99])
def test_meshes_of_a_large_step_have_no_bounds_where_one_is_left_with_that_of_its_work(monkeypatch, least_gain):
    """The least of all bounds is that one, whether the others have better ones or not."""
    step, request = question(tuning=Tuning(large=0, least_gain=least_gain))
    bounded, least_s = {}, MeshSearch.least_s

    def note(search, enough_s):
        bounded[search.mesh] = enough_s
        return least_s(search, enough_s)

    monkeypatch.setattr(MeshSearch, "least_s", note)
    plan = plan_way(step, request, SharedSearch()).plan
    assert all(enough_s >= plan.step_s for enough_s in bounded.values()), "up to the best plan, a bound matters"
    assert math.inf not in list(bounded.values())[1:]
    are_left = [mesh for mesh in request.meshes if len(mesh.shape) == 3 and mesh not in bounded]
    assert bool(are_left) == (least_gain > 0.5)
    assert bool(bounded) == (least_gain < 0.5)
    small = dataclasses.replace(request, tuning=dataclasses.replace(request.tuning, large=10**9))
    assert 0 < plan.lower_bound_s <= plan_way(step, small, SharedSearch()).plan.lower_bound_s * (1 + 1e-9)


def test_a_mesh_of_many_axes_that_is_looked_at_has_its_bound(monkeypatch):
    """Also one that was asked for by its shape, and where nothing better is known yet."""
    step, request = question(tuning=Tuning(large=0, least_gain=0.99))
    request = dataclasses.replace(request, meshes=(LogicalMesh.of((2, 2, 2)),))
    assert not Worth(10**6, request.tuning).leaves(math.inf, 1.0)
    shared = SharedSearch()
    plan = plan_way(step, request, shared).plan
    assert set(shared.least_s) == set(request.meshes)
    assert plan.lower_bound_s >= min(plan.step_s, *shared.least_s.values()) > shared.work_s


@pytest.mark.parametrize(("is_stage", "has_other_ways"), [(True, False), (False, True), (False, False)])
def test_a_first_plan_is_not_sought_for_ever_where_others_may_take_its_place(monkeypatch, is_stage, has_other_ways):
    step, request = question()
    allowed, init = [], MeshSearch.__init__

    def note(search, traced, mesh, request, *rest, **options):
        allowed.append(request.budget.work)
        init(search, traced, mesh, request, *rest, **options)

    monkeypatch.setattr(MeshSearch, "__init__", note)
    plan_way(step, request, SharedSearch(is_bounded=not is_stage, has_other_ways=has_other_ways))
    assert allowed[0] == (request.tuning.first_work if is_stage or has_other_ways else math.inf)


@pytest.mark.parametrize("clock_s", [0.0, 1e6])
def test_a_first_plan_within_the_memory_is_sought_for_a_while_where_the_clock_is_over(monkeypatch, clock_s):
    """A plan late is better than none, and the next mesh may have one: it is not sought without an end on the first."""
    free = plan_step(*question()).plan.peak_bytes
    step, request = question(limit=int(0.7 * free))
    left_s = []

    def note(problem, *rest, **options):
        left_s.append(problem.budget.seconds_left)
        return choose_within_limit(problem, *rest, **options)

    monkeypatch.setattr(mesh_search, "choose_within_limit", note)
    plan_way(step, dataclasses.replace(request, budget=Budget(seconds=clock_s)), SharedSearch())
    assert left_s[0] == pytest.approx(max(clock_s, request.tuning.first_limited_s), rel=0.1)


def test_what_a_way_has_proven_is_known_to_the_next():
    step, request = question()
    shared = SharedSearch()
    first = plan_way(step, request, shared)
    assert shared.best_s == first.plan.step_s
    assert shared.at_least_s[LogicalMesh.of(first.plan.mesh_shape)] <= first.plan.step_s
    assert set(shared.at_least_s) <= set(request.meshes)
    assert isinstance(plan_way(step, request, shared), Beaten)


@pytest.mark.parametrize("shapes", [((8,), (2, 4)), ((2, 4), (8,))])
def test_a_mesh_that_another_one_of_its_row_beats_counts_as_not_planned_whenever_its_search_has_ended(
    monkeypatch, shapes
):
    """Which of the two is told of the other is chance where processes work side by side."""
    step, request = question(tuning=Tuning(large=0, side_by_side=0, most_worth=0.0, most_worth_within=0.0), processes=2)
    meshes = tuple(LogicalMesh.of(shape) for shape in shapes)
    request = dataclasses.replace(request, meshes=meshes)
    usual, heard, found = MeshSearch.plan, [], []

    def search(self, cutoff_s, *, rival_s, most_work=math.inf, **rest):
        heard.append(rival_s())
        found.append(usual(self, cutoff_s, rival_s=rival_s, most_work=most_work, **rest).plan.step_s)
        return usual(self, cutoff_s, rival_s=rival_s, most_work=most_work, **rest)

    monkeypatch.setattr(MeshSearch, "plan", search)
    monkeypatch.setattr(compare_meshes, "run_side_by_side", lambda jobs, **_: [job() for job in jobs])
    plan = plan_way(step, request, SharedSearch()).plan
    assert [one.step_s for one in plan.candidates] == [step_s if step_s == min(found) else None for step_s in found]
    assert heard == [math.inf, pytest.approx(found[0] - request.cluster.dispatch_s(len(step.inputs)))]


def test_when_the_time_is_over_the_first_plan_says_what_was_not_compared():
    step, request = question(budget=Budget(work=0))
    plan = plan_step(step, request).plan
    assert plan.ended_early
    assert math.isfinite(plan.step_s)
    left = {one for mesh in logical_meshes(8) for one in [f"mesh {mesh.shape}"] if one in plan.not_compared}
    assert left
    assert {one.mesh_shape for one in plan.candidates} == {(8,)}


def test_when_the_time_is_over_a_further_way_is_not_planned():
    step, request = question(budget=Budget(work=0))
    found = plan_way(step, request, SharedSearch(best_s=1e9))
    assert isinstance(found, Beaten)
    assert found.step_s is None


def test_equal_budgets_of_work_give_equal_plans():
    for work in (0, 10**4, 10**6):
        plans = [plan_step(*question(budget=Budget(work=work))).plan for _ in range(2)]
        assert plans[0].equations == plans[1].equations
        assert plans[0].not_compared == plans[1].not_compared


def test_where_time_is_short_a_mesh_is_left_for_its_own_axes_and_not_for_those_of_the_one_beside_it(monkeypatch):
    class Short(Budget):
        seconds_left = 10.0

    step, request = question(tuning=Tuning(large=0, side_by_side=0, axis_factor=2.0), budget=Short(), processes=2)
    comparison, looked = MeshComparison(step, request, SharedSearch(best_s=1.0)), []

    def look(meshes):
        looked.extend(mesh.shape for mesh in meshes)
        comparison._took = max(len(mesh.shape) for mesh in meshes), 6.0

    monkeypatch.setattr(comparison, "_look_at", look)
    comparison.run()
    assert looked == [(8,), (2, 4), (4, 2)]
    assert [mesh.shape for mesh in comparison.not_compared] == [(2, 2, 2)]


def test_where_all_meshes_are_ruled_out_none_is_said_to_be_looked_at():
    heard, comparison = [], MeshComparison(*question(), SharedSearch(best_s=1.0))
    with listening(heard.append):
        comparison._look_at(())
    assert [progress.at for progress in heard if progress.at is not None] == []


class CountedClock(Budget):
    """Late once it has been asked so many times."""

    def __init__(self, looks):
        super().__init__()
        self.looks = looks

    @property
    def is_late(self):
        self.looks -= 1
        return self.looks < 0


def test_a_clock_that_ends_anywhere_leaves_a_legal_plan_and_what_was_not_compared():
    step, request = question(tuning=Tuning(worth=-1.0, repaid_in_steps=10**12, large=0))
    whole = CountedClock(10**9)
    best = plan_way(step, dataclasses.replace(request, budget=whole), SharedSearch()).plan
    shapes = {f"mesh {one.mesh_shape}" for one in best.candidates}
    asked, ended = 10**9 - whole.looks, []
    for part in (0.0, 0.02, 0.1, 0.2, 0.4, 0.7, 0.99, 2.0):
        clocked = dataclasses.replace(request, budget=CountedClock(int(part * asked)))
        plan = plan_way(step, clocked, SharedSearch()).plan
        found = restore(step, plan, request).plan
        assert found.step_s == plan.step_s >= best.step_s * (1 - 1e-9)
        assert plan.lower_bound_s <= best.step_s * (1 + 1e-9)
        assert shapes == {f"mesh {one.mesh_shape}" for one in plan.candidates} | set(plan.not_compared)
        assert plan.ended_early == bool(plan.not_compared)
        ended.append(len(plan.not_compared))
    assert ended == sorted(ended, reverse=True)
    assert ended[0] > ended[-1] == 0


def test_a_graph_is_not_finished_when_the_time_is_over():
    step, request = question()
    request = dataclasses.replace(request, budget=Budget(seconds=0))
    with pytest.raises(LateError):
        MeshSearch(step, LogicalMesh.of((2, 4)), request)


def test_one_mesh_that_cannot_beat_stages_is_not_planned():
    step, request = question(devices=4)
    request = dataclasses.replace(request, meshes=(LogicalMesh.of((4,)),))
    ways = {"num_microbatches": "auto", "recompute": "auto", "devices": 4}
    best = plan_on_one_mesh(step, request, **ways)
    beaten = plan_on_one_mesh(step, request, **ways, beat_s=0.9 * best.plan.step_s)
    assert isinstance(beaten, Slower)
    assert beaten.compared
    assert plan_on_one_mesh(step, request, **ways, beat_s=1.1 * best.plan.step_s).plan.equations == best.plan.equations


def test_the_bound_is_one_over_all_meshes_and_numbers_of_microbatches():
    step, request = question()
    bound_s = plan_step(step, request).plan.lower_bound_s
    free = dataclasses.replace(request, tuning=EVERY)
    for count in (1, 2, 8):
        for mesh in logical_meshes(8):
            ways = {"num_microbatches": count, "recompute": "none", "devices": 8}
            plan = plan_on_one_mesh(step, dataclasses.replace(free, meshes=(mesh,)), **ways).plan
            assert bound_s <= plan.step_s * (1 + 1e-9)


@pytest.mark.sweep
def test_a_mesh_beside_a_plan_takes_hardly_more_work_than_it_may_repay(monkeypatch):
    """An operation ends before the budget is asked again, and a search may be repeated within the limit and narrowed."""
    taken, real = {}, MeshSearch.plan

    def plan(self, cutoff_s, *, rival_s, most_work=math.inf, **rest):
        before = self.request.budget.spent
        found = real(self, cutoff_s, rival_s=rival_s, most_work=most_work, **rest)
        taken[self.mesh.shape] = (most_work, self.request.budget.spent - before)
        return found

    monkeypatch.setattr(MeshSearch, "plan", plan)
    free = plan_step(*question()).plan
    tuning = Tuning(quick_s=0.05, repaid_in_steps=1, search_s_per_equation=0.0, bound_s_per_equation=0.0, worth=-1.0)
    plan_step(*question(limit=int(0.8 * free.peak_bytes), tuning=tuning))
    most, spent = taken[2, 2, 2]
    assert most == pytest.approx(0.05 / SECONDS_PER_UNIT, rel=0.1)
    assert most / 10 < spent < 5 * most


@pytest.mark.parametrize(("cluster", "devices"), [("p4d.24xlarge", 16), ("dgx-h100", 32), ("p3.16xlarge", 16)])
def test_meshes_are_left_out_that_another_equals_but_for_the_order_of_its_last_axes(cluster, devices):
    """Whatever is exchanged along some axes takes as long along the axes of the same sizes of the mesh that stays."""
    request = dataclasses.replace(request_on(find_cluster(cluster)), meshes=logical_meshes(devices))
    left = distinct_meshes(request, is_free=True)
    dropped = [mesh for mesh in request.meshes if mesh not in left]
    assert bool(dropped) == (cluster != "p3.16xlarge")  # whose devices have links of two kinds
    for mesh in dropped:
        (same,) = [one for one in left if one.shape[0] == mesh.shape[0] and sorted(one.shape) == sorted(mesh.shape)]
        costs, others = (request.cluster.mesh_costs(one.shape) for one in (mesh, same))
        swap = (0, 2, 1)
        for axes in itertools.chain.from_iterable(itertools.combinations(range(3), count) for count in (1, 2, 3)):
            swapped = tuple(sorted(swap[axis] for axis in axes))
            assert costs.all_reduce_s(1e6, axes) == pytest.approx(others.all_reduce_s(1e6, swapped))
            assert costs.all_to_all_s(1e6, axes) == pytest.approx(others.all_to_all_s(1e6, swapped))
    assert distinct_meshes(request, is_free=False) == list(request.meshes)

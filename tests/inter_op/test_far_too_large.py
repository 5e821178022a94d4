"""A step that is far too large however it is divided is not planned in one microbatch, and the plan stays the same."""

import dataclasses
import math

import pytest
from jax.sharding import PartitionSpec as P

from autopar.errors import OutOfMemoryError
from autopar.explain.units import bytes_text
from autopar.inter_op import attempts, one_mesh
from autopar.inter_op.attempts import Slower, bytes_held
from autopar.inter_op.one_mesh import Promising, plan_on_one_mesh
from autopar.intra_op import planner
from autopar.intra_op.planner import plan_way
from autopar.intra_op.shared_search import Beaten, SharedSearch
from autopar.layouts.constraints import as_constraints
from autopar.layouts.mesh import LogicalMesh
from tests.inter_op.test_search import arguments, request_on, traced_step, two_nodes

WAYS, MESHES = [], []
"""Numbers of microbatches that were planned, and the meshes that were looked at for each."""


@pytest.fixture
def traced():
    return traced_step(*arguments(32, batch=4096))


@pytest.fixture(autouse=True)
def noted(monkeypatch):
    WAYS.clear()
    MESHES.clear()

    def noting(step, request, shared):
        WAYS.append(step.microbatches)
        MESHES.append(request.meshes)
        return plan_way(step, request, shared)

    monkeypatch.setattr(attempts, "plan_way", noting)


def request_for(limit, *, large):
    request = dataclasses.replace(request_on(two_nodes(), limit), meshes=(LogicalMesh.of((4,)),))
    return dataclasses.replace(request, tuning=dataclasses.replace(request.tuning, large=large))


def planned(traced, limit, *, large, **options):
    request = request_for(limit, large=large)
    found = plan_on_one_mesh(traced, request, num_microbatches="auto", recompute="none", devices=4, **options)
    return found.plan, tuple(WAYS)


def test_temporaries_that_are_divided_evenly_are_nearly_those_of_a_plan_without_a_limit(traced):
    limit = 200_000
    request = dataclasses.replace(request_for(limit, large=0), meshes=(LogicalMesh.of((4,)),))
    shared = SharedSearch(has_other_ways=True)
    with pytest.raises(OutOfMemoryError):
        plan_way(traced, request, shared)
    kept, temporaries = planner.evenly_divided_parts(traced, request)
    least = temporaries / (limit - kept)
    assert 1 < least <= shared.excess * (1 + 1e-6)
    assert math.isclose(least, shared.excess, rel_tol=0.1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("limit", [220_000, 300_000])
def test_one_microbatch_is_left_out_where_it_cannot_fit_and_the_plan_is_the_same(traced, limit):
    usual, all_ways = planned(traced, limit, large=10**6)
    WAYS.clear()
    large, ways = planned(traced, limit, large=0)
    assert all_ways[0] == 1
    assert ways == all_ways[1:]
    assert (large.step_s, large.num_microbatches) == (usual.step_s, usual.num_microbatches)
    assert large.lower_bound_s <= usual.lower_bound_s
    assert [one.num_microbatches for one in large.compared] == [one.num_microbatches for one in usual.compared]


def test_ways_that_no_division_makes_small_enough_are_not_planned_and_the_leanest_explains_why(traced):
    """A search of each took ten seconds for a GPT of 24 layers, and the clock had ended before."""
    with pytest.raises(OutOfMemoryError, match="in 512 microbatches, the leanest of 4 ways") as usual:
        planned(traced, 137_000, large=10**6)
    assert WAYS == [1, 512, 4096, 1024, 1024]
    WAYS.clear()
    with pytest.raises(OutOfMemoryError, match="1024 microbatches, the leanest of 3 ways") as short:
        planned(traced, 100_000, large=0)
    assert WAYS == [1024], "one microbatch, 4096 and 1024 are left out"
    assert short.value.bound_bytes == usual.value.bound_bytes > 137_000


def test_what_fits_in_some_division_is_not_refused(traced):
    kept, temporaries = planner.evenly_divided_parts(traced, request_for(10**6, large=0))
    assert planner.least_excess(traced, request_for(kept + temporaries, large=0)) == 0
    excess = planner.least_excess(traced, request_for(kept + temporaries // 2, large=0))
    assert excess == pytest.approx(2, rel=1e-3)
    assert planner.least_excess(traced, request_for(kept, large=0)) == math.inf
    assert planner.least_excess(traced, request_for(kept, large=10**6)) == 0, "a small step is soon searched"


@pytest.mark.parametrize(("refused", "ways"), [(set(), [4096]), ({4096}, [1024])])
def test_where_no_number_may_do_those_are_planned_that_fit_in_some_division(traced, monkeypatch, refused, ways):
    """The largest, and the largest with an example for each device."""
    monkeypatch.setattr(attempts, "far_excess", lambda *_: 5000.0)
    monkeypatch.setattr(attempts, "least_excess", lambda step, _: 1.5 if step.microbatches in refused else 0.0)
    planned(traced, 10**8, large=0)
    assert ways == WAYS


@pytest.mark.parametrize(("constraints", "share"), [({}, 0.25), ({"weights/*": P()}, 1.0)], ids=["free", "replicated"])
def test_a_state_that_is_too_large_in_its_smallest_layouts_is_told_without_a_search(traced, constraints, share):
    held = bytes_held(leaf for leaf in traced.inputs if leaf.role != "batch")
    request = request_for(int(held * share) - 1, large=0)
    meshes = (LogicalMesh.of((4,)), LogicalMesh.of((2, 2)))
    request = dataclasses.replace(request, meshes=meshes, constraints=as_constraints(constraints))
    with pytest.raises(OutOfMemoryError, match="the state alone takes") as caught:
        plan_on_one_mesh(traced, request, num_microbatches="auto", recompute="none", devices=4)
    assert not MESHES
    assert caught.value.needed_bytes is None
    least = "as far as the constraints allow" if constraints else "as far as its layouts go"
    assert f"the state alone takes {bytes_text(held * share)} on each, divided {least}." in str(caught.value)
    assert "more devices, 5 at the least if all of it is divided (ZeRO-3)" in str(caught.value)
    assert caught.value.tensors == (f"{bytes_text(held * share)}  weights/*",)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("large", [0, 10**6])
def test_with_a_time_to_beat_ways_that_do_not_fit_are_no_reason_to_leave_those_that_may(traced, large):
    """What does not fit is not slower: it says nothing about more microbatches. Only the order is another."""
    alone, ways = planned(traced, 220_000, large=large)
    WAYS.clear()
    beating, same_ways = planned(traced, 220_000, large=large, beat_s=2 * alone.step_s)
    assert sorted(same_ways) == sorted(ways)
    assert (beating.step_s, beating.num_microbatches) == (alone.step_s, alone.num_microbatches)


def test_with_a_time_to_beat_a_step_that_fits_in_no_way_is_slower_and_no_error(traced, monkeypatch):
    """Nobody asks why it does not fit: there are stages."""
    monkeypatch.setattr(one_mesh, "microbatch_counts", lambda _: (1, 64))
    request = request_for(100_000, large=10**6)
    found = plan_on_one_mesh(traced, request, num_microbatches="auto", recompute="none", devices=4, beat_s=1.0)
    assert isinstance(found, Slower)
    assert [(one.num_microbatches, one.step_s, one.estimate_s) for one in found.compared] == [
        (count, None, None) for count in (1, 64)
    ]
    assert WAYS == [1, 64], "the last one is not planned again for the sake of its error"


def test_what_looks_best_by_its_layers_is_planned_first_where_one_microbatch_does_not_fit(traced):
    """A clock that ends early then leaves a good plan."""
    promising = Promising(microbatches=8, meshes=(LogicalMesh.of((4,)),))
    plan, ways = planned(traced, 300_000, large=0, promising=promising)
    assert ways[0] == 8
    assert plan.step_s <= planned(traced, 300_000, large=0)[0].step_s
    WAYS.clear()
    assert planned(traced, 10**8, large=0, promising=promising)[1] == (1,)


@pytest.mark.parametrize(
    ("fitting", "early", "beat_s", "tried"),
    [
        (4, True, math.inf, [16, 8, 4, 2]),
        (16, True, math.inf, [16, 8]),
        (2, True, math.inf, [16, 8, 4, 2]),
        (2, False, math.inf, [16]),
        (2, False, 1e9, [16, 8, 4, 2]),
    ],
)
def test_fewer_microbatches_than_look_best_are_planned_early_as_long_as_they_fit_and_are_faster(
    traced, monkeypatch, fitting, early, beat_s, tried
):
    """Sums of layers may ask for more than the whole needs. Where stages are planned, nothing else waits for the clock."""

    def plan(step, request, shared):
        WAYS.append(step.microbatches)
        if step.microbatches < fitting:
            raise OutOfMemoryError("", needed_bytes=1.0, tensors=())
        found = plan_way(step, dataclasses.replace(request, memory_limit_bytes=None), SharedSearch())
        return dataclasses.replace(
            found,
            plan=dataclasses.replace(found.plan, compute_s=1 + 0.01 * step.microbatches, comm_s=0.0, hidden_s=0.0),
        )

    monkeypatch.setattr(attempts, "plan_way", plan)
    monkeypatch.setattr(attempts, "far_excess", lambda *_: 2.0)
    monkeypatch.setattr(attempts.Attempts, "is_dear", lambda these: not these._found)
    monkeypatch.setattr(attempts.Attempts, "is_early", early)
    best, _ = planned(traced, 300_000, large=0, promising=Promising(16, ()), beat_s=beat_s)
    assert tried == WAYS
    assert best.num_microbatches == max(fitting, min(tried))


@pytest.mark.parametrize(("recompute", "tried"), [(False, [2, 4]), (True, [2, 2, 4])])
def test_what_looked_best_and_does_not_fit_is_not_planned_again(traced, monkeypatch, recompute, tried):
    """Two microbatches are also where plans should fit without recomputation, which then is another way."""

    def plan(step, request, shared):
        WAYS.append(step.microbatches)
        shared.excess = 2.0
        if step.microbatches < 4:
            raise OutOfMemoryError("", needed_bytes=1.0, tensors=())
        return plan_way(step, dataclasses.replace(request, memory_limit_bytes=None), SharedSearch())

    monkeypatch.setattr(attempts, "plan_way", plan)
    monkeypatch.setattr(attempts, "far_excess", lambda *_: 2.0)
    monkeypatch.setattr(attempts.Attempts, "is_dear", lambda these: not these._found)
    planned(traced, 300_000, large=0, promising=Promising(2, (), recompute))
    assert tried == WAYS


@pytest.mark.parametrize(
    ("fitting", "beat_s", "tried"),
    [
        (4, math.inf, [2, 16, 8, 4]),
        (16, math.inf, [2, 16, 8]),
        (2, math.inf, [2]),
        (2, 1e9, [4, 2]),
        (4, 1e9, [4, 2]),
        (8, 1e9, [4, 32, 16, 8]),
    ],
)
def test_numbers_that_were_jumped_over_are_planned_as_long_as_fewer_fit(traced, monkeypatch, fitting, beat_s, tried):
    """The first number is a guess; one that does not fit says by how much, which is another.

    With a time to beat there are stages, and the clock goes on: the guess is larger.
    """

    def plan(step, request, shared):
        WAYS.append(step.microbatches)
        shared.excess = 8.0
        if step.microbatches < fitting:
            raise OutOfMemoryError("", needed_bytes=1.0, tensors=())
        return plan_way(step, dataclasses.replace(request, memory_limit_bytes=None), SharedSearch())

    monkeypatch.setattr(attempts, "plan_way", plan)
    monkeypatch.setattr(attempts, "far_excess", lambda *_: 2.0)
    monkeypatch.setattr(attempts.Attempts, "is_dear", lambda these: not these._found)
    planned(traced, 300_000, large=0, beat_s=beat_s)
    assert tried == WAYS


@pytest.mark.parametrize("slow", [8, 4, 2])
def test_where_a_roomy_guess_is_beaten_the_usual_one_is_planned(traced, monkeypatch, slow):
    """With a time to beat the first guess is larger, and so many microbatches may be too slow where the usual number is not."""

    def plan(step, request, shared):
        WAYS.append(step.microbatches)
        shared.excess = 8.0
        if step.microbatches >= slow:
            return Beaten(None, 2.0)
        return plan_way(step, dataclasses.replace(request, memory_limit_bytes=None), SharedSearch())

    monkeypatch.setattr(attempts, "plan_way", plan)
    monkeypatch.setattr(attempts, "far_excess", lambda *_: 2.0)
    monkeypatch.setattr(attempts.Attempts, "is_dear", lambda these: not these._found)
    request = request_for(300_000, large=0)
    found = plan_on_one_mesh(traced, request, num_microbatches="auto", recompute="none", devices=4, beat_s=1e9)
    assert WAYS == [4, 2]
    assert isinstance(found, Slower) == (slow == 2)


@pytest.mark.parametrize(
    ("devices", "beat_s", "tried"),
    [
        (4096, 1e9, ["again", 4, 2]),
        (4, 1e9, [4, "again", 2]),
        (4096, math.inf, [2, "again"]),
    ],
    ids=["fewer examples than devices", "enough examples", "no stages"],
)
def test_forward_work_is_done_again_first_where_microbatches_would_have_fewer_examples_than_devices(
    traced, monkeypatch, devices, beat_s, tried
):
    """Its microbatches are fewer, and each has examples for all devices. Where there is no other plan, the usual order holds."""

    def plan(step, request, shared):
        WAYS.append(step.microbatches)
        return plan_way(step, dataclasses.replace(request, memory_limit_bytes=None), SharedSearch())

    monkeypatch.setattr(attempts, "plan_way", plan)
    monkeypatch.setattr(attempts, "far_excess", lambda *_: 2.0)
    monkeypatch.setattr(attempts.Attempts, "is_dear", lambda these: not these._found)
    monkeypatch.setattr(attempts.Attempts, "may_recompute", lambda _: True)
    monkeypatch.setattr(one_mesh, "_plan_recomputed", lambda *_, **__: WAYS.append("again"))
    request = request_for(300_000, large=0)
    plan_on_one_mesh(traced, request, num_microbatches="auto", recompute="auto", devices=devices, beat_s=beat_s)
    assert tried == WAYS


def test_a_way_that_was_beaten_is_not_planned_again(traced, monkeypatch):
    """What is asked for first by what its layers promise is also the usual guess."""

    def plan(step, request, shared):
        WAYS.append(step.microbatches)
        return Beaten(None, 2.0)

    monkeypatch.setattr(attempts, "plan_way", plan)
    monkeypatch.setattr(attempts, "far_excess", lambda *_: 2.0)
    request, promising = request_for(300_000, large=0), Promising(4, ())
    found = plan_on_one_mesh(
        traced, request, num_microbatches="auto", recompute="none", devices=4, beat_s=1e9, promising=promising
    )
    assert isinstance(found, Slower)
    assert WAYS == [4, 2]


def test_where_it_may_fit_one_microbatch_is_planned_first(traced):
    assert planned(traced, 10**8, large=0)[1] == (1,)


def test_a_state_that_is_too_large_is_told_by_its_tensors(traced):
    with pytest.raises(OutOfMemoryError, match=r"the state alone takes (.|\n)*weights/"):
        planned(traced, 2000, large=0)

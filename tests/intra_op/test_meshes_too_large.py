"""Meshes on which nothing fits are left only where that is right, and told from what their bounds say."""

import math

import pytest

from autopar.errors import OutOfMemoryError
from autopar.intra_op.compare_meshes import MeshComparison
from autopar.intra_op.mesh_search import MeshSearch
from autopar.intra_op.out_of_memory import NothingFits
from autopar.intra_op.planner import plan_way
from autopar.intra_op.shared_search import SharedSearch
from autopar.intra_op.tuning import Tuning
from autopar.layouts.mesh import LogicalMesh
from autopar.plan import Candidate
from autopar.solver.budget import Budget
from tests.intra_op.test_compare_meshes import question


@pytest.mark.parametrize(
    ("large", "has_other_ways", "is_chosen"), [(0, True, False), (10**6, True, True), (10**6, False, False)]
)
def test_where_the_bound_on_memory_ruled_out_an_earlier_way_it_is_looked_at_first(
    monkeypatch, large, has_other_ways, is_chosen
):
    """A choice without a limit says by how much that exceeds it, and takes most of the time. Of the last way nobody asks."""
    step, request = question(limit=50_000, tuning=Tuning(large=large))
    shared, chosen = SharedSearch(has_other_ways=has_other_ways), []
    monkeypatch.setattr(MeshSearch, "_note_excess", lambda self, *_: chosen.append(self.mesh))
    with pytest.raises(OutOfMemoryError, match="a bound that no choice of layouts goes below") as first:
        plan_way(step, request, shared)
    assert shared.is_exceeded
    assert bool(chosen) == has_other_ways, "nothing is known before the first"
    chosen.clear()
    shared.in_vain.clear()
    with pytest.raises(OutOfMemoryError, match="a bound that no choice of layouts goes below") as again:
        plan_way(step, request, shared)
    assert bool(chosen) == is_chosen
    assert str(again.value) == str(first.value)


@pytest.mark.parametrize(
    ("excess", "is_settled", "clock_s", "is_looked_at"),
    [(2.0, False, 1e6, False), (1.1, False, 1e6, True), (2.0, True, 1e6, True), (2.0, True, 0.0, False)],
)
def test_a_mesh_of_many_axes_is_left_where_the_others_need_far_more_memory(excess, is_settled, clock_s, is_looked_at):
    """But where it is proven that nothing fits the others, it is to be proven of all, as long as there is time."""
    step, request = question(limit=10**6, budget=Budget(seconds=clock_s))
    line = LogicalMesh.of((8,))
    comparison = MeshComparison(step, request, SharedSearch(excess=excess))
    comparison.candidates.append(Candidate(line.shape, None))
    comparison.failures.append(NothingFits(mesh=line, bound_bytes=1, tried_bytes=2, tensors=(), is_settled=is_settled))
    assert comparison._may_win(LogicalMesh.of((2, 2, 2))) == is_looked_at


@pytest.mark.parametrize(
    ("is_settled", "has_other_ways", "looked"),
    [(False, True, 2), (False, False, 6), (True, True, 2), (True, False, 6)],
)
def test_meshes_of_a_large_program_are_left_for_another_way_when_it_fits_two_of_them_in_none(
    monkeypatch, is_settled, has_other_ways, looked
):
    step, request = question(limit=10**6, tuning=Tuning(large=0))
    seen = []

    def search(self, cutoff_s, *, rival_s, most_work=math.inf, **rest):
        seen.append(self.mesh.shape)
        self.excess = 1.1
        return NothingFits(mesh=self.mesh, bound_bytes=1, tried_bytes=2, tensors=(), is_settled=is_settled)

    monkeypatch.setattr(MeshSearch, "plan", search)
    monkeypatch.setattr(MeshComparison, "_is_rather_left", lambda _: False)
    with pytest.raises(OutOfMemoryError):
        plan_way(step, request, SharedSearch(has_other_ways=has_other_ways))
    assert len(seen) == min(looked, len(request.meshes))

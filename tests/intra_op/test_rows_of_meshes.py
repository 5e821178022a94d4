"""What is asked of a mesh that comes after others, and how many are looked at side by side."""

import dataclasses
import math

import pytest

from autopar.intra_op import compare_meshes
from autopar.intra_op.compare_meshes import MeshComparison
from autopar.intra_op.mesh_search import MeshSearch
from autopar.intra_op.planner import plan_way
from autopar.intra_op.request import PlannedStep
from autopar.intra_op.shared_search import SharedSearch
from autopar.intra_op.tuning import Tuning
from autopar.intra_op.worth import Worth
from autopar.layouts.mesh import LogicalMesh
from tests.intra_op.test_compare_meshes import question


@pytest.mark.parametrize("large", [0, 10**9])
def test_in_a_large_step_a_choice_on_another_mesh_must_promise_a_faster_step(monkeypatch, large):
    """Steps take longer than the choices that they are plans of, and the next one is taken to do so too."""
    step, request = question(tuning=Tuning(large=large))
    usual, asked, planned = MeshSearch.plan, [], []

    def plan(search, cutoff_s, **rest):
        found = usual(search, cutoff_s, **rest)
        asked.append(cutoff_s)
        if isinstance(found, PlannedStep):
            planned.append(found.plan.step_s)
            search.choice_s = found.plan.step_s / 2
        return found

    monkeypatch.setattr(MeshSearch, "plan", plan)
    monkeypatch.setattr(MeshComparison, "_call_s", lambda comparison: 0.0)
    monkeypatch.setattr(MeshComparison, "_is_beaten", lambda comparison, mesh: False)
    monkeypatch.setattr(Worth, "planning_s", lambda worth, best_s: math.inf)
    meshes = tuple(LogicalMesh.of(shape) for shape in ((8,), (2, 4)))
    plan_way(step, dataclasses.replace(request, meshes=meshes), SharedSearch())
    assert asked[0] == math.inf
    assert asked[1] == pytest.approx(planned[0] / 2 if large == 0 else planned[0])


@pytest.mark.parametrize(("side_by_side", "together"), [(0, 2), (10**9, 1)])
def test_meshes_of_a_small_step_are_looked_at_one_by_one(monkeypatch, side_by_side, together):
    step, request = question(tuning=Tuning(side_by_side=side_by_side), processes=2)
    usual, rows = compare_meshes.run_side_by_side, []

    def run(jobs, **options):
        rows.append(len(jobs))
        return usual(jobs, **options)

    monkeypatch.setattr(compare_meshes, "run_side_by_side", run)
    plan_way(step, request, SharedSearch())
    assert max(rows) == together

"""One stage promises most by the sum of its layers: whether it is planned on one mesh first, and what if it keeps no promise."""

import dataclasses
import math
import types

import pytest

from autopar.errors import ConstraintError, OutOfMemoryError, UnsupportedProgramError
from autopar.inter_op import one_or_stages
from autopar.inter_op.attempts import Slower
from autopar.inter_op.candidates.tuning import TUNING
from autopar.inter_op.describe_pipeline import PlannedPipeline
from autopar.inter_op.one_mesh import Promising
from autopar.inter_op.plan_pipeline import PipelineWishes
from autopar.inter_op.search_pipeline import OneStage, SearchedPipeline, search_pipeline
from autopar.intra_op.request import PlannedStep
from tests.inter_op.test_one_or_stages import node, planned
from tests.inter_op.test_search import arguments, request_on, traced_step


@pytest.mark.parametrize(("promised", "has_stages"), [(1.0, False), (0.5, True), (None, True)])
def test_several_stages_are_searched_where_one_stage_is_not_what_its_layers_promised(promised, has_stages, monkeypatch):
    """It takes longer on one mesh, or does not fit there (None)."""
    planned_one, in_stages = planned_step(1.0), stages_of(0.9)
    comparison, asked = one_stage_that_promises(promised or 1.0, in_stages, monkeypatch, excess=1.0)

    def plan_mesh(comparison, promising=None):
        if promised is None:
            raise OutOfMemoryError("too large")
        return planned_one

    monkeypatch.setattr(one_or_stages._OneOrStages, "plan_on_one_mesh", plan_mesh)
    found = one_or_stages._plan_stages_first(comparison)
    assert isinstance(found, PlannedPipeline) == has_stages
    below = (math.inf, math.inf, False)
    if promised is not None:
        below = pytest.approx(1 / (1 + TUNING.worth)), math.inf, True
    assert asked == ([below] if has_stages else [])


def one_stage_that_promises(step_s, in_stages, monkeypatch, *, excess):
    """A comparison in which one stage promises `step_s`, and what the search is asked for several."""
    asked = []

    def several(beat_s, worth_s, has_fallback):
        asked.append((beat_s, worth_s, has_fallback))
        return in_stages

    one_stage = OneStage(promising=Promising(8, (), step_s=step_s), several=several)
    monkeypatch.setattr(one_or_stages._OneOrStages, "search_stages", lambda *_, **__: one_stage)
    monkeypatch.setattr(one_or_stages, "far_excess", lambda *_: excess)
    wishes = types.SimpleNamespace(num_microbatches="auto", recompute="auto")
    request = request_on(node(1e9))
    return one_or_stages._OneOrStages(traced=None, wishes=wishes, request=request, devices=4, tuning=TUNING), asked


@pytest.mark.parametrize("mesh_s", [None, 0.95, 0.8], ids=["no plan", "slower than stages", "faster than stages"])
@pytest.mark.parametrize("has_stages", [True, False])
def test_where_one_mesh_needs_many_microbatches_stages_that_promise_as_much_are_planned_before_it(
    mesh_s, has_stages, monkeypatch
):
    """One mesh may take the whole clock, and not keep its promise."""
    in_stages = dataclasses.replace(stages_of(0.9), one_stage_s=0.85) if has_stages else OneStage()
    on_mesh = None if mesh_s is None else planned_step(mesh_s)
    comparison, asked = one_stage_that_promises(0.85, in_stages, monkeypatch, excess=2 * TUNING.many)
    to_beat = []

    def plan_below(comparison, beat_s, promising=None):
        to_beat.append((beat_s, promising.microbatches))
        if on_mesh is None:
            raise OutOfMemoryError("too large")
        return on_mesh if mesh_s < beat_s else Slower(())

    monkeypatch.setattr(one_or_stages._OneOrStages, "plan_mesh_below", plan_below)
    if not has_stages and mesh_s is None:
        with pytest.raises(OutOfMemoryError):
            one_or_stages._plan_stages_first(comparison)
    else:
        found = one_or_stages._plan_stages_first(comparison)
        assert isinstance(found, PlannedPipeline) == (has_stages and mesh_s != 0.8)
    assert asked[0] == (0.85, pytest.approx(0.85 * (1 + TUNING.squeezed)), False)
    assert to_beat == [(0.9 if has_stages else math.inf, 8)]


@pytest.mark.parametrize("error", [ConstraintError("x"), OutOfMemoryError("x"), UnsupportedProgramError("x")])
def test_what_stages_cannot_be_planned_for_is_left_to_one_mesh(error, monkeypatch):
    comparison, _ = one_stage_that_promises(1.0, OneStage(), monkeypatch, excess=2 * TUNING.many)

    def several(*_):
        raise error

    one_stage = OneStage(promising=Promising(8, (), step_s=1.0), several=several)
    assert comparison.plan_several(one_stage, beat_s=1.0) == OneStage()


def test_several_stages_are_planned_as_wholes_only_if_they_promise_enough():
    traced, wishes = traced_step(*arguments(2048, batch=2048)), PipelineWishes(num_stages=1, num_microbatches=4)
    one_stage = search_pipeline(traced, wishes, request_on(node(1e13)), devices=4)
    assert isinstance(one_stage, OneStage)
    promised_s = one_stage.promising.step_s
    assert isinstance(one_stage.several(math.inf, promised_s, False), OneStage), "several promise more than one"
    found = one_stage.several(math.inf, math.inf, False)
    assert isinstance(found, SearchedPipeline)
    assert found.pipeline.plan.num_stages > 1
    assert found.one_stage_s == pytest.approx(promised_s), "what one stage takes is known of the first search"


def planned_step(step_s):
    """A plan on one mesh of which nothing else is looked at."""
    one = planned(node(1e12))
    return PlannedStep(
        plan=dataclasses.replace(one, compute_s=step_s, comm_s=0.0, hidden_s=0.0), assignment=None, traced=None
    )


def stages_of(step_s):
    others = {field.name: None for field in dataclasses.fields(PlannedPipeline) if field.name != "plan"}
    pipeline = PlannedPipeline(plan=dataclasses.replace(planned(node(1e9)), step_s=step_s), **others)
    return SearchedPipeline(pipeline=pipeline, promised_s=step_s, one_stage_s=math.inf, by_layers_s=(), alone_s={})

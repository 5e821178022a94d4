"""Stages that share a mesh are planned in all of it first, then in parts of it, until they fit together."""

import types

import pytest

from autopar.errors import OutOfMemoryError
from autopar.inter_op import plan_stages
from autopar.inter_op.plan_stage import KnownStages, StagePlanning
from autopar.stages.tasks.mesh_memory import own_limits, peak_bytes
from tests.stages.test_mesh_memory import interleaved, memory

IN_FLIGHT = interleaved()
FREE = [memory(0, weights=400), memory(1, weights=10), memory(2, weights=200), memory(3, weights=10)]
"""The first mesh has the large ones."""
PART = 300
"""What each stage may have if all have as much: the first mesh needs 685 of 600."""


class Planner:
    """Stands for the planning of all stages: keeps the limits that it gets, and plans as `within` says of each limit."""

    def __init__(self, monkeypatch, within):
        self.limits, self.within = [], within
        monkeypatch.setattr(plan_stages, "_plan_jobs", self.plan)

    def plan(self, planning, jobs, *, processes):
        limits = planning.limits or [None] * len(jobs)
        self.limits.append(tuple(limits))
        memories = [FREE[n] if limit is None else self.within(n, limit) for n, limit in enumerate(limits)]
        return [types.SimpleNamespace(memory=one) for one in memories]

    def run(self, part=PART):
        job = types.SimpleNamespace(request=types.SimpleNamespace(memory_limit_bytes=part))
        planning = StagePlanning(planner=None, in_flight=IN_FLIGHT, memory_rounds=1, known=KnownStages())
        found = plan_stages._plan_together(planning, [job] * 4, processes=1)
        return [stage.memory for stage in found]


def least(number, limit, *, least_weights):
    """As many weights as fit, or an error if fewer than the least would have to be there."""
    weights = FREE[number].kept_bytes - max(0, peak_bytes([FREE[number]], IN_FLIGHT) - limit)
    if weights < least_weights[number]:
        raise OutOfMemoryError(f"stage {number} within {limit}")
    return memory(number, weights=weights)


def test_stages_that_fit_together_are_planned_once_though_one_takes_more_than_its_part(monkeypatch):
    planner = Planner(monkeypatch, within=None)
    assert peak_bytes([FREE[0]], IN_FLIGHT) > 350
    assert planner.run(350) == FREE
    assert planner.limits == [(None,) * 4]


def test_a_mesh_that_is_too_small_is_shared_by_size_and_the_others_are_left_alone(monkeypatch):
    planner = Planner(monkeypatch, within=lambda n, limit: least(n, limit, least_weights=(0,) * 4))
    found = planner.run()
    by_size = own_limits(FREE, [PART] * 4, IN_FLIGHT, is_sure=False)
    assert planner.limits == [(None,) * 4, by_size]
    assert by_size[1] is by_size[3] is None
    assert by_size[0] > PART > by_size[2]
    assert peak_bytes(found[::2], IN_FLIGHT) <= 2 * PART
    assert found[1::2] == FREE[1::2]


def test_what_shrinks_in_another_place_than_at_the_peak_is_planned_in_sure_limits(monkeypatch):
    """The second stage lets go of what only its own peak has."""

    def within(number, limit):
        sure = own_limits(FREE, [PART] * 4, IN_FLIGHT, is_sure=True)[number]
        return least(number, limit, least_weights=(0,) * 4) if limit == sure else FREE[number]

    planner = Planner(monkeypatch, within)
    found = planner.run()
    limits = [own_limits(FREE, [PART] * 4, IN_FLIGHT, is_sure=is_sure) for is_sure in (False, True)]
    assert planner.limits == [(None,) * 4, *limits]
    assert peak_bytes(found[::2], IN_FLIGHT) <= 2 * PART


def test_where_the_small_stage_cannot_shrink_equal_parts_are_tried(monkeypatch):
    planner = Planner(monkeypatch, within=lambda n, limit: least(n, limit, least_weights=(0, 0, 200, 0)))
    found = planner.run()
    assert planner.limits[2:] == [(PART, None, PART, None)]
    assert peak_bytes(found[::2], IN_FLIGHT) <= 2 * PART


def test_the_error_is_that_of_the_parts_by_size(monkeypatch):
    planner = Planner(monkeypatch, within=lambda n, limit: least(n, limit, least_weights=(400, 0, 200, 0)))
    by_size = own_limits(FREE, [PART] * 4, IN_FLIGHT, is_sure=False)
    with pytest.raises(OutOfMemoryError, match=f"stage 0 within {by_size[0]}"):
        planner.run()
    assert len(planner.limits) == 3

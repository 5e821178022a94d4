"""Where giving up one wish is not enough: two are tried, then as many as are needed, for as long as there is time."""

import pytest

import autopar
from autopar.commands.arguments.in_flags import in_flags
from autopar.errors import OutOfMemoryError
from autopar.why import conflict
from autopar.why.question import OUT_OF_TIME
from tests.why.test_conflict import plan

GIVEN = {"mesh_shape": (4,), "num_microbatches": 1, "recompute": "none"}
FITS_NOT = "does not fit the memory"


def is_open(settings, *fields):
    return all(getattr(settings, field) == "auto" for field in fields)


def conflict_where(monkeypatch, fits, budget_s=600.0):
    """What conflicts if plans fit where `fits` says so of the settings, and what was asked."""
    free = plan(**GIVEN)
    with pytest.raises(OutOfMemoryError) as caught:
        plan(**GIVEN, constraints=autopar.data_parallel(), memory_limit_bytes=int(0.9 * free.peak_bytes))
    asked = []

    def search(settings, traced):
        asked.append(settings)
        found = settings.memory_limit_bytes > free.peak_bytes or fits(settings)
        return {True: free, False: FITS_NOT}.get(found, found)

    monkeypatch.setattr(conflict, "solve", search)
    return caught.value.conflict(budget_s=budget_s).answer, asked


def words_of(answer, *, enough):
    """Relaxations of wishes that are enough, or that are not."""
    without = [one for one in answer.relaxations if one.words.startswith("without ") and "limit" not in one.words]
    return [one.words for one in without if one.is_tried and (one.step_s is not None) == enough]


def test_two_wishes_are_given_up_where_one_is_not_enough(monkeypatch):
    def fits(settings):
        return is_open(settings, "num_microbatches") and not settings.constraints.rules

    answer, _ = conflict_where(monkeypatch, fits)
    assert answer.is_smallest
    assert answer.wishes == ("num_microbatches=1",), "the preset conflicts too, by itself: each is a smallest set"
    assert words_of(answer, enough=False) == ["without num_microbatches=1"]
    assert words_of(answer, enough=True) == ["without data_parallel() and num_microbatches=1"]
    assert in_flags("without data_parallel() and num_microbatches=1") == "without --data-parallel and --microbatches 1"


def test_as_many_as_are_needed_are_given_up_where_two_are_not_enough(monkeypatch):
    answer, _ = conflict_where(
        monkeypatch, lambda settings: is_open(settings, "meshes", "num_microbatches", "recompute")
    )
    assert answer.is_smallest
    assert words_of(answer, enough=True) == ["without mesh_shape=[(4,)] and num_microbatches=1 and recompute='none'"]


def test_a_search_without_every_wish_that_takes_too_long_does_not_end_the_others(monkeypatch):
    def fits(settings):
        if is_open(settings, "meshes", "num_microbatches", "recompute") and not settings.constraints.rules:
            return OUT_OF_TIME
        return is_open(settings, "num_microbatches")

    answer, _ = conflict_where(monkeypatch, fits)
    assert answer.wishes == ("num_microbatches=1",)
    assert answer.is_smallest, "there is a plan that gives up less, so that there is one without all"
    assert words_of(answer, enough=True) == ["without num_microbatches=1"]


def test_a_search_whose_share_was_too_short_is_made_again_in_the_time_that_is_left(monkeypatch):
    def fits(settings):
        if settings.planning_seconds < 40.0:
            return OUT_OF_TIME
        return is_open(settings, "num_microbatches")

    answer, asked = conflict_where(monkeypatch, fits, budget_s=90.0)
    assert any(one.is_tried for one in answer.relaxations)
    assert max(one.planning_seconds for one in asked) >= 40.0

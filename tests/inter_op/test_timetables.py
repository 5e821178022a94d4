"""Which timetables are compared, and what one number of microbatches tells about another."""

import itertools

import numpy as np
import pytest

from autopar.inter_op.candidates.timetables import (
    Timetable,
    counts_around,
    latency_share,
    likely_microbatches,
    list_timetables,
    more_counts,
    neighbours,
    seconds_at,
    usual_microbatches,
)
from autopar.inter_op.candidates.tuning import TUNING
from autopar.inter_op.plan_pipeline import PipelineWishes
from tests.inter_op.test_search import arguments, traced_step


def test_two_planned_numbers_tell_exactly_about_others_if_costs_are_latency_and_work():
    latency, work = np.array([0.5, 2.0]), np.array([8.0, 24.0])
    known = {m: latency + work / m for m in (2, 16)}
    for count in (1, 2, 4, 8, 64):
        np.testing.assert_allclose(seconds_at(known, count), latency + work / count)
    np.testing.assert_allclose(latency_share(known, 16), latency / (latency + work / 16))


def test_one_planned_number_is_divided_perfectly_but_for_the_share_of_latency_that_is_known():
    known = {4: np.array([1.0])}
    assert latency_share(known, 4) is None
    assert seconds_at(known, 8) == 0.5
    assert seconds_at(known, 8, share=0.5) == 0.75
    assert seconds_at(known, 2, share=0.5) == 1.5


def test_seconds_that_fall_faster_than_the_work_have_no_latency_below_zero():
    assert latency_share({2: np.array([1.0]), 4: np.array([0.1])}, 2) == 0.0


def test_a_layer_that_takes_no_time_has_no_latency():
    assert latency_share({2: np.array([0.0]), 4: np.array([0.0])}, 2) == 0.0


def divisors(number):
    return tuple(m for m in range(1, number + 1) if number % m == 0)


def test_numbers_around_the_usual_one_are_all_compared_if_they_are_few_and_evenly_if_many():
    assert counts_around((1, 2, 4, 8, 16), 8) == (1, 2, 4, 8, 16)
    assert counts_around((1, 3, 128), 8) == (1, 3)
    many = counts_around(divisors(720), 30)
    assert len(many) <= TUNING.most_counts + 1
    assert 30 in many
    assert many[0] <= 5
    assert many[-1] >= 180
    assert all(1.2 < b / a < 4 for a, b in itertools.pairwise(many) if 30 not in (a, b))


def test_of_numbers_near_each_other_that_is_compared_whose_microbatches_many_devices_divide():
    """Of 1,520 examples 95 microbatches have 16 each; 80, which is nearer to an equal ratio, have 19."""
    assert counts_around(divisors(1520), 20) == (5, 8, 10, 19, 20, 38, 95, 152)
    assert more_counts(divisors(1520), 38) == (40, 95, 152, 190, 380, 760, 1520)


def test_numbers_for_a_step_that_needs_more_of_them_are_all_that_are_larger_or_evenly_many():
    assert more_counts((1, 2, 4, 8, 16), 4) == (8, 16)
    assert more_counts((1, 2, 4), 4) == ()
    many = more_counts(divisors(720), 8)
    assert many[0] <= 12
    assert (many[-1], len(many)) == (720, TUNING.most_counts)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [("1f1b", 1), ("eager-1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 4)]),
        ({"virtual_stages": 1}, [("1f1b", 1), ("eager-1f1b", 1), ("zb-h1", 1)]),
        ({"virtual_stages": 3}, [("interleaved", 3)]),
        ({"schedule": "interleaved"}, [("interleaved", 2), ("interleaved", 4)]),
        ({"schedule": "gpipe"}, [("gpipe", 1)]),
        ({"gradients": False}, [("inference", 1)]),
    ],
)
def test_what_is_decided_by_hand_is_not_compared(options, expected):
    options = {"schedule": "auto", "virtual_stages": "auto", "gradients": True, **options}
    found = list_timetables((2, 4, 8), usual=4, **options)
    assert found[: len(expected)] == tuple(Timetable(4, name, v) for name, v in expected), "the usual number first"
    assert {t.microbatches for t in found} == {2, 4, 8}
    assert len(found) == 3 * len(expected)


def test_the_usual_number_is_the_most_up_to_four_per_stage():
    assert usual_microbatches((1, 2, 4, 8, 16, 32), 2) == 8
    assert usual_microbatches((5, 25), 1) == 1


def test_the_usual_number_is_one_whose_examples_the_devices_of_a_stage_divide():
    assert usual_microbatches(divisors(1520), 8) == 20
    assert usual_microbatches(divisors(1520), 8, devices=64) == 19, "80 examples among 8 devices, not 76"
    assert usual_microbatches(divisors(1536), 8, devices=64) == 32, "48 examples do as well as 64"
    assert usual_microbatches(divisors(14), 2, devices=8) == 7, "2 examples among 4 devices: the largest as well as any"
    assert usual_microbatches((1, 16), 2, devices=16) == 1, "two per stage at least: nothing is near"
    assert usual_microbatches((1, 2, 4, 8, 16), 2, devices=16) == 4, "nor is 2, whose 8 examples all 8 devices divide"


@pytest.mark.parametrize(
    ("room_bytes", "expected"), [(1 << 20, 4), (16 << 10, 4), (15 << 10, 8), (4 << 10, 16), (100, 4)]
)
def test_stages_probably_fit_in_the_usual_number_or_in_the_next_one_with_room_for_what_they_keep(room_bytes, expected):
    found = likely_microbatches(4, [16, 8, 4, 2, 64 // 3, 1], kept_bytes=64 << 10, room_bytes=room_bytes)
    assert found == expected


def test_the_neighbours_of_a_number_are_the_next_ones_whatever_the_order():
    assert neighbours(8, (8, 4, 16, 2, 32)) == [4, 16]
    assert neighbours(2, {2, 4}) == [4]
    assert neighbours(4, {2, 4}) == [2]
    assert neighbours(4, [4]) == []


def test_a_search_begins_with_microbatches_that_the_devices_of_a_stage_divide():
    traced, wishes = traced_step(*arguments(8, batch=1520)), PipelineWishes(num_stages=8)
    assert wishes.timetables(traced, 8, 64)[0].microbatches == 19
    assert wishes.timetables(traced, 8, 8)[0].microbatches == 20

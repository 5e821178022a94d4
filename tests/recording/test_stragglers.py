"""Who takes longer than its equals is named with the figure."""

import dataclasses

import pytest

from autopar.recording.stragglers import find_stragglers
from tests.recording.recordings import in_stages, on_one_mesh, ran, span


def test_a_device_that_computes_longer_than_the_others_is_named():
    (slow,) = find_stragglers(on_one_mesh())
    assert str(slow) == "the compute of device 1 takes 2.00 ms, 100% longer than the median of its equals, 1.00 ms"
    assert find_stragglers(on_one_mesh(), more_than=1.1) == ()


def test_equal_devices_are_no_stragglers_and_neither_are_differences_of_microseconds():
    assert find_stragglers(on_one_mesh(operations=tuple(ran("dot.1", n, 0, 1) for n in range(4)))) == ()
    assert find_stragglers(on_one_mesh(operations=tuple(ran("dot.1", n, 0, 0.01 + 0.005 * n) for n in range(4)))) == ()


def test_a_mesh_is_held_against_what_the_plan_says_of_it():
    assert find_stragglers(in_stages()) == ()
    slow = tuple(
        dataclasses.replace(one, end_s=one.start_s + 2 * one.seconds) if one.mesh == 1 else one
        for one in in_stages().spans
    )
    found = find_stragglers(dataclasses.replace(in_stages(), spans=slow))
    assert [str(one) for one in found] == [
        "the work of mesh 1 takes 24.0 ms, 100% longer than as much work takes on the others, 12.0 ms"
    ]


def test_a_task_is_held_against_other_microbatches_of_its_stage():
    spans = tuple(span(0, "forward", 10 * n, 10 * n + (5 if n == 2 else 1), n) for n in range(4))
    found = find_stragglers(dataclasses.replace(in_stages(), spans=spans))
    named = [one for one in found if one.kind == "task"]
    assert [one.what for one in named] == ["the forward of microbatch 2 in stage 0"]
    assert named[0].excess == pytest.approx(4.0)
    two = find_stragglers(dataclasses.replace(in_stages(), spans=spans[1:3]))
    assert not [one for one in two if one.kind == "task"], "of two, nobody knows which is the slow one"


def test_the_worst_comes_first():
    operations = tuple(ran("dot.1", n, 0, ms) for n, ms in enumerate([1, 1, 1, 3, 2]))
    assert [one.what for one in find_stragglers(on_one_mesh(operations=operations))] == [
        "the compute of device 3",
        "the compute of device 4",
    ]

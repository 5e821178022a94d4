"""What stages of one mesh take together: by hand, between what the largest takes and the sum of all, and as limits are shared."""

import dataclasses
import types

import hypothesis
import hypothesis.strategies as st
import pytest

from autopar.schedules.in_flight import InFlight, Kept
from autopar.schedules.schedules import make_schedule
from autopar.stages.tasks.mesh_memory import fit_together, own_limits, peak_bytes, share_peak
from autopar.stages.tasks.stage_memory import StageMemory
from autopar.stages.tasks.task_memory import TaskMemory


def memory(stage, *, weights=100, sums=10, residual=7, forward=20, backward=30, received=0, alone=0, late=0):
    """A stage whose tasks keep `residual` of a microbatch, and get `received` from the stage before."""
    passing = [Kept("forward", stage, "input_gradient", residual)]
    passing += [Kept("forward", stage - 1, "forward", received)] if stage else []
    task = TaskMemory(sums, {"forward": forward, "backward": backward})
    return StageMemory(
        peak_bytes=max(alone, weights + sums),
        kept_bytes=weights,
        late_bytes=late,
        accumulator_bytes=sums,
        received_bytes=received,
        stage=stage,
        passing=tuple(passing),
        tasks=types.SimpleNamespace(whole=task, split=task, outside_bytes=max(alone - weights, sums)),
    )


def interleaved(meshes=2, microbatches=8, chunks=2):
    return InFlight(
        make_schedule("interleaved", num_meshes=meshes, num_microbatches=microbatches, virtual_stages=chunks)
    )


def test_the_bytes_that_calls_hand_to_each_other_by_hand():
    """Forward reads what came and writes the residual, which backward reads; sums stay where they are in a loop, too."""
    calls = memory(1, residual=7, received=3, sums=10).bytes_of_calls()
    assert calls == {"forward": 3 + 7, "input_gradient": 7, "weight_gradient": 0, "backward": 7}
    split = dataclasses.replace(
        memory(0), passing=(*memory(0).passing, Kept("input_gradient", 0, "weight_gradient", 4))
    )
    calls = split.bytes_of_calls()
    assert (calls["input_gradient"], calls["weight_gradient"]) == (7 + 4, 4)
    assert calls["backward"] == 7, "in one task the cotangents stay where they are"


def test_what_earlier_stages_make_after_their_loops_is_there_outside_the_loop_alone():
    schedule = InFlight(make_schedule("1f1b", num_meshes=2, num_microbatches=4))
    assert peak_bytes([memory(1, late=40, backward=60)], schedule) == 60 + 10 + 7 + 60
    assert peak_bytes([memory(1, late=40, backward=60, alone=150)], schedule) == 150
    assert peak_bytes([memory(0), memory(2, late=40)], interleaved()) == peak_bytes(
        [memory(0), memory(2)], interleaved()
    )


def test_what_earlier_stages_make_may_be_there_while_weight_gradients_wait():
    schedule = InFlight(make_schedule("zb-h1", num_meshes=2, num_microbatches=4))
    halves = TaskMemory(10, {"forward": 20, "input_gradient": 60, "weight_gradient": 5})
    late = memory(1, late=40)
    for tasks, beside in ((halves, 100), (dataclasses.replace(halves, working_bytes={"input_gradient": 60}), 60)):
        stage = dataclasses.replace(late, tasks=types.SimpleNamespace(whole=tasks, split=tasks, outside_bytes=10))
        assert peak_bytes([stage], schedule) == beside + 10 + 7 + 60


def test_the_peak_of_a_mesh_by_hand():
    """The first mesh of two goes 2 + 2 forwards ahead; with the fifth there are five residuals, at most four of one stage."""
    first, second = memory(0), memory(2)
    assert peak_bytes([first], interleaved()) == 110 + 4 * 7 + 30
    assert peak_bytes([first, second], interleaved()) == 2 * 110 + 5 * 7 + 30
    shares = share_peak([first, second], interleaved())
    assert sum(share.flying_bytes for share in shares) == 5 * 7
    assert sum(share.peak_bytes for share in shares) == 2 * 110 + 5 * 7 + 30


def test_a_stage_that_takes_more_outside_its_loop_takes_it_while_the_others_stand_by():
    first, second = memory(0), memory(2, alone=500)
    assert peak_bytes([first, second], interleaved()) == 110 + 500
    assert [share.peak_bytes for share in share_peak([first, second], interleaved())] == [110 + 3 * 7, 500 - 3 * 7]
    in_order = share_peak([memory(2, alone=500), memory(0)], interleaved())
    assert sum(share.peak_bytes for share in in_order) == 110 + 500


sizes = st.integers(0, 50)


@st.composite
def meshes_of_stages(draw):
    meshes, chunks = draw(st.sampled_from([(2, 2), (3, 2), (2, 3)]))
    names = ("weights", "sums", "residual", "forward", "backward", "received", "alone")
    stages = [memory(number, **{name: draw(sizes) for name in names}) for number in range(meshes * chunks)]
    return stages, interleaved(meshes, draw(st.sampled_from([1, 2])) * meshes, chunks)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(meshes_of_stages())
def test_together_stages_take_no_less_than_each_beside_what_stands_there_and_no_more_than_the_sum(given):
    stages, in_flight = given
    meshes = in_flight.schedule.num_meshes
    for mesh in range(meshes):
        here = stages[mesh::meshes]
        alone = [peak_bytes([stage], in_flight) for stage in here]
        standing = [stage.standing_bytes(in_flight) for stage in here]
        together = peak_bytes(here, in_flight)
        assert (
            max(own + sum(standing) - its for own, its in zip(alone, standing, strict=True)) <= together <= sum(alone)
        )
        assert together == sum(share.peak_bytes for share in share_peak(here, in_flight))
        assert all(share.flying_bytes <= share.peak_bytes for share in share_peak(here, in_flight))


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(meshes_of_stages(), st.integers(1, 300))
def test_stages_within_their_sure_limits_fit_together_and_where_they_fit_there_are_none(given, part):
    stages, in_flight = given
    meshes, parts = in_flight.schedule.num_meshes, [part] * len(stages)
    by_size, sure = (own_limits(stages, parts, in_flight, is_sure=is_sure) for is_sure in (False, True))
    assert fit_together(stages, parts, in_flight) == (by_size == sure == (None,) * len(stages))
    assert fit_together(stages, [None] * len(stages), in_flight)
    for mesh in range(meshes):
        here, limit = stages[mesh::meshes], part * in_flight.schedule.virtual_stages
        if peak_bytes(here, in_flight) <= limit:
            assert set(by_size[mesh::meshes]) == set(sure[mesh::meshes]) == {None}
            continue
        assert sum(sure[mesh::meshes]) <= limit
        for stage, larger, least in zip(here, by_size[mesh::meshes], sure[mesh::meshes], strict=True):
            assert least <= larger <= peak_bytes([stage], in_flight)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_the_only_stage_of_a_mesh_takes_its_own_peak(name):
    in_flight = InFlight(make_schedule(name, num_meshes=2, num_microbatches=4))
    for alone in (0, 1000):
        stage = memory(1, alone=alone)
        (share,) = share_peak([stage], in_flight)
        loop = in_flight.most_bytes(1, stage.looping(in_flight))
        assert share.peak_bytes == max(stage.peak_bytes, stage.standing_bytes(in_flight) + loop)

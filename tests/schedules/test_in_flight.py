"""How many bytes of what tasks hand on are there at once: closed forms, and never less than the simulator counts."""

import dataclasses
import random

import pytest

from autopar.errors import ScheduleError
from autopar.schedules.chain import make_chain
from autopar.schedules.in_flight import InFlight, Kept
from autopar.schedules.schedules import make_schedule
from autopar.schedules.simulate import simulate
from tests.schedules.chains import TRAINING_IN_CHUNKS


def schedules():
    for name, chunks in TRAINING_IN_CHUNKS:
        for p in (1, 2, 3, 4):
            for m in (1, 2, 4, 5, 8):
                if name != "interleaved" or m % p == 0:
                    yield make_schedule(name, num_meshes=p, num_microbatches=m, virtual_stages=chunks)


def test_zb_h1_keeps_residuals_as_1f1b_does_until_the_input_gradient_and_cotangents_of_the_weights_held_back():
    for p in range(1, 7):
        for m in range(1, 13):
            schedule = make_schedule("zb-h1", num_meshes=p, num_microbatches=m)
            for mesh in range(p):

                def most(maker, reader, schedule=schedule, mesh=mesh):
                    return InFlight(schedule).most_bytes(mesh, [Kept(maker, mesh, reader, 1)])

                assert most("forward", "input_gradient") == min(m, p - mesh)
                assert most("forward", "weight_gradient") == min(m, p)
                assert most("input_gradient", "weight_gradient") == min(m, mesh + 1)


def test_in_zb_h1_the_three_kinds_are_most_at_one_time():
    for p in range(1, 7):
        schedule = make_schedule("zb-h1", num_meshes=p, num_microbatches=2 * p)
        for mesh in range(p):
            kept = [
                Kept("forward", mesh, "input_gradient", 1),
                Kept("forward", mesh, "weight_gradient", 100),
                Kept("input_gradient", mesh, "weight_gradient", 10_000),
            ]
            assert InFlight(schedule).most_bytes(mesh, kept) == (p - mesh) + 100 * p + 10_000 * (mesh + 1)


@pytest.mark.parametrize(
    ("name", "ahead"),
    [("1f1b", (4, 3, 2)), ("eager-1f1b", (7, 5, 3)), ("gpipe", (8, 8, 8)), ("zb-h1", (6, 6, 6))],
)
def test_what_a_stage_receives_is_one_microbatch_ahead_at_most_and_two_in_zb_h1_and_eager_1f1b(name, ahead):
    schedule = make_schedule(name, num_meshes=4, num_microbatches=8)
    last = schedule.kinds[-1]
    found = [InFlight(schedule).most_bytes(s, [Kept("forward", s - 1, last, 1)]) for s in (1, 2, 3)]
    assert tuple(found) == ahead


def test_a_skip_from_the_first_stage_to_the_last_waits_there_while_the_microbatches_are_in_flight():
    schedule = make_schedule("1f1b", num_meshes=4, num_microbatches=8)
    assert InFlight(schedule).most_bytes(3, [Kept("forward", 0, "backward", 1)]) == 4


def test_without_a_backward_meshes_are_equally_fast():
    schedule = make_schedule("inference", num_meshes=4, num_microbatches=8)
    assert [InFlight(schedule).most_bytes(s, [Kept("forward", s - 1, "forward", 1)]) for s in (1, 2, 3)] == [1, 1, 1]


def test_no_speeds_of_tasks_make_a_stage_keep_more():
    """Residuals of a chain, and what crosses to the stage: with random seconds per task, which differ between microbatches."""
    draw = random.Random(0)
    for schedule in schedules():
        for stage in range(schedule.num_stages):
            kept = [Kept("forward", stage, schedule.kinds[-1], 100)]
            sizes = {f"r{stage}": 100}
            if stage > 0 and schedule.num_meshes > 1:
                kept.append(Kept("forward", stage - 1, "forward", 7))
                sizes[f"x{stage}"] = 7
            most = InFlight(schedule).most_bytes(stage, kept)
            for _ in range(3):
                mesh = stage % schedule.num_meshes
                simulation = simulate(
                    make_chain(schedule).emit(),
                    run_s=lambda run: draw.choice([0, 1, 1, 2, 5]),
                    value_bytes=lambda value, sizes=sizes: sizes.get(value.name, 0),
                )
                assert simulation.peak_bytes[mesh] <= most, (schedule.name, stage)


def test_what_the_stages_of_a_mesh_keep_together_is_what_a_walk_along_its_tasks_counts():
    """Residuals of different sizes, and a task's own; no stage alone has most when all together have."""
    for schedule in schedules():
        if schedule.virtual_stages == 1 or "weight_gradient" in schedule.kinds:
            continue
        last, p = schedule.kinds[-1], schedule.num_meshes
        for mesh in range(p):
            stages = range(mesh, schedule.num_stages, p)
            size = {stage: 10 ** (2 * place) for place, stage in enumerate(stages)}
            work = {(stage, kind): 7 + stage + 3 * (kind == last) for stage in stages for kind in schedule.kinds}
            kept = [(s, Kept("forward", s, last, size[s])) for s in stages]
            kept += [(s, Kept(kind, s, kind, work[s, kind])) for s in stages for kind in schedule.kinds]
            now, most = 0, 0
            for task in schedule.rows[mesh]:
                now += size[task.stage] * (task.kind == "forward")
                most = max(most, now + work[task.stage, task.kind])
                now -= size[task.stage] * (task.kind == last)
            found = InFlight(schedule).at_peak(kept)
            assert sum(found) == most, (schedule.name, mesh)
            assert [size > 0 for size in found[len(stages) :]].count(True) == 1, "one task runs"
            alone = sum(InFlight(schedule).most_bytes(s, [one for keeper, one in kept if keeper == s]) for s in stages)
            assert sum(found) < alone


def test_an_interleaved_mesh_keeps_at_the_most_what_its_closed_form_says():
    """Mesh i has begun 2 (p - 1 - i) + (v - 1) p forwards before its first backward, and one with each."""
    for p, v, m in ((2, 2, 8), (3, 2, 12), (2, 4, 8), (4, 2, 8)):
        schedule = make_schedule("interleaved", num_meshes=p, num_microbatches=m, virtual_stages=v)
        for mesh in range(p):
            kept = [(s, Kept("forward", s, "backward", 1)) for s in range(mesh, p * v, p)]
            assert sum(InFlight(schedule).at_peak(kept)) == 2 * (p - 1 - mesh) + (v - 1) * p + 1


def test_a_schedule_that_does_not_end_is_refused_with_the_task_that_comes_too_early():
    schedule = make_schedule("1f1b", num_meshes=2, num_microbatches=2)
    first, *others = schedule.rows
    wrong = dataclasses.replace(schedule, rows=(tuple(reversed(first)), *others))
    with pytest.raises(ScheduleError, match="comes before the forward of stage"):
        InFlight(wrong).most_bytes(0, [Kept("forward", 0, "backward", 1)])

"""Closed forms of bubbles, exactly; transfers and memory by hand."""

import dataclasses
import functools
from fractions import Fraction

import pytest

from autopar.schedules.chain import make_chain
from autopar.schedules.emit import emit
from autopar.schedules.grid import draw_grid
from autopar.schedules.instructions import Receive, Run, Slot, TaskSpec, Value
from autopar.schedules.schedules import make_schedule
from autopar.schedules.simulate import simulate, simulate_schedule
from autopar.schedules.tasks import task_times
from tests.schedules.chains import small_schedules

# Forward, input gradient, weight gradient.
TIMES = ((1, 1, 1), (2, 3, 1), (5, 7, 3), (4, 2, 1), (3, 1, 2), (Fraction(1, 3), Fraction(2, 7), Fraction(1, 5)))
SIZES = [(p, m) for p in range(1, 5) for m in (1, 2, 3, 4, 5, 8)]


def seconds(forward, input_gradient, weight_gradient):
    by_kind = {
        "forward": forward,
        "backward": input_gradient + weight_gradient,
        "input_gradient": input_gradient,
        "weight_gradient": weight_gradient,
    }
    return lambda task: Fraction(by_kind[task.kind])


@functools.cache
def program(name, p, m, v=1):
    return make_chain(make_schedule(name, num_meshes=p, num_microbatches=m, virtual_stages=v)).emit()


def simulated(name, p, m, times, *, v=1):
    return simulate(program(name, p, m, v), run_s=seconds(*times))


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
def test_gpipe_and_both_1f1b_wait_p_minus_1_microbatches(name, times):
    for p, m in SIZES:
        assert simulated(name, p, m, times).bubble == Fraction(p - 1, m), (p, m)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_chunks_of_a_mesh(v, times):
    for p, m in SIZES:
        if m % p == 0:
            assert simulated("interleaved", p, m, times, v=v).bubble == Fraction(p - 1, v * m), (p, m)


@pytest.mark.parametrize("times", TIMES)
def test_zb_h1_waits_only_for_what_weight_gradients_do_not_fill(times):
    """(p-1)(tF + tB - tW) of the paper, where tW is the shortest; otherwise the shortest takes its place."""
    forward, input_gradient, _ = times
    for p, m in SIZES:
        if m >= p:
            simulation = simulated("zb-h1", p, m, times)
            waiting = (p - 1) * (forward + input_gradient - min(times))
            assert simulation.makespan_s == m * sum(times) + waiting, (p, m)


def test_zb_h1_never_waits_longer_than_1f1b():
    for p, m in SIZES:
        for times in TIMES:
            split, whole = (simulated(name, p, m, times) for name in ("zb-h1", "1f1b"))
            assert split.makespan_s < whole.makespan_s if p > 1 else split.makespan_s == whole.makespan_s


def test_inference_waits_p_minus_1_forwards():
    for p, m in SIZES:
        simulation = simulated("inference", p, m, (3, 0, 0))
        assert simulation.makespan_s == 3 * (m + p - 1)


def test_the_simulated_tasks_are_where_the_grid_draws_them():
    for schedule in small_schedules(max_meshes=3, max_microbatches=6, max_virtual=2):
        simulation = simulate_schedule(schedule, seconds(1, 2, 1))
        times = task_times(schedule, seconds(1, 2, 1))
        spans = {
            (span.instruction.kind, span.instruction.stage, span.instruction.microbatch): (span.start_s, span.end_s)
            for span in simulation.timeline.spans
            if isinstance(span.instruction, Run)
        }
        assert spans == {(task.kind, task.stage, task.microbatch): when for task, when in times.items()}


def test_the_bubble_is_what_busy_seconds_leave_of_the_makespan():
    simulation = simulate_schedule(make_schedule("1f1b", num_meshes=3, num_microbatches=4), seconds(1, 1, 1))
    assert simulation.busy_s == (12, 12, 12)
    assert simulation.bubble == (18 - 12) / 12
    assert simulation.timeline.busy_s(1) == 12
    assert simulation.timeline.makespan_s == 18


def test_a_transfer_delays_its_receiver_and_not_its_sender():
    program = make_chain(make_schedule("inference", num_meshes=2, num_microbatches=2)).emit()
    simulation = simulate(program, run_s=lambda run: 10, transfer_s=lambda send: 3)
    starts = {
        (span.instruction.mesh, span.instruction.microbatch): span.start_s
        for span in simulation.timeline.spans
        if isinstance(span.instruction, Run)
    }
    assert starts == {(0, 0): 0, (0, 1): 10, (1, 0): 13, (1, 1): 23}


def test_transfers_on_one_link_follow_each_other():
    program = make_chain(make_schedule("inference", num_meshes=2, num_microbatches=3)).emit()
    simulation = simulate(program, run_s=lambda run: 1, transfer_s=lambda send: 10)
    starts = [
        s.start_s for s in simulation.timeline.spans if isinstance(s.instruction, Run) and s.instruction.mesh == 1
    ]
    assert starts == [11, 21, 31]


@pytest.mark.parametrize("times", TIMES)
def test_eager_1f1b_hides_all_transfers_but_those_of_one_microbatch_and_1f1b_waits_for_more(times):
    """As long as a transfer there and one back take no longer than a forward and a backward."""
    for p, m in SIZES:
        for transfer in (Fraction(sum(times), 7), Fraction(sum(times), 2)):
            eager, plain = (
                simulate(program(name, p, m), run_s=seconds(*times), transfer_s=lambda send, c=transfer: c).makespan_s
                for name in ("eager-1f1b", "1f1b")
            )
            assert eager == (m + p - 1) * sum(times) + 2 * (p - 1) * transfer, (p, m)
            assert plain == eager + 2 * ((m - 1) * (p - 1) // p) * transfer, (p, m)


def residuals(value):
    return 100 if value.name.startswith("r") else 0


@pytest.mark.parametrize(
    ("name", "v", "expected"),
    [
        ("gpipe", 1, (800, 800, 800, 800)),
        ("1f1b", 1, (400, 300, 200, 100)),
        ("eager-1f1b", 1, (700, 500, 300, 100)),
        ("zb-h1", 1, (400, 400, 400, 400)),
        ("interleaved", 2, (1100, 900, 700, 500)),
    ],
)
def test_residual_memory_follows_the_microbatches_in_flight(name, v, expected):
    schedule = make_schedule(name, num_meshes=4, num_microbatches=8, virtual_stages=v)
    simulation = simulate(make_chain(schedule).emit(), run_s=seconds(1, 1, 1), value_bytes=residuals)
    assert simulation.peak_bytes == expected


def test_a_copy_that_goes_makes_room_for_one_that_comes_at_the_same_instant():
    simulation = simulate(
        program("inference", 2, 4), run_s=lambda run: 1, value_bytes=lambda value: 7 if value.name == "x1" else 0
    )
    assert simulation.peak_bytes == (7, 7)


def once(name, mesh, kind, reads, writes, donated=()):
    inputs, outputs = tuple(Slot(r, False) for r in reads), tuple(Slot(w, False) for w in writes)
    return TaskSpec(name=name, mesh=mesh, kind=kind, stage=0, inputs=inputs, outputs=outputs, donated=donated)


@pytest.mark.parametrize(
    ("donated", "consumable", "peak"),
    [
        ((0,), [(0, Value("p"))], 10 + 1),  # the update is written in place
        ((), [(0, Value("p"))], 10 + 10),  # old and new exist while the update runs
        ((), [], 10 + 10 + 1),  # the caller keeps the old one
    ],
)
def test_an_update_in_place_needs_the_parameter_once_and_any_other_update_twice(donated, consumable, peak):
    schedule = make_schedule("inference", num_meshes=1, num_microbatches=1)
    specs = (
        once("forward", 0, "forward", ["p"], []),
        once("update", 0, "epilogue", ["p"], ["p"], donated),
        once("again", 0, "epilogue", ["p"], ["q"]),
    )
    outputs = ((0, Value("p")), (0, Value("q")))
    program = emit(schedule, specs, inputs={0: (Value("p"),)}, outputs=outputs, consumable=consumable)
    size = {"p": 10, "q": 1}
    simulation = simulate(program, run_s=lambda run: 1, value_bytes=lambda value: size[value.name])
    assert simulation.peak_bytes == (peak,)


def test_only_the_first_update_of_a_kept_input_needs_more_memory():
    """The caller keeps the old value. Later updates replace what the step made itself, or received."""
    updates = [once(f"update{n}", 0, "epilogue", ["p"], ["p"]) for n in range(3)]
    forward, p = once("forward", 0, "forward", ["p"], []), Value("p")
    one = make_schedule("inference", num_meshes=1, num_microbatches=1)
    program = emit(one, [forward, *updates], inputs={0: (p,)}, outputs=((0, p),))
    simulation = simulate(program, run_s=lambda run: 1, value_bytes=lambda value: 10)
    assert simulation.peak_bytes == (30,), "the caller's, and during an update the old and the new one"

    two = make_schedule("inference", num_meshes=2, num_microbatches=1)
    stages = [forward, dataclasses.replace(forward, name="forward1", mesh=1, stage=1)]
    later = [once(f"later{n}", 1, "epilogue", ["p"], ["p"]) for n in range(2)]
    program = emit(two, [*stages, updates[0], *later], inputs={0: (p,), 1: (p,)}, outputs=((1, p),))
    assert len([i for i in program.instructions if isinstance(i, Receive)]) == 1
    simulation = simulate(program, run_s=lambda run: 1, value_bytes=lambda value: 10)
    assert simulation.peak_bytes == (20, 30)


def test_a_grid_cell_is_one_unit_of_the_simulator():
    schedule = make_schedule("1f1b", num_meshes=2, num_microbatches=2)
    lines = draw_grid(schedule, {"forward": 1, "backward": 2}).splitlines()
    assert lines == ["mesh 0 | F0 F1 .  .  B0 -  .  B1 -", "mesh 1 | .  F0 B0 -  F1 B1 -"]
    assert simulate_schedule(schedule, seconds(1, 1, 1)).makespan_s == 9

"""The Chrome trace of a simulated step: one row per mesh, slices in microseconds, an arrow for each transfer."""

import json

from autopar.schedules.chain import make_chain
from autopar.schedules.instructions import Free
from autopar.schedules.schedules import make_schedule
from autopar.schedules.simulate import simulate


def simulated():
    program = make_chain(make_schedule("1f1b", num_meshes=2, num_microbatches=1)).emit()
    simulation = simulate(program, run_s=lambda run: 0.5, transfer_s=lambda send: 0.25)
    return simulation.timeline


def events(phase):
    return [event for event in simulated().chrome_trace("my step")["traceEvents"] if event["ph"] == phase]


def test_rows_are_named_after_their_mesh():
    names = [(event["name"], event.get("tid"), event["args"]["name"]) for event in events("M")]
    assert names == [("process_name", None, "my step"), ("thread_name", 0, "mesh 0"), ("thread_name", 1, "mesh 1")]


def test_tasks_are_slices_in_microseconds_with_their_stage_and_microbatch():
    tasks = {event["name"]: event for event in events("X") if "stage" in event["args"] and event["tid"] == 1}
    assert tasks["forward 0"] == {
        "ph": "X",
        "name": "forward 0",
        "cat": "forward",
        "ts": 750_000,
        "dur": 500_000,
        "args": {"task": "forward1", "stage": 1, "microbatch": 0},
        "pid": 0,
        "tid": 1,
    }
    assert tasks["backward 0"]["ts"] == 1_250_000


def test_every_transfer_has_an_arrow_from_its_send_to_the_end_of_its_receive():
    begins = {event["id"]: (event["tid"], event["ts"]) for event in events("s")}
    ends = {event["id"]: (event["tid"], event["ts"]) for event in events("f")}
    assert begins == {0: (0, 500_000), 1: (1, 1_750_000)}
    assert ends == {0: (1, 750_000), 1: (0, 2_000_000)}


def test_waiting_is_seen_and_frees_are_not():
    timeline = simulated()
    assert any(isinstance(span.instruction, Free) for span in timeline.spans)
    names = [event["name"] for event in events("X")]
    assert not [name for name in names if name.startswith("free")]
    waiting = next(event for event in events("X") if event["name"].startswith("receive x1@0"))
    assert (waiting["ts"], waiting["dur"]) == (0, 750_000)


def test_a_mesh_waits_for_the_link_from_the_send_on_and_before_it_for_the_schedule():
    assert [simulated().exposed_s(mesh) for mesh in range(2)] == [0.25, 0.25]
    program = make_chain(make_schedule("1f1b", num_meshes=2, num_microbatches=1)).emit()
    free = simulate(program, run_s=lambda run: 0.5, transfer_s=lambda send: 0.0).timeline
    assert [free.exposed_s(mesh) for mesh in range(2)] == [0.0, 0.0]


def test_the_text_of_a_trace_is_the_same_object():
    assert json.loads(simulated().trace_text("my step")) == simulated().chrome_trace("my step")

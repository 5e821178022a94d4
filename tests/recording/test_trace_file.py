"""A recording is kept whole in a file that trace viewers open."""

import dataclasses
import json

import pytest

from autopar import RecordedRun
from autopar.errors import ArgumentError
from tests.recording.recordings import in_stages, on_one_mesh


@pytest.mark.parametrize("make", [on_one_mesh, in_stages])
def test_a_file_gives_back_what_was_recorded(make, tmp_path):
    file = tmp_path / "run.json"
    RecordedRun(make()).save(file)
    assert RecordedRun.load(file).data == make()


def test_an_execution_takes_a_line_of_the_trace_and_a_few_figures_beside_it(tmp_path):
    file, run = tmp_path / "run.json", on_one_mesh()
    RecordedRun(run).save(file)
    few, lines = file.stat().st_size, len(file.read_text().splitlines())
    times = 50
    RecordedRun(dataclasses.replace(run, operations=run.operations * times)).save(file)
    more = (times - 1) * len(run.operations)
    assert len(file.read_text().splitlines()) - lines == more
    assert (file.stat().st_size - few) / more < 220


def events_of(recorded, tmp_path):
    RecordedRun(recorded).save(tmp_path / "run.json")
    return json.loads((tmp_path / "run.json").read_text())["traceEvents"]


def test_each_device_has_a_row_for_compute_and_one_for_collectives(tmp_path):
    events = events_of(on_one_mesh(), tmp_path)
    rows = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    assert [rows[n] for n in range(4)] == ["device 0", "device 0, collectives", "device 1", "device 1, collectives"]
    slices = [event for event in events if event["ph"] == "X" and event["pid"] == 2]
    assert len(slices) == 8
    longest = max(slices, key=lambda event: event["dur"])
    assert (longest["tid"], longest["cat"], longest["ts"], longest["dur"]) == (2, "compute", 0.0, pytest.approx(2000.0))
    assert longest["args"] == {"opcode": "dot", "bytes": 3000, "flops": 2e6, "scope": "block_0/up"}


def test_stages_are_shown_as_measured_and_as_predicted(tmp_path):
    events = events_of(in_stages(), tmp_path)
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    assert (names[0], names[2]) == ("train, predicted", "train, call 2")
    tasks = {pid: [e["name"] for e in events if e["pid"] == pid and e["ph"] == "X" and e["tid"] == 0] for pid in (0, 2)}
    assert [name for name in tasks[0] if name.startswith("forward")] == ["forward 0", "forward 1"]
    assert tasks[2] == ["forward 0", "send x@0", "forward 1", "backward 0", "backward 1", "epilogue"]
    arrows = {event["ph"]: event["id"] for event in events if event["ph"] in "sf"}
    assert arrows["s"] == arrows["f"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"otherData": {"format": "autopar-recording-2", "recorded": {}}}'])
def test_another_file_is_refused_with_what_writes_one(text, tmp_path):
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ArgumentError, match=r"other.json is no recording of autopar: run.save\(FILE\)"):
        RecordedRun.load(file)


def test_a_file_of_another_version_and_one_that_is_missing_are_told_apart(tmp_path):
    file = tmp_path / "run.json"
    file.write_text('{"otherData": {"format": "autopar-recording-0"}}')
    with pytest.raises(ArgumentError, match="'autopar-recording-0'; this version reads 'autopar-recording-2'"):
        RecordedRun.load(file)
    with pytest.raises(ArgumentError, match=r"cannot read .*none.json: No such file"):
        RecordedRun.load(tmp_path / "none.json")


def test_before_its_block_ends_a_recording_says_so(tmp_path):
    run = RecordedRun()
    assert str(run).startswith("the recording is not over: ")
    with pytest.raises(ArgumentError, match="the recording is not over: look at it behind its"):
        run.save(tmp_path / "run.json")

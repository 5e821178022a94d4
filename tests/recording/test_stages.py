"""Operations and collectives of stages: each stage's parts add up to its tasks, and keep their stage wherever they are shown."""

import dataclasses
import json

import pytest

from autopar import RecordedRun
from autopar.recording.compare import compare, parts_of_step
from autopar.recording.device_times import collective_runs, device_times
from autopar.recording.stragglers import find_stragglers
from tests.recording.recordings import on_one_mesh, with_operations


def test_what_devices_do_in_a_stage_adds_up_to_its_tasks():
    found, recorded = compare(with_operations()), with_operations()
    for stage in range(2):
        tasks_s = sum(span.seconds for span in recorded.spans if span.stage == stage)
        names = ("compute", "communication that is waited for", "neither")
        parts = [found[f"{name} in stage {stage}"] for name in names]
        assert sum(part.measured_s for part in parts) == pytest.approx(tasks_s)
        planned = recorded.plan.stages[stage]
        called_s = 2 * (planned.forward_s + planned.backward_s) + planned.once_s
        assert sum(part.predicted_s for part in parts) == pytest.approx(called_s)
    assert found["compute in stage 0"].measured_s == pytest.approx(0.75 * 13e-3 + 5 * 0.5e-4)
    assert found["compute in stage 1"].measured_s == pytest.approx(0.75 * 14e-3)


def test_collectives_of_a_stage_stand_beside_its_plan():
    found = compare(with_operations())
    first, second = (found[f"all-reduce over x in stage {stage}"] for stage in range(2))
    assert (first.predicted_s, second.predicted_s) == (2e-3, 2e-3)
    assert first.measured_s == pytest.approx(0.25 * 13e-3 - 5 * 0.5e-4)
    assert second.measured_s == pytest.approx(0.25 * 14e-3)
    assert first.note == "3 in the programs of its tasks, 8% of it for the last device to come"
    assert second.note == "4 in the programs of its tasks, 0% of it for the last device to come"


def test_parts_of_stages_are_no_parts_of_the_step():
    assert parts_of_step(compare(with_operations())) == parts_of_step(
        compare(with_operations(operations=(), program=()))
    )


def test_a_stage_that_another_process_has_is_not_measured():
    whole = with_operations()
    spans = tuple(span for span in whole.spans if span.mesh == 0)
    operations = tuple(one for one in whole.operations if whole.mesh(one) == 0)
    found = compare(dataclasses.replace(whole, spans=spans, operations=operations))
    assert found["forward of stage 0"].measured_s == pytest.approx(2e-3)
    assert found["forward of stage 1"].measured_s is None
    assert not [part.what for part in found.parts if part.what.endswith("in stage 1")]


def test_executions_are_paired_within_their_task_and_microbatch():
    recorded = with_operations()
    unseen = [one for one in recorded.operations if (one.name, one.device, one.microbatch) != ("psum.2", 1, 0)]
    runs = collective_runs(dataclasses.replace(recorded, operations=tuple(unseen)), 2, stage=0)
    assert len(runs) == 3, "of two microbatches, forward and backward, the second, and the update"
    assert all(max(run.waited_s) == pytest.approx(1e-4) for run in runs)


def test_devices_are_told_by_their_meshes():
    recorded = with_operations()
    assert [(one.mesh, one.device) for one in device_times(recorded, 2)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    slow = tuple(
        dataclasses.replace(one, end_s=one.end_s + 4e-3)
        if (recorded.stage(one), one.device, one.name, one.task) == (1, 1, "dot.1", "epilogue 1")
        else one
        for one in recorded.operations
    )
    found = find_stragglers(dataclasses.replace(recorded, operations=slow))
    assert [one.what for one in found if one.kind == "device"] == ["the compute of device 1 of mesh 1"]


def test_the_page_names_the_task_of_each_operation():
    text = str(RecordedRun(with_operations()))
    assert "dot.1 in backward 0" in text
    row = next(line for line in text.splitlines() if "all-reduce psum.2 in backward 0" in line)
    assert row.split()[5:8] == ["2", "1.90", "ms"], (
        "twice on each device, a quarter of 4 ms each, less what one comes late"
    )
    assert "block_0/up" in text


def test_devices_have_rows_below_those_of_meshes(tmp_path):
    RecordedRun(with_operations()).save(tmp_path / "run.json")
    assert RecordedRun.load(tmp_path / "run.json").data == with_operations()
    events = [e for e in json.loads((tmp_path / "run.json").read_text())["traceEvents"] if e["pid"] == 2]
    rows = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    assert [rows[n] for n in range(10)] == [
        "mesh 0",
        "mesh 1",
        *(
            f"mesh {mesh}, device {device}{what}"
            for mesh in (0, 1)
            for device in (0, 1)
            for what in ("", ", collectives")
        ),
    ]
    reduces = [event for event in events if event.get("cat") == "all-reduce"]
    assert {rows[event["tid"]] for event in reduces} == {name for name in rows.values() if name.endswith("collectives")}
    assert {(event["args"]["task"], event["args"].get("microbatch")) for event in reduces} == {
        (one.task, one.microbatch) for one in with_operations().operations
    }


def test_the_page_of_a_plan_draws_devices_below_the_pipeline():
    recorded = with_operations()
    text = recorded.plan.html(recorded=RecordedRun(recorded))
    assert 0 < text.index('aria-label="measured-pipeline') < text.index('aria-label="measured-devices')
    assert "mesh 1 device 0" in text


def test_a_file_from_before_operations_had_tasks_is_still_read(tmp_path):
    file = tmp_path / "run.json"
    RecordedRun(on_one_mesh()).save(file)
    content = json.loads(file.read_text())
    recorded = content["otherData"]["recorded"]
    content["otherData"] = {"format": "autopar-recording-1", "recorded": recorded}
    recorded["operations"] = [dataclasses.asdict(one) for one in on_one_mesh().operations]
    for one in (*recorded["operations"], *recorded["program"]):
        del one["task"]
    for one in recorded["operations"]:
        del one["microbatch"]
    file.write_text(json.dumps(content))
    assert RecordedRun.load(file).data == on_one_mesh()

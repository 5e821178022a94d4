"""Trainings over processes go on after faults with the losses of an uninterrupted run, and name what stood still."""

import re
import time

import numpy as np
import pytest

from tests.launch.launching import HERE, end, lines, run, start, wait_until
from tests.launch.training_step import losses_of_one_device

pytestmark = pytest.mark.slow
TRAINING = (HERE / "training.py",)
STEPS, MOST_STEPS = 12, 30
LIMIT_S = 400
"""On a machine that others use, a start of two processes takes half a minute."""


@pytest.fixture(scope="module")
def reference():
    return losses_of_one_device(MOST_STEPS)


def losses(folder):
    """By step: each loss as it was written, with its attempt and its number of devices."""
    found = {}
    for line in lines(folder, "losses"):
        attempt, devices, number, loss = line.split()
        found.setdefault(int(number), []).append((int(attempt), int(devices), float(loss)))
    return found


def check(found, reference, steps=STEPS):
    """Every step was done; on the same devices always with the same loss, and on any with that of one process."""
    assert sorted(found) == list(range(steps))
    for number, expected in enumerate(reference[:steps]):
        for _, _, loss in found[number]:
            np.testing.assert_allclose(loss, expected, rtol=1e-5)
        assert len({(devices, loss) for _, devices, loss in found[number]}) == len({d for _, d, _ in found[number]})


@pytest.mark.fault(3, 6, 13, 14, 15, 26, 30)
@pytest.mark.parametrize(
    ("way", "fault", "words"),
    [
        ("mesh", "kill@step,count=8,rank=1", "worker 1 was ended by SIGKILL"),
        ("mesh", "kill@step,count=8,rank=0", "worker 0 was ended by SIGKILL"),
        ("mesh", "stop@step,count=5,rank=1", "worker 1 has stood still by SIGSTOP"),
        (
            "mesh",
            "raise@phase:compiling,rank=1",
            "worker 1 ended with status 1: InjectedFaultError: fault on purpose at phase comp",
        ),
        (
            "mesh",
            "kill@write,count=2,rank=0",
            "worker 0 was ended by SIGKILL",
        ),  # while the second checkpoint is written
        ("stages", "kill@write,count=2,rank=1", "worker 1 was ended by SIGKILL"),
        (
            "mesh",
            "full@write,count=2,rank=1",
            "worker 1 ended with status 1 .*: CheckpointError: the checkpoint before cannot be written: .*No space left on",
        ),
        ("stages", "kill@instruction:run backward*,count=9,rank=1", "worker 1 was ended by SIGKILL"),
        ("stages", "kill@instruction:send *,count=9,rank=0", "worker 0 was ended by SIGKILL"),
        (
            "stages",
            "raise@instruction:receive *,count=9,rank=0",
            "worker 0 ended with status 1 .*: PipelineError: InjectedFault",
        ),
        ("stages", "stop@instruction:run *,count=20,rank=0", "worker 0 has stood still by SIGSTOP"),
    ],
)
def test_a_training_goes_on_after_a_fault_as_if_nothing_had_happened(way, fault, words, reference, tmp_path):
    options = ("-n", "2", "--devices-per-process", "2", "--fault", f"{fault},attempt=0")
    status, said = run(tmp_path, *options, script=TRAINING, arguments=(STEPS, way), limit_s=LIMIT_S)
    assert status == 0, said
    assert re.search(words, said), said
    assert "restart 1 of 10" in said
    check(losses(tmp_path), reference)


@pytest.mark.fault(25)
def test_a_job_goes_on_with_eight_four_six_and_eight_devices(reference, tmp_path):
    size = tmp_path / "size"
    job = start(
        tmp_path,
        *("-n", "2", "--devices-per-process", "4", "--size-file", size, "--grace-seconds", "5"),
        script=TRAINING,
        arguments=(MOST_STEPS, "mesh"),
        TRAINING_PAUSE_S="1.0",
    )
    seconds = []
    for text, devices in (("2 2", "4"), ("2 3", "6"), ("2 4", "8")):
        before = len(lines(tmp_path, "losses"))
        assert wait_until(lambda: len(lines(tmp_path, "losses")) >= before + 3, LIMIT_S)  # noqa: B023
        size.write_text(text)
        began = time.monotonic()
        assert wait_until(lambda: lines(tmp_path, "losses")[-1].split()[1] == devices, LIMIT_S)  # noqa: B023
        seconds.append(round(time.monotonic() - began, 1))
    (tmp_path / "seconds").write_text(str(seconds))
    status, said = end(job, tmp_path, LIMIT_S)
    assert status == 0, said
    found = losses(tmp_path)
    check(found, reference, MOST_STEPS)
    devices = [line.split()[1] for line in lines(tmp_path, "losses")]
    assert [d for d, before in zip(devices, [None, *devices], strict=False) if d != before] == ["8", "4", "6", "8"]
    assert max(seconds) < 60, seconds


@pytest.mark.fault(11)
def test_a_pipeline_that_stands_still_is_named_by_each_process_with_its_peer(reference, tmp_path):
    fault = "slow@instruction:run backward*,count=9,rank=1,attempt=0,seconds=300"
    options = ("-n", "2", "--devices-per-process", "2", "--stall-seconds", "10", "--fault", fault)
    status, said = run(tmp_path, *options, script=TRAINING, arguments=(STEPS, "stages"), limit_s=LIMIT_S)
    assert status == 0, said
    told = said.partition("start again")[0]
    assert re.search(
        r"mesh 1 of process 1 performs instruction \d+ of \d+, backward of stage 1, microbatch \d", told
    ), said
    assert re.search(r"mesh 0 of process 0 .*(receives? |send ).*mesh 1 of process 1", told), said
    check(losses(tmp_path), reference)

"""Several JAX processes do what one process does.

The parent starts them on loopback, waits no longer than `LIMIT_S`, ends what it started, and compares with `jax.jit`.
"""

import os
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests import process_scenarios
from tests.xla_flags import QUICK_COMPILE

LIMIT_S = 300


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def started(scenario, folder, devices=4, count=2):
    """The processes, with their output in files."""
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICK_COMPILE}",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    port, processes = free_port(), []
    for rank in range(count):
        with (folder / f"{rank}.txt").open("w") as output:
            command = [
                sys.executable,
                "-m",
                "tests.process_scenarios",
                scenario,
                *map(str, (rank, count, port)),
                str(folder),
            ]
            processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment))
    return processes


def ended(processes, limit_s=LIMIT_S):
    """Their exit codes; those that are not done in time are killed, and have none."""
    codes = []
    try:
        for process in processes:
            try:
                codes.append(process.wait(limit_s))
            except subprocess.TimeoutExpired:
                codes.append(None)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    return codes


def said(folder):
    return "\n".join(f"--- {path.stem}\n{path.read_text()[-6000:]}" for path in sorted(folder.glob("*.txt")))


def numbers_of(scenario, folder, devices=4, count=2):
    """What each process found."""
    codes = ended(started(scenario, folder, devices, count))
    assert codes == [0] * count, f"exit codes {codes}\n{said(folder)}"
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(count)]


def check(scenario, folder, expected=process_scenarios.expected, devices=4):
    wanted = expected()
    for found in numbers_of(scenario, folder, devices):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_allclose(
                found[name], value, rtol=1e-5, atol=1e-5 * max(1e-2, np.abs(value).max()), err_msg=name
            )


def test_two_processes_on_one_mesh_train_as_one_does(tmp_path):
    check("one_mesh", tmp_path)


@pytest.mark.slow
def test_a_batch_that_lies_on_all_processes_is_laid_out_anew(tmp_path):
    check("one_mesh_global_batch", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["stage_each", "interleaved_devices", "four_stages", "one_device_each"])
def test_a_pipeline_over_two_processes_trains_as_one_does(scenario, tmp_path):
    check(scenario, tmp_path, devices=1 if scenario == "one_device_each" else 4)


@pytest.mark.slow
def test_state_on_one_device_of_each_process_is_laid_out_and_stays_the_callers(tmp_path):
    wanted = process_scenarios.flat(
        jax.jit(process_scenarios.step)(process_scenarios.init_state(0), process_scenarios.batch(0))[0]
    )
    for found in numbers_of("callers_arrays", tmp_path):
        assert found.keys() == {f"{n}{path}" for n in range(2) for path in wanted}
        for name, value in found.items():
            scale = max(1e-2, np.abs(wanted[name[1:]]).max())
            np.testing.assert_allclose(value, wanted[name[1:]], rtol=1e-5, atol=1e-5 * scale, err_msg=name)


@pytest.mark.slow
def test_an_evaluation_follows_a_pipeline_over_two_processes(tmp_path):
    wanted = process_scenarios.expected()["loss0"]
    for found in numbers_of("evaluation", tmp_path):
        np.testing.assert_allclose(found["loss0"], wanted, rtol=1e-5)


@pytest.mark.slow
def test_state_goes_from_one_mesh_to_stages_of_both_processes_and_starts_again_from_what_was_gathered(tmp_path):
    check("stack_in_two_processes", tmp_path, process_scenarios.stack_expected)


@pytest.mark.slow
def test_each_process_records_the_operations_of_its_own_devices_at_their_places(tmp_path):
    first, second = numbers_of("recorded", tmp_path)
    assert first["one mesh: places"].tolist() == [[0, place] for place in range(4)]
    assert second["one mesh: places"].tolist() == [[0, place] for place in range(4, 8)]
    assert first["stages: places"].tolist() == [[mesh, place] for mesh in (0, 1) for place in (0, 2)]
    assert second["stages: places"].tolist() == [[mesh, place] for mesh in (0, 1) for place in (1, 3)]
    for found in (first, second):
        assert found["stages: held"].all()
        assert found["stages: held"].size
        assert "all-reduce over x" in str(found["one mesh: said"])
        assert "other processes have some of its devices" in str(found["one mesh: said"])
        assert "not measured: what 4 of 8 devices do, which other processes have" in str(found["stages: said"])


@pytest.mark.slow
def test_numbers_that_were_pythons_are_weakly_typed_in_every_process(tmp_path):
    types = [("bfloat16", False), ("bfloat16", False), ("float32", True), ("int32", True)]
    for found in numbers_of("weak_rate", tmp_path):
        assert str(found["types"]) == str([types, types])
        assert found["plans"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices"), [(2, 4), (3, 1)])
def test_where_one_process_does_something_else_all_refuse_alike_and_go_on(count, devices, tmp_path):
    found = numbers_of("odd_one_out", tmp_path, devices, count)
    last = count - 1
    for way in ("mesh", "stages"):
        for kind, doing in (("batch", "plans step"), ("plan", "plans step"), ("gather", "gathers")):
            words = {str(one[f"{way} {kind}"]) for one in found}
            assert len(words) == 1, words
            assert re.match(
                f"process 0 runs step .*, process {last} {doing} .*: every process has to make", words.pop()
            )
        assert len({float(one[f"{way} loss"]) for one in found}) == 1
        *others, odd = (str(one[f"{way} gone"]) for one in found)
        assert "given to step no longer exist" in odd
        assert all(f"process {last} cannot go on: ArgumentError" in words for words in others)


@pytest.mark.slow
def test_processes_that_plan_different_things_are_told_both(tmp_path):
    found = numbers_of("plans_that_differ", tmp_path)
    for one in found:
        words, rows = str(one["differ"]), [re.escape(f"batch/x float32[{n}, 16]") for n in (8, 16)]
        assert re.search(f"process 0 plans step .*{rows[0]}.*process 1 plans step .*{rows[1]}", words)
        assert "same calls in the same order" in words
        assert len({*re.findall(r"constraints=(\w+)", str(one["constrained"]))}) == 2
    assert "memory" in str(found[0]["memory"])
    assert "process 0 could not plan step" in str(found[1]["memory"])
    assert "OutOfMemoryError" in str(found[1]["memory"])


@pytest.mark.fault(1)
@pytest.mark.slow
def test_a_stage_that_fails_in_one_process_is_reported_by_all(tmp_path):
    zero, one = numbers_of("stage_that_fails", tmp_path)
    told = (
        r"ValueError: broken on purpose\sStage 1, microbatch 0: the backward failed on mesh 1 .*process_scenarios.py:"
    )
    assert re.match(told, str(one["first"]))
    assert re.match(f"process 1 failed: PipelineError: {told}", str(zero["first"]))
    for words in (zero["first"], zero["again"], one["again"]):
        assert "processes 0, 1 together, and they have lost step" in str(words)
    assert max(zero["waited_s"], one["waited_s"]) < 60


@pytest.mark.slow
def test_a_process_whose_thread_is_freed_while_it_ends_does_not_abort(tmp_path):
    """A thread that comes back from XLA while the interpreter ends takes the process down with it, so it is waited for."""
    zero, one = numbers_of("stage_that_fails_and_ends_late", tmp_path)
    assert "broken on purpose" in str(zero["first"])
    assert "broken on purpose" in str(one["first"])


@pytest.mark.slow
def test_a_process_that_dies_does_not_leave_the_other_waiting(tmp_path):
    codes = ended(started("process_that_dies", tmp_path))
    assert codes[1] == 3
    assert codes[0] is not None, said(tmp_path)
    found = dict(np.load(tmp_path / "0.npz"))
    assert re.search(r"failed.*on mesh 0(.|\n)*", str(found["first"])), found["first"]
    assert found["waited_s"] < 60


@pytest.mark.slow
@pytest.mark.parametrize("ends", [0, 1])
def test_a_process_that_fails_between_steps_is_named_to_the_other_with_its_error(ends, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_TEST_ENDS", str(ends))
    codes = ended(started("ends_between_steps", tmp_path, devices=1))
    assert codes[ends] == 1, said(tmp_path)
    words = (tmp_path / "words.txt").read_text()
    assert words.startswith(f"process {ends} has ended with RuntimeError: no more data, while process")


PRINTED = """
import jax, autopar
from tests import pipeline_steps
step, state, batch = pipeline_steps.clipped_adamw()
compiled = autopar.parallelize(
    step, num_stages=4, mesh_shape=(1,), num_microbatches=4, schedule="zb-h1", cluster="cpu"
).compile(state, batch)
print(*(stage.program.step.fingerprint for stage in compiled.stages), compiled.instructions, sep="\\n")
"""


@pytest.mark.slow
def test_stages_and_instructions_are_the_same_in_every_process_whatever_the_order_of_its_sets():
    """What a plan becomes is not sent to others: each process makes it again."""
    found = []
    for seed in ("1", "2"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        command = [sys.executable, "-c", PRINTED]
        found.append(subprocess.run(command, env=environment, check=True, text=True, capture_output=True).stdout)
    assert "run weight_gradient 0" in found[0]
    assert found[0] == found[1]

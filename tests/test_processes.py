"""Two JAX processes with four devices each do what one process does.

The parent starts both on loopback, waits no longer than `LIMIT_S`, ends what it started, and compares with `jax.jit`.
"""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests import process_scenarios

LIMIT_S = 120


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def started(scenario, folder):
    """Both processes, with their output in files."""
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    port, processes = free_port(), []
    for rank in range(2):
        with (folder / f"{rank}.txt").open("w") as output:
            command = [sys.executable, "-m", "tests.process_scenarios", scenario, str(rank), str(port), str(folder)]
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
    return "\n".join(f"--- process {rank}\n{(folder / f'{rank}.txt').read_text()[-6000:]}" for rank in range(2))


def numbers_of(scenario, folder):
    """What each process found."""
    codes = ended(started(scenario, folder))
    assert codes == [0, 0], f"exit codes {codes}\n{said(folder)}"
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(2)]


def check(scenario, folder):
    wanted = process_scenarios.expected()
    for found in numbers_of(scenario, folder):
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
@pytest.mark.parametrize("scenario", ["stage_each", "interleaved_devices", "four_stages"])
def test_a_pipeline_over_two_processes_trains_as_one_does(scenario, tmp_path):
    check(scenario, tmp_path)

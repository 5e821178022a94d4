"""A restore over several processes holds little more than the share of each, under another plan than that of the save."""

import subprocess
import sys
from os import environ, pathsep

import pytest

from tests.test_processes import ended, free_port


@pytest.mark.slow
def test_a_restore_takes_little_more_than_a_processs_share(tmp_path):
    for _ in ("save", "restore"):
        port, processes = free_port(), []
        for rank in range(4):
            command = [
                sys.executable,
                "-m",
                "tests.checkpoints.memory_of_restore",
                str(tmp_path),
                *map(str, (rank, 4, port)),
            ]
            path = pathsep.join(path for path in sys.path if path)
            setting = {**environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1", "PYTHONPATH": path}
            processes.append(subprocess.Popen(command, env=setting))
        assert ended(processes) == [0] * 4
    for rank in range(4):
        before, peak, share = map(int, (tmp_path / f"memory.{rank}").read_text().split())
        assert (peak - before) / share < 1.2, (
            f"process {rank}: {(peak - before) / share:.2f} times {share / 2**20:.0f} MiB"
        )

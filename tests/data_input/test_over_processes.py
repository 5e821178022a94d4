"""The order of the data goes on exactly where it was, with other numbers of processes, each of which reads its own rows."""

import ast
import itertools
import subprocess
import sys
from os import environ, pathsep

import pytest

from tests.data_input.order_over_processes import KINDS, ROWS, batch_of, drawn
from tests.test_processes import ended, free_port

STEPS = 12
STARTS = [(2, 5), (1, 9), (4, 0)]
"""How many processes there are, and behind which step they end; the last ones make all steps."""


def train(folder, count, end):
    """A training over so many processes; returns what they said if one failed."""
    port, processes = free_port(), []
    for rank in range(count):
        command = [sys.executable, "-m", "tests.data_input.order_over_processes", str(folder)]
        command += map(str, (rank, count, port, STEPS, end))
        path = pathsep.join(path for path in sys.path if path)
        setting = {**environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1", "PYTHONPATH": path}
        with (folder / f"{count}.{rank}.txt").open("w") as said:
            processes.append(subprocess.Popen(command, env=setting, stdout=said, stderr=said))
    assert ended(processes) == [0] * count, [path.read_text()[-3000:] for path in folder.glob(f"{count}.*.txt")]


@pytest.mark.slow
def test_the_order_of_the_data_goes_on_over_other_numbers_of_processes(tmp_path):
    expected = [list(map(int, batch)) for batch in itertools.islice(drawn(), STEPS)]
    for count, end in STARTS:
        train(tmp_path, count, end)
        if count == 2:
            read = [ast.literal_eval((tmp_path / f"by number.read.{rank}").read_text())[1:] for rank in range(2)]
            assert not {*read[0]} & {*read[1]}  # but for the first example, which tells the shapes
            assert {*itertools.chain(*expected[:end])} <= {*read[0], *read[1]}
    for kind in KINDS:
        rows = [line.split() for line in (tmp_path / f"{kind}.losses").read_text().splitlines()]
        made = [(int(number), batch_of(float(loss))) for number, loss in rows]
        assert [number for number, _ in made] == [*range(1, 6), *range(5, 10), *range(9, STEPS + 1)]
        assert all(batch == expected[number - 1] for number, batch in made)
    assert len(expected[0]) == ROWS

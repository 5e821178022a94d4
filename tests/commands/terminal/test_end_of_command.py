"""A command that a signal stopped ends at once, whatever still works in its threads."""

import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import sys, threading, time
    import autopar.__main__ as command

    def stopped():
        threading.Thread(target=time.sleep, args=(60,)).start()  # as XLA's compiler, which nobody can interrupt
        print("the plan so far")
        {end}

    command.main = stopped
    command.end_with_command()
"""


@pytest.mark.parametrize(("end", "status"), [("return 130", 130), ("sys.exit(143)", 143)])
def test_a_stopped_command_does_not_wait_for_threads(end, status):
    script = textwrap.dedent(SCRIPT).replace("{end}", end)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=40, check=False)
    assert (done.returncode, done.stdout) == (status, "the plan so far\n")


@pytest.mark.parametrize(("end", "status"), [("return 1", 1), ("sys.exit(2)", 2), ("return 0", 0)])
def test_other_commands_end_as_usual(end, status):
    script = textwrap.dedent(SCRIPT).replace("{end}", end).replace("time.sleep, args=(60,)", "print, args=('done',)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == status
    assert sorted(done.stdout.split("\n")) == ["", "done", "the plan so far"]

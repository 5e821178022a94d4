"""A command that a signal stopped ends at once, whatever still works in its threads."""

import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import sys, threading, time
    import autopar.__main__ as command

    def work():
        time.sleep({seconds})
        print("done")

    def run():
        threading.Thread(target=work).start()  # as XLA's compiler, which nobody can interrupt
        print("the plan so far")
        {end}

    command.main = run
    command.end_with_command()
"""


def ended(end, seconds):
    """The status and the output of a command that ends so while a thread works for some seconds."""
    script = textwrap.dedent(SCRIPT).replace("{end}", end).replace("{seconds}", str(seconds))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize(("end", "status"), [("return 130", 130), ("sys.exit(143)", 143)])
def test_a_stopped_command_does_not_wait_for_threads(end, status):
    assert ended(end, 100) == (status, "the plan so far\n")


@pytest.mark.parametrize(("end", "status"), [("return 1", 1), ("sys.exit(2)", 2), ("return 0", 0)])
def test_other_commands_end_as_usual(end, status):
    assert ended(end, 1) == (status, "the plan so far\ndone\n")

"""A script for tests of `autopar launch`, without JAX: a chaotic sequence that is saved after each step.

python counting.py FOLDER STEPS [WHAT RANK STEP]: WHAT happens once, in the first attempt, to worker RANK in step STEP, when all
workers have started. With COUNTING_HOLD no worker goes beyond that step before there is a file FOLDER/go.
"""

import atexit
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from autopar.events import StepRun, running
from autopar.testing.faults import point

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])
RANK, ATTEMPT = int(os.environ["AUTOPAR_RANK"]), int(os.environ["AUTOPAR_ATTEMPT"])
STEP_S, PAUSE_S = 0.01, 0.01
LONG_S = 600
"""Longer than a test waits for anything."""
HOLD = int(os.environ.get("COUNTING_HOLD", "-1"))
SAVED = FOLDER / f"state{RANK}.json"


def save(state):
    part = SAVED.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(state))
    part.replace(SAVED)


def note(name, text):
    with (FOLDER / name).open("a") as file:
        file.write(f"{text}\n")


def wait_until(holds):
    while not holds():
        time.sleep(PAUSE_S)


def all_have_started():
    """All workers of this attempt have noted that they started; a fault before that might end one that has not."""
    started = (FOLDER / "started").read_text().splitlines()
    return sum(f" attempt {ATTEMPT} " in line for line in started) == int(os.environ["AUTOPAR_PROCESSES"])


def happens(state):
    what, rank, step = (*sys.argv[3:], "nothing", "0", "0")[:3] if len(sys.argv) < 6 else sys.argv[3:6]
    is_due = state["step"] >= int(step) if what == "always raise" else state["step"] == int(step) and ATTEMPT == 0
    if int(rank) != RANK or not is_due:
        return
    wait_until(all_have_started)
    match what:
        case "raise and stay":
            atexit.register(time.sleep, LONG_S)
            raise ValueError("broken on purpose")
        case "raise and abort":
            atexit.register(os.abort)
            raise ValueError("broken on purpose")
        case "raise" | "always raise":
            raise ValueError("broken on purpose")
        case "leave":
            command = [sys.executable, "-c", f"import time; time.sleep({LONG_S})", str(FOLDER)]
            subprocess.Popen(command, start_new_session=True)
        case "stand":
            with running(StepRun(name="train", plan=None, standing=list), []):
                time.sleep(LONG_S)
        case "stick":
            ctypes.PyDLL(None).sleep(LONG_S)  # keeps Python's lock
        case "exit":
            sys.exit(7)
        case _:
            os.kill(os.getpid(), getattr(signal, what))


def stop(number, frame):
    note("stopped", f"{RANK} {number}")
    sys.exit(0)


signal.signal(signal.SIGTERM, stop)
note("started", f"{RANK} of {os.environ['AUTOPAR_PROCESSES']} attempt {ATTEMPT} pid {os.getpid()}")
state = json.loads(SAVED.read_text()) if SAVED.exists() else {"step": 0, "x": 0.3 + RANK / 100}
while state["step"] < STEPS:
    if state["step"] == HOLD:
        wait_until((FOLDER / "go").exists)
    point(f"step {state['step']}")
    time.sleep(STEP_S)
    state = {"step": state["step"] + 1, "x": 3.9 * state["x"] * (1 - state["x"])}
    save(state)
    happens(state)
sys.stdout.write(f"ends with {state['x']!r}\n")

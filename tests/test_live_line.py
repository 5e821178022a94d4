"""The line that a terminal shows while a plan is sought: its words, that it moves, that it goes, and that a pipe gets nothing."""

import io
import math
import os
import pty
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from autopar.live_line import _Line, describe, show_progress
from autopar.progress import Progress, enter, report
from tests.commands.command_line import CLEAN_ENVIRONMENT, ROOT, SMALL, start


class _Terminal(io.StringIO):
    """A terminal that sets an event when it is written a text, and remembers everything."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited, self.seen = "", threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.awaited and self.awaited in self.getvalue():
            self.seen.set()
        return written


def test_the_words_are_phase_candidates_best_step_bound_and_seconds_left():
    now = Progress(
        phase="searching",
        at="mesh (2, 4)",
        bounded=120,
        dropped=88,
        proven=1,
        best_s=0.0123,
        bound_s=0.012,
    )
    assert describe(now, elapsed_s=20.0, left_s=39.2) == (
        "searching, mesh (2, 4) · 120 bounded / 88 dropped / 1 proven · best step 12.3 ms · bound 12.0 ms · 39 s left"
    )
    assert describe(Progress(phase="tracing"), elapsed_s=3.2) == "tracing · 3 s"
    assert describe(Progress(phase="tracing", stopping="stopping"), elapsed_s=3.2) == "stopping, tracing · 3 s"
    of_several = Progress(phase="tracing", search="ZeRO-2, 2 of 5")
    assert describe(of_several, elapsed_s=3.2) == "ZeRO-2, 2 of 5, tracing · 3 s"
    promising = Progress(phase="choosing stages", promised_s=0.023)
    assert describe(promising, elapsed_s=3.2) == "choosing stages · stages promise 23.0 ms · 3 s"
    assert describe(Progress(), elapsed_s=9.0, left_s=-4.0) == "starting · 0 s left"


@pytest.mark.parametrize(
    ("width", "words"),
    [
        (100, "planning on one mesh in 16 microbatches, mesh (2, 4) · best step 12.3 ms · bound 12.0 ms · 39 s left"),
        (98, "planning on one mesh in 16 microbatches, mesh (2, 4) · best step 12.3 ms · 39 s left"),
        (80, "planning on one mesh in 16 microbatches, mesh (… · best step 12.3 ms · 39 s left"),
        (58, "planning on one mesh in 1… · best step 12.3 ms · 39 s left"),
        (20, "… · best step 12.3 ms · 39 s left"),
    ],
)
def test_a_narrow_terminal_has_the_best_step_and_the_seconds_whole(width, words):
    now = Progress(
        phase="planning on one mesh in 16 microbatches",
        at="mesh (2, 4)",
        bounded=120,
        dropped=88,
        best_s=0.0123,
        bound_s=0.012,
    )
    assert describe(now, elapsed_s=20.0, left_s=39.2, width=width) == words


def test_the_line_ends_with_the_seconds_at_the_last_column_of_a_terminal():
    console = Console(width=60, legacy_windows=False)
    line = _Line(console)
    line.hear(
        Progress(phase="planning on one mesh in 16 microbatches", at="mesh (2, 4)", best_s=0.5, seconds_left=60.0)
    )
    drawn = line.draw()
    assert drawn.cell_len == 60
    assert drawn.plain.endswith("… · best step 500 ms · 60 s left")


def test_the_line_is_drawn_while_nothing_is_reported_and_is_gone_at_the_end():
    terminal = _Terminal()
    console = Console(file=terminal, force_terminal=True, width=100, legacy_windows=False)
    with show_progress(console=console):
        enter("tracing")
        report(Progress(best_s=0.5))
        terminal.awaited = "best step 500 ms"
        assert terminal.seen.wait(timeout=60), "the thread that draws is at work without further reports"
    assert terminal.getvalue().endswith("\x1b[1A\x1b[2K"), "the line is erased"


def test_the_seconds_that_are_left_pass_whatever_else_is_reported():
    times = [100.0]
    line = _Line(Console(get_time=lambda: times[-1]))
    line.hear(Progress(phase="planning", seconds_left=60.0))
    times.append(110.0)
    line.hear(Progress(best_s=0.5))
    times.append(112.0)
    assert line.draw().plain.endswith("planning · best step 500 ms · 48 s left")
    line.hear(Progress(seconds_left=math.inf))
    assert line.draw().plain.endswith("12 s")


def test_what_compiles_and_runs_has_neither_a_clock_nor_candidates():
    times = [100.0]
    line = _Line(Console(get_time=lambda: times[-1]))
    line.hear(Progress(phase="planning", seconds_left=60.0, bounded=4, best_s=0.5))
    times.append(110.0)
    line.hear(Progress(phase="compiling"))
    times.append(113.0)
    assert line.draw().plain.endswith(" compiling · 3 s")
    line.hear(Progress(phase="first step"))
    times.append(114.0)
    assert line.draw().plain.endswith(" first step · 1 s")


SCRIPT = """
import jax, jax.numpy as jnp
import autopar

@autopar.parallelize(plan_cache=False)
def step(state, batch):
    return state - 0.1 * jnp.mean(batch @ state), jnp.sum(batch)

with autopar.show_progress():
    state, loss = step(jnp.ones((8, 8)), jnp.ones((8, 8)))
    print("first", float(loss))
    jax.block_until_ready(state)
"""


def test_a_script_in_a_terminal_sees_what_is_going_on_and_what_it_prints():
    ours, theirs = pty.openpty()
    env = CLEAN_ENVIRONMENT | {"TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=ROOT, env=env, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = _read_all(ours)
    assert process.wait(timeout=120) == 0
    assert "first 64.0" in shown
    assert "first step" in shown, "what came last is drawn at the end"
    assert shown.endswith("\x1b[2K"), "the line is erased"


def test_a_script_on_a_pipe_prints_what_it_prints():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=CLEAN_ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "first 64.0\n", "")


def test_a_pipe_gets_nothing_even_if_colours_are_forced():
    process = start("plan", "mlp", *SMALL, "--devices", "2", FORCE_COLOR="1")
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.sweep
def test_verbose_logs_phases_on_standard_error_and_everything_if_it_is_given_twice():
    process = start("plan", "mlp", *SMALL, "--devices", "4", "-v")
    _, errors = process.communicate(timeout=120)
    assert "INFO tracing\n" in errors
    assert "DEBUG" not in errors
    process = start("plan", "mlp", *SMALL, "--devices", "4", "-vv")
    _, errors = process.communicate(timeout=120)
    assert "INFO tracing\n" in errors
    assert "DEBUG" in errors


def test_a_terminal_sees_the_phase_and_then_the_plan_alone():
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "autopar", "plan", "mlp", *SMALL, "--devices", "4"]
    env = CLEAN_ENVIRONMENT | {"TERM": "xterm"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    shown = _read_all(ours)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "planning on one mesh" in shown, "what came last is drawn at the end"
    assert printed.startswith("mesh ")
    assert shown.endswith("\x1b[2K"), "the line is erased before the plan is printed"


def _read_all(terminal: int) -> str:
    parts = []
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # Linux says so when the other end is closed
            part = b""
        if not part:
            os.close(terminal)
            return b"".join(parts).decode()
        parts.append(part)

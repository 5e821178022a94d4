"""What a run tells of itself fits the terminal that it has."""

import io
import re

import pytest
from rich.console import Console

from autopar.explain.training_progress import Report, RunStep, Scale

SCALE = Scale(count=2048, noun="tokens", ideal_s=0.001, predicted_s=0.009)


def report(console):
    return Report(console, SCALE, name="autopar", first=0, last=300)


def test_without_a_terminal_a_line_says_all():
    console = Console(file=io.StringIO(), width=200)
    told = report(console)
    told.tell(RunStep(1, 2.6, 30.0))  # it is compiled, and says nothing about those to come
    told.tell(RunStep(2, 2.5, 0.01))
    told.tell(RunStep(300, 2.5, 0.01))
    assert console.file.getvalue().splitlines() == [
        "autopar  step 1/300  loss 2.6000  68 tokens/s, 30.0 s per step, 9.00 ms predicted, MFU 0.0%",
        "autopar  step 300/300  loss 2.5000  204,800 tokens/s, 10.0 ms per step, 9.00 ms predicted, MFU 10.0%, 0 s left",
    ]


@pytest.mark.parametrize(
    ("width", "shown"),
    [(140, "204,800 tokens/s, 10.0 ms per step, 9.00 ms predicted, MFU 10.0%"), (80, "204,800 tokens/s"), (60, "")],
)
def test_in_a_terminal_the_bar_stays_whole_and_the_report_says_what_fits(width, shown):
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    told = report(console)
    with told.showing():
        told.tell(RunStep(120, 2.5, 0.01))
    last = console.file.getvalue().splitlines()[-2:][0].split("\r")[-1]
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", last)
    assert "autopar" in plain
    assert "120/300" in plain
    assert "\u2026" not in plain
    assert f"loss 2.5000  {shown}".strip() in plain

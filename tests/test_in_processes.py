"""A process that hangs is told from one that has little of a busy machine."""

import math
import os
import queue
import time

import pytest

from tests import in_processes


@pytest.fixture
def said(monkeypatch):
    """What a process said before it fell silent: that one of two cases is under way."""
    monkeypatch.setattr(in_processes, "SILENT_SECONDS", 0.01)
    monkeypatch.setattr(in_processes, "HARDLY_SECONDS", 0.001)
    lines = queue.Queue()
    lines.put("at 1\n")
    return lines


LOOKS = {
    "waits": (0.0, 5.0, 5.0005),
    "waits after some work": (0.0, 5.0, 5.002, 5.0025),
    "works without end": (0.0, 5.0, 5.006, 5.012),
    "is not seen": (0.0, 5.0, math.nan),
}
"""Seconds of the processor that a process has used, at its start, when it speaks, and then while it is silent."""


@pytest.mark.parametrize("looks", LOOKS.values(), ids=LOOKS)
def test_a_silent_process_hangs_if_it_hardly_works_or_works_for_too_long(monkeypatch, said, looks):
    used_s = iter(looks)
    monkeypatch.setattr(in_processes, "cpu_seconds", lambda pid: next(used_s))
    report = in_processes.followed(said, ["first", "second"], 0)
    assert report.ending is not None
    assert next(used_s, None) is None
    assert (report.under_way, report.left) == (["first"], ["second"])


def test_a_silent_process_that_works_slowly_is_waited_for(monkeypatch, said):
    used_s = iter([0.0, 5.0, 5.002, 5.004])

    def look(pid):
        found = next(used_s, None)
        if found == 5.004:
            said.put('done {"first": "differs"}\n')
            said.put(None)
        return found

    monkeypatch.setattr(in_processes, "cpu_seconds", look)
    report = in_processes.followed(said, ["first", "second"], 0)
    assert report.ending is None
    assert report.problems == {"first": "differs"}


def test_seconds_of_the_processor_are_those_that_a_process_used():
    used_s = in_processes.cpu_seconds(os.getpid())
    assert math.isnan(used_s) or used_s == pytest.approx(time.process_time(), abs=0.5)
    assert math.isnan(in_processes.cpu_seconds(2**30))

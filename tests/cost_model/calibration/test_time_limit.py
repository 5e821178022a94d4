"""Calibration ends in the time that it is given, whatever compiling takes, and says what it left out."""

import io
import json
import types

import pytest
from rich.console import Console

from autopar.commands.machine import calibrate, whole_steps
from autopar.cost_model.calibration import measure as measuring
from autopar.cost_model.calibration.cases import Sample, cases_for, needed_of
from autopar.cost_model.hardware import load_cluster
from autopar.errors import ArgumentError

H100 = types.SimpleNamespace(
    platform="gpu", device_kind="NVIDIA H100 80GB HBM3", memory_stats=lambda: {"bytes_limit": 80e9}
)


class Clock:
    """Seconds that pass when something is done."""

    def __init__(self):
        self.s = 0.0

    def __call__(self):
        return self.s

    def compiling(self, each_s, seen=()):
        """What stands for `_prepare`: it takes so long, and a repetition a tenth of a millisecond."""

        def prepare(case, _):
            self.s += each_s
            self.compiled.append(case)
            for look in seen:
                look()
            return measuring._Prepared(case=case, run=self.run, count=100, clock=self)

        self.compiled = []
        return prepare

    def run(self, count):
        self.s += 1e-3 + 1e-4 * count


@pytest.fixture
def clock():
    return Clock()


@pytest.mark.parametrize(("platform", "devices"), [("cpu", 8), ("gpu", 1), ("gpu", 8)])
def test_the_first_cases_tell_every_figure_and_one_of_each_kind_follows_in_turn(platform, devices):
    cases = cases_for(platform, devices)
    needed = needed_of(cases)
    assert cases[: len(needed)] == needed
    assert len(set(cases)) == len(cases)
    kinds = {(case.kind, case.dtype) for case in cases}
    assert {(case.kind, case.dtype) for case in needed} == kinds
    more = [(case.kind, case.dtype) for case in cases[len(needed) :]]
    assert len(set(more[: len(set(more))])) == len(set(more))
    sizes = [case.sizes for case in needed if case.kind == "all-reduce"]
    assert [ranks for ranks, _ in sizes] == [devices] * len(sizes)
    assert devices == 1 or sizes[0][1] > 100 * sizes[1][1]


def test_one_device_of_a_gpu_needs_eleven_cases():
    assert len(needed_of(cases_for("gpu", 1))) == 11


def test_compiling_stops_when_its_share_is_used_and_what_was_compiled_is_measured(clock, monkeypatch):
    monkeypatch.setattr(measuring, "_prepare", clock.compiling(1.0))
    cases, events, came_s = cases_for("gpu", 1), [], []
    for event in measuring.measure([H100], cases, seconds=25, most_s=50, now=clock):
        events.append(event)
        came_s.append(clock.s)
    samples = [(event.case, at_s) for event, at_s in zip(events, came_s, strict=True) if isinstance(event, Sample)]
    assert [case for case, _ in samples[:11]] == list(needed_of(cases))
    assert all(at_s < 13 for _, at_s in samples[:11])
    assert [case for case, _ in samples[11:]] == clock.compiled == list(cases[: len(clock.compiled)])
    assert 11 < len(clock.compiled) < len(cases)
    assert 13 < 1.0 * len(clock.compiled) <= measuring.COMPILING * 25
    assert clock.s <= 25 + 1


def test_all_cases_are_measured_where_compiling_is_fast(clock, monkeypatch):
    monkeypatch.setattr(measuring, "_prepare", clock.compiling(0.01))
    events = list(measuring.measure([H100], cases_for("gpu", 1), seconds=25, most_s=50, now=clock))
    assert {event.case for event in events if isinstance(event, Sample)} == set(cases_for("gpu", 1))
    assert 20 < clock.s <= 26


def test_nothing_is_measured_if_the_needed_cases_are_not_compiled_in_time(clock, monkeypatch):
    monkeypatch.setattr(measuring, "_prepare", clock.compiling(12.0))
    events = list(measuring.measure([H100], cases_for("gpu", 1), seconds=25, most_s=50, now=clock))
    assert not [event for event in events if isinstance(event, Sample)]
    assert clock.s == 60  # the compile that had begun


@pytest.fixture
def run(clock, monkeypatch, tmp_path):
    """Calibrate the H100 with compiles of so many seconds; returns what was printed, and when the file was there."""
    path = tmp_path / "here.json"
    monkeypatch.setattr(calibrate, "find_devices", lambda _: [H100])
    monkeypatch.setattr(calibrate, "ranks_wait", lambda _: False)
    monkeypatch.setattr(whole_steps, "step_clock", lambda _: clock)

    def plan_step(name, sizes, microbatches, *, cluster, devices):
        clock.s += clock.step_s
        step = lambda state, _: (state, clock.run(100))  # noqa: E731
        return whole_steps.WholeStep(
            name=name, model=name, step=step, state=0.0, batch=0.0, computed_s=1e-2, beside_s=1e-4, times_s=[]
        )

    monkeypatch.setattr(whole_steps, "_plan_step", plan_step)

    def calibrated(each_s, *, seconds, step_s=1.0):
        there = []
        clock.step_s = step_s
        monkeypatch.setattr(measuring, "_prepare", clock.compiling(each_s, [lambda: there.append(path.exists())]))
        stream = io.StringIO()
        calibrate.calibrate_to_file(path, seconds=seconds, console=Console(file=stream, width=200), now=clock)
        return stream.getvalue(), there, json.loads(path.read_text())

    calibrated.path = path
    return calibrated


def test_a_file_is_there_as_soon_as_every_figure_is_told_and_the_last_says_what_was_left_out(run, clock):
    said, there, file = run(1.0, seconds=50, step_s=5.0)
    assert there == [False] * 11 + [True] * (len(there) - 11)
    assert len(there) > 11
    assert clock.s < 50 + 5
    assert "measuring 1 device 'NVIDIA H100 80GB HBM3' for about 50 s at the most" in said
    assert "wrote first figures, of 11 measurements" in said
    assert "left out for want of time (--seconds): 7 of 8 product bfloat16" not in said
    assert "left out for want of time (--seconds): " in said
    assert "of 8 product float16" in file["about"]
    assert "whole steps of" not in file["about"]
    assert "in the ratio of whole steps to their parts" in file["sources"]["device"]
    assert load_cluster(run.path).device.peak_of("float16") > 0


def test_a_whole_step_that_would_take_longer_than_what_is_left_is_left_out_and_that_is_said(run, clock):
    _, _, file = run(1.0, seconds=50, step_s=20.0)
    assert clock.s < 50
    assert "whole steps of unet" in file["about"]
    assert "bert 1." in file["sources"]["device"]
    _, _, file = run(4.0, seconds=50)
    assert "whole steps of bert, whole steps of unet" in file["about"]
    assert "whole steps were not measured, which may take longer than their parts" in file["sources"]["device"]


def test_nothing_is_left_out_where_compiling_is_fast(run):
    said, _, file = run(0.01, seconds=50)
    assert "left out" not in said + json.dumps(file)


def test_too_little_time_for_every_figure_is_an_error_and_writes_no_file(run):
    words = r"--seconds 50 did not suffice: 5 of the 11 measurements .* in 60 s, so no .* such as --seconds 270"
    with pytest.raises(ArgumentError, match=words):
        run(12.0, seconds=50)
    assert not run.path.exists()

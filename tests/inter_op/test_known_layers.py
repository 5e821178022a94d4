"""Layers that do not repeat scale as the one that does, and are planned where they are chosen."""

import dataclasses
import math

import pytest

from autopar.errors import OutOfMemoryError
from autopar.inter_op.candidates.layer_figures import LayerFigures
from autopar.inter_op.candidates.timetables import Timetable
from autopar.inter_op.dynamic_program.submeshes import size_of
from autopar.inter_op.known_layers import KnownLayers
from autopar.inter_op.plan_stage import plan_program
from autopar.inter_op.planned_layers import PlannedLayers
from autopar.inter_op.search import search_stages
from autopar.stages.split_scans import split_scans
from autopar.stages.time_loops import make_loops
from tests.inter_op.test_search import CountingPlanner, arguments, request_on, traced_step, two_nodes

COUNTS = (4, 8, 2, 1)


def search(width, batch, *, limit=None, planner=plan_program):
    traced = traced_step(*arguments(width, layers=6, batch=batch))
    return search_stages(
        make_loops(split_scans(traced, ()), COUNTS[0]),
        request_on(two_nodes(), limit),
        devices=4,
        timetables=[Timetable(count, "1f1b") for count in COUNTS],
        planner=planner,
    )


@pytest.mark.parametrize("batch", [32, 512])
def test_they_are_planned_on_the_devices_of_the_stages_that_they_are_in(batch):
    planner = CountingPlanner()
    found = search(1024, batch, planner=planner)
    asked = {(program.cut.loop.plan.microbatches, program.stage, meshes[0].size) for program, meshes in planner.asked}
    assert found.loop.plan.microbatches == found.timetable.microbatches
    others = {place for _, place, _ in asked} - {1}
    assert others, "the first and the last layer differ from the others"
    for stage in found.choice.stages:
        for place in others & {*range(stage.first_layer, stage.end_layer)}:
            assert (found.timetable.microbatches, place, size_of(stage.submesh)) in asked
    everywhere = {(count, size) for count, place, size in asked if place == 1}
    assert len([one for one in asked if one[1] != 1]) < len(others) * len(everywhere)


@pytest.mark.parametrize(("width", "batch"), [(1024, 32), (1024, 512), (64, 512), (256, 32)])
def test_the_choice_is_as_fast_as_if_all_layers_were_planned_everywhere(monkeypatch, width, batch):
    found = search(width, batch)
    monkeypatch.setattr(PlannedLayers, "has_common", property(lambda _: False))
    full = search(width, batch)
    assert found.choice.step_s <= 1.01 * full.choice.step_s


def test_they_never_seem_too_large_where_they_fit(monkeypatch):
    """What seems too large is not chosen, and so not planned. Where nothing fits, all are planned."""
    need = max(stage.peak_bytes for stage in search(64, 4096).choice.stages)
    for part in (0.9, 0.7, 0.55):
        limit = int(part * need)
        with monkeypatch.context() as patched:
            patched.setattr(PlannedLayers, "has_common", property(lambda _: False))
            try:
                full = search(64, 4096, limit=limit)
            except OutOfMemoryError:
                continue
        assert search(64, 4096, limit=limit).choice.step_s <= 1.03 * full.choice.step_s


class Layers:
    """Three layers, the second of which repeats. On twice the devices it takes 0.75 times as long, and the others half."""

    has_common, common = True, 1
    small = LayerFigures(forward_s=4.0, backward_s=8.0, once_s=2.0, kept_bytes=100.0, passing_bytes=10.0)

    def __init__(self, times=1.0, *, fits=True):
        self.times, self.fits, self.asked = times, fits, []

    def __len__(self):
        return 3

    def first_alike(self, layer):
        return layer

    def useful_devices(self, layer, devices):
        return devices

    def waiting(self, layer, devices):
        self.asked.append((layer, devices))
        return 0.0

    def figures(self, layer, devices):
        self.asked.append((layer, devices))
        if layer == self.common and devices > 1 and not self.fits:
            return None
        part = 0.75 if layer == self.common else 0.5
        times = part ** math.log2(devices)
        figures = dataclasses.replace(
            self.small.slower(self.times * times), once_s=2.0 / devices, kept_bytes=100.0 * times
        )
        return figures if layer == self.common else dataclasses.replace(figures, residual_bytes=8.0 / devices)


def test_a_layer_takes_as_many_times_longer_as_the_one_that_repeats_and_keeps_as_many_times_more():
    layers = Layers()
    known = KnownLayers(examples=64)
    known.begin(4, layers, {1, 2}, others_on=1)
    assert known.others == {4: {(0, 1), (2, 1)}}
    found = known.figures(4, 0, 2)
    assert (0, 2) not in layers.asked
    assert (found.forward_s, found.backward_s, found.once_s) == (3.0, 6.0, 1.0)
    assert (found.kept_bytes, found.passing_bytes) == (75.0, 10.0)
    assert found.residual_bytes == 4.0, "the one that repeats has none, so they are divided evenly"
    assert known.add_others(4, [(0, 2), (1, 2)])
    assert known.figures(4, 0, 2).forward_s == 2.0, "it is planned now"
    assert not known.add_others(4, [(0, 2), (1, 2)])
    known.begin(4, layers, {1, 2}, others_on=1)
    layers.asked.clear()
    assert known.figures(4, 0, 4).forward_s == 1.0, "on four nobody is planned"
    assert not [one for one in layers.asked if one[0] == 0 and one[1] > 1]
    known.begin(4, layers, {1, 2}, others_on=2)
    assert known.figures(4, 0, 1).residual_bytes == 4.0, "on fewer devices there may be no more"


def test_what_is_known_on_some_devices_is_known_on_more_that_a_layer_can_use_no_better(monkeypatch):
    monkeypatch.setattr(
        Layers, "useful_devices", lambda _, layer, devices: devices // 3 if devices % 3 == 0 else devices
    )
    known = KnownLayers(examples=64)
    known.begin(4, Layers(), {1}, others_on=1)
    known.add(4, 2, (1, 2, 3, 4, 6, 12))
    assert known.sizes == {4: {1, 2, 3, 6}}


def test_in_another_number_of_microbatches_it_scales_from_the_nearest_place():
    known = KnownLayers(examples=64)
    known.begin(4, Layers(), {1, 8}, others_on=1)
    known.add_others(4, [(0, 8)])
    known.begin(8, Layers(0.5), {4})
    near = known.figures(4, 0, 8)
    assert known.figures(8, 0, 4).forward_s == pytest.approx(near.forward_s * 0.5 / 0.75)


def test_where_the_layer_that_repeats_does_not_fit_others_are_divided_evenly():
    known = KnownLayers(examples=64)
    layers = Layers(fits=False)
    known.begin(4, layers, {1, 2}, others_on=1)
    assert known.figures(4, 0, 2).forward_s == 2.0
    assert known.figures(4, 1, 2) is None

"""Collectives that wait for ranks which share cores: measured between pieces of compute, fitted, written, priced."""

import dataclasses
import json
import re

import jax
import pytest

from autopar.cost_model.calibration.clocks import cores_of
from autopar.cost_model.calibration.fit_cluster import slow_down
from autopar.cost_model.calibration.fit_waiting import add_waiting, remove_waiting
from autopar.cost_model.calibration.tuning import TUNING
from autopar.cost_model.calibration.waiting import GRAINS, Waited, are_steady, make_program, measure_waiting, ranks_wait
from autopar.cost_model.cluster_files import (
    ClusterFileError,
    cluster_from_json,
    cluster_text,
    cluster_to_json,
    load_cluster,
)
from autopar.cost_model.hardware import preset
from autopar.cost_model.tiers import MeasuredCollective

FIGURES = MeasuredCollective(latency_s=10e-6, s_per_byte=1e-9, latency_s_per_rank=2e-6)


def cluster_with(figures, all_reduce_latency=1.0):
    """The CPU preset, whose collectives have these figures."""
    cpu = preset("cpu")
    tier = dataclasses.replace(cpu.tiers[0], measured=dict.fromkeys(cpu.tiers[0].measured, figures))
    return dataclasses.replace(cpu, tiers=(tier,), all_reduce_latency=all_reduce_latency)


def waited(ranks, merged, seconds, grain=GRAINS[0], disturbed=1.0):
    figures = {"seconds": seconds, "compute_s": 1e-3, "disturbed": disturbed}
    return Waited(grain=grain, ranks=ranks, merged=merged, **figures)


def test_a_collective_pays_its_latency_its_waiting_and_its_bytes():
    """Four ranks: 10 us + 4 x 2 us + 4 x 30 us = 138 us, and 1 ns for each of the 750 or 1500 bytes that a rank sends."""
    waiting = dataclasses.replace(FIGURES, waiting_s_per_rank=30e-6)
    costs = cluster_with(waiting).mesh_costs((2, 4))
    assert costs.all_gather_s(1000.0, (1,)) == pytest.approx(138e-6 + 0.75e-6, rel=1e-12)
    assert costs.all_reduce_s(1000.0, (1,)) == pytest.approx(138e-6 + 1.5e-6, rel=1e-12)
    merged = cluster_with(waiting, all_reduce_latency=0.5).mesh_costs((2, 4))
    assert merged.all_reduce_s(1000.0, (1,)) == pytest.approx(69e-6 + 1.5e-6, rel=1e-12)


def test_a_cluster_file_without_waiting_loads_and_prices_as_before(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(cluster_text(cluster_with(FIGURES), about="made up", sources={}))
    assert "waiting" not in path.read_text()
    costs = load_cluster(path).mesh_costs((8,))
    assert costs.all_to_all_s(0.0, (0,)) == pytest.approx(10e-6 + 8 * 2e-6, rel=1e-12)


def test_waiting_is_in_the_file_and_comes_back(tmp_path):
    path = tmp_path / "new.json"
    cluster = cluster_with(dataclasses.replace(FIGURES, waiting_s_per_rank=30e-6))
    path.write_text(cluster_text(cluster, about="made up", sources={}))
    assert json.loads(path.read_text())["tiers"][0]["measured"]["all-gather"]["waiting_s_per_rank"] == 30e-6
    assert load_cluster(path) == cluster


def test_a_negative_waiting_is_refused_with_its_place():
    fields = cluster_to_json(cluster_with(FIGURES), about="made up", sources={})
    fields["tiers"][0]["measured"]["all-gather"]["waiting_s_per_rank"] = -1e-6
    with pytest.raises(
        ClusterFileError, match=r"tiers\.0\.measured\.all-gather\.waiting_s_per_rank is -1e-06; at least 0"
    ):
        cluster_from_json(fields, origin="mine.json")


def test_the_fit_finds_the_waiting_of_a_machine_that_waits_in_proportion_to_its_ranks():
    """10 us + 2 n us of latency and 30 n us of waiting; four all-reduces at once pay 0.9 of that each."""
    alone = {n: 10e-6 + 32e-6 * n for n in (2, 4, 8)}
    samples = [waited(n, 1, seconds, grain) for n, seconds in alone.items() for grain in GRAINS]
    samples += [waited(8, 4, 0.9 * 4 * alone[8], grain) for grain in GRAINS]
    found = add_waiting(cluster_with(FIGURES, all_reduce_latency=0.3), samples)
    for figures in found.tiers[0].measured.values():
        assert figures.waiting_s_per_rank == pytest.approx(30e-6)
    assert found.all_reduce_latency == pytest.approx(0.9)


def test_the_fit_takes_the_mean_over_grains_and_the_least_squares_over_ranks():
    """Waits of 100 us among 2 and 200 us among 4: (2 x 100 + 4 x 200) / (4 + 16) = 50 us a rank."""
    samples = [waited(2, 1, 14e-6 + 90e-6), waited(2, 1, 14e-6 + 110e-6, GRAINS[1]), waited(4, 1, 18e-6 + 200e-6)]
    found = add_waiting(cluster_with(FIGURES), [*samples, waited(4, 4, 436e-6)])
    assert found.tiers[0].measured["all-to-all"].waiting_s_per_rank == pytest.approx(50e-6)
    assert found.all_reduce_latency == pytest.approx(436 / (4 * 218))


def test_collectives_quicker_than_those_of_ready_ranks_wait_for_nothing():
    found = add_waiting(cluster_with(FIGURES), [waited(2, 1, 5e-6), waited(2, 4, 40e-6)])
    assert found.tiers[0].measured["all-reduce"].waiting_s_per_rank == 0.0
    assert found.all_reduce_latency == 1.0  # twice the price of one alone is no merging


def test_processor_time_is_priced_without_waiting_and_a_slower_device_waits_as_long():
    cluster = cluster_with(dataclasses.replace(FIGURES, waiting_s_per_rank=30e-6))
    assert remove_waiting(cluster) == cluster_with(FIGURES)
    assert slow_down(cluster, 1.5).tiers == cluster.tiers


def test_samples_beside_other_programs_are_not_used():
    quiet, busy = waited(2, 1, 1e-4, disturbed=TUNING.disturbed), waited(2, 1, 1e-4, disturbed=1.01 * TUNING.disturbed)
    assert are_steady([quiet])
    assert not are_steady([quiet, busy])
    assert not are_steady([])
    cluster = cluster_with(FIGURES, all_reduce_latency=0.3)
    assert add_waiting(cluster, [busy]) == add_waiting(cluster, []) == cluster


def test_ranks_wait_only_where_devices_share_cores():
    devices = jax.devices()
    assert ranks_wait(devices) is (cores_of(devices) < len(devices))
    assert not ranks_wait(devices[:1])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("merged", [0, 1, 4])
def test_a_program_alternates_compute_and_one_instruction_of_so_many_all_reduces(merged):
    """What XLA does not merge, or moves out of the way, would be measured as something else."""
    for grain in GRAINS:
        text = make_program(grain, jax.devices()[:4], ranks=2, merged=merged).step.as_text()
        reductions = re.findall(r"= (.*?) all-reduce\(", text)
        assert [result.count("f32[64]") for result in reductions] == [merged] * (TUNING.pairs if merged else 0)


@pytest.mark.sweep
def test_waiting_is_measured_for_every_group_and_grain():
    events = list(measure_waiting(jax.devices()[:4], rounds=1))
    samples = [event for event in events if isinstance(event, Waited)]
    assert [(s.grain, s.ranks, s.merged) for s in samples] == [
        (grain, *which) for grain in GRAINS for which in ((2, 1), (4, 1), (4, 4))
    ]
    assert all(1e-6 < sample.compute_s < 1.0 and sample.disturbed > 0.5 for sample in samples)
    assert any("round 1" in event for event in events if isinstance(event, str))

"""Figures of a cluster are found again in runs that were made with them; what runs do not tell stays, and is named."""

import dataclasses

import pytest

from autopar.cost_model.cluster_files import cluster_text, load_cluster
from autopar.cost_model.device import MatrixEfficiency
from autopar.cost_model.hardware import preset
from autopar.errors import ArgumentError
from autopar.recording.recorded import ProgramOperation
from autopar.recording.refit import refit
from autopar.recording.trace_file import write_run
from tests.commands.command_line import run
from tests.recording.recordings import PLAN, PRODUCT, in_stages, on_one_mesh, ran

CPU = dataclasses.replace(preset("cpu"), device=dataclasses.replace(preset("cpu").device, matrix_efficiency={}))
PAIRS = ((0, 1), (2, 3))
GELU = ProgramOperation(name="fusion.3", opcode="fusion", bytes=4096)
EFFICIENCY = CPU.device.efficiency_of("float32").best


def made_with(latency_s=3e-4, s_per_byte=2e-9, products=2.0, rest=3.0, sizes=(1 << 12, 1 << 16, 1 << 20), late_s=5e-3):
    """A run on a machine whose figures are these: factors of compute, all-reduces among two, of whom one comes late."""
    plan = dataclasses.replace(PLAN, compute_s=2e-3, at_peak_s=1.5e-3 * EFFICIENCY)
    reduces = tuple(
        ProgramOperation(
            name=f"psum.{n}", opcode="all-reduce", collective="all-reduce", axes=("y",), groups=PAIRS, bytes=n
        )
        for n in sizes
    )
    operations = []
    for device in range(4):
        now_ms = 1.5 * products
        operations.append(ran("dot.1", device, 0, now_ms))
        operations.append(ran("fusion.3", device, now_ms, now_ms + 0.5 * rest))
        now_ms += 0.5 * rest
        for n in sizes:
            end_ms = now_ms + 1e3 * (late_s + latency_s + s_per_byte * n)
            operations.append(ran(f"psum.{n}", device, now_ms + 1e3 * late_s * (device % 2), end_ms))
            now_ms = end_ms
    return on_one_mesh(plan_text=plan.to_json(), program=(PRODUCT, GELU, *reduces), operations=tuple(operations))


def test_the_figures_that_a_run_was_made_with_are_found_whoever_came_late():
    found = refit(CPU, [made_with()])
    device, reduce = found.cluster.device, found.cluster.tiers[0].measured["all-reduce"]
    assert reduce.latency_s == pytest.approx(3e-4)
    assert reduce.s_per_byte == pytest.approx(2e-9)
    assert device.peak_of("float32") == pytest.approx(CPU.device.peak_of("float32") / 2)
    assert device.memory_bytes_per_s == pytest.approx(CPU.device.memory_bytes_per_s / 3)
    assert device.launch_s == pytest.approx(3 * CPU.device.launch_s)
    assert "products take 2.00 times what was predicted: peak FLOP/s" in found.fitted
    assert "all-reduce: 300 us and 0.5 GB/s, of 3 sizes, 0% off on average" in found.fitted


def test_several_runs_are_refitted_together():
    found = refit(CPU, [made_with(products=2.0, sizes=(1 << 12,)), made_with(products=8.0, sizes=(1 << 20,))])
    assert found.cluster.device.peak_of("float32") == pytest.approx(CPU.device.peak_of("float32") / 4)
    assert found.cluster.tiers[0].measured["all-reduce"].latency_s == pytest.approx(3e-4)


def test_what_a_run_does_not_tell_stays_and_is_named():
    found = refit(CPU, [made_with(sizes=(1 << 12, 5 << 10))])
    assert found.cluster.tiers == CPU.tiers
    assert "all-reduce: all of about one size, from which latency and bandwidth cannot be told apart" in found.kept
    assert "all-gather: none ran within shared memory" in found.kept
    assert any(words.startswith("memory, overlap, calls") for words in found.kept)


def test_collectives_beyond_the_first_tier_say_nothing_of_it():
    first = dataclasses.replace(CPU.tiers[0], devices=1)
    found = refit(dataclasses.replace(CPU, tiers=(first, CPU.tiers[0])), [made_with()])
    assert "all-reduce: none ran within shared memory" in found.kept


def test_a_device_with_a_curve_has_one_factor_for_all_its_compute():
    device = dataclasses.replace(CPU.device, matrix_efficiency={"float32": MatrixEfficiency(1.0, (8.0, 8.0, 8.0))})
    found = refit(dataclasses.replace(CPU, device=device), [made_with(products=4.0, rest=4.0)])
    assert found.cluster.device.peak_of("float32") == pytest.approx(device.peak_of("float32") / 4)
    assert found.cluster.device.memory_bytes_per_s == pytest.approx(device.memory_bytes_per_s / 4)


def test_runs_of_unlike_devices_and_of_stages_alone_are_refused():
    with pytest.raises(ArgumentError, match=r"unlike devices \(other, toy\)"):
        refit(CPU, [made_with(), dataclasses.replace(made_with(), device_kind="other")])
    with pytest.raises(ArgumentError, match="record a plan of one mesh, and call the step twice"):
        refit(CPU, [in_stages()])


def test_the_command_writes_a_cluster_file_and_says_what_it_could_not_fit(tmp_path, capsys):
    file, output = tmp_path / "run.json", tmp_path / "refitted.json"
    recorded = dataclasses.replace(made_with(), cluster_text=cluster_text(CPU, about="", sources={}))
    write_run(recorded, file)
    assert run("calibrate", "--from", file, "-o", output) == 0
    printed = capsys.readouterr().out
    assert "fitted: products take 2.00 times what was predicted: peak FLOP/s\n" in printed
    assert "as it was: all-gather: none ran within shared memory\n" in printed
    assert load_cluster(output).device.peak_of("float32") == pytest.approx(CPU.device.peak_of("float32") / 2)
    write_run(on_one_mesh(), file)
    assert run("calibrate", "--from", file, "-o", output) == 2
    assert "does not hold its cluster" in capsys.readouterr().err

"""Figures of a cluster are found again in runs that were made with them; what runs do not tell stays, and is named."""

import dataclasses

import pytest

from autopar.cost_model.cluster_files import cluster_text, load_cluster
from autopar.cost_model.device import MatrixEfficiency
from autopar.cost_model.hardware import preset
from autopar.errors import ArgumentError
from autopar.recording.recorded import ProgramOperation, RecordedOperation, RecordedSpan
from autopar.recording.refit import refit
from autopar.recording.trace_file import write_run
from tests.commands.command_line import run
from tests.recording.recordings import ACROSS, PLAN, PRODUCT, in_stages, on_one_mesh, ran, with_operations

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


def test_runs_of_unlike_devices_and_without_operations_are_refused():
    with pytest.raises(ArgumentError, match=r"unlike devices \(other, toy\)"):
        refit(CPU, [made_with(), dataclasses.replace(made_with(), device_kind="other")])
    with pytest.raises(ArgumentError, match="tell of no operations: call the step twice in the block"):
        refit(CPU, [in_stages()])


def made_in_stages_with(latency_s=3e-4, s_per_byte=2e-9, products=2.0, rest=3.0, sizes=(1 << 12, 1 << 16, 1 << 20)):
    """A run in stages on a machine whose figures are these: two microbatches, the second device late to each all-reduce.

    Half of the products are in each stage, and three quarters of the rest are in the second.
    """
    reduces = tuple(dataclasses.replace(ACROSS, name=f"psum.{n}", bytes=n) for n in sizes)
    base, predicted_products_s = with_operations(), 1.5e-3
    flops = base.plan.num_devices * 2 * PRODUCT.flops
    stages, spans, operations = [], [], []
    for stage, rest_s in enumerate((0.5e-3, 1.5e-3)):
        planned = base.plan.stages[stage]
        plan = dataclasses.replace(planned.plan, compute_s=predicted_products_s + rest_s)
        stages.append(dataclasses.replace(planned, plan=plan))
        now_s, task = 0.0, f"forward {stage}"
        for microbatch in range(2):
            began_s, on = now_s, {"call": 2, "task": task, "microbatch": microbatch}
            ends_s = [
                now_s + products * predicted_products_s / 2,
                now_s + (products * predicted_products_s + rest * rest_s) / 2,
            ]
            for device in range(2):
                operations.append(RecordedOperation(name="dot.1", device=device, start_s=now_s, end_s=ends_s[0], **on))
                operations.append(
                    RecordedOperation(name="fusion.3", device=device, start_s=ends_s[0], end_s=ends_s[1], **on)
                )
            now_s = ends_s[1]
            for one in reduces:
                end_s = now_s + 1e-3 + latency_s + s_per_byte * one.bytes
                for device in range(2):
                    start_s = now_s + 1e-3 * device
                    operations.append(
                        RecordedOperation(name=one.name, device=device, start_s=start_s, end_s=end_s, **on)
                    )
                now_s = end_s
            spans.append(
                RecordedSpan(
                    call=2,
                    mesh=stage,
                    kind="forward",
                    start_s=began_s,
                    end_s=now_s,
                    stage=stage,
                    microbatch=microbatch,
                    name=task,
                )
            )
    plan = dataclasses.replace(
        base.plan, stages=tuple(stages), flops=flops, at_peak_s=predicted_products_s * EFFICIENCY
    )
    program = [dataclasses.replace(one, task=f"forward {n}") for n in range(2) for one in (PRODUCT, GELU, *reduces)]
    return dataclasses.replace(
        base, plan_text=plan.to_json(), spans=tuple(spans), operations=tuple(operations), program=tuple(program)
    )


def test_the_figures_that_a_run_in_stages_was_made_with_are_found():
    found = refit(CPU, [made_in_stages_with()])
    device, reduce = found.cluster.device, found.cluster.tiers[0].measured["all-reduce"]
    assert (reduce.latency_s, reduce.s_per_byte) == pytest.approx((3e-4, 2e-9))
    assert device.peak_of("float32") == pytest.approx(CPU.device.peak_of("float32") / 2)
    assert device.memory_bytes_per_s == pytest.approx(CPU.device.memory_bytes_per_s / 3)
    assert "all-reduce: 300 us and 0.5 GB/s, of 3 sizes, 0% off on average" in found.fitted


def test_work_that_is_done_again_in_stages_is_predicted_too():
    """Each stage runs its product twice as often as the step needs it."""
    run = made_in_stages_with()
    plan = dataclasses.replace(run.plan, flops=run.plan.flops / 2, at_peak_s=run.plan.at_peak_s / 2)
    found = refit(CPU, [dataclasses.replace(run, plan_text=plan.to_json())])
    assert found.cluster.device.peak_of("float32") == pytest.approx(CPU.device.peak_of("float32") / 2)


def test_links_between_the_devices_of_a_stage_are_told_by_its_place_among_all():
    """Of nodes of three devices, the first stage has two on the first node, and the second one on each of two."""
    nodes = dataclasses.replace(CPU, tiers=(dataclasses.replace(CPU.tiers[0], devices=3), CPU.tiers[0]))
    run = made_in_stages_with()
    second = tuple(one for one in run.operations if run.stage(one) == 1)
    found = refit(nodes, [dataclasses.replace(run, operations=second)])
    assert "all-reduce: none ran within shared memory" in found.kept
    assert refit(nodes, [run]).cluster.tiers[0].measured["all-reduce"].latency_s == pytest.approx(3e-4)


def test_a_recording_without_operations_beside_others_is_named():
    found = refit(CPU, [made_with(), in_stages()])
    assert "recording 2 of 2: it tells of no operations" in found.kept
    assert found.cluster == refit(CPU, [made_with()]).cluster


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

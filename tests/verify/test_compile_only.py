"""Devices that only compile: what is asked of XLA's compiler for GPUs, and what is said where there is none.

What that compiler makes of steps is in `tests/libraries/test_compile_only.py`, which needs its packages.
"""

import dataclasses
import os

import jax
import numpy as np
import pytest
from jax.experimental import topologies

import autopar
from autopar.commands.parser import read
from autopar.cost_model.hardware import PRESETS
from autopar.errors import ArgumentError
from autopar.verify import compile_only, memory
from tests.verify.steps import shapes, train_step


def run(options):
    return options.run(options)


@pytest.fixture
def asked(monkeypatch):
    """What the compiler is asked for devices."""
    calls = []

    def get_topology_desc(name, platform, **options):
        calls.append((name, platform, options))
        return topologies.TopologyDescription(jax.devices()[: int(options["topology"].split("x")[-1])])

    monkeypatch.setattr(topologies, "get_topology_desc", get_topology_desc)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    return calls


@pytest.mark.parametrize("kind", ["v100", "a100", "h100"])
def test_the_compiler_is_told_what_the_gpu_is_and_that_nothing_can_be_tuned_on_it(asked, kind):
    assert len(autopar.compile_only_devices(kind, 4)) == 4
    ((name, platform, options),) = asked
    assert (name, platform, options["topology"]) == (kind, "cuda", "1x1x4")
    gpu = compile_only._GPUS[kind]
    for field in dataclasses.fields(gpu):
        assert str(getattr(gpu, field.name)) in options["target_config"], field.name
    flags = ["--xla_gpu_autotune_level=0", "--xla_gpu_enable_triton_gemm=false"]
    assert os.environ["XLA_FLAGS"].split() == ["--xla_force_host_platform_device_count=8", *flags]


def test_what_the_user_says_of_tuning_stays(asked, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4")
    autopar.compile_only_devices("a100", 1)
    assert os.environ["XLA_FLAGS"].split() == ["--xla_gpu_autotune_level=4", "--xla_gpu_enable_triton_gemm=false"]


@pytest.mark.parametrize("kind", ["v100", "a100", "h100"])
def test_a_gpu_is_described_as_in_the_cluster_file_of_its_machine(kind):
    preset = {"v100": "p3.16xlarge", "a100": "dgx-a100-80gb", "h100": "dgx-h100"}[kind]
    gpu, device = compile_only._GPUS[kind], PRESETS[preset].device
    assert gpu.memory_bytes == pytest.approx(device.memory_bytes, rel=0.1)
    assert gpu.memory_bytes_per_s == pytest.approx(device.memory_bytes_per_s, rel=0.02)


def test_unknown_kinds_are_named_with_those_that_are_known():
    with pytest.raises(ArgumentError, match="kind 'b200'; known are v100, a100, h100"):
        autopar.compile_only_devices("b200", 8)


def test_a_missing_compiler_is_named_with_its_packages(monkeypatch):
    def get_topology_desc(*args, **options):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", get_topology_desc)
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(ArgumentError, match=r"topology not implemented.*jax-cuda12-plugin.*JAX_PLATFORMS=cpu"):
        autopar.compile_only_devices("a100", 8)


def test_the_command_line_compiles_for_them_and_runs_nothing(asked, capsys):
    options = read(["verify", "mlp", "--layers", "2", "--batch", "64", "--devices", "4", "--compile-for", "h100"])
    assert run(options) == 0
    assert asked[0][:2] == ("h100", "cuda")
    assert "4 cpu devices" in capsys.readouterr().out, "those that stand in for GPUs here"
    with pytest.raises(ArgumentError, match="--values runs the step"):
        run(read(["verify", "mlp", "--compile-for", "h100", "--values"]))


def test_a_plan_for_gpus_that_is_compiled_for_cpus_explains_its_peak():
    """GPUs keep less, so that the plan is below what XLA's compiler for CPUs needs."""
    step = autopar.parallelize(train_step, mesh_shape=(8,), cluster="dgx-a100-80gb", num_stages=1)
    (peak,) = [row for row in step.verify(*shapes()).rows if row.what == "peak"]
    assert peak.verdict in ("matches", "explained")
    if peak.verdict == "explained":
        assert peak.note.endswith("planned for GPUs' compiler, this is CPUs'")


@pytest.mark.parametrize(
    ("platform", "counted_as", "planned", "verdict"),
    [
        ("cpu", "cpu", 10**6, "differs"),
        ("cpu", "gpu", 10**6, "explained"),
        ("gpu", "cpu", 10**7, "explained"),
        ("gpu", "gpu", 10**7, "differs"),
        ("tpu", "gpu", 10**7, "explained"),
        ("tpu", "gpu", 10**6, "differs"),
        ("gpu", "gpu", 3 * 10**6, "matches"),
    ],
)
def test_a_peak_is_explained_only_where_another_compiler_was_planned_for(platform, counted_as, planned, verdict):
    row = memory._peak_row(planned, 10**6, 2 * 10**6, mesh=None, platform=platform, counted_as=counted_as)
    assert row.verdict == verdict


def test_a_step_that_closes_over_arrays_is_compiled_without_them():
    """Devices that only compile take no arrays."""
    table = np.arange(8.0, dtype=np.float32)

    def step(state, batch):
        return state + (batch * table).sum(), state.sum()

    given = np.zeros((8,), np.float32), np.ones((16, 8), np.float32)
    compiled = autopar.parallelize(step, mesh_shape=(2,)).compile(*given)
    assert compiled.memory_analysis() is not None
    assert "_constants" not in vars(compiled)
    assert float(compiled(*given)[1]) == 0.0
    assert "_constants" in vars(compiled)

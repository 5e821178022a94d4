"""Optimizer states in the host's memory: what that takes and what it saves."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_model.device import slowest_device
from autopar.cost_model.hardware import preset
from autopar.cost_model.machine import Cluster
from autopar.simulate.closed_forms.operations import FusedGroup, Work
from autopar.simulate.closed_forms.stage_work import StageWork
from autopar.simulate.closed_forms.training_step import predict_step
from tests.simulate.closed_forms.test_laws import ROUNDING, rows, step
from tests.simulate.closed_forms.test_training_step import AS_MEASURED, PLAN, machine

linked = st.sampled_from(("dgx-h100", "dgx-h200", "a3-mega", "dgx-a100-80gb", "p4d.24xlarge")).map(preset)
OFFLOADED = dataclasses.replace(PLAN, offload="optimizer")


def linked_at(bytes_per_s: float) -> Cluster:
    return dataclasses.replace(machine(), device=dataclasses.replace(machine().device, host_bytes_per_s=bytes_per_s))


@pytest.mark.parametrize(("zero_stage", "owners"), [(0, 1), (1, 4), (3, 4)])
def test_states_come_from_the_host_and_go_back_once_a_step(zero_stage, owners):
    """Two layers of 10^6 parameters, 12 bytes of Adam's states each, at 10^8 bytes/s."""
    work = Work(forward=(FusedGroup(1e9),), backward=(FusedGroup(2e9),), parameters=1e6, kept_bytes=1e7)
    stages = [StageWork(layers=((work, 2),), data_ranks=4)]
    plans = (dataclasses.replace(plan, zero_stage=zero_stage) for plan in (PLAN, OFFLOADED))
    usual, offloaded = (predict_step(linked_at(1e8), plan, stages, reached=AS_MEASURED) for plan in plans)
    assert offloaded.optimizer_s - usual.optimizer_s == pytest.approx(2 * 24e6 / 1e8 / owners)
    assert offloaded.step_s - usual.step_s == pytest.approx(2 * 24e6 / 1e8 / owners)
    assert usual.memory.states_bytes - offloaded.memory.states_bytes == pytest.approx(24e6 / owners)


def test_experts_are_shared_by_fewer_ranks_and_their_states_too():
    """ZeRO 1 over four ranks, of which two hold the same experts: 12 bytes of half a million over 4, of as many over 2."""
    work = Work(forward=(), backward=(), parameters=1e6, expert_parameters=5e5)
    stages = [StageWork(layers=((work, 1),), data_ranks=4, expert_ranks=2)]
    plans = (dataclasses.replace(plan, zero_stage=1) for plan in (PLAN, OFFLOADED))
    usual, offloaded = (predict_step(linked_at(1e8), plan, stages, reached=AS_MEASURED) for plan in plans)
    saved = usual.memory.states_bytes - offloaded.memory.states_bytes
    assert saved == pytest.approx(12 * (5e5 / 4 + 5e5 / 2))
    assert offloaded.optimizer_s - usual.optimizer_s == pytest.approx(2 * saved / 1e8)


def test_the_update_has_the_states_of_two_layers_on_the_device():
    """Of five layers of 10^6 parameters: 24 x 10^6 bytes where activations, which are gone by then, had 5 x 10^6."""
    work = Work(forward=(), backward=(), parameters=1e6, kept_bytes=1e6)
    one = dataclasses.replace(OFFLOADED, microbatches=1)
    memory = predict_step(linked_at(1e8), one, [StageWork(layers=((work, 5),), data_ranks=1)]).memory
    assert memory.states_bytes == 5e6 * 4
    assert memory.peak_bytes == 5e6 * 4 + 24e6


@given(linked, rows())
@settings(max_examples=40, deadline=None)
def test_offload_costs_the_bytes_over_the_host_link_and_saves_memory(cluster, job):
    usual, offloaded = step(cluster, job), step(cluster, job, offload="optimizer")
    saved = usual.memory.states_bytes - offloaded.memory.states_bytes
    assert saved > 0
    assert offloaded.memory.states_bytes > 0
    assert offloaded.memory.peak_bytes < usual.memory.peak_bytes
    assert offloaded.memory.activation_bytes == usual.memory.activation_bytes
    assert offloaded.compute_s == usual.compute_s
    if job.stages == 1:
        carried_s = 2 * saved / cluster.device.host_bytes_per_s
        assert offloaded.step_s == pytest.approx(usual.step_s + carried_s)


@given(linked, rows(), st.floats(1.1, 100))
@settings(max_examples=20, deadline=None)
def test_a_faster_link_to_the_host_never_makes_a_step_slower(cluster, job, factor):
    times = []
    for rate in (cluster.device.host_bytes_per_s, factor * cluster.device.host_bytes_per_s, math.inf):
        faster = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, host_bytes_per_s=rate))
        times.append(step(faster, job, offload="optimizer").step_s)
    assert times[1] <= times[0] * ROUNDING
    assert times[2] == pytest.approx(step(cluster, job).step_s)


def test_a_device_without_a_link_is_refused_and_a_mixed_cluster_has_that_of_the_slower():
    with pytest.raises(ValueError, match="states no host_bytes_per_s, which offload needs"):
        predict_step(machine(), OFFLOADED, [StageWork(layers=(), data_ranks=1)])
    devices = [preset(name).device for name in ("dgx-h100", "dgx-a100-80gb", "tpu-v4")]
    assert slowest_device(devices[:2]).host_bytes_per_s == devices[1].host_bytes_per_s
    assert slowest_device(devices).host_bytes_per_s == 0

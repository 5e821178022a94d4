"""What fused kernels reach beside large copies: in plans, in mixed clusters, and not twice in the replay of published runs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from autopar.cost_model.device import fastest_device, slowest_device
from autopar.cost_model.hardware import preset
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.planner import plan_step
from autopar.intra_op.request import PlanRequest
from autopar.layouts.constraints import Constraints
from autopar.layouts.mesh import LogicalMesh
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.trace import trace
from autopar.simulate.closed_forms.job_prediction import predict
from autopar.simulate.closed_forms.training_job import TrainingJob
from autopar.simulate.closed_forms.transformer_shape import TransformerShape
from autopar.simulate.planned_parts import PartPlanner

H100 = preset("dgx-h100")


def with_efficiency(part, **changes):
    return dataclasses.replace(H100, device=dataclasses.replace(H100.device, kernel_efficiency=part, **changes))


def planned_s(function, argument, cluster):
    """Seconds of a program on one device."""
    signature = CallSignature(function, (), (), ())
    traced = trace(signature, bind_arguments(signature, (argument,), {}))
    request = PlanRequest(
        meshes=(LogicalMesh.of({"x": 1}),),
        cluster=cluster,
        memory_limit_bytes=None,
        constraints=Constraints(()),
        options=PlannerOptions(),
    )
    return plan_step(traced, request).plan.step_s


def test_kernels_take_longer_and_products_do_not():
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    whole, half = with_efficiency(1.0, launch_s=0.0), with_efficiency(0.5, launch_s=0.0)

    def kernel(x):
        return jnp.tanh(x) + 1

    def product(x):
        return x @ x

    assert planned_s(kernel, x, half) == pytest.approx(2 * planned_s(kernel, x, whole))
    assert planned_s(product, x, half) == pytest.approx(planned_s(product, x, whole))


def test_of_several_devices_the_slowest_or_the_fastest_kernels_count():
    a100 = preset("dgx-a100-80gb").device
    rates = [H100.device.kernel_bytes_per_s, a100.kernel_bytes_per_s]
    assert slowest_device([H100.device, a100]).kernel_bytes_per_s == pytest.approx(min(rates))
    assert fastest_device([H100.device, a100]).kernel_bytes_per_s == pytest.approx(max(rates))


def test_the_replay_of_published_runs_does_not_count_it_twice():
    shape = TransformerShape(
        family="gpt", layers=2, hidden=2048, heads=16, kv_heads=16, ffn_hidden=8192, vocab=51200, seq_len=1024
    )
    job = TrainingJob(
        shape=shape, devices=2, global_batch=8, microbatch=4, data_ranks=2, tensor_ranks=1, stages=1, virtual_stages=1,
        zero_stage=0, precision="bf16",
    )  # fmt: skip
    unknown, known = with_efficiency(1.0, launch_s=0.0), with_efficiency(0.75, launch_s=0.0)
    # What is neither a product nor a kernel, such as looking rows up, is the difference.
    found = [PartPlanner().predict(cluster, job).step.step_s for cluster in (unknown, known)]
    assert found[1] == pytest.approx(found[0], rel=2e-2)
    assert predict(known, job).step.step_s == predict(unknown, job).step.step_s

"""When gradients are summed over data ranks, once a step or in every microbatch: seconds and bytes."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_model.hardware import preset
from autopar.cost_model.overlap import Communication
from autopar.simulate.closed_forms.training_job import TrainingJob
from autopar.simulate.closed_forms.training_step import StepPrediction
from autopar.simulate.closed_forms.transformer_shape import TransformerShape
from tests.simulate.closed_forms.test_laws import machines, rows, step

CLUSTER = preset("dgx-h100")
GPT = TransformerShape(
    family="gpt", layers=8, hidden=1024, heads=16, kv_heads=16, ffn_hidden=4096, vocab=32_000, seq_len=1024
)
EXAMPLE = TrainingJob(
    shape=GPT, devices=8, global_batch=64, microbatch=1, data_ranks=8, tensor_ranks=1, stages=1, virtual_stages=1
)


def on_ranks(job: TrainingJob, ranks: int, **changes: object) -> TrainingJob:
    """Without experts' ranks and a pipeline, on so many data ranks, in eight microbatches."""
    devices = ranks * job.tensor_ranks * job.context_ranks
    batch = 8 * ranks * job.microbatch
    return dataclasses.replace(job, data_ranks=ranks, devices=devices, global_batch=batch, **changes)


def data_parallel(found: StepPrediction) -> Communication:
    return found.communication["data_parallel"]


@given(machines, rows(stages=(1,)), st.sampled_from((2, 8)))
@settings(max_examples=25, deadline=None)
def test_zero_2_that_reduces_once_is_zero_1(cluster, job, ranks):
    once = on_ranks(job, ranks, zero_stage=2, reduce_gradients="once")
    assert step(cluster, once) == step(cluster, once, zero_stage=1)


@given(machines, rows(stages=(1,)), st.sampled_from((2, 8)), st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_every_microbatch_reduces_as_much_as_a_step_does_once(cluster, job, ranks, zero_stage):
    once, each = (
        step(cluster, on_ranks(job, ranks, zero_stage=zero_stage, reduce_gradients=when)) for when in ("once", "each")
    )
    gathered_s = 0.0
    if zero_stage in (1, 2):  # new parameters, once a step either way
        split = dataclasses.replace(job, zero_stage=3, reduce_gradients="once")
        gathered_s = data_parallel(once).total_s - data_parallel(step(cluster, on_ranks(split, ranks))).total_s
    assert data_parallel(each).total_s - gathered_s == pytest.approx(8 * (data_parallel(once).total_s - gathered_s))
    assert each.communication["zero3"].total_s == once.communication["zero3"].total_s


@given(machines, rows(stages=(1,)), st.sampled_from((2, 8)), st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_whole_gradients_are_what_zero_2_would_divide(cluster, job, ranks, zero_stage):
    once, each = (
        step(cluster, on_ranks(job, ranks, zero_stage=zero_stage, reduce_gradients=when)).memory.states_bytes
        for when in ("once", "each")
    )
    owners = ranks * job.context_ranks
    gradients = job.states.gradient * (1 - 1 / owners)
    usual = job.states.per_parameter(zero_stage, owners)
    more = gradients / usual if zero_stage >= 2 else 0.0
    assert once == pytest.approx(each * (1 + more))


@given(machines, rows(), st.integers(0, 3))
@settings(max_examples=15, deadline=None)
def test_the_usual_is_each_microbatch_for_zero_2_and_3_and_else_once(cluster, job, zero_stage):
    stated = "each" if zero_stage >= 2 else "once"
    usual, same = (step(cluster, job, zero_stage=zero_stage, reduce_gradients=when) for when in ("usual", stated))
    assert usual == same


def test_a_single_microbatch_reduces_as_often_either_way():
    """By hand under ZeRO 3: what differs is that the sums of weight gradients are added to a whole buffer, and its bytes."""
    job = dataclasses.replace(EXAMPLE, global_batch=8, zero_stage=3)
    once, each = (step(CLUSTER, job, reduce_gradients=when) for when in ("once", "each"))
    assert data_parallel(once).total_s == pytest.approx(data_parallel(each).total_s)
    assert once.memory.states_bytes - each.memory.states_bytes == pytest.approx(
        4 * job.shape.parameters * 7 / 8, rel=1e-3
    )

"""Gradients in buckets, in the order of the backward pass: against a run of events, by hand, and by laws."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_model.hardware import preset
from autopar.cost_model.machine import Cluster, Overlap
from autopar.cost_model.overlap import Communication, in_order
from autopar.simulate.closed_forms.data_reductions import PassSeconds, reduce_once
from autopar.simulate.closed_forms.job_prediction import predict
from autopar.simulate.closed_forms.operations import Work
from autopar.simulate.closed_forms.prices import InTraining, StagePrices
from autopar.simulate.closed_forms.stage_work import StageWork
from autopar.simulate.closed_forms.training_job import TrainingJob
from autopar.simulate.closed_forms.transformer_shape import TransformerShape
from tests.simulate.closed_forms.test_laws import rows, step, switched
from tests.simulate.closed_forms.test_training_step import PLAN, machine

ROUNDING = 1 + 1e-9
MIB = 2.0**20


def work(parameters: float) -> Work:
    return Work(forward=(), backward=(), parameters=parameters)


STAGE = StageWork(layers=((work(1e6), 4),), data_ranks=2, first=work(3e6), last=work(2e6))
"""9 million parameters: an embedding of 3, four layers of 1, a head of 2."""
PASSES = [PassSeconds(0.1, 0.2), PassSeconds(2.0, 4.0), PassSeconds(0.5, 1.0)]


def reduced(
    bucket_bytes: float, *, hidden: float = 1.0, interference: float = 0.0, **changes: object
) -> list[Communication]:
    """Gradients of 4 bytes over two devices of a node: S bytes in S / 10^8 s."""
    overlap = Overlap({"data_parallel": hidden}, interference, bucket_bytes)
    cluster = dataclasses.replace(machine(), overlap=overlap)
    prices = StagePrices(cluster=cluster, dtype="float16", element_bytes=2, mesh=(1, 2, 1, 1, 1), reached=InTraining())
    states = dataclasses.replace(PLAN.states, gradient=4)
    return reduce_once(prices, dataclasses.replace(PLAN, states=states, **changes), STAGE, PASSES)


def events(exchanges: list[tuple[float, float]], compute_s: float) -> float:
    """When the last exchange has ended, moment by moment: the link works whenever one of them may."""
    left, now = list(exchanges), 0.0
    while left:
        begins_s, seconds = left.pop(0)
        while now < begins_s:
            now = begins_s
        now += seconds
    return max(now, compute_s)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 5)), max_size=8), st.floats(0, 10), st.floats(0, 0.5))
def test_exchanges_in_order_end_when_a_run_of_events_does(given_parts, compute_s, interference):
    exchanges = sorted((part * compute_s, seconds) for part, seconds in given_parts)
    found = in_order(Overlap({"zero3": 0.3}, interference), "zero3", exchanges, compute_s=compute_s)
    exposed_s = events(exchanges, compute_s) - compute_s
    total_s = sum(seconds for _, seconds in exchanges)
    assert found.total_s == pytest.approx(total_s)
    assert found.exposed_s == pytest.approx(exposed_s + interference * (total_s - exposed_s), abs=1e-9)
    assert in_order(Overlap({}), "zero3", exchanges, compute_s=compute_s).exposed_s == pytest.approx(total_s)


def test_the_head_s_gradients_are_reduced_first_and_the_embedding_s_last():
    """Buckets of 2 million: the head, layers, layers, part of the embedding, the rest; of 8 MB, 0.08 s each but the last, 0.04.

    They are full after 1.0, 3.0, 5.0 and 5.133 s of 5.2, the rest at 5.2: the fourth ends at 5.213, the fifth at 5.253.
    """
    (found,) = reduced(8e6)
    assert found.total_s == pytest.approx(0.36)
    full_at = 5.0 + 2 / 3 * 0.2
    assert found.exposed_s == pytest.approx(full_at + 0.08 + 0.04 - 5.2)
    (slowed,) = reduced(8e6, interference=0.1)
    assert slowed.exposed_s == pytest.approx(found.exposed_s + 0.1 * found.hidden_s)


def test_one_bucket_is_reduced_at_the_end_and_blocking_launches_hide_nothing():
    (whole,) = reduced(1e9)
    assert [whole.exposed_s, whole.total_s] == pytest.approx([0.36, 0.36])
    (blocked,) = reduced(8e6, hidden=0.0)
    assert blocked.exposed_s == blocked.total_s == pytest.approx(0.36)


def test_new_parameters_are_gathered_in_the_opposite_order():
    """Two bytes each, 18 MB in 0.09 s: the bucket that forward needs first, of the embedding, is waited for, the others hide."""
    _, gathered = reduced(2e6, zero_stage=1)
    assert gathered.total_s == pytest.approx(0.09)
    assert gathered.exposed_s == pytest.approx(
        0.01
    )  # one bucket of a million, the embedding's others come beside its own pass
    _, coarse = reduced(6e6, zero_stage=1)
    assert coarse.exposed_s == pytest.approx(0.03)


def test_equal_layers_as_buckets_are_what_layer_by_layer_is():
    """exposed = c + (n - 1) max(0, c - b), with no share of the file's in it."""
    overlap = Overlap({"data_parallel": 1.0})
    for seconds in (0.5, 1.0, 1.5):
        stage = StageWork(layers=((work(1e6), 5),), data_ranks=2)
        for size in (0.0, 4e6):
            cluster = dataclasses.replace(machine(), overlap=dataclasses.replace(overlap, bucket_bytes=size))
            prices = StagePrices(
                cluster=cluster, dtype="float16", element_bytes=2, mesh=(1, 2, 1, 1, 1), reached=InTraining()
            )
            plan = dataclasses.replace(PLAN, states=dataclasses.replace(PLAN.states, gradient=4))
            (found,) = reduce_once(prices, plan, stage, [PassSeconds(0.0, seconds * 5 * 0.04)])
            assert found.exposed_s == pytest.approx(0.04 + 4 * max(0.0, 0.04 - seconds * 0.04))


@given(switched, rows(), st.sampled_from((1, 25, 400)))
@settings(max_examples=25, deadline=None)
def test_buckets_cost_no_less_than_if_all_hid_and_no_more_than_if_nothing_did(cluster: Cluster, job, size):
    whole = step(cluster, job, overlap="none")
    found = step(cluster, job, overlap="gradients", bucket_bytes=size * MIB)
    least = found.step_s - found.communication["data_parallel"].exposed_s
    assert least <= found.step_s * ROUNDING
    latencies = found.communication["data_parallel"].total_s - whole.communication["data_parallel"].total_s
    assert found.step_s <= whole.step_s * ROUNDING + max(0.0, latencies) + 1e-12
    faster = dataclasses.replace(
        cluster, tiers=tuple(dataclasses.replace(tier, bytes_per_s=2 * tier.bytes_per_s) for tier in cluster.tiers)
    )
    assert step(faster, job, overlap="gradients", bucket_bytes=size * MIB).step_s <= found.step_s * ROUNDING


def test_a_cluster_file_or_a_row_states_the_buckets():
    cluster = preset("dgx-a100-80gb")
    stated = dataclasses.replace(cluster, overlap=dataclasses.replace(cluster.overlap, bucket_bytes=25 * MIB))
    job = predict(cluster, _job()).job
    of_file, of_row, of_layers = (
        step(machine_, job, bucket_bytes=size)
        for machine_, size in ((stated, 0.0), (cluster, 25 * MIB), (cluster, 0.0))
    )
    assert of_file.step_s == of_row.step_s != of_layers.step_s
    assert not math.isclose(of_row.step_s, step(cluster, job, bucket_bytes=400 * MIB).step_s)


def _job():
    shape = TransformerShape(
        family="gpt", layers=24, hidden=2048, heads=16, kv_heads=16, ffn_hidden=8192, vocab=51_200, seq_len=2048
    )
    return TrainingJob(
        shape=shape, devices=64, global_batch=64, microbatch=1, data_ranks=64, tensor_ranks=1, stages=1,
        virtual_stages=1,
    )  # fmt: skip

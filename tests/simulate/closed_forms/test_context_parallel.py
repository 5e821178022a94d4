"""Ranks that divide the sequence: operations by hand, and laws of seconds and bytes."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.cost_model.hardware import preset
from autopar.cost_model.machine import Cluster
from autopar.simulate.closed_forms.layer_split import LayerSplit
from autopar.simulate.closed_forms.operations import Exchange, MatrixProduct, Operation
from autopar.simulate.closed_forms.training_job import TrainingJob, problems
from autopar.simulate.closed_forms.transformer import block_work
from autopar.simulate.closed_forms.transformer_shape import TransformerShape
from tests.simulate.closed_forms.test_laws import ROUNDING, machines, rows, step, switched

# A sequence of 16 tokens, one sample, 4 heads of width 2 and 2 key heads: u = 2 x 2 bytes x 16/c tokens x 4 wide.
LLAMA = TransformerShape(family="llama", layers=2, hidden=8, heads=4, kv_heads=2, ffn_hidden=32, vocab=64, seq_len=16)
SPLIT = LayerSplit(samples=1, context_ranks=4, fused_attention=True)
OWN_BYTES = 2 * 2 * 4 * 4
EXCHANGES = st.sampled_from(("all-gather", "ring"))


def exchanges(operations: Sequence[Operation]) -> Counter[tuple[str, str, float]]:
    found = (op for op in operations if isinstance(op, Exchange) and op.group == "context")
    return Counter((op.kind, op.behind, op.full_bytes) for op in found)


def flops(operations: Sequence[Operation]) -> float:
    return sum(op.flops for op in operations if isinstance(op, MatrixProduct))


def divided(job: TrainingJob, ranks: int) -> TrainingJob:
    """The same job with each sequence on so many ranks, and as many times the devices."""
    devices = job.devices // job.context_ranks * ranks
    return dataclasses.replace(job, context_ranks=ranks, devices=devices)


def test_keys_and_values_are_gathered_forward_and_again_backward_and_their_gradients_scattered():
    work = block_work(LLAMA, SPLIT)
    assert exchanges(work.forward) == {("all-gather", "nothing", 4 * OWN_BYTES): 1}
    assert exchanges(work.backward) == {
        ("all-gather", "nothing", 4 * OWN_BYTES): 1,
        ("reduce-scatter", "nothing", 4 * OWN_BYTES): 1,
    }


def test_a_ring_sends_beside_every_block_but_the_last_and_gradients_go_home():
    work = block_work(LLAMA, dataclasses.replace(SPLIT, context_exchange="ring"))
    assert exchanges(work.forward) == {("permute", "product", OWN_BYTES): 3}
    assert exchanges(work.backward) == {("permute", "product", 2 * OWN_BYTES): 3, ("permute", "nothing", OWN_BYTES): 1}
    blocks = [op for op in work.forward if isinstance(op, MatrixProduct) and op.attention]
    assert [(op.m, op.n) for op in blocks] == [(4, 2)] * 4  # 4 of 16 queries; half of each block's 4 keys in the mean
    place = [isinstance(op, Exchange) for op in work.forward].index(True)
    assert work.forward[place + 1] == blocks[0]


@pytest.mark.parametrize("exchange", ["all-gather", "ring"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["plain", "expert"])
def test_ranks_share_the_products_and_what_is_kept(exchange, fused, kind):
    if exchange == "ring" and not fused:
        return
    shape = dataclasses.replace(
        LLAMA, family="moe" if kind == "expert" else "llama", experts=8 if kind == "expert" else 1
    )
    split = dataclasses.replace(SPLIT, fused_attention=fused, context_exchange=exchange)
    whole = block_work(shape, dataclasses.replace(split, context_ranks=1), kind)
    part = block_work(shape, split, kind)
    for name in ("forward", "backward"):
        assert flops(getattr(part, name)) == pytest.approx(flops(getattr(whole, name)) / 4)
    assert part.kept_bytes == whole.kept_bytes / 4
    assert part.boundary_bytes == whole.boundary_bytes / 4
    assert part.parameters == whole.parameters


def test_fewer_key_heads_than_tensor_ranks_are_repeated():
    one, two, four = (block_work(LLAMA, dataclasses.replace(SPLIT, tensor_ranks=t)) for t in (1, 2, 4))
    sizes = [next(iter(exchanges(work.forward)))[2] for work in (one, two, four)]
    assert sizes == [4 * OWN_BYTES, 2 * OWN_BYTES, 2 * OWN_BYTES]


def test_gathered_keys_are_whole_while_backward_runs_and_a_ring_has_two_blocks():
    kept = block_work(LLAMA, dataclasses.replace(SPLIT, context_ranks=1)).transient_bytes
    assert kept == 0
    assert block_work(LLAMA, SPLIT).transient_bytes == 2 * 4 * OWN_BYTES
    assert block_work(LLAMA, dataclasses.replace(SPLIT, context_exchange="ring")).transient_bytes == 2 * 2 * OWN_BYTES


@given(machines, rows(), st.sampled_from((2, 4, 8)))
@settings(max_examples=25, deadline=None)
def test_activations_are_divided_and_states_only_by_zero(cluster, job, ranks):
    whole, part = (step(cluster, divided(job, n)).memory for n in (1, ranks))
    assume(not any(problems(divided(job, ranks))))
    assert part.activation_bytes == pytest.approx(whole.activation_bytes / ranks)
    more = dataclasses.replace(
        divided(job, 1), data_ranks=ranks * job.data_ranks, global_batch=ranks * job.global_batch,
        devices=ranks * divided(job, 1).devices,
    )  # fmt: skip
    assert part.states_bytes == pytest.approx(step(cluster, more).memory.states_bytes)


def without_limits(cluster: Cluster) -> Cluster:
    """Links and memory take no time, and products of any shape reach the peak."""
    tiers = tuple(dataclasses.replace(tier, latency_s=0.0, bytes_per_s=math.inf) for tier in cluster.tiers)
    device = dataclasses.replace(
        cluster.device,
        matrix_efficiency={},
        memory_bytes_per_s=math.inf,
        launch_s=0.0,
        attention=(),
        thread_blocks=None,
    )
    return dataclasses.replace(cluster, device=device, tiers=tiers)


@given(switched, rows(), st.sampled_from((2, 4, 8)))
@settings(max_examples=25, deadline=None)
def test_with_infinite_bandwidth_the_step_is_the_compute_divided(cluster, job, ranks):
    assume(not any(problems(divided(job, ranks))))
    cluster = without_limits(cluster)
    whole, part = (step(cluster, divided(job, n)) for n in (1, ranks))
    assert part.exposed_comm_s == 0
    assert part.step_s == pytest.approx(whole.step_s / ranks)


@given(switched, rows(), st.sampled_from((2, 4, 8)))
@settings(max_examples=50, deadline=None)
def test_a_divided_sequence_is_never_faster_than_perfect_division(cluster, job, ranks):
    assume(not any(problems(divided(job, ranks))))
    whole, part = (step(cluster, divided(job, n)).step_s for n in (1, ranks))
    assert part >= whole / ranks / ROUNDING


@given(machines, rows(), EXCHANGES)
@settings(max_examples=15, deadline=None)
def test_one_rank_has_the_whole_sequence_whatever_the_exchange(cluster, job, exchange):
    job = dataclasses.replace(divided(job, 1), context_exchange="all-gather")
    assert step(cluster, job, context_exchange=exchange) == step(cluster, job)


@given(rows(stages=(1,)), st.sampled_from((2, 4)), st.integers(0, 3), st.booleans())
@settings(max_examples=25, deadline=None)
def test_gradients_are_reduced_over_data_and_context_ranks(job, ranks, zero_stage, hybrid):
    """As over as many data ranks, on the same devices; of hybrid sharding each data rank's context ranks are a group."""
    job = dataclasses.replace(
        divided(job, 1), data_ranks=2, tensor_ranks=1, devices=2, sequence_parallel=False, zero_stage=zero_stage,
        global_batch=16 * job.microbatch, overlap="none",
        shard_ranks=1 if hybrid and zero_stage else None,
    )  # fmt: skip
    cluster = preset("dgx-h100")
    context = step(cluster, divided(job, ranks))
    data = step(
        cluster, job, data_ranks=2 * ranks, devices=2 * ranks, global_batch=ranks * job.global_batch,
        shard_ranks=ranks if job.shard_ranks else None,
    )  # fmt: skip
    for kind in ("data_parallel", "zero3"):
        assert context.communication[kind].total_s == pytest.approx(data.communication[kind].total_s)
    assert context.optimizer_s == pytest.approx(data.optimizer_s)


def test_a_ring_hides_its_sends_where_blocks_are_long_and_waits_where_links_are_slow():
    shape = dataclasses.replace(
        LLAMA, hidden=4096, heads=32, kv_heads=8, ffn_hidden=14336, vocab=128_256, seq_len=131_072
    )
    job = TrainingJob(
        shape=shape, devices=8, global_batch=8, microbatch=1, data_ranks=1, tensor_ranks=1, stages=1, virtual_stages=1,
        context_ranks=8, context_exchange="ring", fused_attention=True, recompute="full", zero_stage=1,
    )  # fmt: skip
    cluster = preset("dgx-h100")
    long = step(cluster, job).communication["context"]
    # Forward, forward again and backward send 7 u, 7 u and 14 u beside blocks; one u goes home alone.
    assert long.exposed_s / long.total_s < 0.1
    slow = dataclasses.replace(
        cluster, tiers=tuple(dataclasses.replace(tier, bytes_per_s=tier.bytes_per_s / 1000) for tier in cluster.tiers)
    )
    late = step(slow, job).communication["context"]
    assert late.exposed_s / late.total_s > 0.5

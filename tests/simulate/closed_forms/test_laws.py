"""Laws that the price of a step keeps, whatever the row: bubble, ring, ZeRO's volumes, weak and strong scaling, shares."""

import dataclasses

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from autopar.cost_model.hardware import preset
from autopar.cost_model.machine import Cluster
from autopar.simulate.closed_forms.job_prediction import predict
from autopar.simulate.closed_forms.training_job import TrainingJob, problems
from autopar.simulate.closed_forms.training_step import StepPrediction
from autopar.simulate.closed_forms.transformer_shape import TransformerShape

CLUSTERS = ("dgx-a100-80gb", "dgx-h100", "dgx2-v100-32gb", "a3-mega", "p3.16xlarge", "tpu-v5p")
ROUNDING = 1 + 1e-9


@st.composite
def rows(draw: st.DrawFn, *, stages: tuple[int, ...] = (1, 2, 4)) -> TrainingJob:
    """A transformer and a plan that divide each other."""
    heads = draw(st.sampled_from((8, 16, 32)))
    hidden = heads * draw(st.sampled_from((64, 80, 128)))
    family = draw(st.sampled_from(("gpt", "llama", "bert", "moe")))
    shape = TransformerShape(
        family=family, layers=draw(st.sampled_from((8, 16))), hidden=hidden, heads=heads, kv_heads=heads,
        ffn_hidden=4 * hidden, vocab=draw(st.sampled_from((32_000, 51_200))),
        seq_len=draw(st.sampled_from((512, 2048, 4096))), experts=8 if family == "moe" else 1,
    )  # fmt: skip
    dp, tp, pp = draw(st.sampled_from((1, 2, 8, 16))), draw(st.sampled_from((1, 2, 8))), draw(st.sampled_from(stages))
    microbatch, cp = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 1, 2, 8)))
    job = TrainingJob(
        shape=shape, devices=dp * tp * pp * cp, global_batch=dp * microbatch * 8, microbatch=microbatch, data_ranks=dp,
        tensor_ranks=tp, stages=pp, virtual_stages=1, zero_stage=draw(st.integers(0, 3)),
        recompute=draw(st.sampled_from(("none", "selective", "dots", "full"))),
        sequence_parallel=tp > 1 and draw(st.booleans()), fused_attention=draw(st.booleans()),
        overlap=draw(st.sampled_from(("usual", "none", "gradients", "all"))), context_ranks=cp,
        context_exchange=draw(st.sampled_from(("all-gather", "ring"))),
        reduce_gradients=draw(st.sampled_from(("usual", "once", "each"))),
    )  # fmt: skip
    assume(not any(problems(job)))
    return job


def bound_by_links(ranks: int, heads: int, **plan: object) -> TrainingJob:
    """A GPT under ZeRO 3 whose gathers would hide behind more compute than there is."""
    shape = TransformerShape(
        family="gpt", layers=8, hidden=4096, heads=heads, kv_heads=heads, ffn_hidden=16384, vocab=32_000, seq_len=1024
    )
    base = TrainingJob(
        shape=shape, devices=ranks, global_batch=64, microbatch=1, data_ranks=ranks, tensor_ranks=1, stages=1,
        virtual_stages=1, zero_stage=3, overlap="gradients",
    )  # fmt: skip
    return dataclasses.replace(base, **plan)


machines = st.sampled_from(CLUSTERS).map(preset)
switched = st.sampled_from(CLUSTERS[:4]).map(preset)
"""Where a larger group has no more links to each of its members, as it has in a torus or a cube mesh."""


def step(cluster: Cluster, job: TrainingJob, **changes: object) -> StepPrediction:
    return predict(cluster, dataclasses.replace(job, **changes)).step


@given(machines, rows(), st.floats(1.1, 10))
@example(preset("p3.16xlarge"), bound_by_links(16, 16), 3.0)
@example(preset("a3-mega"), bound_by_links(32, 16, data_ranks=8, tensor_ranks=4, microbatch=4, overlap="all"), 1.5)
@settings(max_examples=25, deadline=None)
def test_faster_links_memory_or_arithmetic_never_make_a_step_slower(cluster, job, factor):
    before = step(cluster, job).step_s
    device = cluster.device
    peaks = {dtype: factor * peak for dtype, peak in device.peak_flops_per_s.items()}
    tiers = tuple(dataclasses.replace(tier, bytes_per_s=factor * tier.bytes_per_s) for tier in cluster.tiers)
    memory = dataclasses.replace(device, memory_bytes_per_s=factor * device.memory_bytes_per_s)
    for faster in (
        {"tiers": tiers},
        {"device": memory},
        {"device": dataclasses.replace(device, peak_flops_per_s=peaks)},
    ):
        assert step(dataclasses.replace(cluster, **faster), job).step_s <= before * ROUNDING


@given(machines, rows(stages=(1,)))
@example(preset("p3.16xlarge"), bound_by_links(16, 16))
@settings(max_examples=25, deadline=None)
def test_a_second_of_compute_hides_one_second_of_communication(cluster, job):
    found = step(cluster, job)
    hidden_s = sum(part.hidden_s for part in found.communication.values())
    assert hidden_s <= found.compute_s * ROUNDING
    assert found.step_s == pytest.approx(found.compute_s + found.exposed_comm_s + found.optimizer_s)


@given(switched, rows())
@settings(max_examples=25, deadline=None)
def test_weak_scaling_costs_time_but_for_what_more_owners_share(cluster, job):
    """Twice the data ranks with twice the samples: no less time, but for the shares of optimizer and gradients under ZeRO."""
    once = step(cluster, job)
    twice = step(
        cluster, job, data_ranks=2 * job.data_ranks, devices=2 * job.devices, global_batch=2 * job.global_batch
    )
    saved = once.optimizer_s - twice.optimizer_s
    shared = once.compute_s - twice.compute_s
    assert twice.step_s + saved + shared >= once.step_s / ROUNDING
    assert saved == pytest.approx(once.optimizer_s / 2 if job.zero_stage else 0.0, abs=2 * cluster.device.launch_s)
    if job.divides_gradients:
        assert 0 <= shared < once.compute_s / 2
    else:
        assert twice.compute_s == pytest.approx(once.compute_s)


@given(switched, rows(stages=(1,)))
@settings(max_examples=25, deadline=None)
def test_strong_scaling_halves_the_compute_and_no_more(cluster, job):
    """Twice the data ranks for the same samples, in half as many microbatches; ZeRO 2 also shares the sums of gradients."""
    once, twice = step(cluster, job), step(cluster, job, data_ranks=2 * job.data_ranks, devices=2 * job.devices)
    shared = once.compute_s / 2 - twice.compute_s
    assert shared == pytest.approx(0.0) if not job.divides_gradients else 0 <= shared < once.compute_s / 2
    assert twice.step_s >= once.step_s / 2 / ROUNDING - once.optimizer_s - shared


@given(machines, rows(stages=(1,)))
@settings(max_examples=25, deadline=None)
def test_a_larger_microbatch_never_takes_longer_without_a_pipeline(cluster, job):
    small = step(cluster, job)
    large = step(cluster, job, microbatch=2 * job.microbatch)
    assert large.step_s <= small.step_s * ROUNDING
    assert large.memory.peak_bytes >= small.memory.peak_bytes


@given(machines, rows(stages=(2, 4)), st.sampled_from((1, 2)))
@settings(max_examples=25, deadline=None)
def test_the_bubble_is_what_the_other_stages_take_once(cluster, job, virtual):
    """Between (p-1)/v times the lightest stage's microbatch and p-1 times the slowest one's: (p-1)/(v m) of equal stages."""
    job = dataclasses.replace(job, virtual_stages=virtual)
    assume(not any(problems(job)))
    found = step(cluster, job)
    slowest = (found.step_s - found.bubble_s) / job.microbatches
    assert 0 < found.bubble_s <= (job.stages - 1) * slowest / virtual * ROUNDING
    more = step(cluster, job, global_batch=4 * job.global_batch)
    assert more.bubble_s == pytest.approx(found.bubble_s)


@given(machines, rows())
@settings(max_examples=25, deadline=None)
def test_more_shards_and_more_recomputation_never_keep_more(cluster, job):
    states = [step(cluster, job, zero_stage=stage).memory.states_bytes for stage in range(4)]
    assert states == sorted(states, reverse=True)
    kept = [step(cluster, job, recompute=how).memory.activation_bytes for how in ("none", "selective", "full")]
    assert kept == sorted(kept, reverse=True)
    if job.tensor_ranks == 1 and job.shape.heads % 2 == 0:
        halves = step(cluster, job, tensor_ranks=2, devices=2 * job.devices)
        assert halves.memory.states_bytes < step(cluster, job).memory.states_bytes


@given(rows(stages=(1,)), st.sampled_from((2, 4, 8)))
@settings(max_examples=25, deadline=None)
def test_zero_moves_what_rajbhandari_et_al_count(job, ranks):
    """In bytes of all-reduce 2 (n-1)/n P: ZeRO 1 as much, a scatter for every microbatch under 2, one and a half under 3."""
    slow = preset("dgx-a100-80gb")
    tiers = tuple(dataclasses.replace(tier, latency_s=0.0) for tier in slow.tiers)
    cluster = dataclasses.replace(slow, tiers=tiers)
    job = dataclasses.replace(
        job, data_ranks=ranks, tensor_ranks=1, devices=ranks, global_batch=8 * ranks * job.microbatch, expert_ranks=1,
        context_ranks=1, reduce_gradients="usual", sequence_parallel=False, precision="bf16", accumulate_fp32=False,
    )  # fmt: skip
    m = job.microbatches
    total = [step(cluster, job, zero_stage=stage).comm_s for stage in range(4)]
    assert total[1] == pytest.approx(total[0])
    assert total[2] == pytest.approx(total[0] * (m + 1) / 2)
    assert total[3] == pytest.approx(total[0] * 3 * m / 2)
    (seconds,) = {cluster.mesh_costs((ranks,)).seconds("all-reduce", 1e9, (0,))}
    assert seconds == pytest.approx(2 * (ranks - 1) / ranks * 1e9 / tiers[0].sustained_bytes_per_s)

"""What optional columns say of a row: kinds of nodes, hybrid sharding, widths of heads, shared experts, deeper decoders."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_model.hardware import preset
from autopar.simulate.closed_forms.job_prediction import predict
from autopar.simulate.closed_forms.layer_split import LayerSplit
from autopar.simulate.closed_forms.training_job import StageLayout, TrainingJob, problems
from autopar.simulate.closed_forms.training_step import StepPrediction
from autopar.simulate.closed_forms.transformer import block_work
from autopar.simulate.closed_forms.transformer_shape import TransformerShape

GPT = TransformerShape(
    family="gpt", layers=32, hidden=4096, heads=32, kv_heads=32, ffn_hidden=16384, vocab=51200, seq_len=2048
)
MIXED, LAYERS = preset("mixed-a100-v100"), 32
JOB = TrainingJob(
    shape=GPT, devices=16, global_batch=64, microbatch=1, data_ranks=1, tensor_ranks=8, stages=2, virtual_stages=1,
    precision="fp16", recompute="full",
)  # fmt: skip


def step(job: TrainingJob, cluster: str = "dgx-a100-80gb", **changes: object) -> StepPrediction:
    changed = dataclasses.replace(job, **changes)
    assert list(problems(changed)) == []
    return predict(preset(cluster), changed).step


def on_kinds(kinds: tuple[str, str], first: int) -> float:
    layouts = tuple(StageLayout(count, 1, 8) for count in (first, LAYERS - first))
    return predict(MIXED, dataclasses.replace(JOB, stage_kinds=kinds, stage_layouts=layouts)).step.step_s


def test_stages_that_take_equally_long_on_unlike_machines_beat_the_slowest_of_both_and_the_faster_half():
    """8 A100 and 8 V100: every share of the layers, in both orders."""
    every = {(k, n): on_kinds(k, n) for k in (("a100", "v100"), ("v100", "a100")) for n in range(1, LAYERS)}
    best = min(every, key=every.__getitem__)
    lockstep = [predict(MIXED, JOB), predict(MIXED, dataclasses.replace(JOB, stages=1, data_ranks=2))]
    alone = predict(MIXED.of_kind("a100"), dataclasses.replace(JOB, devices=8, stages=1)).step.step_s
    assert 1.25 * every[best] <= min(found.step.step_s for found in lockstep)
    assert every[best] < alone
    kinds, first = best
    share = (first if kinds[0] == "a100" else LAYERS - first) / LAYERS
    assert 0.6 < share < 0.8  # of the layers on the A100s, which are about 2.2 times as fast
    assert step(JOB, "mixed-a100-v100").step_s >= every[best]


def test_a_stage_fits_the_memory_of_its_own_kind():
    huge = dataclasses.replace(GPT, hidden=12288, heads=96, kv_heads=96, ffn_hidden=49152)
    small, large = (
        dataclasses.replace(
            JOB, shape=huge, stage_kinds=("a100", "v100"), zero_stage=0,
            stage_layouts=(StageLayout(first, 1, 8), StageLayout(LAYERS - first, 1, 8)),
        )
        for first in (9, 4)
    )  # fmt: skip
    assert not predict(MIXED, small).step.fits
    assert not predict(MIXED, large).step.fits
    assert predict(MIXED, dataclasses.replace(small, shape=GPT)).step.fits


@given(
    st.sampled_from((1, 2, 4, 8, 16, 64)),
    st.sampled_from((1, 2, 3)),
    st.sampled_from(("dgx-a100-80gb", "p4d.24xlarge")),
)
@settings(max_examples=20, deadline=None)
def test_copies_of_states_cost_memory_and_all_ranks_are_usual_sharding(ranks, zero_stage, cluster):
    job = dataclasses.replace(JOB, devices=64, data_ranks=64, tensor_ranks=1, stages=1, zero_stage=zero_stage)
    usual, hybrid = step(job, cluster), step(job, cluster, shard_ranks=ranks)
    assert hybrid.memory.states_bytes >= usual.memory.states_bytes
    assert hybrid.optimizer_s >= usual.optimizer_s
    if ranks == 64:
        assert hybrid == usual


def test_hybrid_sharding_moves_less_between_nodes():
    """Half-precision gradients: 6 bytes a parameter cross nodes under ZeRO 3, 4 where each node holds a copy of the states."""
    job = dataclasses.replace(
        JOB, devices=64, data_ranks=64, tensor_ranks=1, stages=1, zero_stage=3, accumulate_fp32=False
    )
    usual, hybrid = step(job, "p4d.24xlarge"), step(job, "p4d.24xlarge", shard_ranks=8)
    assert 4 / 6 < hybrid.comm_s / usual.comm_s < 1


def test_what_divides_nothing_is_refused():
    job = dataclasses.replace(JOB, devices=64, data_ranks=64, tensor_ranks=1, stages=1)
    assert "zero_stage is 0" in dict(problems(dataclasses.replace(job, shard_ranks=8)))["shard_ranks"]
    job = dataclasses.replace(job, zero_stage=3, shard_ranks=12)
    assert dict(problems(job))["shard_ranks"].startswith("is 12, which does not divide dp = 64: use one of 8, 16")


def test_a_head_width_of_hidden_over_heads_changes_nothing():
    split = LayerSplit(samples=2, tensor_ranks=2)
    assert block_work(dataclasses.replace(GPT, head_width=128), split) == block_work(GPT, split)
    wide = dataclasses.replace(GPT, head_width=256)
    assert wide.block_parameters("plain") - GPT.block_parameters("plain") == 4 * 4096**2 + 3 * 4096
    assert block_work(wide, split).kept_bytes > block_work(GPT, split).kept_bytes
    tokens = 2 * GPT.seq_len
    more = 2 * tokens * 4096 * (3 + 1) * 4096 + 4 * tokens * GPT.seq_len * 4096
    assert (wide.forward_flops(2) - GPT.forward_flops(2)) == pytest.approx(more * 32)


@given(st.integers(0, 4), st.booleans(), st.sampled_from((1, 2)))
@settings(max_examples=12, deadline=None)
def test_shared_experts_are_passed_by_every_token(count, gated, every):
    moe = dataclasses.replace(
        GPT, family="moe", layers=4, experts=16, ffn_hidden=1024, experts_per_token=4, expert_every=every, gating=gated
    )
    more = dataclasses.replace(moe, shared_experts=count)
    assert more.blocks.count("expert") == 4 // every
    each = (3 if gated else 2) * 4096 * 1024
    assert more.forward_flops(1) - moe.forward_flops(1) == pytest.approx(count * 4 // every * 2 * GPT.seq_len * each)
    split = LayerSplit(samples=1, expert_ranks=8)
    before, after = block_work(moe, split, "expert"), block_work(more, split, "expert")
    assert after.expert_parameters == before.expert_parameters
    assert after.parameters - before.parameters == pytest.approx(count * (each + 1024 + 4096))
    assert (after == before) == (count == 0)


def test_a_deeper_decoder_is_priced_by_its_layers():
    t5 = TransformerShape(
        family="t5", layers=4, hidden=1024, heads=16, kv_heads=16, ffn_hidden=4096, vocab=32128, seq_len=512
    )
    job = dataclasses.replace(JOB, shape=t5, devices=1, tensor_ranks=1, stages=1)
    times = [step(job, shape=dataclasses.replace(t5, decoder_layers=layers)).compute_s for layers in (2, 4, 6)]
    assert times[1] == step(job).compute_s
    assert times[2] - times[1] == pytest.approx(times[1] - times[0])
    assert dataclasses.replace(t5, decoder_layers=6).blocks == ("plain",) * 4 + ("decoder",) * 6

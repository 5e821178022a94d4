"""Precision fp8: 8-bit products of linear layers, their casts, and laws of seconds and bytes."""

import dataclasses
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_model.hardware import preset
from autopar.simulate.closed_forms.job_prediction import predict
from autopar.simulate.closed_forms.layer_split import LayerSplit
from autopar.simulate.closed_forms.operations import FusedGroup, MatrixProduct, Operation
from autopar.simulate.closed_forms.prices import InTraining, StagePrices
from autopar.simulate.closed_forms.training_job import TrainingJob
from autopar.simulate.closed_forms.transformer import block_work, embedding_work, head_work
from autopar.simulate.closed_forms.transformer_shape import TransformerShape
from tests.simulate.closed_forms.test_laws import ROUNDING, rows, step

narrow_machines = st.sampled_from(("dgx-h100", "dgx-h200", "a3-mega", "b200", "gb200-nvl72", "gb300-nvl72")).map(preset)
GPT = TransformerShape(family="gpt", layers=2, hidden=8, heads=2, kv_heads=2, ffn_hidden=32, vocab=64, seq_len=4)
WIDE = LayerSplit(samples=2)
NARROW = dataclasses.replace(WIDE, narrow_products=True)
TOKENS, CAST_BYTES = 8, 2 + 2 + 1 + 1


def products(operations: Sequence[Operation], *, narrow: bool) -> list[MatrixProduct]:
    return [op for op in operations if isinstance(op, MatrixProduct) and op.narrow == narrow]


def moved(operations: Sequence[Operation]) -> float:
    return sum(op.moved_bytes for op in operations if isinstance(op, FusedGroup))


def test_linear_layers_of_a_block_are_narrow_and_attention_is_not():
    work = block_work(GPT, NARROW)
    assert [(op.n, op.k) for op in products(work.forward, narrow=True)] == [(24, 8), (8, 8), (32, 8), (8, 32)]
    assert len(products(work.backward, narrow=True)) == 8
    assert all(op.k == 4 or op.n == 4 for op in products((*work.forward, *work.backward), narrow=False))
    for end in (head_work, embedding_work):
        assert end(GPT, NARROW) == end(GPT, WIDE)


def test_operands_are_read_twice_and_written_twice_for_a_cast():
    """Forward casts x and w, backward dy: the gradient of each product's result."""
    work, wide = block_work(GPT, NARROW), block_work(GPT, WIDE)
    results = (24, 8, 32, 8)
    operands = sum(TOKENS * k + n * k for n, k in zip(results, (8, 8, 8, 32), strict=True))
    assert moved(work.forward) - moved(wide.forward) == CAST_BYTES * operands
    assert moved(work.backward) - moved(wide.backward) == CAST_BYTES * TOKENS * sum(results)


def test_experts_are_narrow_and_their_gate_and_dispatch_are_not():
    moe = dataclasses.replace(GPT, family="moe", experts=4, expert_group=4)
    narrow = block_work(moe, NARROW, "expert")
    sizes = {(op.n, op.k) for op in products(narrow.forward, narrow=True)}
    assert sizes == {(24, 8), (8, 8), (32, 8), (8, 32)}
    assert (4, 8) in {(op.n, op.k) for op in products(narrow.forward, narrow=False)}  # gate


def test_a_narrow_product_runs_at_its_own_rate_and_moves_operands_of_one_byte():
    cluster = preset("dgx-h100")
    prices = StagePrices(cluster=cluster, dtype="bfloat16", element_bytes=2, mesh=(1, 1, 1, 1, 1), reached=InTraining())
    device, launch_s = cluster.device, cluster.device.launch_s
    large = MatrixProduct(m=8192, n=8192, k=8192, narrow=True)
    rate = device.peak_of("float8") * device.efficiency_of("float8").of(8192, 8192, 8192)
    assert prices.product_s(large) == pytest.approx(large.flops / rate + launch_s)
    assert rate == pytest.approx(1550e12, rel=0.01)
    thin = MatrixProduct(m=65536, n=65536, k=16, narrow=True)
    bytes_each = 2 * 65536 * 16 + 2 * 65536**2
    assert prices.product_s(thin) == pytest.approx(bytes_each / device.sustained_bytes_per_s + launch_s)


@given(narrow_machines, rows())
@settings(max_examples=40, deadline=None)
def test_narrow_products_gain_no_more_than_their_rate_and_keep_as_much(cluster, job):
    wide, narrow = step(cluster, job), step(cluster, job, precision="fp8")
    device = cluster.device
    gain = device.flops_per_s_of("float8") / device.flops_per_s_of("bfloat16")
    assert 1.9 < gain <= 2.01
    assert narrow.step_s >= wide.step_s / max(2.0, gain) / ROUNDING
    assert narrow.memory == wide.memory
    assert narrow.optimizer_s == wide.optimizer_s
    assert {kind: one.total_s for kind, one in narrow.communication.items()} == {
        kind: one.total_s for kind, one in wide.communication.items()
    }


@given(narrow_machines, rows())
@settings(max_examples=25, deadline=None)
def test_where_memory_is_no_limit_narrow_products_are_never_slower(cluster, job):
    device = dataclasses.replace(cluster.device, memory_bytes_per_s=math.inf, launch_s=0.0)
    cluster = dataclasses.replace(cluster, device=device)
    assert step(cluster, job, precision="fp8").step_s <= step(cluster, job).step_s * ROUNDING


def test_a_device_that_states_no_rate_is_refused():
    job = TrainingJob(
        shape=GPT, devices=1, global_batch=2, microbatch=2, data_ranks=1, tensor_ranks=1, stages=1, virtual_stages=1,
        precision="fp8",
    )  # fmt: skip
    with pytest.raises(ValueError, match="A100-SXM4-80GB states no peak of float8"):
        predict(preset("dgx-a100-80gb"), job)

"""The layer that `simulate` prices against the layer that the planner plans under the same plan, stated as constraints."""

from collections import Counter

import jax
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.cost_model.hardware import Cluster
from autopar.cost_model.operations import Exchange
from autopar.cost_model.transformer import LayerSplit, block_work
from autopar.cost_model.transformer_shape import TransformerShape
from autopar.models import build
from autopar.plan import Plan

BATCH, SEQ, HIDDEN, DATA, TENSOR, ITEMSIZE = 16, 64, 256, 2, 4, 4
MEGATRON = {
    "state/params/*/qkv/kernel": P(None, None, "tensor", None),
    "state/params/*/out/kernel": P("tensor", None, None),
    "state/params/*/up/kernel": P(None, "tensor"),
    "state/params/*/down/kernel": P("tensor", None),
    "batch/*": P("data"),
}


def planned(layers: int) -> Plan:
    """A GPT on (data, tensor), its matrices split by column and row; latency decides, so that few collectives are best."""
    model = build("gpt", layers=layers, hidden=HIDDEN, heads=4, seq=SEQ, batch=BATCH, vocab=256, dropout=0.0)
    state = jax.eval_shape(lambda: model.create_state(jax.random.key(0)))
    cluster = Cluster.uniform((1.0, 1.0), (1e-9, 1e-9))
    mesh = {"data": DATA, "tensor": TENSOR}
    step = autopar.parallelize(model.train_step, devices=8, mesh_shape=mesh, constraints=MEGATRON, cluster=cluster)
    return step.plan(state, model.batch_shape())


def collectives(plan: Plan, axes: tuple[str, ...]) -> Counter[tuple[str, int]]:
    """Kind and bytes of the collectives over exactly these axes."""
    found: Counter[tuple[str, int]] = Counter()
    for item in plan.collectives:
        if item.axes == axes:
            found[item.kind, item.bytes] += round(item.count)
    return found


@pytest.mark.slow
def test_a_planned_layer_communicates_what_the_analytic_layer_lists():
    one_more, fewer = planned(3), planned(2)
    shape = TransformerShape("gpt", 1, HIDDEN, 4, 4, 4 * HIDDEN, 256, SEQ)
    split = LayerSplit(samples=BATCH / DATA, tensor_ranks=TENSOR, element_bytes=ITEMSIZE, gradient_bytes=ITEMSIZE)
    work = block_work(shape, split)
    listed = Counter(
        (op.kind, int(op.full_bytes)) for op in (*work.forward, *work.backward) if isinstance(op, Exchange)
    )
    activation_bytes = BATCH // DATA * SEQ * HIDDEN * ITEMSIZE
    assert listed == {("all-reduce", activation_bytes): 4}
    reduced = collectives(one_more, ("tensor",)) - collectives(fewer, ("tensor",))
    assert {key: count for key, count in reduced.items() if key[0] == "all-reduce"} == listed

    gradients = collectives(one_more, ("data",)) - collectives(fewer, ("data",))
    matrices = sum(
        size * count for (kind, size), count in gradients.items() if kind == "all-reduce" and size > HIDDEN * ITEMSIZE
    )
    assert matrices == 12 * HIDDEN**2 // TENSOR * ITEMSIZE
    assert work.parameters * ITEMSIZE == pytest.approx(matrices, rel=0.01)

"""What the kernels of attention hand to each other, beside what the model of fused kernels counts in its loops."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.attention.primitive import dot_product_attention
from autopar.cost_model.hardware import preset
from autopar.intra_op.choices.kernels import traffic_of
from autopar.program.from_jaxpr import program_of
from autopar.rules.attention import between_kernels

BATCH, LENGTH, HEADS, DEPTH = 2, 96, 4, 40
SCORES = BATCH * HEADS * LENGTH * LENGTH


def operands(dtype, length=LENGTH):
    return [jax.ShapeDtypeStruct((BATCH, length, HEADS, DEPTH), dtype)] * 3


def attended(query, key, value):
    return dot_product_attention(query, key, value)


def gradients(query, key, value):
    return jax.grad(lambda *given: attended(*given).astype(jnp.float32).sum(), argnums=(0, 1, 2))(query, key, value)


def equations(function, dtype, **wishes):
    """Attention and its gradients."""
    found = jax.make_jaxpr(function)(*operands(dtype, **wishes)).eqns
    return [eqn for eqn in found if eqn.primitive.name.startswith("attention")]


def counted(eqn):
    """Bytes of scores, weights and their gradients that kernels of its loops read and write; it has one block."""
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    program, _ = program_of(jax.make_jaxpr(lambda *given: eqn.primitive.impl(*given, **eqn.params))(*shapes))
    total = 0.0
    for one, traffic in traffic_of(program).items():
        for v, part in [*zip(one.invars, traffic.reads, strict=True), *zip(one.outvars, traffic.writes, strict=True)]:
            total += part * v.aval.size * v.aval.dtype.itemsize * (v.aval.size == SCORES)
    return total


@pytest.mark.parametrize(("dtype", "each"), [("bfloat16", [12, 26]), ("float32", [16, 36])])
def test_scores_pass_through_memory_between_kernels(dtype, each):
    found = equations(gradients, dtype)
    assert [between_kernels(eqn) / SCORES for eqn in found] == each
    for eqn in found:
        assert counted(eqn) == pytest.approx(between_kernels(eqn), rel=0.01)


def test_attention_pays_for_that_where_kernels_are_fused_and_memory_is_the_limit():
    length, device = 1024, preset("dgx-h100").device
    step = autopar.parallelize(lambda state, batch: (state, attended(*batch)), devices=1, cluster="dgx-h100")
    plan = step.plan({}, operands("bfloat16", length))
    passed_s = 12 * BATCH * HEADS * length**2 / device.sustained_bytes_per_s
    assert passed_s < plan.compute_s < 2 * passed_s

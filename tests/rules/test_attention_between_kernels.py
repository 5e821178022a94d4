"""What the kernels of attention hand to each other, beside what XLA's kernels read and write in its loops.

`data/profiles` has the bodies of these loops, without the places of sources: `attention_shared_h100`, where two heads of queries
share one of keys, as JAX 0.11.2 compiled them on an H100, and `attention_h100`, where each has its own, as JAX 0.10.2 compiled
them for one.
"""

import math

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.attention.blocks import cut_run
from autopar.attention.primitive import dot_product_attention
from autopar.cost_model.hardware import preset
from autopar.hlo.text import parse_module
from autopar.rules.attention import between_kernels
from autopar.rules.table import flops_of, rule_for
from tests.measuring.gpu_profiles import hlo_of

BATCH, LENGTH, HEADS, DEPTH = 2, 96, 4, 40


def operands(dtype, *, batch=BATCH, length=LENGTH, heads=HEADS, key_heads=HEADS, depth=DEPTH):
    key = jax.ShapeDtypeStruct((batch, length, key_heads, depth), dtype)
    return [jax.ShapeDtypeStruct((batch, length, heads, depth), dtype), key, key]


def attended(query, key, value):
    return dot_product_attention(query, key, value)


def causal(query, key, value):
    return dot_product_attention(query, key, value, is_causal=True)


def equations(dtype, *, of=attended, **wishes):
    """Attention and its gradients."""

    def gradients(query, key, value):
        return jax.grad(lambda *given: of(*given).astype(jnp.float32).sum(), argnums=(0, 1, 2))(query, key, value)

    found = jax.make_jaxpr(gradients)(*operands(dtype, **wishes)).eqns
    return [eqn for eqn in found if eqn.primitive.name.startswith("attention")]


def counted(name, scores):
    """Bytes of each body's arrays with a score for each query and key of a block, written and read by its kernels."""
    for body in parse_module(hlo_of(name)).values():
        if body.name.startswith("region") and any(one.opcode == "custom-call" for one in body.instructions.values()):
            kernels = [one for one in body.instructions.values() if one.opcode in ("custom-call", "fusion")]
            made = {name: one.shape for name, one in body.instructions.items()}
            shapes = [shape for one in kernels for shape in _arrays(one.shape)]
            shapes += [
                shape for one in kernels for name in dict.fromkeys(one.operands) for shape in _arrays(made[name])
            ]
            yield sum(
                shape.bytes
                for shape in shapes
                if math.prod(shape.dims) == scores and len(shape.dims) > 1 and 128 not in shape.dims
            )


def _arrays(shape):
    return shape.members or [shape]


@pytest.mark.parametrize(
    ("name", "batch", "heads", "key_heads"), [("attention_shared_h100", 8, 16, 8), ("attention_h100", 4, 4, 4)]
)
def test_scores_pass_through_memory_between_kernels(name, batch, heads, key_heads):
    scores = batch * heads * 512 * 512
    forward, backward = equations(jnp.bfloat16, batch=batch, length=512, heads=heads, key_heads=key_heads, depth=128)
    sums = 4 * 4 * 128 / 512
    seen = [
        between_kernels(forward) / scores - sums,
        between_kernels(backward) / scores - sums * (1 + 2 * key_heads / heads),
    ]
    assert seen == [count / scores for count in counted(name, scores)]


@pytest.mark.parametrize(("dtype", "each"), [("bfloat16", [20, 28]), ("float32", [24, 40])])
def test_sums_over_blocks_pass_through_memory_too(dtype, each):
    length = 1024
    _, block = cut_run(length)
    written = 4 * 4 * DEPTH / block
    found = [between_kernels(eqn) / (BATCH * HEADS * length**2) for eqn in equations(dtype, length=length)]
    assert found == pytest.approx([each[0] + written, each[1] + 3 * written])


@pytest.mark.parametrize(("length", "part"), [(512, 1), (1024, 3 / 4), (2048, 10 / 16), (768, 3 / 4)])
def test_blocks_on_the_diagonal_are_whole(length, part):
    whole, halves = equations("bfloat16", length=length), equations("bfloat16", of=causal, length=length)
    for every, some in zip(whole, halves, strict=True):
        assert between_kernels(some) == pytest.approx(part * between_kernels(every))
        assert flops_of(some, rule_for(some)) == pytest.approx(part * flops_of(every, rule_for(every)))


def test_attention_pays_for_that_where_kernels_are_fused_and_memory_is_the_limit():
    length, device = 1024, preset("dgx-h100").device
    step = autopar.parallelize(lambda state, batch: (state, attended(*batch)), devices=1, cluster="dgx-h100")
    plan = step.plan({}, operands("bfloat16", length=length))
    passed_s = 20 * BATCH * HEADS * length**2 / device.sustained_bytes_per_s
    assert passed_s < plan.compute_s < 2 * passed_s

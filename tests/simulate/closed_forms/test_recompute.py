"""Recomputation that keeps the results of linear products: what it keeps against what JAX saves, and laws."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import assume, given, settings
from jax.ad_checkpoint import print_saved_residuals

from autopar.models import gpt, llama, sizes
from autopar.simulate.closed_forms.layer_split import LayerSplit
from autopar.simulate.closed_forms.operations import Exchange, FusedGroup, MatrixProduct
from autopar.simulate.closed_forms.training_job import problems
from autopar.simulate.closed_forms.transformer import block_work
from autopar.simulate.closed_forms.transformer_shape import TransformerShape
from tests.simulate.closed_forms.test_laws import ROUNDING, machines, rows, step

GPT = TransformerShape(family="gpt", layers=2, hidden=32, heads=4, kv_heads=4, ffn_hidden=128, vocab=256, seq_len=16)
LLAMA = dataclasses.replace(GPT, family="llama", kv_heads=2, ffn_hidden=96)
DOTS = LayerSplit(samples=2, recompute="dots")


def bytes_saved_by_jax(shape: TransformerShape, printed: pytest.CaptureFixture[str]) -> int:
    """Of a block of `models/` under the policy: its input and the results that it saves, not its parameters."""
    common = {"layers": 2, "hidden": shape.hidden, "heads": shape.heads, "vocab": shape.vocab, "dropout": 0.1}
    common |= {"batch": 2, "seq": shape.seq_len}
    if shape.family == "llama":
        config = sizes.LlamaConfig(**common, kv_heads=shape.kv_heads, ffn=shape.ffn_hidden)
        block = llama.LlamaBlock(config)
        more = (llama.rotary_angles(config.seq, config.head_depth, config.theta).astype(jnp.bfloat16),)
    else:
        block, more = gpt.GPTBlock(sizes.GPTConfig(**common, ffn_factor=shape.ffn_hidden // shape.hidden)), ()
    x, key = jnp.zeros((2, shape.seq_len, shape.hidden), jnp.bfloat16), jax.random.PRNGKey(0)
    made = jax.eval_shape(lambda key: block.init(key, x, None, *more), key)["params"]
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, x.dtype), made)
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    apply = jax.checkpoint(lambda params, x, key: block.apply({"params": params}, x, key, *more), policy=policy)
    print_saved_residuals(apply, params, x, key)
    kept = re.findall(r"^bf16\[([\d,]+)\] (?:from the argument x|output of)", printed.readouterr().out, re.MULTILINE)
    return sum(2 * math.prod(map(int, dims.split(","))) for dims in kept)


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_what_is_kept_is_what_jax_saves_under_the_policy(shape, capsys):
    assert block_work(shape, DOTS).kept_bytes == bytes_saved_by_jax(shape, capsys)


def test_all_but_linear_products_and_what_joins_them_runs_again():
    split = dataclasses.replace(DOTS, tensor_ranks=2, sequence_parallel=True)
    work = block_work(GPT, split)
    linear = 4
    products = [op for op in work.recomputed if isinstance(op, MatrixProduct)]
    assert len(products) == len([op for op in work.forward if isinstance(op, MatrixProduct)]) - linear
    assert all(op.batch == 2 * 2 for op in products)  # scores and values, of two samples and two heads
    assert not any(isinstance(op, Exchange) for op in work.recomputed)
    last = [op for op in work.forward if isinstance(op, FusedGroup)][
        -1
    ]  # the dropout at the end: no backward pass reads it
    again, before = (
        sum(op.moved_bytes for op in found if isinstance(op, FusedGroup)) for found in (work.recomputed, work.forward)
    )
    assert before - again == last.moved_bytes


def test_other_ranks_keys_are_brought_again_and_operands_cast_again():
    split = dataclasses.replace(DOTS, context_ranks=2, fused_attention=True, narrow_products=True)
    work, wide = (block_work(LLAMA, dataclasses.replace(split, narrow_products=narrow)) for narrow in (True, False))
    assert [op.group for op in work.recomputed if isinstance(op, Exchange)] == ["context"]
    assert (
        len(work.recomputed) - len(wide.recomputed) == 4 * 2 * 2
    )  # products, their operands, and two kernels for each


@given(machines, rows())
@settings(max_examples=40, deadline=None)
def test_it_keeps_less_than_nothing_recomputed_and_more_than_all_and_takes_as_long_as_between_them(cluster, job):
    job = dataclasses.replace(job, recompute="dots")
    assume(not any(problems(job)))
    found = {how: step(cluster, job, recompute=how) for how in ("none", "dots", "full")}
    kept = [found[how].memory.activation_bytes for how in ("none", "dots", "full")]
    assert kept == sorted(kept, reverse=True)
    times = [found[how].step_s for how in ("none", "dots", "full")]
    assert times[0] <= times[1] * ROUNDING
    assert times[1] <= times[2] * ROUNDING

"""Attention whose sequence is split over all devices goes around a ring, equals `jax.jit`, and its plan can be kept in a file.

The search takes the ring by itself where a sequence is long and there are fewer heads of keys than devices.
"""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.layouts.mesh import LogicalMesh
from autopar.models import build
from autopar.program.from_jaxpr import program_of
from autopar.rules.table import entry_for, rule_for
from tests.oracles import assert_predicted_bytes_are_real, assert_same_as_jit


def within(plan):
    """What is exchanged within operations: (kind, operand, axes)."""
    return {(item.kind, item.operand, item.axes) for item in plan.collectives if item.overlap == "within"}


LLAMA = {
    "layers": 1,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 24,
    "seq": 64,
    "fused_attention": True,
    "sgd": True,
}
RINGS = {
    "all devices": ((8,), {"batch": 1}, P(None, "x")),
    "recomputed in a scan": ((2, 4), {"batch": 2, "layers": 2, "scan_layers": True, "remat": True}, P("x", "y")),
    "along two axes": ((2, 4), {"batch": 1}, P(None, ("x", "y"))),
    "keys and values alone": ((8,), {"batch": 1, "balanced_attention": False}, P(None, "x")),
}


def ringed(model, mesh_shape, split, **wishes):
    """The model's step with its batch split so, and no way to bring keys together."""
    return autopar.parallelize(
        model.train_step,
        devices=math.prod(mesh_shape),
        mesh_shape=mesh_shape,
        constraints={"batch/*": split} if math.prod(mesh_shape) > 1 else {},
        collectives=("collective-permute", "all-reduce"),
        num_microbatches=1,
        recompute="none",
        **wishes,
    )


def shapes_of(model):
    return jax.eval_shape(model.create_state, jax.random.key(0)), model.batch_shape()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "all devices" else name for name in RINGS]
)
@pytest.mark.filterwarnings("ignore:.*no mesh axis of size")
def test_a_llama_whose_sequence_is_split_equals_jit_and_hands_keys_and_values_around(name):
    mesh_shape, sizes, split = RINGS[name]
    model = build("llama", **LLAMA | sizes)
    state, batch = jax.jit(model.create_state)(jax.random.key(0)), jax.device_put(next(model.data(0)))
    plan = ringed(model, mesh_shape, split).plan(*shapes_of(model))
    kept = autopar.plan_from_json(plan.to_json())
    assert kept == plan
    sequence = split[1] if isinstance(split[1], tuple) else (split[1],)
    found, of_keys = within(plan), f"float32[{model.config.batch},64,2,4]"
    assert ("collective-permute", of_keys, sequence) in found
    assert ({operand for _, operand, _ in found} == {of_keys}) == (not model.config.balanced_attention)
    assert {(kind, axes) for kind, _, axes in found} == {("collective-permute", sequence)}

    step = ringed(model, mesh_shape, split, plan=kept)
    if not model.config.remat:  # else the first pass has results that nobody reads, which XLA does not send
        assert_predicted_bytes_are_real(step.compile(state, batch))
    assert_same_as_jit(model.train_step, step, state, batch, steps=2, rtol_of_scale=1e-4)


LONG = {"batch": 1, "layers": 1, "hidden": 4096, "heads": 32, "ffn": 14336, "seq": 131_072, "vocab": 32_000}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kv_heads", "is_balanced", "is_ring"), [(2, True, True), (2, False, True), (8, True, False)])
@pytest.mark.filterwarnings("ignore:.*no mesh axis of size")
def test_for_128k_positions_on_eight_a100s_the_search_takes_the_ring_where_heads_of_keys_are_too_few(
    kv_heads, is_balanced, is_ring
):
    model = build("llama", **LONG, kv_heads=kv_heads, fused_attention=True, balanced_attention=is_balanced)
    wishes = {"cluster": "dgx-a100-80gb", "devices": 8, "mesh_shape": (8,), "num_microbatches": 1, "recompute": "none"}
    plan = autopar.parallelize(model.train_step, **wishes).plan(*shapes_of(model))
    assert bool(within(plan)) == is_ring
    assert is_balanced or {operand for _, operand, _ in within(plan)} == {"float32[1,131072,2,128]"}
    assert plan.peak_bytes < 40e9


@pytest.mark.sampled(4)
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.filterwarnings("ignore:.*no mesh axis of size")
def test_the_predicted_peak_counts_what_attention_needs_while_it_runs(devices):
    model = build("llama", **LLAMA | {"batch": 2, "seq": 4096})
    compiled = ringed(model, (devices,), P(None, "x")).compile(*shapes_of(model))
    account = compiled.memory_analysis()
    kept = account.argument_size_in_bytes + account.output_size_in_bytes - account.alias_size_in_bytes
    assert compiled.plan.peak_tensors[0].name.startswith("within attention_backward")
    assert 0.9 <= compiled.plan.peak_bytes / (kept + account.temp_size_in_bytes) <= 1.1


@pytest.mark.parametrize(("is_causal", "is_balanced"), [(False, True), (True, True), (True, False)])
def test_what_travels_around_the_ring_are_keys_and_values_and_queries_only_to_balance_causal_work(
    is_causal, is_balanced
):
    arrays = [jax.ShapeDtypeStruct((1, 64, heads, 4), jnp.float32) for heads in (4, 2, 2)]

    def loss_of(*arrays):
        return autopar.dot_product_attention(*arrays, is_causal=is_causal, is_balanced=is_balanced).sum()

    program, _ = program_of(jax.make_jaxpr(jax.grad(loss_of, argnums=(0, 1, 2)))(*arrays))
    forward, backward = (eqn for eqn in program.equations if "attention" in eqn.primitive.name)
    for eqn, gradients in ((forward, set()), (backward, {len(backward.invars) + 1, len(backward.invars) + 2})):
        rule = rule_for(eqn)
        axes = {factor: (0,) for group in rule.together for factor in group}
        division = entry_for(eqn).divided(eqn, rule, axes, LogicalMesh.of((8,)))
        sent = {one.value for one in division.exchanges}
        around = {1, 2} | gradients
        assert sent >= around
        assert (sent == around) == (not is_causal or not is_balanced)
        pairs = [sum(i + 1 for i in range(8 * d, 8 * d + 8)) for d in range(8)]
        longest = max(pairs) / (sum(pairs) / 8) if is_causal and not is_balanced else 1.0
        assert division.slowest == pytest.approx(longest, rel=0.02)

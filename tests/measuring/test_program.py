"""The module of each operation of a compiled program is the one that the user named."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.hlo.text import parse_module
from autopar.measuring.program import operations_of, scope_of
from tests.measuring.gpu_profiles import HEAD, entry, fusion


@pytest.mark.parametrize(
    ("op_name", "scope"),
    [
        ("jit(step)/shard_map/block_0/up/dot_general", "block_0/up"),
        ("jit(step)/transpose(jvp(block_0/up))/dot_general", "block_0/up"),
        ("jit(step)/jvp(GPT)/GPT.hidden/block_0/bsd,df->bsf/dot_general", "GPT/GPT/block_0"),
        ("jit(step)/while/body/closed_call/checkpoint/rematted_computation/block_0/tanh", "block_0"),
        ("jit(step)/jit(_where)/select_n", ""),
        ("transpose(jvp())/mul;transpose(jvp(block_1))/broadcast_in_dim", "block_1"),
        ("jit(update_0)/shard_map/(transpose(jvp(block_0))/psum:psum:psum)", "block_0"),
        ("arrays[0]", ""),
        ("", ""),
    ],
)
def test_a_scope_is_what_the_user_named(op_name, scope):
    assert scope_of(op_name) == scope


def test_a_fusion_without_a_name_is_of_the_module_of_what_it_fuses():
    inner = HEAD.replace("exponential(%r)", 'exponential(%r), metadata={op_name="jit(f)/jvp(block_2)/exp"}')
    text = inner + entry(fusion("exp.7", "x", "fused_exp"), fusion("add.1", "exp.7", "fused_add"))
    assert parse_module(text)
    found = operations_of(text, (1,), ("x",))
    assert (found["exp.7"].scope, found["add.1"].scope) == ("block_2", "")


@pytest.mark.parametrize("num_stages", [1, 2])
def test_compiled_programs_carry_the_scopes_of_the_step(num_stages):
    def train_step(state, batch):
        def loss_of(state):
            x = batch
            for n, kernel in enumerate(state):
                with jax.named_scope(f"block_{n}"):
                    x = jnp.tanh(x @ kernel)
            return (x**2).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda x, gradient: x - 0.1 * gradient, state, gradients), loss

    way = {"num_stages": 2, "num_microbatches": 2} if num_stages == 2 else {"mesh_shape": (2,)}
    step = autopar.parallelize(train_step, devices=jax.devices()[:2], plan_cache=False, **way)
    state = [jnp.eye(8) for _ in range(4)]
    with autopar.record(step) as run:
        for _ in range(2):
            state, _ = step(state, jnp.ones((8, 8)))
    products = {one.scope for one in run.data.program if one.flops}
    assert products == {f"block_{n}" for n in range(4)}

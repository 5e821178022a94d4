"""Acceptance case 17: a mixture-of-experts layer with GShard's einsum dispatch."""

import jax
import pytest

from tests.acceptance.planning import (
    FIRST_AXIS,
    all_reduce_cost,
    assert_costs_at_most,
    assert_whole,
    compiled,
    gather_cost,
    layout,
)
from tests.acceptance.transformers import moe
from tests.oracles import assert_same_as_jit, census


@pytest.mark.parametrize("mesh_shape", FIRST_AXIS)
def test_case_17_experts_are_split_and_tokens_travel_to_them(mesh_shape):
    """Twice forward and twice backward; the capacity is two places per token, so 2 B S H numbers on all devices."""
    batch, seq, hidden = 64, 16, 64
    problem = moe(batch, seq, hidden, heads=16, group=32, experts=16)
    program = compiled(problem, mesh_shape)
    found = census(program)
    dispatched = 2 * batch * seq * hidden * 4 // 4
    assert found.kinds() == {"all-reduce", "all-to-all"}, found
    assert found.bytes_of("all-to-all") == [dispatched] * 4, found

    experts = problem.state.params["moe"]
    dense = [leaf.nbytes for leaf in jax.tree.leaves(problem.state.params) if leaf.ndim < 3]
    assert found.bytes_of("all-reduce") == sorted(dense), found
    axis = ("x",) if mesh_shape[0] > 1 else ("y",)
    for name in ("wi", "wo"):
        assert experts[name].ndim == 3
        assert layout(program, f"state/params/moe/{name}") == (axis, (), ())
    assert_whole(program, "state/params/attention")
    assert_whole(program, "state/params/moe/wg")
    bound = 4 * gather_cost(dispatched, 4) + sum(all_reduce_cost(size, 4) for size in dense)
    assert_costs_at_most(program, bound)
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)

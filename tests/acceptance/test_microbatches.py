"""Acceptance case 19: gradients are reduced once per step, after the loop over microbatches."""

from tests.acceptance.models import mlp
from tests.acceptance.planning import assert_whole, compiled
from tests.oracles import assert_same_as_jit, census


def test_case_19_one_gradient_all_reduce_per_step_after_the_loop():
    problem = mlp(256, 16, layers=2)
    program = compiled(problem, (1, 4), num_microbatches=2)
    found = census(program)
    assert program.plan.num_microbatches == 2
    assert found.kinds() == {"all-reduce"}, found
    assert found.bytes_of("all-reduce") == sorted(problem.leaf_bytes()), found
    assert all(operand.count == 1 for operand in found.operands), found
    assert_whole(program, "state/params")
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)

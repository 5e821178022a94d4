"""Acceptance cases 19 and 20: gradients are reduced once per step, after the loop over microbatches, on every stage."""

from collections import Counter

import jax
import pytest

import autopar
from autopar.cost_model.hardware import Cluster
from tests.acceptance.models import mlp
from tests.acceptance.planning import assert_whole, compiled
from tests.oracles import assert_same_as_jit, census, census_of_text
from tests.schedules.chains import TRAINING_IN_ONE


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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", TRAINING_IN_ONE)
def test_case_20_two_data_parallel_stages_reduce_each_gradient_once_per_step_and_nothing_in_forward(schedule):
    problem = mlp(256, 16, layers=4)
    machine = Cluster.uniform(alpha=(1.0, 1.0), beta=(1.0, 1.0))
    step = autopar.parallelize(
        problem.step, num_stages=2, mesh_shape=(1, 2), num_microbatches=4, schedule=schedule, cluster=machine
    )
    pipeline = step.compile(problem.state, problem.batch)
    found = {name: census_of_text(task.as_text(), (1, 2)) for name, task in pipeline.tasks.items()}
    assert Counter(name.kind for name, of_task in found.items() if of_task.operands) == {"update": 2}, found
    sizes = {jax.tree_util.keystr(path): leaf.nbytes for path, leaf in jax.tree.leaves_with_path(problem.state.params)}
    for stage in pipeline.plan.stages:
        here = [path for path in stage.leaves if path.startswith("state/params/")]
        named = ["".join(f"['{part}']" for part in path.split("/")[2:]) for path in here]
        operands = [
            o
            for name, of_task in found.items()
            if (name.kind, name.stage) == ("update", stage.stage)
            for o in of_task.operands
        ]
        assert {o.kind for o in operands} == {"all-reduce"}, operands
        assert all(o.count == 1 for o in operands), operands
        assert sum(o.bytes for o in operands) == sum(sizes[name] for name in named), (operands, here)
    assert_same_as_jit(problem.step, step, problem.state, problem.batch, adam_lr=1e-2, steps=1)

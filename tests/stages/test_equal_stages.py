"""Equal stages are found before they are traced: their programs are equal indeed, and so is what they take."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from autopar.cost_model.hardware import preset
from autopar.inter_op.plan_stages import StageRequest, plan_stages
from autopar.inter_op.stage_seconds import price_stage
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.request import PlanRequest
from autopar.layouts.constraints import Constraints
from autopar.layouts.mesh import LogicalMesh
from autopar.models.registry import build
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.trace import trace
from autopar.schedules.in_flight import InFlight
from autopar.schedules.schedules import make_schedule
from autopar.stages.chain import forward_chain
from autopar.stages.cut import cut_stages
from autopar.stages.even_cuts import choose_even_cuts
from autopar.stages.layers import cluster
from autopar.stages.tasks.equal_stages import key_of_stage, match_senders
from autopar.stages.tasks.mesh_memory import peak_bytes
from autopar.stages.tasks.stage_program import program_of_stage
from autopar.stages.time_loops import make_time_loop
from tests import pipeline_steps

MICROBATCHES = 4
STAGES = 5


def traced(step, state, batch):
    signature = CallSignature(step, (1,), (), "auto")
    return trace(signature, bind_arguments(signature, (state, batch), {}))


def deep_gpt():
    """Blocks with dropout, whose keys are made from numbers that differ."""
    model = build("gpt", layers=STAGES - 1, hidden=32, heads=4, seq=16, batch=8, vocab=256, dropout=0.1)
    return model.train_step, jax.eval_shape(model.create_state, jax.random.key(0)), next(model.data(0))


def deep_layers():
    """Twice as many layers as stages, alike but for a constant that the loss adds."""
    step = pipeline_steps.plain()[0]
    return step, pipeline_steps.layers(2 * STAGES), pipeline_steps.rows()


def programs_of(step, stages=STAGES, choose_cuts=choose_even_cuts):
    loop = make_time_loop(step, MICROBATCHES)
    cut = cut_stages(loop, choose_cuts(forward_chain(loop), stages))
    return [program_of_stage(cut, stage) for stage in range(stages)]


def find_equal(programs):
    """For each stage the number of the first one that it equals."""
    first = {}
    return tuple(first.setdefault(key_of_stage(program.ports), number) for number, program in enumerate(programs))


def content_of(program):
    """All that planning looks at."""
    step = program.step
    leaves = [dataclasses.replace(leaf, path="") for leaf in (*step.inputs, *step.outputs)]
    return step.outline, step.state_of_output, leaves


def between_blocks(chain, stages):
    """As many layers as stages."""
    return cluster(chain, max_layers=stages)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("example", "choose_cuts"), [(deep_gpt, between_blocks), (deep_layers, choose_even_cuts)])
def test_the_stages_in_the_middle_are_equal(example, choose_cuts):
    programs = programs_of(traced(*example()), choose_cuts=choose_cuts)
    kinds = find_equal(programs)
    assert kinds == (0, 1, 1, 1, 4)
    for number, kind in enumerate(kinds):
        assert content_of(programs[number]) == content_of(programs[kind]), f"stage {number}"


def test_a_stage_with_another_function_or_other_uses_of_its_values_is_another_one():
    def loss(weights, x, middle):
        for number, w in enumerate(weights):
            x = middle(x, w) if number == 2 else jnp.sinh(x @ w)
        return (x**2).mean()

    def kinds(middle):
        def step(weights, batch):
            gradients = jax.grad(loss)(weights, batch["x"], middle)
            return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]

        programs = programs_of(traced(step, [jnp.ones((4, 4))] * STAGES, {"x": jnp.ones((8, 4))}))
        return find_equal(programs)

    assert kinds(lambda x, w: jnp.sinh(x @ w)) == (0, 1, 1, 1, 4)
    assert kinds(lambda x, w: jnp.cosh(x @ w)) == (0, 1, 2, 1, 4)
    assert kinds(lambda x, w: jnp.sinh(x @ w.T)) == (0, 1, 2, 1, 4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", ["dropout", "tied_weights", "metrics", "clipped_adamw", "long_skips", "recomputed", "transformer"]
)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_that_are_taken_for_equal_are(name, stages):
    programs = programs_of(traced(*getattr(pipeline_steps, name)()), stages)
    kinds = find_equal(programs)
    for number, kind in enumerate(kinds):
        assert content_of(programs[number]) == content_of(programs[kind]), f"stage {number}"


def test_what_equal_stages_take_is_what_their_own_programs_take():
    """Memory with as many microbatches as are in flight at their places, seconds, and names of their own leaves."""
    schedule = make_schedule("1f1b", num_meshes=STAGES, num_microbatches=MICROBATCHES)
    mesh, in_flight = LogicalMesh.of((2,)), InFlight(schedule)
    request = PlanRequest(
        meshes=(mesh,),
        cluster=preset("cpu"),
        memory_limit_bytes=None,
        constraints=Constraints(),
        options=PlannerOptions(),
    )
    wanted = StageRequest(
        meshes=((mesh,),) * STAGES, num_stages=STAGES, num_microbatches=MICROBATCHES, in_flight=in_flight
    )
    staged = plan_stages(traced(*deep_layers()), wanted, request)
    for stage in staged.stages:
        own = price_stage(stage.program, stage.plan, stage.assignment, cluster=request.cluster)
        for name in ("forward_s", "backward_s", "once_s"):
            assert getattr(stage, name) == getattr(own, name), f"{name} of stage {stage.program.stage}"
        assert stage.peak_bytes == peak_bytes([own.memory], in_flight)
        assert sorted(map(str, stage.memory.passing)) == sorted(map(str, own.memory.passing))
        assert [value.path for value in stage.plan.inputs] == [leaf.path for leaf in stage.program.step.inputs]
        assert [value.path for value in stage.plan.outputs] == [leaf.path for leaf in stage.program.step.outputs]


def test_senders_are_matched_by_what_they_send():
    programs = programs_of(traced(*deep_layers()))
    found = match_senders(programs[1].ports, programs[3].ports)
    assert found == {0: 2, 1: 3, 2: 4}

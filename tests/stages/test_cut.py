"""A step cut into stages: what crosses a cut, where leaves live, and which cuts are refused."""

import dataclasses

import jax
import pytest

from autopar.compat import Literal
from autopar.cost_model.hardware import preset
from autopar.errors import PlanError
from autopar.execution.devices import device_mesh
from autopar.execution.stage_tasks import make_stage_tasks
from autopar.inter_op.plan_stages import StageRequest, plan_stages
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.request import PlanRequest
from autopar.layouts.constraints import Constraints
from autopar.layouts.mesh import LogicalMesh
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.task_name import TaskName
from autopar.program.trace import trace
from autopar.stages.chain import forward_chain
from autopar.stages.cut import check, cut_stages
from autopar.stages.even_cuts import choose_even_cuts
from autopar.stages.tasks.refs import SendRef
from autopar.stages.time_loops import make_time_loop
from tests import pipeline_steps, zoo

MICROBATCHES = 4
OPERATIONS_PER_LAYER = 5
"""Product, bias, tanh, and what its transposition keeps."""


def traced(example):
    """The traced step of (step, state, batch)."""
    step, state, batch = example
    signature = CallSignature(step, (1,), (), "auto")
    return trace(signature, bind_arguments(signature, (state, batch), {}))


def cut_evenly(example, stages=2):
    """The step cut where its work is shared equally."""
    loop = make_time_loop(traced(example), MICROBATCHES)
    return cut_stages(loop, choose_even_cuts(forward_chain(loop), stages))


def crossing(cut, kind):
    """What segments of a kind read of other stages: (from, to, shape in the full batch), each value once per stage."""
    found = {
        (maker.stage, name.stage, v)
        for name, segment in cut.segments.items()
        if name.kind == kind
        for v in segment.reads
        if (maker := cut.made_by.get(v)) is not None and maker.stage != name.stage
    }
    return sorted((source, target, tuple(v.aval.shape)) for source, target, v in found)


def homes(cut):
    """The stage of every leaf by its path."""
    leaves = zip(cut.loop.traced.inputs, cut.loop.program.invars, strict=True)
    return {leaf.path: cut.homes[v] for leaf, v in leaves if leaf.role == "state"}


def lent(cut):
    """Leaves of the state that segments read on a stage where they do not live: (stage, path)."""
    paths = dict(zip(cut.loop.program.invars, (leaf.path for leaf in cut.loop.traced.inputs), strict=True))
    state = {v for v, leaf in zip(cut.loop.program.invars, cut.loop.traced.inputs, strict=True) if leaf.role == "state"}
    found = {
        (name.stage, paths[v])
        for name, segment in cut.segments.items()
        for v in cut.loop.leaves_of(segment.reads) & state
        if cut.homes[v] != name.stage
    }
    return sorted(found)


@pytest.fixture(scope="module")
def gpt():
    """Two blocks with a tied embedding, in two stages."""
    return cut_evenly(zoo.build_gpt())


def test_one_activation_crosses_forward_and_one_cotangent_back(gpt):
    activation = (zoo.BATCH, zoo.SEQ, zoo.HIDDEN)
    assert crossing(gpt, "forward") == [(0, 1, activation)]
    assert crossing(gpt, "backward") == [(1, 0, activation)]


def test_the_gradient_of_a_tied_embedding_crosses_once_per_step_and_only_the_embedding_is_lent(gpt):
    assert crossing(gpt, "update") == [(1, 0, (zoo.VOCAB, zoo.HIDDEN))]
    assert lent(gpt) == [(1, "state/params/tokens")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_join_their_updates_in_scalars(stages):
    for example in (pipeline_steps.clipped_adamw(), pipeline_steps.loss_scaling()):
        cut = cut_evenly(example, stages)
        assert {shape for _, _, shape in crossing(cut, "update")} == {()}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_leaves_live_with_their_layer_and_so_do_their_moments(stages):
    where = homes(cut_evenly(pipeline_steps.clipped_adamw(), stages))
    for layer in range(4):
        of_layer = {stage for path, stage in where.items() if f"/{layer}/w" in path}
        assert len(of_layer) == 1, where
    assert [where[f"state/0/{layer}/w"] for layer in range(4)] == sorted(where[f"state/0/{n}/w"] for n in range(4))
    assert len({where[f"state/0/{layer}/w"] for layer in range(4)}) == stages


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["plain", "tied_weights", "dropout", "metrics", "long_skips", "recomputed"])
def test_wherever_a_step_is_cut_everything_is_made_once_and_in_order(name):
    loop = make_time_loop(traced(getattr(pipeline_steps, name)()), MICROBATCHES)
    body, epilogue = loop.plan.of_phase("body"), loop.plan.of_phase("epilogue")
    for place in range(1, len(forward_chain(loop))):
        cut = cut_stages(loop, [place])
        check(cut)
        results = [r.var for segment in cut.segments.values() for r in segment.results]
        assert sorted(map(id, results)) == sorted(id(r.var) for r in loop.results), f"results, cut before {place}"
        outputs = sorted(number for segment in cut.segments.values() for number in segment.outputs)
        assert outputs == list(range(len(loop.program.outvars))), f"outputs, cut before {place}"
        has_place = {v for eqn in (*body, *epilogue) for v in eqn.outvars if v in cut.made_by}
        for segment in cut.segments.values():
            made = {v for eqn in segment.equations for v in eqn.outvars}
            for v in made & has_place:
                assert cut.made_by[v] == segment.name, f"{v} is made by {segment.name} too, cut before {place}"
            needed = {v for eqn in segment.equations for v in eqn.invars if not isinstance(v, Literal)}
            assert needed <= made | set(segment.reads), f"{segment.name} lacks operands, cut before {place}"


@pytest.mark.parametrize("name", ["plain", "long_skips"])
def test_wherever_a_step_is_cut_weights_and_their_gradients_stay(name):
    """No weight and no gradient of a weight crosses a cut behind the first two layers."""
    loop = make_time_loop(traced(getattr(pipeline_steps, name)()), MICROBATCHES)
    for place in range(2 * OPERATIONS_PER_LAYER, len(forward_chain(loop))):
        cut = cut_stages(loop, [place])
        assert not lent(cut), f"cut before {place}"
        assert {shape for _, _, shape in crossing(cut, "update")} <= {()}, f"cut before {place}"


def test_a_value_that_flows_against_the_order_of_stages_is_refused_with_its_operation():
    cut = cut_evenly(pipeline_steps.plain())
    value = next(v for v in cut.segments[TaskName("forward", 1)].reads if v in cut.made_by)
    wrong = dataclasses.replace(cut, made_by={**cut.made_by, value: TaskName("backward", 0)})
    with pytest.raises(PlanError, match=r"2 stages here: forward 1 needs a value of backward 0, .*pipeline_steps\.py"):
        check(wrong)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("split", [False, True])
def test_a_stage_that_only_hands_on_what_it_receives_has_a_task_for_all_that_it_sends(split):
    """The stage in the middle is the copy of a value for its users behind."""
    step = traced(pipeline_steps.long_skips())
    chain = forward_chain(make_time_loop(step, MICROBATCHES))
    one = LogicalMesh.of((1,))
    request = PlanRequest(
        meshes=(one,),
        cluster=preset("cpu"),
        memory_limit_bytes=None,
        constraints=Constraints(),
        options=PlannerOptions(),
    )
    copies = [
        i for i, place in enumerate(chain) if place.equation.primitive.name == "fan_out" and 0 < i < len(chain) - 1
    ]
    for place in copies[:3]:
        wanted = StageRequest(
            meshes=((one,),) * 3, num_stages=3, num_microbatches=MICROBATCHES, cuts=(place, place + 1)
        )
        for stage in plan_stages(step, wanted, request).stages:
            mesh = device_mesh(one, jax.devices())
            tasks = make_stage_tasks(stage.program, stage.assignment, mesh, split_backward=split)
            sent = [ref.port for task in tasks for ref in task.writes if isinstance(ref, SendRef)]
            ports = [i for i, port in enumerate(stage.program.outputs) if port.source == "received"]
            assert sorted(sent) == ports, f"stage {stage.program.stage}, cut before {place}"

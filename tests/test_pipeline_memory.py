"""The predicted memory of pipelines: what tasks hand on is what the runtime's instructions keep, under every schedule."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.cost_model.hardware import preset
from autopar.errors import OutOfMemoryError
from autopar.inter_op.candidates.timetables import Timetable
from autopar.inter_op.plan_pipeline import PipelineWishes, plan_in_other_schedules, plan_pipeline
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.request import PlanRequest
from autopar.layouts.constraints import Constraints
from autopar.layouts.mesh import LogicalMesh
from autopar.models import build
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.trace import trace
from autopar.schedules.in_flight import InFlight, Kept
from autopar.schedules.schedules import make_schedule
from autopar.stages.tasks.mesh_memory import peak_bytes
from autopar.stages.tasks.stage_memory import split_in_flight
from tests import pipeline_steps
from tests.inter_op.test_search import arguments, step, two_nodes
from tests.live_bytes import LiveBytes
from tests.schedules.chains import TRAINING_IN_ONE


def gpt():
    model = build("gpt", layers=4, hidden=32, heads=2, seq=16, batch=16, vocab=256)
    return model.train_step, jax.eval_shape(lambda: model.create_state(jax.random.key(0))), model.batch_shape()


MODELS = {
    "perceptron": lambda: (step, *arguments(32, layers=8, batch=64)),
    "gpt": gpt,
    "tied": pipeline_steps.tied_weights,
    "skips": pipeline_steps.long_skips,
}


QUICK = [
    ("perceptron", 2, 1),
    ("perceptron", 4, 2),
    ("gpt", 4, 2),
    ("skips", 2, 1),
    ("tied", 2, 1),
    ("tied", 2, 2),
    ("tied", 4, 1),
]
TOO_FEW_LAYERS = [("tied", 4, 2), ("skips", 4, 2)]
"""Eight stages of four layers: some have no backward, and so do not wait for it either."""
V100S = preset("p3.16xlarge")
REQUEST = PlanRequest(
    meshes=(),
    cluster=dataclasses.replace(V100S, device=dataclasses.replace(V100S.device, fuses=False)),  # kept as on CPUs
    memory_limit_bytes=None,
    constraints=Constraints(),
    options=PlannerOptions(),
)


def traced_of(train, *args):
    signature = CallSignature(train, (1,), (), "auto")
    return trace(signature, bind_arguments(signature, args, {}))


@functools.cache
def traced_model(name):
    """Once for all the pipelines that it is planned for."""
    return traced_of(*MODELS[name]())


def planned(traced, timetables, *, meshes, **wishes):
    """What is planned in the first timetable, also in others that differ by the schedule alone: plans with their stages."""
    wished = PipelineWishes(num_stages=meshes, stage_meshes=(LogicalMesh.of((2,)),) * meshes, **wishes)
    first = plan_pipeline(traced, wished, timetables[0], REQUEST, devices=2 * meshes)
    others = plan_in_other_schedules(first, timetables[0], timetables, REQUEST)
    return [(one.plan, one.staged) for one in (first, *others.values())]


def assert_kept_as_predicted(plan, staged, *, slack):
    """Exact where other meshes are infinitely fast; no less, and little more, where all are equally fast.

    What goes between two stages of one mesh stays as it was made, which the reader's plan does not know.
    """
    live = LiveBytes(plan, staged)
    kept, meshes = InFlight(live.schedule), live.schedule.num_meshes
    for number, stage in enumerate(staged.stages):
        predicted = kept.most_bytes(number, stage.memory.handed_on(kept))
        if all(one.source == number or (one.source - number) % meshes for one in stage.memory.passing):
            assert predicted == live.handed_on_at_most(number), number
        spare = slack * max(stage.peak_bytes, stage.plan.peak_bytes)
        assert live.handed_on(number) <= predicted <= live.handed_on(number) + spare, number
    for mesh in range(meshes):
        here = [one for one in plan.stages if one.mesh == mesh]
        assert live.peak(mesh) <= sum(one.peak_bytes for one in here), mesh
        alone = [staged.stages[one.stage].memory for one in here]
        assert sum(one.peak_bytes for one in here) <= sum(peak_bytes([memory], kept) for memory in alone), mesh


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("name", "meshes", "chunks"),
    [
        pytest.param(name, meshes, chunks, marks=[] if (name, meshes, chunks) in QUICK else pytest.mark.slow)
        for name, meshes, chunks in itertools.product(MODELS, (2, 4), (1, 2))
        if (name, meshes, chunks) not in TOO_FEW_LAYERS
    ],
)
def test_a_stage_keeps_what_its_plan_says_under_every_schedule(name, meshes, chunks):
    """Small models send much of what they keep, so what is on its way weighs more there than in a GPT."""
    names = TRAINING_IN_ONE if chunks == 1 else ["interleaved"]
    plans = planned(traced_model(name), [Timetable(8, one, chunks) for one in names], meshes=meshes)
    assert [plan.schedule for plan, _ in plans] == names
    for plan, staged in plans:
        assert_kept_as_predicted(plan, staged, slack=0.06 if name == "gpt" else 0.2)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["perceptron", pytest.param("gpt", marks=pytest.mark.slow)])
def test_the_predicted_peak_is_what_the_compiled_tasks_need_on_top_of_what_is_there(name):
    """XLA's own account of every task, in the order of the instructions.

    A plan has room for all that a fast neighbour may send ahead, which in eager 1F1B is more than what comes in that order.
    """
    traced = traced_of(step, *arguments(32, layers=8, batch=4096)) if name == "perceptron" else traced_model(name)
    for plan, staged in planned(traced, [Timetable(8, one) for one in TRAINING_IN_ONE], meshes=2):
        live, most = LiveBytes(plan, staged), 1.25 if plan.schedule == "eager-1f1b" else 1.16
        for mesh, stage in enumerate(staged.stages):
            real = live.peak_with_temporaries(mesh)
            assert 0.98 * real <= stage.peak_bytes <= most * real, (plan.schedule, mesh)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("meshes", [2, 4])
def test_recomputation_in_a_split_backward_hands_on_what_it_makes_again(meshes):
    plans = planned(
        traced_model("perceptron"), [Timetable(8, "1f1b"), Timetable(8, "zb-h1")], meshes=meshes, recompute="layer"
    )
    for plan, staged in plans:
        assert plan.recompute
        assert_kept_as_predicted(plan, staged, slack=0.2)
    (whole, _), (split, _) = plans
    assert split.stages[-1].peak_bytes > whole.stages[-1].peak_bytes


def test_the_search_counts_no_less_than_a_split_backward_keeps_and_on_two_meshes_exactly_that():
    draw = np.random.default_rng(0)
    for p, m in itertools.product(range(2, 7), range(1, 13)):
        kept = InFlight(make_schedule("zb-h1", num_meshes=p, num_microbatches=m))
        early, late, cotangents = (int(size) for size in draw.integers(1, 100, 3))
        most = 0
        for mesh in range(p):
            passing = [
                Kept("forward", mesh, "input_gradient", early),
                Kept("forward", mesh, "weight_gradient", late),
                Kept("input_gradient", mesh, "weight_gradient", cotangents),
            ]
            most = max(most, kept.most_bytes(mesh, passing))
        each = split_in_flight(np.array(early), np.array(late), np.array(cotangents), is_full=m >= p)
        assert most <= kept.microbatches[0] * each
        assert most == kept.microbatches[0] * each or p > 2


def by_two(weights, x, **options):
    """A pipeline of two stages of one device each, in four microbatches."""
    options = {"devices": 2, "mesh_shape": (1,), "num_stages": 2, "num_microbatches": 4, "virtual_stages": 1, **options}
    return autopar.parallelize(step, cluster=two_nodes(1), **options).plan(weights, x)


@pytest.mark.sweep
def test_under_a_limit_that_fits_1f1b_and_not_zb_h1_the_search_chooses_the_fastest_that_fits():
    widths = (64, 64, 64, 64, 16, 16, 256, 16, 256, 16)
    weights, x = [jnp.ones(pair) for pair in itertools.pairwise(widths)], jnp.ones((4096, 64))
    free = {name: by_two(weights, x, schedule=name) for name in ("1f1b", "eager-1f1b", "zb-h1")}
    assert free["zb-h1"].step_s < free["1f1b"].step_s
    assert by_two(weights, x).schedule == min(free, key=lambda name: free[name].step_s)
    between = (free["1f1b"].peak_bytes + free["zb-h1"].peak_bytes) // 2
    assert free["1f1b"].stages[0].peak_bytes == free["zb-h1"].stages[0].peak_bytes < between
    assert free["1f1b"].stages[1].peak_bytes < between < free["zb-h1"].stages[1].peak_bytes
    plan = by_two(weights, x, memory_limit_bytes=between)
    fitting = [name for name, one in free.items() if all(stage.peak_bytes <= between for stage in one.stages)]
    assert (plan.schedule, plan.recompute) == (min(fitting, key=lambda name: free[name].step_s), False)
    assert plan.peak_bytes <= between
    for recompute, waiting in (("none", "2,228,224"), ("auto", "4,390,912")):
        with pytest.raises(
            OutOfMemoryError, match=f"and cotangents that wait for their weight gradients {waiting}. Use"
        ):
            by_two(weights, x, memory_limit_bytes=between, schedule="zb-h1", recompute=recompute)


def test_what_all_microbatches_hand_on_together_may_exceed_the_memory_of_which_each_takes_a_little():
    """The second stage reads 16 MiB of activations, 64th by 64th."""

    def train_step(weights, batch):
        def loss_of(weights):
            return jnp.mean((jnp.tanh(batch @ weights[0]) @ weights[1]) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss

    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 1024), (1024, 64))]
    batch = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    wishes = {"mesh_shape": (1,), "num_stages": 2, "num_microbatches": 64, "cluster": "dgx-a100"}
    plan = autopar.parallelize(train_step, memory_limit_bytes=4_000_000, **wishes).plan(weights, batch)
    assert {leaf.shape for leaf in plan.stages[1].plan.inputs} >= {(1024, 64)}
    assert all(stage.plan.peak_bytes <= 4_000_000 for stage in plan.stages)
    with pytest.raises(OutOfMemoryError, match="every plan needs at least"):
        autopar.parallelize(train_step, memory_limit_bytes=1_000_000, **wishes).plan(weights, batch)

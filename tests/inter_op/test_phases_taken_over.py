"""A plan whose phases were taken over from another number of microbatches is restored with those, not with its own."""

import dataclasses

import pytest

import autopar
from autopar.commands.arguments.subject import find_subject
from autopar.errors import PlanError
from autopar.inter_op.describe_pipeline import describe_pipeline
from autopar.inter_op.plan_pipeline import restore_pipeline
from autopar.inter_op.plan_stages import StageRequest, plan_stages
from autopar.layouts.mesh import LogicalMesh
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.trace import trace
from autopar.schedules.in_flight import InFlight
from autopar.schedules.schedules import make_schedule
from autopar.stages.chain import forward_chain
from autopar.stages.scan_stacks import every_layer
from autopar.stages.split_scans import split_scans
from autopar.stages.time_loops import make_divided_loop, make_loops
from tests.inter_op.test_search import request_on, two_nodes

SIZES = {"layers": 2, "hidden": 32, "heads": 2, "seq": 8, "batch": 32}


def planned_in(model, usual, count):
    """Two stages in `count` microbatches, where the search began with the `usual` number; the step, and the request."""
    subject = find_subject(model, SIZES)
    signature = CallSignature(subject.step, (1,), (), "auto")
    traced = trace(signature, bind_arguments(signature, (subject.state, subject.batch), {}))
    split, request = split_scans(traced, every_layer(traced)), request_on(two_nodes())
    loop = make_loops(split, usual)(count)
    schedule = make_schedule("1f1b", num_meshes=2, num_microbatches=count)
    wanted = StageRequest(
        meshes=((LogicalMesh.of((2,)),),) * 2,
        num_stages=2,
        num_microbatches=count,
        in_flight=InFlight(schedule),
        cuts=(len(forward_chain(loop)) // 2,),
        loop=loop,
        split=split,
    )
    staged = plan_stages(traced, wanted, request)
    return traced, request, describe_pipeline(traced, staged, schedule, request)


@pytest.mark.parametrize(("model", "usual", "count"), [("llama", 2, 4), ("bert", 4, 16), ("bert", 8, 8)])
def test_what_is_restored_is_what_was_planned(model, usual, count):
    """It was refused as another step: a number's own phases need not be those of the number that the search began with."""
    traced, request, planned = planned_in(model, usual, count)
    assert planned.plan.phases_from == (None if usual == count else usual)
    kept = autopar.plan_from_json(planned.plan.to_json())
    assert kept.phases_from == planned.plan.phases_from
    restored = restore_pipeline(traced, kept, request)
    programs = [[stage.program.step.fingerprint.digest for stage in one.stages] for one in (planned, restored)]
    assert programs[0] == programs[1]
    if usual != count:
        with pytest.raises(PlanError, match="another step"):
            restore_pipeline(traced, dataclasses.replace(kept, phases_from=None), request)


def test_a_loop_with_phases_of_its_own_says_so():
    subject = find_subject("bert", SIZES)
    signature = CallSignature(subject.step, (1,), (), "auto")
    traced = trace(signature, bind_arguments(signature, (subject.state, subject.batch), {}))
    split = split_scans(traced, ())
    loops = make_loops(split, 4)
    assert [loops(count).plan.taken_from for count in (4, 8, 2)] == [None, 4, 4]
    assert make_divided_loop(split, 8).plan.taken_from is None


def test_a_plan_of_an_open_search_is_loaded_from_its_file():
    """The search begins with 8 microbatches and ends with 2."""
    subject = find_subject("llama", {"layers": 4, "hidden": 64, "heads": 4, "seq": 16, "batch": 64})
    given = {"devices": 4, "cluster": two_nodes()}
    plan = autopar.parallelize(subject.step, **given).plan(subject.state, subject.batch)
    assert plan.phases_from not in (None, plan.num_microbatches), "otherwise this shows nothing"
    kept = autopar.plan_from_json(plan.to_json())
    assert autopar.parallelize(subject.step, plan=kept, **given).plan(subject.state, subject.batch) == kept

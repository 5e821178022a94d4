"""Text that is no plan is refused with the place in it: what does not follow the schema, and what does not agree."""

import dataclasses
import functools
import json

import pytest

import autopar
from autopar import PipelinePlan, Plan, PlanError
from autopar.pipeline_plan import StagePlan, TransferPlan
from autopar.plan import Alternative
from autopar.schedules.schedules import SCHEDULES
from tests.plan_examples import BATCH, collective, leaf, plan_of
from tests.test_plan import CONSTRAINTS, MESH, make_batch, make_state, train_step

STAGE = StagePlan(
    stage=0,
    mesh=0,
    first_device=0,
    leaves=("state/params/up",),
    forward_s=1e-3,
    backward_s=2e-3,
    once_s=0.0,
    microbatches_in_flight=2,
    peak_bytes=2**20,
    plan=plan_of(leaf("state/params/up", (8, 8)), BATCH, collectives=(collective("all-reduce", "x"),)),
)
PIPELINE = PipelinePlan(
    fingerprint="f",
    trail="",
    cluster="cpu",
    num_microbatches=4,
    schedule="1f1b",
    virtual_stages=1,
    cuts=(7,),
    stages=(STAGE, dataclasses.replace(STAGE, stage=1, mesh=1, first_device=8, leaves=("state/params/down",))),
    transfers=(TransferPlan(source=0, target=1, what="forward", bytes=1024, count=4, predicted_s=1e-3),),
    step_s=0.02,
    bubble=0.25,
    memory_limit_bytes=None,
    planning_s=1.5,
    scan_cuts=((2,),),
    compared=(Alternative(num_stages=2, num_microbatches=4, schedule="1f1b", step_s=0.02),),
)


@pytest.fixture(scope="module")
def plan():
    """The Megatron plan of a two-layer perceptron, on a mesh of 2 x 4."""
    step = autopar.parallelize(train_step, devices=8, mesh_shape=MESH, constraints=CONSTRAINTS)
    return step.plan(make_state(), make_batch())


# --- what is no plan --------------------------------------------------------------------------------------------------


def changed(plan, **fields):
    return json.dumps(json.loads(plan.to_json()) | fields)


def test_text_that_is_not_json_is_no_plan():
    with pytest.raises(PlanError, match="not a plan: line 1 is not JSON: Expecting value"):
        Plan.from_json("plan")


@pytest.mark.parametrize("text", ["[]", "{}", "3", '{"mesh_shape": [8]}'])
def test_json_without_a_version_is_no_plan(text):
    with pytest.raises(PlanError, match="a JSON object with a 'version' is expected"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested more than 64 deep"),
        ("[" * 100 + "]" * 100, "nested more than 64 deep"),
        ('{"version": NaN}', "NaN stands where a finite number is expected"),
        ('{"version": 1e999}', "the number 1e999 is too large"),
        ('{"version": ' + "9" * 5000 + "}", "a number has too many digits"),
        ('{"version": 2, "version": 2}', 'an object has the name "version" twice'),
    ],
)
def test_text_that_json_allows_and_no_file_holds_is_refused(text, words):
    with pytest.raises(PlanError, match=words):
        Plan.from_json(text)


@pytest.mark.fault(23)
@pytest.mark.parametrize("version", [1, 99])
def test_a_plan_of_another_version_says_to_plan_again(plan, version):
    with pytest.raises(PlanError, match=f"a plan of version {version}, this autopar reads version 2: plan again"):
        Plan.from_json(changed(plan, version=version))


def test_missing_and_unknown_fields_are_listed_together(plan):
    fields = json.loads(changed(plan, colour="red"))
    del fields["strategies"], fields["inputs"]
    with pytest.raises(PlanError, match=r"the file lacks 'inputs', 'strategies'; the file has unknown \"colour\""):
        Plan.from_json(json.dumps(fields))


def test_fields_of_a_nested_value_are_checked_too(plan):
    fields = json.loads(plan.to_json())
    del fields["inputs"][0]["spec"]
    with pytest.raises(PlanError, match=r"inputs\.0 lacks 'spec'"):
        Plan.from_json(json.dumps(fields))


WRONG_VALUES = [
    ({"equations": "all"}, 'equations is "all"; a list is expected'),
    ({"equations": [True]}, r"equations\.0 is true; text is expected"),
    ({"inputs": [3]}, r"inputs\.0 is 3; an object is expected"),
    ({"inputs": None}, "inputs is null; a list is expected"),
    ({"cluster": 8}, "cluster is 8; text is expected"),
    ({"comm_s": "fast"}, 'comm_s is "fast"; a number is expected'),
    ({"comm_s": -1}, "comm_s is -1; at least 0 is expected"),
    ({"memory_limit_bytes": []}, r"memory_limit_bytes is \[\]; a whole number or null is expected"),
    ({"recompute": 1}, "recompute is 1; true or false is expected"),
    ({"num_microbatches": 10**6}, "num_microbatches is 1000000; at most 65536 is expected"),
    ({"axis_names": [["x"]]}, r'axis_names\.0 is \["x"\]; text is expected'),
    ({"axis_names": ["data", "data"]}, "axis_names: 2 different names are expected"),
    ({"mesh_shape": [8]}, "axis_names: 1 different names are expected"),
    ({"trail": "00"}, "trail: two digits for each of the .* equations are expected"),
    ({"layouts": []}, "has the layout .*, which layouts lacks"),
    ({"strategies": []}, r"equations\.0 is .*, which strategies lacks"),
]


@pytest.mark.parametrize(("fields", "words"), WRONG_VALUES)
def test_a_value_that_does_not_do_is_refused_by_its_place(plan, fields, words):
    with pytest.raises(PlanError, match=f"not a plan of version 2: .*{words}"):
        Plan.from_json(changed(plan, **fields))


WRONG_LEAVES = [
    ({"spec": [["model"]]}, "spec has 1 items; one for each of the 2 dimensions is expected"),
    ({"spec": [["nope"], []]}, '"nope" is no axis of the mesh, which has data, model'),
    ({"spec": [["data"], ["data"]]}, 'axis "data" is there twice'),
    ({"shape": [63, 15]}, "which do not divide a dimension of"),
    ({"bytes_per_device": 7}, "bytes_per_device is 7; 1024 of float32 are expected"),
]


@pytest.mark.parametrize(("fields", "words"), WRONG_LEAVES)
def test_a_leaf_whose_parts_do_not_agree_is_refused_by_its_path(plan, fields, words):
    changes = json.loads(plan.to_json())
    leaf = next(value for value in changes["inputs"] if value["path"] == "state/params/up")
    leaf.update(fields)
    with pytest.raises(PlanError, match=rf"inputs\.\d \(state/params/up\): .*{words}"):
        Plan.from_json(json.dumps(changes))


def test_what_is_left_out_of_a_plan_has_its_default(plan):
    fields = json.loads(plan.to_json())
    for name in ("recompute", "compared", "unlimited_s"):
        del fields[name]
    assert Plan.from_json(json.dumps(fields)) == dataclasses.replace(plan, unlimited_s=0.0)


# --- the plan of a pipeline -------------------------------------------------------------------------------------------


def changed_pipeline(**fields):
    return json.dumps(json.loads(PIPELINE.to_json()) | fields)


def in_pipeline(name, **fields):
    """The text of a pipeline whose first stage or transfer has other fields."""
    first, *others = json.loads(PIPELINE.to_json())[name]
    return changed_pipeline(**{name: [first | fields, *others]})


def test_the_plan_of_a_pipeline_is_read_back_as_it_was():
    for read in (PipelinePlan.from_json, autopar.plan_from_json):
        assert read(PIPELINE.to_json()) == PIPELINE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (changed_pipeline(transfers=[{"source": 0}]), r"transfers\.0 lacks 'target', 'what', 'bytes', 'count'"),
        (changed_pipeline(transfers=[7]), r"transfers\.0 is 7; an object is expected"),
        (changed_pipeline(transfers="none"), 'transfers is "none"; a list is expected'),
        (in_pipeline("transfers", bytes="many"), r'transfers\.0\.bytes is "many"; a whole number is expected'),
        (in_pipeline("transfers", colour="red"), r'transfers\.0 has unknown "colour"'),
        (in_pipeline("transfers", target=9), r"transfers\.0 is between stages 0 and 9; there are 2"),
        (in_pipeline("stages", leaves=3), r"stages\.0\.leaves is 3; a list is expected"),
        (in_pipeline("stages", plan=None), r"stages\.0\.plan is null; an object is expected"),
        (in_pipeline("stages", mesh=1), r"stages\.0\.mesh is 1; 0 is expected"),
        (in_pipeline("stages", first_device=4), r"stages\.0\.first_device is 4; 0 is expected"),
        (in_pipeline("stages", first_device=8), r"stages\.0\.first_device is 8; 0 is expected"),
        (changed_pipeline(compared=[{}]), r"compared\.0 lacks 'num_stages', 'num_microbatches'"),
        (changed_pipeline(stages=None), "stages is null; a list is expected"),
        (changed_pipeline(virtual_stages=3), "virtual_stages is 3, which does not divide 2 stages"),
        (changed_pipeline(cuts=[9, 3]), "cuts: 1 ascending numbers are expected between 2 stages"),
        (changed_pipeline(recompute=True), "recompute does not agree with recomputed_share"),
    ],
)
def test_a_pipeline_with_a_part_that_is_none_is_refused_by_the_name_of_the_field(text, words):
    for read in (PipelinePlan.from_json, autopar.plan_from_json):
        with pytest.raises(PlanError, match=f"not a plan of version 2: .*{words}"):
            read(text)


def test_a_pipeline_has_one_of_the_schedules_that_there_are():
    for name in SCHEDULES:
        assert PipelinePlan.from_json(changed(PIPELINE, schedule=name)).schedule == name
    with pytest.raises(PlanError, match=r"schedule is .2f2b.; one of .*'1f1b'.* is expected"):
        PipelinePlan.from_json(changed(PIPELINE, schedule="2f2b"))


def test_meshes_need_not_lie_in_the_order_of_the_pipeline():
    last, first = (
        dataclasses.replace(stage, first_device=place) for stage, place in zip(PIPELINE.stages, (8, 0), strict=True)
    )
    turned = dataclasses.replace(PIPELINE, stages=(last, first))
    assert PipelinePlan.from_json(turned.to_json()) == turned


def test_a_pipeline_with_a_stage_planned_by_another_version_says_to_plan_again():
    stage = json.loads(PIPELINE.to_json())["stages"][0]["plan"] | {"version": 99}
    with pytest.raises(PlanError, match=r"stages\.0\.plan\.version is 99; 2 is expected"):
        PipelinePlan.from_json(in_pipeline("stages", plan=stage))


@pytest.mark.sweep
def test_no_change_of_one_value_ends_in_another_error_than_a_plan_error():
    """Every value of the file is replaced by one of each JSON type: it is read or refused, nothing else.

    Of the items of a list, which have one form, it is the first.
    """

    def paths(value, path=()):
        yield path
        for key, item in (
            value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
        ):
            yield from paths(item, (*path, key))

    text = PIPELINE.to_json()
    refused = 0
    for path in paths(json.loads(text)):
        for other in (None, True, -1, 0.5, "text", [], {}, [[]]):
            fields = json.loads(text)
            if not path:
                fields = other
            else:
                functools.reduce(lambda value, key: value[key], path[:-1], fields)[path[-1]] = other
            try:
                autopar.plan_from_json(json.dumps(fields))
            except PlanError:
                refused += 1
    assert refused > 1000

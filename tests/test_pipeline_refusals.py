"""Wishes that a pipeline cannot meet are errors that say what would do."""

import re

import jax
import pytest

import autopar
from autopar.errors import (
    ArgumentError,
    OutOfMemoryError,
    PlanError,
    ScheduleError,
    UnsupportedProgramError,
)
from tests import pipeline_steps, zoo
from tests.pipeline_steps import in_stages

MIXED = [(1,), (1,), (2,)]


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:.*of the forward work is one operation")
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"num_stages": 3, "mesh_shape": "auto"},
            ArgumentError,
            r"8 devices .* 3 stages; use 1 or 2 or 4 or 8 stages, or give each a mesh of its own",
        ),
        ({"num_stages": 50, "devices": 50}, ArgumentError, "26 forward operations, too few for 50 stages .* use fewer"),
        ({"mesh_shape": MIXED}, ArgumentError, "mesh_shape has 3 shapes, num_stages is 2; give one shape per stage"),
        ({"num_stages": 1, "mesh_shape": MIXED}, ArgumentError, "mesh_shape has 3 shapes, num_stages is 1"),
        ({"mesh_shape": (8,)}, ArgumentError, r"meshes \(2 times \(8,\)\) need 16 devices, there are 8; use smaller"),
        ({"mesh_shape": [(4,), (8,)]}, ArgumentError, r"meshes \(\(4,\), \(8,\)\) need 12 devices, there are 8"),
        ({"num_microbatches": 3}, ArgumentError, "3 does not divide the examples .* Numbers that do: 1, 2, 4, 8"),
        ({"schedule": "two-way"}, ArgumentError, "schedule='two-way': 'auto' or one of 1f1b, .*zb-h1 is expected$"),
        ({"schedule": "eager"}, ArgumentError, "zb-h1 is expected; did you mean 'eager-1f1b'"),
        (
            {"schedule": "zb-h1", "virtual_stages": 2},
            ScheduleError,
            "'zb-h1' runs one stage per mesh: virtual_stages=2 is for 'interleaved'",
        ),
        (
            {"schedule": "inference"},
            ArgumentError,
            "'inference' runs forward only, and this step computes gradients; use",
        ),
        (
            {"schedule": "interleaved", "virtual_stages": 1},
            ScheduleError,
            "virtual_stages=1 has nothing to interleave; use '1f1b', or two",
        ),
        (
            {"schedule": "interleaved", "virtual_stages": 2, "num_stages": 4, "num_microbatches": 2},
            ScheduleError,
            "in groups of 4, and num_microbatches=2 does not divide; use 4 microbatches",
        ),
        ({"memory_limit_bytes": 2000}, OutOfMemoryError, "stage 0 of 2, with 2 microbatches in flight: no plan fits"),
    ],
)
def test_wishes_that_cannot_be_met_are_errors_that_say_what_would_do(options, error, words):
    step, state, batch = pipeline_steps.plain()
    with pytest.raises(error, match=words):
        in_stages(step, **{"num_stages": 2} | options).plan(state, batch)


def test_a_step_that_mixes_examples_is_refused_with_its_line_and_runs_with_one_microbatch():
    step, state, batch = zoo.build_resnet_block()
    with pytest.raises(UnsupportedProgramError, match=r"4 microbatches: \w+ at .*zoo\.py.* Use num_microbatches=1"):
        in_stages(step).plan(state, batch)
    assert in_stages(step, num_microbatches=1).plan(state, batch).num_microbatches == 1


def test_wishes_beside_a_plan_of_stages_have_to_agree_with_it():
    step, state, batch = pipeline_steps.plain()
    made_with = {"num_stages": 2, "num_microbatches": 2, "schedule": "1f1b", "virtual_stages": 1, "mesh_shape": (1,)}
    plan = autopar.parallelize(step, **made_with).plan(state, batch)
    for wishes in (made_with, {"mesh_shape": [(1,), (1,)]}, {"num_stages": 2}):
        assert autopar.parallelize(step, plan=plan, **wishes).plan(state, batch).stages == plan.stages
    for wish in (
        {"num_stages": 3},
        {"mesh_shape": (2,)},
        {"schedule": "gpipe"},
        {"virtual_stages": 2},
        {"num_microbatches": 4},
    ):
        ((name, value),) = wish.items()
        words = (
            f"{name}={value!r}: the plan has 2 meshes of (1,), (1,), schedule '1f1b', 1 stages per mesh, 2 microbatches"
        )
        with pytest.raises(ArgumentError, match=re.escape(words)):
            autopar.parallelize(step, plan=plan, **wish).plan(state, batch)


def test_a_plan_of_stages_is_for_its_own_step_and_needs_its_devices():
    step, state, batch = pipeline_steps.plain()
    plan = in_stages(step).plan(state, batch)
    with pytest.raises(PlanError, match="the plan was made for another step"):
        autopar.parallelize(pipeline_steps.masked_loss()[0], plan=plan).plan(state, batch)
    with pytest.raises(ArgumentError, match="the 2 stages need 2 devices, there are 1"):
        autopar.parallelize(step, plan=plan, devices=jax.devices()[:1]).compile(state, batch)

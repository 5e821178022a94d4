"""The phases of one number of microbatches, taken over for another, are those that planning that number finds."""

import jax
import pytest

from autopar.microbatches.phases import in_another_number, phases_of, plan_time
from autopar.microbatches.time_plan import TimePlan
from autopar.models.registry import build
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.trace import trace
from autopar.stages.split_scans import split_scans
from autopar.stages.time_loops import make_loops
from tests import pipeline_steps
from tests.fast_part import on_the_diagonal

BATCH = 16
SIZES = {
    "gpt": {"layers": 2, "hidden": 32, "heads": 4, "seq": 8, "vocab": 256, "dropout": 0.1},
    "t5": {"layers": 1, "hidden": 32, "heads": 4, "vocab": 320},
    "moe": {"layers": 2, "hidden": 32, "heads": 4, "vocab": 256},
    "mlp": {},
}


def traced_model(name):
    model = build(name, batch=BATCH, **SIZES[name])
    state = jax.eval_shape(model.create_state, jax.eval_shape(lambda: jax.random.key(0)))
    signature = CallSignature(model.train_step, (1,), (), "auto")
    return trace(signature, bind_arguments(signature, (state, model.batch_shape()), {}))


def traced_step(name):
    step, *arguments = getattr(pipeline_steps, name)()
    signature = CallSignature(step, (1,), (), "auto")
    return trace(signature, bind_arguments(signature, tuple(arguments), {}))


def content(plan):
    """The phase of every equation, and the layouts of all of them inside the body."""
    made = plan.assignment
    inside = {inner for eqn in plan.of_phase("body") for inner in walk(eqn)}
    return plan.phases, {
        eqn: (found.inputs, found.outputs, found.ways) for eqn, found in made.strategies.items() if eqn in inside
    }


def walk(eqn):
    """An equation and those nested in it."""
    yield eqn
    for region in eqn.regions:
        yield from region.walk()


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("name", "late_sums"),
    on_the_diagonal([*SIZES, "metrics", "tied_weights", "clipped_adamw", "dropout"], [False, True]),
)
def test_they_are_those_that_are_found_by_planning(name, late_sums):
    traced = traced_model(name) if name in SIZES else traced_step(name)
    first = plan_time(traced, 4, late_sums=late_sums)
    assert isinstance(first, TimePlan)
    for count in (1, 2, 8, BATCH if name in SIZES else pipeline_steps.ROWS):
        fresh = phases_of(traced, count, late_sums=late_sums, known=first.phases)
        taken = plan_time(traced, count, late_sums=late_sums, known=first.phases, like=first)
        assert taken.microbatches == taken.assignment.mesh.size == count
        assert content(taken) == content(fresh), count


def test_a_number_that_does_not_divide_the_examples_is_planned():
    traced = traced_step("metrics")
    first = plan_time(traced, 4)
    assert in_another_number(first, 2, first.assignment.rules) is not None
    assert in_another_number(first, 3, first.assignment.rules) is None


def test_microbatches_of_one_example_are_divided_as_others():
    """And from these the plan is taken over for others."""
    traced = traced_step("metrics")
    first, one_each = (phases_of(traced, count) for count in (4, pipeline_steps.ROWS))
    for made, count, fresh in ((first, pipeline_steps.ROWS, one_each), (one_each, 4, first)):
        taken = in_another_number(made, count, made.assignment.rules)
        assert taken is not None
        assert content(taken) == content(fresh)


def test_the_loops_of_other_numbers_have_the_phases_of_the_usual_one():
    loop_of = make_loops(split_scans(traced_step("metrics"), ()), 4)
    assert loop_of(4) is loop_of(4)
    assert loop_of(2).plan.phases == loop_of(4).plan.phases
    assert loop_of(2).plan.microbatches == 2

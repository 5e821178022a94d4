"""Where nothing fits the memory in the usual numbers of microbatches, or only with recomputation, stages are searched in more."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.cost_model.hardware import preset
from autopar.errors import ArgumentError, OutOfMemoryError
from autopar.inter_op.candidates.timetables import Timetable
from autopar.inter_op.candidates.tuning import TUNING
from autopar.inter_op.plan_stage import plan_program
from autopar.inter_op.search import search_stages
from autopar.stages.split_scans import split_scans
from autopar.stages.time_loops import make_loops
from tests.inter_op.test_search import request_on, traced_step, two_nodes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("widths", [(32,) * 5, (32, 64, 16, 64, 8)], ids=["layers alike", "layers that differ"])
def test_more_microbatches_are_compared_where_nothing_fits_in_the_usual_ones(widths):
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in itertools.pairwise(widths)]
    traced = traced_step(weights, jnp.ones((4096, widths[0]), jnp.float32))
    usual, larger = [Timetable(4, "1f1b")], [Timetable(m, "1f1b") for m in (64, 128, 256)]

    def found(tables, limit, **options):
        loop_of = make_loops(split_scans(traced, ()), tables[0].microbatches)
        return search_stages(loop_of, request_on(two_nodes(), limit), devices=4, timetables=tables, **options)

    free = found(usual, None, larger=larger)
    assert free.timetable == usual[0]
    assert {one.num_microbatches for one in free.compared} == {4}, "memory does not ask for more"
    alone = found(larger[:1], None)
    limit = int(1.1 * max(stage.peak_bytes for stage in alone.choice.stages) / TUNING.room)
    with pytest.raises(OutOfMemoryError):
        found(usual, limit)
    tight = found(usual, limit, larger=larger)
    assert tight.timetable in larger
    least_s = min(found([one], limit).choice.step_s for one in larger)
    assert tight.choice.step_s <= (1 + TUNING.worth) * least_s


def test_more_microbatches_are_compared_where_the_usual_ones_fit_with_recomputation_alone():
    """Smaller microbatches keep less; what each task takes to start is nothing beside the work."""
    width, usual, larger = 1024, [Timetable(8, "1f1b")], [Timetable(32, "1f1b")]
    traced = traced_step([jnp.ones((width, width), jnp.float32)] * 4, jnp.ones((65536, width), jnp.float32))

    def found(limit, tables=usual, **options):
        loop_of, request = (
            make_loops(split_scans(traced, ()), tables[0].microbatches),
            request_on(preset("p3.16xlarge"), limit),
        )
        return search_stages(
            loop_of, request, devices=4, timetables=tables, num_stages=2, shares=(0.0, 0.5, 1.0), **options
        )

    def peak(choice):
        return max(stage.peak_bytes for stage in choice.stages)

    free, small = found(None), found(None, larger)
    assert not any(free.shares)
    limit = int(0.95 * peak(free.choice))
    assert peak(small.choice) < limit
    again, more = found(limit), found(limit, larger=larger)
    assert any(again.shares)
    assert (more.timetable, any(more.shares)) == (larger[0], False)
    assert more.choice.step_s < again.choice.step_s
    assert found(None, larger=larger).timetable == usual[0]


def test_layers_are_planned_in_the_largest_number_if_what_is_best_in_few_does_not_fit():
    """Another number takes over what is known of few, so it does not fit either; only its own plans tell."""
    traced = traced_step([jnp.ones((32, 32), jnp.float32)] * 4, jnp.ones((64, 32), jnp.float32))
    few, more, most = (Timetable(count, "1f1b") for count in (2, 4, 64))

    def plan_in_most(program, request):
        if program.ports.microbatches < most.microbatches:
            raise OutOfMemoryError("too large")
        return plan_program(program, request)

    def found(tables, **options):
        loop_of, request = make_loops(split_scans(traced, ()), tables[0].microbatches), request_on(two_nodes(), 10**9)
        return search_stages(loop_of, request, devices=4, timetables=tables, planner=plan_in_most, **options)

    alone = found([most])
    for tables, larger in (([few, more, most], []), ([few], [more, most])):
        both = found(tables, larger=larger)
        assert (both.timetable, both.choice.step_s) == (most, alone.choice.step_s)
    with pytest.raises(ArgumentError):
        found([few, more])

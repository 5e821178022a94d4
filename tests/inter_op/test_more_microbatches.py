"""Where nothing fits the memory in the usual numbers of microbatches, stages are searched in more."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import OutOfMemoryError
from autopar.inter_op.search import search_stages
from autopar.inter_op.timetables import Timetable
from autopar.inter_op.tuning import TUNING
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

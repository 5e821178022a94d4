"""Ways with forward work done again that were left after little work are searched once more where the best way is far slower."""

import dataclasses

import pytest

from autopar.errors import OutOfMemoryError
from autopar.inter_op import attempts
from autopar.inter_op.one_mesh import plan_on_one_mesh
from autopar.intra_op.planner import plan_way
from autopar.intra_op.shared_search import Beaten, SharedSearch
from autopar.layouts.mesh import LogicalMesh
from tests.inter_op.test_search import arguments, request_on, traced_step, two_nodes

WORK_S, LIMIT = 1.0, 300_000


@pytest.fixture(scope="module")
def traced():
    return traced_step(*arguments(32, layers=6, batch=4096))


@pytest.fixture
def tried(monkeypatch):
    """(number of microbatches, whether forward work is done again, whether there are other ways) of each search; and `install`.

    That makes searches say what they find: as it is, the step fits in 64 microbatches or more, in `plain_s`. With forward work
    done again it fits in four, and only a search without other ways finds out.
    """
    found, repeated_now = [], []

    def install(plain_s):
        def plan(step, request, shared):
            is_again, count = repeated_now[-1] is not None, step.microbatches
            found.append((count, is_again, shared.has_other_ways))
            shared.work_s, shared.excess = WORK_S, 64.0
            if count < 64 and not (is_again and count >= 4 and not shared.has_other_ways):
                if shared.best_s < 1e9 and not shared.has_other_ways:
                    return Beaten(None, 0.1)  # as a comparison without a plan says where others have one
                raise OutOfMemoryError("", needed_bytes=1.0, tensors=(), is_settled=False)
            planned = plan_way(step, dataclasses.replace(request, memory_limit_bytes=None), SharedSearch())
            step_s = 1.5 if is_again and count < 64 else plain_s
            shared.best_s = min(shared.best_s, step_s)
            timed = dataclasses.replace(planned.plan, compute_s=step_s, comm_s=0.0, hidden_s=0.0)
            return dataclasses.replace(planned, plan=timed)

        monkeypatch.setattr(attempts, "plan_way", plan)

    def noting(these, step, repeated):
        repeated_now.append(repeated)
        return as_usual(these, step, repeated)

    as_usual = attempts.Attempts.plan
    monkeypatch.setattr(attempts.Attempts, "plan", noting)
    monkeypatch.setattr(attempts, "far_excess", lambda *_: 8.0)
    monkeypatch.setattr(attempts, "least_excess", lambda *_: 0.0)
    return found, install


def best_of(traced):
    request = dataclasses.replace(request_on(two_nodes(), LIMIT), meshes=(LogicalMesh.of((4,)),))
    return plan_on_one_mesh(traced, request, num_microbatches="auto", recompute="auto", devices=4).plan


def test_what_was_left_is_searched_as_if_it_were_the_last_where_the_best_takes_far_longer_than_its_work(traced, tried):
    found, install = tried
    install(plain_s=5.0)
    plan = best_of(traced)
    insisted = [(count, is_again) for count, is_again, has_others in found if not has_others]
    assert (plan.recompute, plan.step_s) == (True, pytest.approx(1.5))
    assert insisted[0][1]
    assert plan.num_microbatches == insisted[-1][0] < 64, "the fewest that fit, and no more after it"


def test_it_is_left_where_the_best_takes_about_as_long_as_its_work(traced, tried):
    found, install = tried
    install(plain_s=2.5)
    assert best_of(traced).step_s == pytest.approx(2.5)
    assert all(has_others for _, _, has_others in found)

"""Communication beside compute: what several exchanges hide together is no more than the compute beside all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_model.machine import Overlap
from autopar.cost_model.overlap import KINDS, Communication, alone, beside, share_compute

seconds = st.floats(0, 1e3, allow_subnormal=False)


@st.composite
def communications(draw: st.DrawFn) -> Communication:
    """Of any kind, of which any part is hidden."""
    total_s = draw(seconds)
    return Communication(draw(st.sampled_from(KINDS)), total_s, total_s * draw(st.floats(0, 1)))


@given(st.lists(communications(), max_size=6), seconds)
def test_together_they_hide_no_more_than_the_compute_beside_them(parts, compute_s):
    shared = share_compute(parts, compute_s)
    assert sum(part.hidden_s for part in shared) <= compute_s * (1 + 1e-9) + 1e-9
    for before, after in zip(parts, shared, strict=True):
        assert (after.kind, after.total_s) == (before.kind, before.total_s)
        assert before.exposed_s <= after.exposed_s + 1e-9
        assert after.exposed_s <= after.total_s + 1e-9


@given(st.lists(communications(), max_size=6), seconds, seconds)
def test_less_compute_never_lengthens_a_step(parts, less_s, more_s):
    """Compute and what is waited for beside it: what the step takes."""
    less_s, more_s = sorted((less_s, more_s))
    slow = more_s + sum(part.exposed_s for part in share_compute(parts, more_s))
    fast = less_s + sum(part.exposed_s for part in share_compute(parts, less_s))
    assert fast <= slow + 1e-6


def test_each_keeps_its_part_of_what_it_would_hide_alone():
    parts = [Communication("zero3", 6.0, 0.0), Communication("tensor", 4.0, 1.0)]
    shared = share_compute(parts, 3.0)
    assert [part.hidden_s for part in shared] == pytest.approx([2.0, 1.0])
    assert share_compute(parts, 9.0) == parts


@given(seconds, seconds, st.floats(0, 1))
def test_alone_or_beside_compute(comm_s, compute_s, part):
    found = beside(Overlap({"zero3": part}), "zero3", comm_s=comm_s, compute_s=compute_s)
    assert found.hidden_s <= compute_s + 1e-9
    assert found.hidden_s <= part * comm_s + 1e-9
    assert alone("expert", comm_s) == beside(Overlap({}), "expert", comm_s=comm_s, compute_s=compute_s)

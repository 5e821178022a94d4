"""Sets that are joined one by one, against sets joined by hand."""

from hypothesis import given
from hypothesis import strategies as st

from autopar.disjoint_sets import DisjointSets

NUMBERS = st.integers(0, 9).map(lambda n: (n, -n))
"""Pairs: equal ones are one element, though they are different objects."""


def joined_by_hand(elements, joins):
    sets = [{element} for element in elements]
    for members in joins:
        touched = [s for s in sets if s & {*members}]
        sets = [s for s in sets if s not in touched] + [set().union(*touched)]
    return sets


@given(st.lists(st.lists(NUMBERS, min_size=1, max_size=4)))
def test_elements_are_together_if_joins_connect_them(joins):
    elements = [(n, -n) for n in range(10)]
    sets = DisjointSets(elements)
    for members in joins:
        sets.join(members)
    expected = joined_by_hand(elements, joins)
    assert [set(group) for group in sets.groups()] == sorted(expected, key=min)
    for group in expected:
        assert {sets.find(element) for element in group} == {sets.find(min(group))}
        assert sets.find(min(group)) in group


def test_groups_keep_the_order_in_which_elements_came():
    sets = DisjointSets("edcba")
    sets.join("ac")
    sets.join("bd")
    assert sets.groups() == [["e"], ["d", "b"], ["c", "a"]]


def test_an_element_that_was_not_named_before_is_a_set_of_its_own():
    sets = DisjointSets(())
    assert sets.find("new") == "new"
    assert sets.groups() == [["new"]]

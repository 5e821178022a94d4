"""The rule that a warning suggests: equal sizes are one factor, and it describes the shapes whatever they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.rules.notation import parse
from autopar.rules.unlisted.guess import guess_from

SHAPES = st.lists(st.lists(st.integers(1, 4), max_size=4), min_size=1, max_size=3)


@pytest.mark.parametrize(
    ("in_shapes", "out_shapes", "rule"),
    [
        ([(8, 4, 12), (12, 16)], [(8, 4, 16)], "a b c, c d -> a b d | whole: c"),
        ([(2, 3, 8)], [(2, 3, 8)], "a b c -> a b c"),
        ([(8, 8)], [(8, 8)], "a b -> a b"),
        ([(8, 5), ()], [(8, 1)], "a b, . -> a 1 | whole: b"),
        ([(8,)], [(8, 5)], "a -> a b | whole: b"),
        ([(8, 5)], [(8,), ()], "a b -> a, . | whole: a b"),
    ],
)
def test_equal_sizes_are_taken_for_one_factor(in_shapes, out_shapes, rule):
    assert guess_from(in_shapes, out_shapes) == rule


@given(SHAPES, SHAPES)
def test_a_guess_describes_the_shapes(in_shapes, out_shapes):
    parse(guess_from(in_shapes, out_shapes), in_shapes, out_shapes)

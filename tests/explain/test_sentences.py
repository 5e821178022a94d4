"""What is said of several stages is said once, with the range of each figure."""

import re

from hypothesis import given
from hypothesis import strategies as st

from autopar.explain.sentences import group_sentences
from autopar.explain.units import bytes_text, percent_text


def test_sentences_that_differ_in_figures_are_one_with_their_ranges():
    said = [
        (0, "collectives over x: 12 all-gather, 1.5 MiB; 1,024 all-reduce, 900.0 KiB"),
        (1, "nothing is split over y"),
        (1, "collectives over x: 9 all-gather, 700.0 KiB; 2,048 all-reduce, 900.0 KiB"),
        (2, "nothing is split over y"),
        (4, "collectives over x: 30 all-gather, 1.0 GiB; 1,024 all-reduce, 900.0 KiB"),
        (8, "collectives over x: 9 all-gather, 1.0 MiB; 1,024 all-reduce, 1.0 KiB"),
    ]
    assert list(group_sentences(said)) == [
        "stages 0 to 1, 4, 8: collectives over x: 9 to 30 all-gather, 700.0 KiB to 1.0 GiB; 1,024 to 2,048 all-reduce, "
        "1.0 KiB to 900.0 KiB",
        "stages 1 to 2: nothing is split over y",
    ]


def test_few_sentences_that_differ_in_counts_stay_apart_for_counts_belong_together():
    said = [
        (0, "26 of 26 parameters (100% of their bytes) split, 3.0 MiB"),
        (1, "6 of 24 parameters (91% of their bytes) split, 2.0 MiB"),
        (2, "26 of 26 parameters (98% of their bytes) split, 1.0 MiB"),
    ]
    assert list(group_sentences(said)) == [
        "stages 0, 2: 26 of 26 parameters (98% to 100% of their bytes) split, 1.0 MiB to 3.0 MiB",
        "stage 1: 6 of 24 parameters (91% of their bytes) split, 2.0 MiB",
    ]


def test_names_are_no_figures():
    said = [(0, "reads state/params/block_{0,1}/up of layer_3"), (1, "reads state/params/block_{2,3}/up of layer_4")]
    assert list(group_sentences(said)) == [f"stage {stage}: {text}" for stage, text in said]


def test_shares_below_one_percent_come_before_it_and_above_99_after_it():
    shares = [percent_text(part, 1000) for part in (1, 10, 990, 999)]
    assert list(group_sentences(enumerate(shares))) == ["stages 0 to 3: <1% to >99%"]


@given(st.lists(st.integers(0, 2**50), min_size=1))
def test_the_range_of_bytes_is_that_of_the_numbers(sizes):
    (text,) = group_sentences((n, f"sends {bytes_text(size)} in all") for n, size in enumerate(sizes))
    ends = list(dict.fromkeys(bytes_text(size) for size in (min(sizes), max(sizes))))
    assert re.sub(r"^stages? [^:]*: ", "", text) == f"sends {' to '.join(ends)} in all"

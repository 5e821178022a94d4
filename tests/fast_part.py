"""Which cases of a product of parameters are fast: a few in which each parameter has each of its values."""

import itertools

import pytest


def on_the_diagonal(first, second):
    """Arguments for `parametrize` of two parameters: every pair, of which those off the diagonal are slow."""
    return [
        pytest.param(a, b, marks=[] if (i - j) % min(len(first), len(second)) == 0 else pytest.mark.slow)
        for (i, a), (j, b) in itertools.product(enumerate(first), enumerate(second))
    ]

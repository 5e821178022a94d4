"""Paths of pieces: what is written is read again, and a whole leaf is no piece."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.layouts.pieces import Piece, read_piece, whole_path

PIECES = st.builds(
    Piece,
    whole=st.text("ab/[]:, 0", max_size=8),
    dim=st.integers(0, 3),
    start=st.integers(0, 99),
    end=st.integers(0, 99),
)


@given(PIECES)
def test_the_path_of_a_piece_is_read_as_the_piece(piece):
    assert read_piece(piece.path) == piece
    assert whole_path(piece.path) == piece.whole


def test_paths_are_those_that_plans_hold():
    assert Piece("state/w", 0, 0, 2).path == "state/w[0:2]"
    assert Piece("state/w", 2, 4, 16).path == "state/w[:, :, 4:16]"


@pytest.mark.parametrize("path", ["state/w", "state/w[0]", "state/w[0:2]/b", "state/w[:, 0]", "state/w[0:2, :]", ""])
def test_other_paths_are_whole(path):
    assert read_piece(path) is None
    assert whole_path(path) == path

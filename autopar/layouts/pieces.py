"""A piece of a leaf: a stack of layers that stages divide is held in pieces, and each of them is a leaf of its own.

Its path ends in its range, as in `state/w[0:2]`, or `state/w[:, 0:2]` along dimension 1. Plans hold that path. Only
this file writes it and reads it as data. What can go wrong: a key of the user's that ends in such brackets is taken for a piece.
"""

from __future__ import annotations

import dataclasses
import re

_PATH = re.compile(r"(?P<whole>.*)\[(?P<before>(?::, )*)(?P<start>\d+):(?P<end>\d+)\]")


@dataclasses.dataclass(frozen=True)
class Piece:
    """The entries from `start` to `end` of the leaf with the path `whole`, along dimension `dim`."""

    whole: str
    dim: int
    start: int
    end: int

    @property
    def path(self) -> str:
        """The path of the piece, in a plan and in messages."""
        return f"{self.whole}[{':, ' * self.dim}{self.start}:{self.end}]"


def read_piece(path: str) -> Piece | None:
    """The piece with this path; None if the path is that of a whole leaf."""
    found = _PATH.fullmatch(path)
    return found and Piece(found["whole"], len(found["before"]) // len(":, "), int(found["start"]), int(found["end"]))


def whole_path(path: str) -> str:
    """The path of the leaf of which this is a piece, such as `state/w` for `state/w[0:2]`; that of a whole leaf is returned."""
    piece = read_piece(path)
    return piece.whole if piece else path

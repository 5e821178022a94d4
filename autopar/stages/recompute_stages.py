"""Recomputation: backward does the forward work of its stage again instead of keeping what it made.

In: a `StageCut`. Out: one whose backward pieces begin with the forward operations whose results they read, so that a microbatch
in flight keeps only what the stage received. Operations and operands are the same, so are the results: a dropout mask comes
from the same key and positions. What forward makes for other stages it still makes. What can go wrong: nothing is saved in a
stage whose backward reads little else than what it received; the predicted memory of both plans tells.
"""

from __future__ import annotations

import dataclasses

from autopar.compat import Literal, Var
from autopar.program.program import Equation
from autopar.stages.segments import PieceName, Segment, StageCut


def recomputed(cut: StageCut) -> StageCut:
    """The same cut with forward work done again in backward."""
    pieces = dict(cut.pieces)
    for name, piece in cut.pieces.items():
        if name.kind == "backward":
            forward = cut.pieces[PieceName(name.stage, "forward")]
            again = _needed(forward, set(piece.reads))
            made = {v for eqn in again for v in eqn.outvars}
            reads = [*(v for v in piece.reads if v not in made), *_operands(again, made)]
            pieces[name] = dataclasses.replace(
                piece, equations=(*again, *piece.equations), reads=tuple(dict.fromkeys(reads))
            )
    read_elsewhere = {v for name, piece in pieces.items() for v in piece.reads if name.kind != "forward"}
    read_elsewhere |= {v for name, piece in pieces.items() for v in piece.reads if v not in _made(piece)}
    for name, piece in pieces.items():
        if name.kind == "forward":
            pieces[name] = dataclasses.replace(piece, writes=tuple(v for v in piece.writes if v in read_elsewhere))
    return dataclasses.replace(cut, pieces=pieces)


def _needed(forward: Segment, wanted: set[Var]) -> list[Equation]:
    """The forward operations behind wanted values, in order."""
    chosen = []
    for eqn in reversed(forward.equations):
        if any(v in wanted for v in eqn.outvars):
            chosen.append(eqn)
            wanted |= {v for v in eqn.invars if not isinstance(v, Literal)}
    return chosen[::-1]


def _operands(equations: list[Equation], made: set[Var]) -> list[Var]:
    used = (v for eqn in equations for v in eqn.invars if not isinstance(v, Literal))
    return [v for v in dict.fromkeys(used) if v not in made]


def _made(piece: Segment) -> set[Var]:
    return {v for eqn in piece.equations for v in eqn.outvars}

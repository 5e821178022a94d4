"""Cut a step in microbatches into pipeline stages: forward, backward and update of each.

In: a `TimeLoop` and where the forward equations are cut. Out: a `StageCut`: `Piece`s, each the equations of one kind of work of
one stage, with the values that it reads and writes. The rules:

    forward     body equations that depend on examples and parameters, in program order, cut at the given places
    backward    those under a transposition, and what depends on them: the stage of the cotangents among the operands, or the
                highest below it that has the others, because its forward makes or reads them
    update      epilogue equations: with the weight that they update; others with their largest operand; level k + 1 if an
                operand comes from level k of another stage, so that exchanges (a global norm) have an order
    anywhere    what depends on no example or on no parameter is computed again in each piece that reads it, unless it is
                heavy or random: then it belongs to the first piece that reads it

A leaf lives on the first stage that uses it; other stages are lent it (tied weights). What can go wrong: a value that would flow
against the order of the stages; `check` refuses the cut and names it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from autopar.compat import Literal as JaxLiteral
from autopar.compat import Var, name_stack, source_line
from autopar.errors import PlanError
from autopar.graph import itemsize_of
from autopar.microbatch import Result, TimeLoop
from autopar.program import Equation
from autopar.rules import entry_for, flops_of

Kind = Literal["forward", "backward", "update"]

SCALAR_BYTES = 8
"""Values of at most this size follow what they are computed from."""
SMALL_BYTES = 1024
"""Up to this size a value of the update is computed on every stage that reads it rather than sent."""


@dataclasses.dataclass(frozen=True, order=True)
class PieceName:
    """Which piece of work: `level` orders the updates of all stages."""

    stage: int
    kind: Kind
    level: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.stage}" + (f".{self.level}" if self.kind == "update" else "")


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Equations in order; `reads` come from elsewhere, `writes` are read elsewhere; `results` are collected over the loop."""

    name: PieceName
    equations: tuple[Equation, ...]
    reads: tuple[Var, ...]
    writes: tuple[Var, ...]
    results: tuple[Result, ...] = ()
    outputs: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class StageCut:
    """See the module's text. `homes`: the stage where each leaf lives; `made_by`: the piece that makes a value for others."""

    loop: TimeLoop
    num_stages: int
    pieces: Mapping[PieceName, Piece]
    made_by: Mapping[Var, PieceName]
    homes: Mapping[Var, int]

    def of_stage(self, stage: int) -> tuple[Piece, ...]:
        """The pieces of one stage: forward, backward, updates by level."""
        kinds = ("forward", "backward", "update")
        mine = [piece for name, piece in self.pieces.items() if name.stage == stage]
        return tuple(sorted(mine, key=lambda p: (kinds.index(p.name.kind), p.name.level)))


@dataclasses.dataclass(frozen=True)
class ForwardEquation:
    """One place of the forward chain: the work up to the next place, and the bytes that a cut before it would send."""

    equation: Equation
    flops: float
    cut_bytes: float


def _bytes(var: Var) -> float:
    return float(math.prod(var.aval.shape)) * itemsize_of(var.aval)


def _operands(eqn: Equation) -> list[Var]:
    return [v for v in eqn.invars if not isinstance(v, JaxLiteral)]


def _is_transposed(eqn: Equation) -> bool:
    stack = name_stack(eqn)
    return "transpose(" in stack or "rematted_computation" in stack


class _Kinds:
    """What each equation of the body depends on."""

    def __init__(self, loop: TimeLoop) -> None:
        self.loop = loop
        self.body = loop.plan.of_phase("body")
        roles = {v: leaf.role for v, leaf in zip(loop.program.invars, loop.traced.inputs, strict=True)}
        self._examples = {v for v, role in roles.items() if role == "batch"}
        self._weights = {v for v, role in roles.items() if role != "batch" and v.aval.shape}
        for eqn in (*loop.plan.of_phase("prologue"), *self.body):
            for kind in (self._examples, self._weights):
                if any(v in kind for v in _operands(eqn)):
                    kind.update(eqn.outvars)
        self.backward: set[Equation] = set()
        behind: set[Var] = set()
        for eqn in self.body:
            if _is_transposed(eqn) or any(v in behind for v in _operands(eqn)):
                self.backward.add(eqn)
                behind.update(eqn.outvars)

    def is_anchored(self, eqn: Equation) -> bool:
        """Whether it depends on examples and on weights, so that it has one place."""
        outs = eqn.outvars
        return any(v in self._examples for v in outs) and any(v in self._weights for v in outs)

    def forward(self) -> list[Equation]:
        """The chain that is cut."""
        return [eqn for eqn in self.body if self.is_anchored(eqn) and eqn not in self.backward]


def forward_chain(loop: TimeLoop) -> tuple[ForwardEquation, ...]:
    """The forward equations of the step in order, with the work of each and what a cut before it sends per microbatch."""
    chain = _Kinds(loop).forward()
    place = {eqn: i for i, eqn in enumerate(chain)}
    last: dict[Var, int] = {}
    for eqn in chain:
        for v in _operands(eqn):
            last[v] = place[eqn]
    change = [0.0] * (len(chain) + 2)
    for eqn in chain:
        for v in eqn.outvars:
            change[place[eqn] + 1] += _bytes(v)
            change[last.get(v, place[eqn]) + 1] -= _bytes(v)
    crossing = list(itertools.accumulate(change))
    return tuple(ForwardEquation(eqn, _work(loop, eqn), crossing[i]) for i, eqn in enumerate(chain))


def _work(loop: TimeLoop, eqn: Equation) -> float:
    rules = loop.plan.assignment.rules
    if eqn.loop is None:
        return flops_of(eqn, rules[eqn])
    inside = sum(_work(loop, e) for region in eqn.regions for e in region.equations)
    return inside * max(eqn.loop.trips, 1)


def cut_stages(loop: TimeLoop, cuts: Sequence[int]) -> StageCut:
    """The pieces of `len(cuts) + 1` stages; `cuts` are ascending places in `forward_chain`. Raises PlanError."""
    return _Cutter(loop, cuts).cut()


class _Cutter:
    def __init__(self, loop: TimeLoop, cuts: Sequence[int]) -> None:
        self.loop, self.cuts = loop, tuple(cuts)
        self.num_stages = len(cuts) + 1
        self.kinds = _Kinds(loop)
        self.prologue = {v: eqn for eqn in loop.plan.of_phase("prologue") for v in eqn.outvars}
        self.body_of = {v: eqn for eqn in self.kinds.body for v in eqn.outvars}
        self.piece_of: dict[Equation, PieceName] = {}

    def cut(self) -> StageCut:
        self._place_forward()
        self._place_backward()
        self._place_loners()
        homes = self._homes_of_the_body()
        updates = _Updates(self, homes)
        updates.place()
        pieces, made_by = self._pieces(updates)
        cut = StageCut(self.loop, self.num_stages, pieces, made_by, updates.homes)
        check(cut)
        return cut

    def _place_forward(self) -> None:
        for place, eqn in enumerate(self.kinds.forward()):
            self.piece_of[eqn] = PieceName(sum(place >= c for c in self.cuts), "forward")

    def _place_backward(self) -> None:
        """Where the cotangents are, or further down, if an operand of forward is only there."""
        where = _Whereabouts(self)
        for eqn in self.kinds.body:
            if self.kinds.is_anchored(eqn) and eqn in self.kinds.backward:
                makers = [self.piece_of[e] for e in map(self.body_of.get, _operands(eqn)) if e in self.piece_of]
                last = min((p.stage for p in makers if p.kind == "backward"), default=self.num_stages - 1)
                self.piece_of[eqn] = PieceName(where.highest(eqn, last), "backward")
        self._sink_gradients(where)

    def _sink_gradients(self, where: _Whereabouts) -> None:
        """A gradient that no stage's operands hold, as of a bias, goes to its weight, if what it needs goes there anyway."""
        readers: dict[Var, list[Equation]] = {}
        for eqn in self.kinds.backward & set(self.piece_of):
            for v in _operands(eqn):
                readers.setdefault(v, []).append(eqn)
        home = self._stages_of_gradients(where)
        for eqn in self.kinds.backward & set(self.piece_of):
            targets = [home[v] for v in eqn.outvars if v in home and v not in readers]
            if targets and max(targets) < self.piece_of[eqn].stage:
                for moved in self._reduced_there(eqn, max(targets), readers):
                    self.piece_of[moved] = PieceName(max(targets), "backward")

    def _reduced_there(self, eqn: Equation, stage: int, readers: Mapping[Var, Sequence[Equation]]) -> list[Equation]:
        """An equation and those that only prepare its operand, if all that they need is read on a stage; else none."""
        chain = [eqn]
        while True:
            needed = [v for v in _operands(chain[-1]) if v in self.body_of]
            if all(any(self.piece_of[e].stage == stage for e in readers[v]) for v in needed):
                return chain
            if len(needed) != 1 or len(readers[needed[0]]) > 1 or self.body_of[needed[0]] not in self.kinds.backward:
                return []
            chain.append(self.body_of[needed[0]])

    def _stages_of_gradients(self, where: _Whereabouts) -> dict[Var, int]:
        """For values of a weight's size that its new value is made of: the lowest stage whose forward uses the weight."""
        found: dict[Var, int] = {}
        for v, source in zip(self.loop.program.outvars, self.loop.traced.state_of_output, strict=True):
            if source is not None and not isinstance(v, JaxLiteral):
                stages = where.of(self.loop.program.invars[source])
                found.update({v: min(stages)} if stages else {})
        for eqn in reversed(self.loop.plan.of_phase("epilogue")):
            stages = {found[v] for v in eqn.outvars if v in found}
            for v in _operands(eqn) if stages else ():
                if v.aval.size == eqn.outvars[0].aval.size:
                    found.setdefault(v, min(stages))
        return found

    def _place_loners(self) -> None:
        """What is heavy, random or collected, though not anchored, goes to the first piece that reads it."""
        collected = {r.var for r in self.loop.results}
        readers: dict[Equation, set[PieceName]] = {}
        for eqn in reversed(self.kinds.body):
            pieces = {self.piece_of[eqn]} if eqn in self.piece_of else readers.get(eqn, set())
            if eqn not in self.piece_of and (_is_costly(eqn) or any(v in collected for v in eqn.outvars)):
                self.piece_of[eqn] = min(pieces, key=self._order, default=PieceName(0, "forward"))
                pieces = {self.piece_of[eqn]}
            for v in _operands(eqn):
                if v in self.body_of:
                    readers.setdefault(self.body_of[v], set()).update(pieces)

    def _order(self, piece: PieceName) -> tuple[int, int]:
        return (0, piece.stage) if piece.kind == "forward" else (1, -piece.stage)

    def _homes_of_the_body(self) -> dict[Var, int]:
        """The first stage whose body reads a leaf, directly or through the prologue."""
        homes: dict[Var, int] = {}
        for eqn, piece in self.piece_of.items():
            for v in self.closure([eqn]):
                homes[v] = min(homes.get(v, piece.stage), piece.stage)
        return {v: home for v, home in homes.items() if v in set(self.loop.program.invars)}

    def closure(self, equations: Iterable[Equation]) -> set[Var]:
        """Every value that equations need, through what is computed anywhere and the prologue, down to leaves."""
        found: set[Var] = set()
        waiting = [v for eqn in equations for v in _operands(eqn)]
        while waiting:
            v = waiting.pop()
            if v in found:
                continue
            found.add(v)
            maker = self.prologue.get(v) or self.body_of.get(v)
            if maker is not None and maker not in self.piece_of:
                waiting += _operands(maker)
        return found

    def _pieces(self, updates: _Updates) -> tuple[dict[PieceName, Piece], dict[Var, PieceName]]:
        names = [PieceName(s, "forward") for s in range(self.num_stages)]
        if self.kinds.backward:
            names += [PieceName(s, "backward") for s in range(self.num_stages)]
        names += sorted(updates.names(), key=lambda n: (n.level, n.stage))
        members: dict[PieceName, list[Equation]] = {name: [] for name in names}
        for eqn in (*self.kinds.body, *self.loop.plan.of_phase("epilogue")):
            if eqn in self.piece_of:
                members[self.piece_of[eqn]].append(eqn)
        made_by = {v: self.piece_of[eqn] for eqn in self.piece_of for v in eqn.outvars}
        wanted: dict[PieceName, set[Var]] = {}
        full: dict[PieceName, tuple[list[Equation], list[Var]]] = {}
        for name in names:
            full[name] = self._completed(members[name], updates.outputs_of(name))
            wanted[name] = set(full[name][1])
        read = set().union(*wanted.values()) if wanted else set()
        results = {r.var: r for r in self.loop.results}
        pieces = {}
        for name in names:
            equations, reads = full[name]
            own = [v for eqn in members[name] for v in eqn.outvars]
            collected = tuple(results[v] for v in own if v in results) if name.kind != "update" else ()
            writes = tuple(
                v for v in own if v in read and not (name.kind != "update" and self._only_updates(v, wanted))
            )
            pieces[name] = Piece(name, tuple(equations), tuple(reads), writes, collected, updates.outputs_of(name))
        return pieces, made_by

    def _only_updates(self, v: Var, wanted: Mapping[PieceName, set[Var]]) -> bool:
        """A result that only updates read is collected, not passed on."""
        return all(name.kind == "update" for name, reads in wanted.items() if v in reads)

    def _completed(self, members: Sequence[Equation], outputs: Sequence[int]) -> tuple[list[Equation], list[Var]]:
        """(members and the equations they need that are computed anywhere, in order; what is read from elsewhere)."""
        updates = self.loop.plan.of_phase("epilogue")
        anywhere = {v: eqn for eqn in (*self.kinds.body, *updates) if eqn not in self.piece_of for v in eqn.outvars}
        chosen = set(members)
        made = {v for eqn in members for v in eqn.outvars}
        reads: dict[Var, None] = {}
        waiting = [v for eqn in members for v in _operands(eqn)]
        outvars = self.loop.program.outvars
        waiting += [outvars[i] for i in outputs if not isinstance(outvars[i], JaxLiteral)]
        while waiting:
            v = waiting.pop(0)
            if v in made or v in reads:
                continue
            if v in anywhere and v not in self._collected():
                eqn = anywhere[v]
                chosen.add(eqn)
                made.update(eqn.outvars)
                waiting += _operands(eqn)
            else:
                reads[v] = None
        ordered = [eqn for eqn in (*self.kinds.body, *updates) if eqn in chosen]
        return ordered, list(reads)

    def _collected(self) -> set[Var]:
        return {r.var for r in self.loop.results}


def _is_costly(eqn: Equation) -> bool:
    return bool(eqn.regions) or entry_for(eqn).heavy or entry_for(eqn).random


class _Whereabouts:
    """The stages that have a value of forward, because they make or read it, or what it is computed from anywhere."""

    def __init__(self, cutter: _Cutter) -> None:
        self._origins: dict[Var, frozenset[Var]] = {}
        self._stages: dict[Var, set[int]] = {}
        weights = {
            v
            for v, leaf in zip(cutter.loop.program.invars, cutter.loop.traced.inputs, strict=True)
            if leaf.role != "batch" and v.aval.shape
        }
        for eqn in (*cutter.loop.plan.of_phase("prologue"), *cutter.kinds.body):
            sources = [self._origins.get(v, frozenset({v} & weights)) for v in _operands(eqn)]
            piece = cutter.piece_of.get(eqn)
            if piece is not None:
                for origin in frozenset().union(*sources):
                    self._stages.setdefault(origin, set()).add(piece.stage)
            for v in eqn.outvars:
                if piece is not None or _is_costly(eqn):
                    self._origins[v] = frozenset({v})
                elif not cutter.kinds.is_anchored(eqn):
                    self._origins[v] = frozenset().union(*sources)
                if piece is not None:
                    self._stages.setdefault(v, set()).add(piece.stage)
        self._weights = weights

    def of(self, value: Var) -> set[int]:
        """The stages whose forward has a value."""
        return self._stages.get(value, set())

    def highest(self, eqn: Equation, last: int) -> int:
        """The highest stage up to `last` that has all operands of forward; those that no such stage has must travel."""
        origins = frozenset().union(*(self._origins.get(v, frozenset({v} & self._weights)) for v in _operands(eqn)))
        places = [[s for s in self._stages.get(origin, ()) if s <= last] for origin in origins]
        return min((max(stages) for stages in places if stages), default=last)


class _Updates:
    """Places the epilogue: stages by weights and the largest operands, levels by exchanges."""

    def __init__(self, cutter: _Cutter, homes: Mapping[Var, int]) -> None:
        self.cutter = cutter
        self.loop = cutter.loop
        self.equations = self.loop.plan.of_phase("epilogue")
        self.homes = dict(homes)
        self.stage_of: dict[Equation, int] = {}
        self._maker = {v: eqn for eqn in self.equations for v in eqn.outvars}
        self._results = {r.var: cutter.piece_of[cutter.body_of[r.var]].stage for r in self.loop.results}
        self._outputs: dict[PieceName, list[int]] = {}

    def names(self) -> set[PieceName]:
        """All pieces that have something to do."""
        placed = {self.cutter.piece_of[eqn] for eqn in self.equations if eqn in self.cutter.piece_of}
        finishing = {PieceName(stage, "update") for stage in self._results.values()}
        return placed | finishing | set(self._outputs)

    def outputs_of(self, name: PieceName) -> tuple[int, ...]:
        """Numbers of the step's outputs that a piece returns."""
        return tuple(self._outputs.get(name, ()))

    def place(self) -> None:
        """Weights first, then what is made for them, then the rest."""
        self._follow_weights()
        self._serve_weights()
        for eqn in self.equations:
            if eqn not in self.stage_of:
                self._follow_operands(eqn)
        self._follow_users()
        self._place_what_depends()
        self._find_homes()
        self._find_levels()
        self._place_outputs()

    def _known(self, v: Var) -> int | None:
        if v in self._results:
            return self._results[v]
        if v in self._maker:
            return self.stage_of.get(self._maker[v])
        return self.homes.get(self._leaf_of(v)) if v.aval.shape else None

    def _leaf_of(self, v: Var) -> Var:
        """The largest leaf from which the prologue makes a value, such as the weight of which it is a copy."""
        while v in self.cutter.prologue and (operands := _operands(self.cutter.prologue[v])):
            v = max(operands, key=_bytes)
        return v

    def _follow_weights(self) -> None:
        """An operation on a weight, or on what became of one, as large as its other operands is where the weight lives."""
        for eqn in self.equations:
            operands = _operands(eqn)
            largest = max(map(_bytes, operands), default=0.0)
            weights = [v for v in operands if v not in self._results and _bytes(v) == largest]
            stages = [s for v in weights if (s := self._known(v)) is not None]
            if stages and largest > SCALAR_BYTES:
                self.stage_of[eqn] = min(stages)

    def _serve_weights(self) -> None:
        """Going back: what is as large as its user's largest operand is made where the user is."""
        wanted: dict[Var, int] = {}
        for eqn in reversed(self.equations):
            if eqn not in self.stage_of:
                stages = [wanted[v] for v in eqn.outvars if v in wanted]
                if stages:
                    self.stage_of[eqn] = min(stages)
            if eqn in self.stage_of:
                largest = max(map(_bytes, _operands(eqn)), default=0.0)
                for v in _operands(eqn):
                    if _bytes(v) == largest > SCALAR_BYTES:
                        wanted.setdefault(v, self.stage_of[eqn])

    def _follow_operands(self, eqn: Equation) -> None:
        known = [(_bytes(v), -s) for v in _operands(eqn) if (s := self._known(v)) is not None]
        unknown = max((_bytes(v) for v in _operands(eqn) if self._known(v) is None), default=0.0)
        if known and max(known)[0] >= unknown:
            self.stage_of[eqn] = -max(known)[1]

    def _follow_users(self) -> None:
        """What only leaves feed goes where it is used, if it is large; small values are computed anywhere."""
        wanted: dict[Var, int] = {}
        for number, v in enumerate(self.loop.program.outvars):
            source = self.loop.traced.state_of_output[number]
            if source is not None and not isinstance(v, JaxLiteral):
                leaf = self.loop.program.invars[source]
                if leaf in self.homes:
                    wanted.setdefault(v, self.homes[leaf])
        for eqn in reversed(self.equations):
            if eqn not in self.stage_of:
                stages = [wanted[v] for v in eqn.outvars if v in wanted]
                depends = any(self._known(v) is not None for v in _operands(eqn))
                if stages and (depends or max(map(_bytes, eqn.outvars)) > SMALL_BYTES):
                    self.stage_of[eqn] = min(stages)
                elif depends:
                    self.stage_of[eqn] = min(s for v in _operands(eqn) if (s := self._known(v)) is not None)
            if eqn in self.stage_of:
                for v in _operands(eqn):
                    wanted.setdefault(v, self.stage_of[eqn])

    def _place_what_depends(self) -> None:
        """Only what leaves alone feed is computed anywhere: what depends on a placed value gets a place, and so a level."""
        for eqn in self.equations:
            if eqn not in self.stage_of:
                stages = [s for v in _operands(eqn) if (s := self._known(v)) is not None]
                if stages:
                    self.stage_of[eqn] = min(stages)

    def _find_homes(self) -> None:
        for eqn in self.equations:
            for v in _operands(eqn):
                if v not in self.homes and eqn in self.stage_of and self._is_leaf(v):
                    self.homes[v] = self.stage_of[eqn]
        for number, v in enumerate(self.loop.program.outvars):
            source = self.loop.traced.state_of_output[number]
            if source is not None and v in self._maker and self._maker[v] in self.stage_of:
                self.homes.setdefault(self.loop.program.invars[source], self.stage_of[self._maker[v]])
        for v in self.loop.program.invars:
            self.homes.setdefault(v, 0)

    def _is_leaf(self, v: Var) -> bool:
        return v in set(self.loop.program.invars)

    def _find_levels(self) -> None:
        """As early as exchanges allow for what other stages read; else where it is read, so that state is replaced in place."""
        levels = self._first_levels()
        readers: dict[Var, list[Equation]] = {}
        for eqn in self.equations:
            for v in _operands(eqn) if eqn in self.stage_of else ():
                readers.setdefault(v, []).append(eqn)
        for eqn in reversed(self.equations):
            if eqn in self.stage_of:
                users = [user for v in eqn.outvars for user in readers.get(v, ())]
                if users and all(self.stage_of[user] == self.stage_of[eqn] for user in users):
                    levels[eqn] = min(levels[user] for user in users)
                self.cutter.piece_of[eqn] = PieceName(self.stage_of[eqn], "update", levels[eqn])

    def _first_levels(self) -> dict[Equation, int]:
        """For every equation with a place, how many exchanges lie before it at least."""
        levels: dict[Equation, int] = {}
        for eqn in self.equations:
            stage = self.stage_of.get(eqn)
            if stage is None:
                continue
            level = 0
            for v in _operands(eqn):
                maker = self._maker.get(v)
                source = self._results.get(v) if maker is None else self.stage_of.get(maker)
                if source is not None:
                    level = max(level, (0 if maker is None else levels[maker]) + (source != stage))
            levels[eqn] = level
        return levels

    def _place_outputs(self) -> None:
        for number, v in enumerate(self.loop.program.outvars):
            source = self.loop.traced.state_of_output[number]
            home = 0 if source is None else self.homes[self.loop.program.invars[source]]
            name = PieceName(home, "update")
            if not isinstance(v, JaxLiteral):
                if v in self._maker and self._maker[v] in self.cutter.piece_of:
                    name = self.cutter.piece_of[self._maker[v]]
                elif v in self._results:
                    name = PieceName(self._results[v], "update")
            self._outputs.setdefault(name, []).append(number)


def check(cut: StageCut) -> None:
    """Raise PlanError for a value that would flow against the order of the pieces."""

    def order(name: PieceName) -> tuple[int, int]:
        ranks = {"forward": (0, name.stage), "backward": (1, -name.stage), "update": (2, name.level)}
        return ranks[name.kind]

    for name, piece in cut.pieces.items():
        for v in piece.reads:
            maker = cut.made_by.get(v)
            if maker is not None and order(maker) > order(name):
                (eqn,) = (e for e in cut.loop.program.equations if v in e.outvars)
                raise PlanError(
                    f"this step cannot be cut into {cut.num_stages} stages here: {name} needs a value of {maker}, which comes "
                    f"later: {eqn.primitive.name} at {source_line(eqn) or 'an unknown line'}. Use fewer stages."
                )

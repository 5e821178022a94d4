"""Recomputation by stages: backward does the forward work of its stage again, layer by layer, instead of keeping its results.

In: a `StageCut`, for each stage the share of its forward work to do again, from its beginning, and the places where layers begin.
Out: a cut whose backward segments do forward operations of that share again, whose results they read: those of a layer just
before its own backward. So a microbatch in flight keeps what its layers hand on and the results of the rest, and a backward has
the results of one layer at a time. Stages that do nothing again stay as they are. A stage whose layers hand on more than its
backward reads, as those of a dense-net do, is one layer: it keeps what it received. Values that the user named may be kept as
well. Operations and operands are the same, and so are the results: a dropout mask comes from the same key and positions. Forward
still makes what other stages read. What can go wrong: a stage whose backward reads little else than what the stage received saves
nothing; the predicted memory of both plans shows it.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set

from autopar.avals import bytes_of
from autopar.compat import Var
from autopar.program.checkpoint_names import find_named
from autopar.program.loops import LoopEquation
from autopar.program.program import Equation, operands_of
from autopar.program.task_name import TaskName
from autopar.stages.chain import forward_chain
from autopar.stages.segments import Segment, StageCut

SHARED = -1
"""The layer of what several layers use and none makes, such as positions. It is made again before all else."""


def recompute_in_backward(
    cut: StageCut, shares: Sequence[float], *, layers: Sequence[int] = (), keeps_named: bool = False
) -> StageCut:
    """The same cut with a share of each stage's forward work, 0 to 1, done again in backward.

    `layers`: the places of the forward chain where layers begin. `keeps_named`: values that the user named are kept.
    """
    chain = forward_chain(cut.loop)
    layer_of = {link.equation: bisect.bisect_right(layers, place) for place, link in enumerate(chain)}
    flops = {link.equation: link.flops for link in chain}
    segments = dict(cut.segments)
    for name, segment in cut.segments.items():
        if name.kind == "backward" and shares[name.stage] > 0:
            forward = _first_part(cut.segments[TaskName("forward", name.stage)], shares[name.stage], flops)
            named = find_named(forward) if keeps_named else frozenset()
            ways = [_Repetition(segment, forward, own, named) for own in (dict.fromkeys(layer_of, 0), layer_of)]
            best = min(ways, key=lambda way: way.bytes_needed(cut.num_stages - name.stage))
            moving = [v for v in segment.reads if v in cut.made_by]
            segments[name] = best.backward(set(cut.segments[TaskName("forward", name.stage)].equations), moving)
    read = set(_read_by_others(segments.values()))
    made_by = dict(cut.made_by)
    for name, segment in segments.items():
        if name.kind == "forward":
            more = segment.made() if shares[name.stage] > 0 else ()
            writes = tuple(v for v in dict.fromkeys((*segment.writes, *more)) if v in read)
            segments[name] = dataclasses.replace(segment, writes=writes)
            made_by |= dict.fromkeys(writes, name)
    return dataclasses.replace(cut, segments=segments, made_by=made_by)


def _first_part(forward: Segment, share: float, flops: Mapping[Equation, float]) -> Sequence[Equation]:
    """The first operations of a forward; their number is this share of all, or where loops are among them, about their work."""
    equations = forward.equations
    done = list(itertools.accumulate((flops.get(eqn, 0.0) for eqn in equations), initial=0.0))
    if share == 1 or not done[-1] or not any(isinstance(eqn, LoopEquation) for eqn in equations):
        return equations[: round(share * len(equations))]
    return equations[: min(range(len(done)), key=lambda count: abs(done[count] - share * done[-1]))]


class _Repetition:
    """A backward, and what it does again of these forward operations, by layers.

    `layer_of`: the layer of each equation of the forward chain. `named`: values that are kept.
    """

    def __init__(
        self, backward: Segment, forward: Sequence[Equation], layer_of: Mapping[Equation, int], named: Set[Var]
    ) -> None:
        self._backward, self._forward, self._named = backward, forward, named
        self._layer_of = _place_others(forward, layer_of)
        self._maker = {v: eqn for eqn in forward for v in eqn.outvars}
        self._kept = self._named | self._handed_on()
        self._again = self._find_again()

    def bytes_needed(self, in_flight: int) -> int:
        """Bytes of one microbatch's whole values: what so many in flight keep, and what backward makes again at a time."""
        return in_flight * sum(map(bytes_of, self._reads())) + max(
            (sum(bytes_of(v) for eqn in again for v in eqn.outvars) for again in self._again.values()), default=0
        )

    def backward(self, forward: Set[Equation], moving: Iterable[Var]) -> Segment:
        """The backward that first makes again what it reads, each layer's results just before it reads them.

        A layer waits for the last that was made of the gradient before: it reads nothing of that, and could come first. Cheap
        operations of the whole `forward` that the backward does in any case, such as masks, come with their layer too. `moving`:
        what it reads of one microbatch; a constant, such as the zeros beside a mask, is nothing to wait for.
        """
        waiting = self._with_own()
        repeated = {eqn for again in waiting.values() for eqn in again}
        equations: dict[Equation, None] = dict.fromkeys(waiting.pop(SHARED, ()))
        reads = dict.fromkeys(self._reads())
        layer_made = {v: n for n, again in waiting.items() for eqn in again for v in eqn.outvars if v not in reads}
        late: dict[Equation, Var] = {}
        gradient: Var | None = None
        moved = {*moving, *layer_made}
        for eqn in (eqn for eqn in self._backward.equations if eqn not in repeated):
            for layer in sorted({layer_made[v] for v in operands_of(eqn) if v in layer_made}, reverse=True):
                again = waiting.pop(layer, ())
                late |= dict.fromkeys(_first_of(again), gradient) if gradient is not None else {}
                equations |= dict.fromkeys(again)
            equations[eqn] = None
            if eqn.outvars and eqn not in forward and not moved.isdisjoint(operands_of(eqn)):
                gradient = eqn.outvars[-1]
                moved.update(eqn.outvars)
        for rest in waiting.values():
            equations |= dict.fromkeys(rest)
        return dataclasses.replace(self._backward, equations=tuple(equations), reads=tuple(reads), late=late)

    def _with_own(self) -> dict[int, Sequence[Equation]]:
        """By layer, what is made again, with the forward operations of these layers that the backward has in any case."""
        place = {eqn: number for number, eqn in enumerate(self._forward)}
        found = {layer: dict.fromkeys(again) for layer, again in self._again.items()}
        for eqn in self._backward.equations:
            if eqn in place and self._layer_of[eqn] in found.keys() - {SHARED}:
                found[self._layer_of[eqn]][eqn] = None
        return {layer: sorted(again, key=place.__getitem__) for layer, again in found.items()}

    def _handed_on(self) -> set[Var]:
        """What a layer makes, and another one of these reads."""
        found: set[Var] = set()
        for eqn in self._forward:
            layer = self._layer_of[eqn]
            makers = {v: self._layer_of[self._maker[v]] for v in operands_of(eqn) if v in self._maker}
            found.update(v for v, maker in makers.items() if SHARED not in (layer, maker) and maker != layer)
        return found

    def _find_again(self) -> dict[int, Sequence[Equation]]:
        """By layer, the forward operations behind what backward reads, in order, as far as what is kept."""
        wanted = {v for v in self._backward.reads if v in self._maker} - self._kept
        chosen: dict[int, list[Equation]] = {}
        for eqn in reversed(self._forward):
            if any(v in wanted for v in eqn.outvars):
                chosen.setdefault(self._layer_of[eqn], []).append(eqn)
                wanted.update(v for v in operands_of(eqn) if v not in self._kept)
        return {layer: equations[::-1] for layer, equations in chosen.items()}

    def _reads(self) -> tuple[Var, ...]:
        """What the backward reads that it does not make again, and what is kept; a loop that is done again may make that too."""
        again = [eqn for equations in self._again.values() for eqn in equations]
        made = {v for eqn in again for v in eqn.outvars} - self._kept
        operands = (v for eqn in again for v in operands_of(eqn))
        return tuple(dict.fromkeys(v for v in (*self._backward.reads, *operands) if v not in made))


def _first_of(equations: Sequence[Equation]) -> list[Equation]:
    """Those that read nothing of the others."""
    made = {v for eqn in equations for v in eqn.outvars}
    return [eqn for eqn in equations if made.isdisjoint(operands_of(eqn))]


def _place_others(forward: Sequence[Equation], layer_of: Mapping[Equation, int]) -> dict[Equation, int]:
    """The layer of every forward operation: of one beside the chain, that of its readers, `SHARED` if these are several."""
    readers: dict[Var, set[int]] = {}
    found: dict[Equation, int] = {}
    for eqn in reversed(forward):
        layers = {layer_of[eqn]} if eqn in layer_of else set[int]().union(*(readers.get(v, ()) for v in eqn.outvars))
        layers = layers if len(layers) == 1 else {SHARED}
        (found[eqn],) = layers
        for v in operands_of(eqn):
            readers.setdefault(v, set()).update(layers)
    return found


def _read_by_others(segments: Iterable[Segment]) -> Iterable[Var]:
    """What some segment reads and a forward does not make for itself."""
    for segment in segments:
        made = set(segment.made()) if segment.name.kind == "forward" else set()
        yield from (v for v in segment.reads if v not in made)

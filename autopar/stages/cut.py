"""Cut a step in microbatches into pipeline stages: forward, backward and update of each.

In: a `TimeLoop` and the places where its forward equations are cut. Out: a `StageCut`. Each of its segments has the equations of
one kind of work of one stage, and the values that it reads and writes. The rules:

    forward     body equations that depend on examples and parameters, in program order, cut at the given places
    backward    those under a transposition, and what depends on them: the stage of the cotangents among the operands, or the
                highest below it that has the others, because its forward makes or reads them
    update      epilogue equations: with the weight that they update; others with their largest operand; level k + 1 if an
                operand comes from level k of another stage, so that exchanges (a global norm) have an order
    anywhere    what depends on no example or on no parameter is computed again in each segment that reads it, unless it is
                heavy or random: then it belongs to the first segment that reads it

A scan over layers has been divided before (`split_scans.py`), and its pieces are links of the chain like other equations. A leaf
lives on the first stage that uses it; it is lent to other stages (tied weights). What can go wrong: a value that would flow
against the order of the stages; `check` refuses the cut and names it.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence

from autopar.compat import Var, source_line
from autopar.errors import PlanError
from autopar.microbatches.loop import TimeLoop
from autopar.program.program import Equation, operands_of, variables_of
from autopar.program.task_name import TaskName
from autopar.stages.dependence import Dependence, StagesOfValues
from autopar.stages.segments import Segment, StageCut, is_costly
from autopar.stages.updates import UpdatePlaces, place_updates


def cut_stages(loop: TimeLoop, cuts: Sequence[int]) -> StageCut:
    """Cut a step into `len(cuts) + 1` stages at ascending places in `forward_chain`. Raises PlanError."""
    return place_stages(loop, [sum(i >= c for c in cuts) for i in range(len(Dependence.of(loop).forward()))], {})


def place_stages(loop: TimeLoop, stages: Sequence[int], homes: Mapping[Var, int]) -> StageCut:
    """Cut a step into stages, given the stage of every equation in `forward_chain`. Raises PlanError.

    Args:
        loop: the step in microbatches.
        stages: the stage of each equation, from 0 to the highest.
        homes: the stages of leaves that do not live on the first stage that uses them.
    """
    return _StageCutter(loop, stages, homes).cut()


class _StageCutter:
    def __init__(self, loop: TimeLoop, stages: Sequence[int], homes: Mapping[Var, int]) -> None:
        self.loop, self.stages, self.homes = loop, tuple(stages), homes
        self.num_stages = max(stages, default=0) + 1
        self.kinds = Dependence.of(loop)
        self.prologue = {v: eqn for eqn in loop.plan.of_phase("prologue") for v in eqn.outvars}
        self.body_of = {v: eqn for eqn in self.kinds.body for v in eqn.outvars}
        self.segment_of: dict[Equation, TaskName] = {}

    def cut(self) -> StageCut:
        self._place_forward()
        self._place_backward()
        self._place_loners()
        homes = {**self._homes_of_the_body(), **self.homes}
        results = {r.var: self.segment_of[self.body_of[r.var]].stage for r in self.loop.results}
        updates = place_updates(self.loop, homes, prologue=self.prologue, results=results)
        self.segment_of |= updates.segment_of
        cut = StageCut(
            loop=self.loop,
            num_stages=self.num_stages,
            segments=self._segments(updates),
            made_by={v: name for eqn, name in self.segment_of.items() for v in eqn.outvars},
            homes=updates.homes,
        )
        check(cut)
        return cut

    def _place_forward(self) -> None:
        for stage, eqn in zip(self.stages, self.kinds.forward(), strict=True):
            self.segment_of[eqn] = TaskName("forward", stage)

    def _place_backward(self) -> None:
        """On the stage of the cotangents, or on a lower one if an operand of forward is only there."""
        where = StagesOfValues(self.kinds, self.segment_of)
        for eqn in self.kinds.body:
            if self.kinds.is_anchored(eqn) and eqn in self.kinds.backward:
                makers = [self.segment_of[e] for e in map(self.body_of.get, operands_of(eqn)) if e in self.segment_of]
                last = min((p.stage for p in makers if p.kind == "backward"), default=self.num_stages - 1)
                self.segment_of[eqn] = TaskName("backward", where.highest(eqn, last))
        self._sink_gradients(where)

    def _sink_gradients(self, where: StagesOfValues) -> None:
        """Move a gradient that no operand holds on a stage, as that of a bias, to its weight, if its operands are read there."""
        readers: dict[Var, list[Equation]] = {}
        # In the program's order, not a set's: several processes cut alike.
        backward = [eqn for eqn in self.kinds.body if eqn in self.kinds.backward and eqn in self.segment_of]
        for eqn in backward:
            for v in operands_of(eqn):
                readers.setdefault(v, []).append(eqn)
        home = self._stages_of_gradients(where)
        for eqn in backward:
            targets = [home[v] for v in eqn.outvars if v in home and v not in readers]
            if targets and max(targets) < self.segment_of[eqn].stage:
                for moved in self._reduced_there(eqn, max(targets), readers):
                    self.segment_of[moved] = TaskName("backward", max(targets))

    def _reduced_there(self, eqn: Equation, stage: int, readers: Mapping[Var, Sequence[Equation]]) -> list[Equation]:
        """An equation and those that only prepare its operand, if all that they need is read on a stage; else none."""
        chain = [eqn]
        while True:
            needed = [v for v in operands_of(chain[-1]) if v in self.body_of]
            if all(any(self.segment_of[e].stage == stage for e in readers[v]) for v in needed):
                return chain
            if len(needed) != 1 or len(readers[needed[0]]) > 1 or self.body_of[needed[0]] not in self.kinds.backward:
                return []
            chain.append(self.body_of[needed[0]])

    def _stages_of_gradients(self, where: StagesOfValues) -> dict[Var, int]:
        """For each gradient the lowest stage whose forward uses its weight."""
        return {v: min(stages) for v, weight in self.kinds.gradients.items() if (stages := where.of(weight))}

    def _place_loners(self) -> None:
        """Place heavy, random and collected operations that are not anchored with the first segment that reads them."""
        collected = {r.var for r in self.loop.results}
        readers: dict[Equation, set[TaskName]] = {}
        for eqn in reversed(self.kinds.body):
            segments = {self.segment_of[eqn]} if eqn in self.segment_of else readers.get(eqn, set())
            if eqn not in self.segment_of and (is_costly(eqn) or any(v in collected for v in eqn.outvars)):
                self.segment_of[eqn] = min(segments, key=self._order, default=TaskName("forward", 0))
                segments = {self.segment_of[eqn]}
            for v in operands_of(eqn):
                if v in self.body_of:
                    readers.setdefault(self.body_of[v], set()).update(segments)

    def _order(self, name: TaskName) -> tuple[int, int]:
        return (0, name.stage) if name.kind == "forward" else (1, -name.stage)

    def _homes_of_the_body(self) -> dict[Var, int]:
        """The first stage whose body reads a leaf, directly or through the prologue."""
        homes: dict[Var, int] = {}
        for eqn, name in self.segment_of.items():
            for v in self.closure([eqn]):
                homes[v] = min(homes.get(v, name.stage), name.stage)
        leaves = frozenset(self.loop.program.invars)
        return {v: home for v, home in homes.items() if v in leaves}

    def closure(self, equations: Iterable[Equation]) -> set[Var]:
        """Every value that equations need, down to leaves, through operations without a place and the prologue."""
        found: set[Var] = set()
        waiting = [v for eqn in equations for v in operands_of(eqn)]
        while waiting:
            v = waiting.pop()
            if v in found:
                continue
            found.add(v)
            maker = self.prologue.get(v) or self.body_of.get(v)
            if maker is not None and maker not in self.segment_of:
                waiting += operands_of(maker)
        return found

    def _segments(self, updates: UpdatePlaces) -> dict[TaskName, Segment]:
        names = [TaskName("forward", s) for s in range(self.num_stages)]
        if self.kinds.backward:
            names += [TaskName("backward", s) for s in range(self.num_stages)]
        names += sorted(updates.names)
        order = {eqn: i for i, eqn in enumerate((*self.kinds.body, *self.loop.plan.of_phase("epilogue")))}
        members: dict[TaskName, list[Equation]] = {name: [] for name in names}
        for eqn in order:
            if eqn in self.segment_of:
                members[self.segment_of[eqn]].append(eqn)
        anywhere = {v: eqn for eqn in order if eqn not in self.segment_of for v in eqn.outvars}
        for v in self._collected():
            anywhere.pop(v, None)
        outputs = {name: updates.outputs.get(name, ()) for name in names}
        full = {name: self._complete(members[name], outputs[name], anywhere) for name in names}
        wanted = {name: set(reads) for name, (_, reads) in full.items()}
        read = set().union(*wanted.values()) if wanted else set()
        results = {r.var: r for r in self.loop.results}
        segments = {}
        for name in names:
            equations, reads = full[name]
            own = [v for eqn in members[name] for v in eqn.outvars]
            passed_on = [v for v in own if v in read and (name.kind == "update" or not self._only_updates(v, wanted))]
            segments[name] = Segment(
                name=name,
                equations=tuple(sorted(equations, key=order.__getitem__)),
                reads=tuple(reads),
                writes=tuple(passed_on),
                results=tuple(results[v] for v in own if v in results) if name.kind != "update" else (),
                outputs=outputs[name],
            )
        return segments

    def _only_updates(self, v: Var, wanted: Mapping[TaskName, set[Var]]) -> bool:
        """Whether only updates read a value: then it is collected, not passed on."""
        return all(name.kind == "update" for name, reads in wanted.items() if v in reads)

    def _complete(
        self, members: Sequence[Equation], outputs: Sequence[int], anywhere: Mapping[Var, Equation]
    ) -> tuple[set[Equation], list[Var]]:
        """(members and the equations they need that are computed anywhere; what is read from elsewhere)."""
        chosen = set(members)
        made = {v for eqn in members for v in eqn.outvars}
        reads: dict[Var, None] = {}
        waiting = collections.deque(v for eqn in members for v in operands_of(eqn))
        waiting += variables_of([self.loop.program.outvars[i] for i in outputs])
        while waiting:
            v = waiting.popleft()
            if v in made or v in reads:
                continue
            if v in anywhere:
                eqn = anywhere[v]
                chosen.add(eqn)
                made.update(eqn.outvars)
                waiting += operands_of(eqn)
            else:
                reads[v] = None
        return chosen, list(reads)

    def _collected(self) -> set[Var]:
        return {r.var for r in self.loop.results}


def check(cut: StageCut) -> None:
    """Raise PlanError for a value that would flow against the order of the segments."""

    def order(name: TaskName) -> tuple[int, int]:
        ranks = {"forward": (0, name.stage), "backward": (1, -name.stage), "update": (2, name.level)}
        return ranks[name.kind]

    for name, segment in cut.segments.items():
        for v in segment.reads:
            maker = cut.made_by.get(v)
            if maker is not None and order(maker) > order(name):
                (eqn,) = (e for e in cut.loop.program.equations if v in e.outvars)
                raise PlanError(
                    f"this step cannot be cut into {cut.num_stages} stages here: {name} needs a value of {maker}, which comes "
                    f"later: {eqn.primitive.name} at {source_line(eqn) or 'an unknown line'}. Use fewer stages."
                )

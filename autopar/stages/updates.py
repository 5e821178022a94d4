"""The part of a step after the loop over microbatches, in stages: where each operation of the epilogue runs, and in which order.

In: the stages of the values that forward and backward make. Out: `UpdatePlaces`: a stage and a level for the operations of the
epilogue, and the stage where each leaf lives. The rules are in `stages/cut.py`. What can go wrong: two stages make a value; the
first one counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autopar.avals import bytes_of
from autopar.compat import Literal as JaxLiteral
from autopar.compat import Var
from autopar.microbatches.loop import TimeLoop
from autopar.program.program import Equation, operands_of
from autopar.program.task_name import TaskName
from autopar.stages.segments import first_call

SCALAR_BYTES = 8
"""Values of at most this size follow what they are computed from."""
SMALL_BYTES = 1024
"""Up to this size a value of the update is computed on every stage that reads it rather than sent."""


@dataclasses.dataclass(frozen=True, eq=False)
class UpdatePlaces:
    """Where the epilogue runs.

    `segment_of`: the update of each operation that has a place; the others are computed wherever they are read. `outputs`: the
    numbers of the step's outputs that each update returns. `homes`: the stage where each leaf lives. `names`: all updates.
    """

    segment_of: Mapping[Equation, TaskName]
    outputs: Mapping[TaskName, tuple[int, ...]]
    homes: Mapping[Var, int]
    names: frozenset[TaskName]


def place_updates(
    loop: TimeLoop, homes: Mapping[Var, int], *, prologue: Mapping[Var, Equation], results: Mapping[Var, int]
) -> UpdatePlaces:
    """Stages by weights and the largest operands, levels by exchanges.

    Args:
        loop: the step in microbatches.
        homes: the stages of leaves that are known already.
        prologue: the operations of the prologue, by their results.
        results: the stages of the values that leave the body.
    """
    return _UpdatePlacer(loop, homes, prologue=prologue, results=results).place()


class _UpdatePlacer:
    def __init__(
        self,
        loop: TimeLoop,
        homes: Mapping[Var, int],
        *,
        prologue: Mapping[Var, Equation],
        results: Mapping[Var, int],
    ) -> None:
        self.loop, self.prologue, self._results = loop, prologue, results
        self.equations = self.loop.plan.of_phase("epilogue")
        self.homes = dict(homes)
        self.stage_of: dict[Equation, int] = {}
        self._maker = {v: eqn for eqn in self.equations for v in eqn.outvars}
        self._leaves = frozenset(self.loop.program.invars)

    def place(self) -> UpdatePlaces:
        """Weights first, then what is made for them, then the rest."""
        self._follow_weights()
        self._serve_weights()
        for eqn in self.equations:
            if eqn not in self.stage_of:
                self._follow_operands(eqn)
        self._follow_users()
        self._place_what_depends()
        self._find_homes()
        levels = self._find_levels()
        segment_of = {eqn: TaskName("update", self.stage_of[eqn], level) for eqn, level in levels.items()}
        outputs = self._place_outputs(segment_of)
        finishing = {TaskName("update", stage) for stage in self._results.values()}
        return UpdatePlaces(segment_of, outputs, self.homes, frozenset({*segment_of.values(), *finishing, *outputs}))

    def _known(self, v: Var) -> int | None:
        if v in self._results:
            return self._results[v]
        if v in self._maker:
            return self.stage_of.get(self._maker[v])
        return self.homes.get(self._leaf_of(v)) if v.aval.shape else None

    def _leaf_of(self, v: Var) -> Var:
        """The largest leaf from which the prologue makes a value, such as the weight that it copies."""
        while v in self.prologue and (operands := operands_of(self.prologue[v])):
            v = max(operands, key=bytes_of)
        return v

    def _follow_weights(self) -> None:
        """Place operations whose largest operand is a weight, or made from one, where the weight lives."""
        for eqn in self.equations:
            operands = operands_of(eqn)
            largest = max(map(bytes_of, operands), default=0.0)
            weights = [v for v in operands if v not in self._results and bytes_of(v) == largest]
            stages = [s for v in weights if (s := self._known(v)) is not None]
            if stages and largest > SCALAR_BYTES:
                self.stage_of[eqn] = min(stages)

    def _serve_weights(self) -> None:
        """Going back, place the makers of an operation's largest operands where the operation is."""
        wanted: dict[Var, int] = {}
        for eqn in reversed(self.equations):
            if eqn not in self.stage_of:
                stages = [wanted[v] for v in eqn.outvars if v in wanted]
                if stages:
                    self.stage_of[eqn] = min(stages)
            if eqn in self.stage_of:
                largest = max(map(bytes_of, operands_of(eqn)), default=0.0)
                for v in operands_of(eqn):
                    if bytes_of(v) == largest > SCALAR_BYTES:
                        wanted.setdefault(v, self.stage_of[eqn])

    def _follow_operands(self, eqn: Equation) -> None:
        known = [(bytes_of(v), -s) for v in operands_of(eqn) if (s := self._known(v)) is not None]
        unknown = max((bytes_of(v) for v in operands_of(eqn) if self._known(v) is None), default=0.0)
        if known and max(known)[0] >= unknown:
            self.stage_of[eqn] = -max(known)[1]
        elif first_call(eqn) is not None:  # only what has a place is done once
            self.stage_of[eqn] = -max(known)[1] if known else 0

    def _follow_users(self) -> None:
        """Place large values that are made of leaves alone where they are used; small ones are computed anywhere."""
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
                depends = any(self._known(v) is not None for v in operands_of(eqn))
                if stages and (depends or max(map(bytes_of, eqn.outvars)) > SMALL_BYTES):
                    self.stage_of[eqn] = min(stages)
                elif depends:
                    self.stage_of[eqn] = min(s for v in operands_of(eqn) if (s := self._known(v)) is not None)
            if eqn in self.stage_of:
                for v in operands_of(eqn):
                    wanted.setdefault(v, self.stage_of[eqn])

    def _place_what_depends(self) -> None:
        """Place everything that depends on a placed value, so that it has a level; only what is made of leaves has no place."""
        for eqn in self.equations:
            if eqn not in self.stage_of:
                stages = [s for v in operands_of(eqn) if (s := self._known(v)) is not None]
                if stages:
                    self.stage_of[eqn] = min(stages)

    def _find_homes(self) -> None:
        for eqn in self.equations:
            for v in operands_of(eqn):
                if v not in self.homes and eqn in self.stage_of and self._is_leaf(v):
                    self.homes[v] = self.stage_of[eqn]
        for number, returned in enumerate(self.loop.program.outvars):
            source = self.loop.traced.state_of_output[number]
            if source is None or isinstance(returned, JaxLiteral):  # a flag of the state that the step only ever sets
                continue
            if returned in self._maker and self._maker[returned] in self.stage_of:
                self.homes.setdefault(self.loop.program.invars[source], self.stage_of[self._maker[returned]])
        for v in self.loop.program.invars:
            self.homes.setdefault(v, 0)

    def _is_leaf(self, v: Var) -> bool:
        return v in self._leaves

    def _find_levels(self) -> dict[Equation, int]:
        """As early as exchanges allow if other stages read the results; else with the readers, so that state stays in place."""
        levels = self._first_levels()
        readers: dict[Var, list[Equation]] = {}
        for eqn in self.equations:
            for v in operands_of(eqn) if eqn in self.stage_of else ():
                readers.setdefault(v, []).append(eqn)
        for eqn in reversed(self.equations):
            if eqn in self.stage_of:
                users = [user for v in eqn.outvars for user in readers.get(v, ())]
                if users and all(self.stage_of[user] == self.stage_of[eqn] for user in users):
                    levels[eqn] = min(levels[user] for user in users)
        return levels

    def _first_levels(self) -> dict[Equation, int]:
        """For every equation with a place, the least number of exchanges before it."""
        levels: dict[Equation, int] = {}
        for eqn in self.equations:
            stage = self.stage_of.get(eqn)
            if stage is None:
                continue
            level = 0
            for v in operands_of(eqn):
                maker = self._maker.get(v)
                source = self._results.get(v) if maker is None else self.stage_of.get(maker)
                if source is not None:
                    level = max(level, (0 if maker is None else levels[maker]) + (source != stage))
            levels[eqn] = level
        return levels

    def _place_outputs(self, segment_of: Mapping[Equation, TaskName]) -> dict[TaskName, tuple[int, ...]]:
        outputs: dict[TaskName, tuple[int, ...]] = {}
        for number, v in enumerate(self.loop.program.outvars):
            source = self.loop.traced.state_of_output[number]
            name = TaskName("update", 0 if source is None else self.homes[self.loop.program.invars[source]])
            if not isinstance(v, JaxLiteral):
                if v in self._maker and self._maker[v] in segment_of:
                    name = segment_of[self._maker[v]]
                elif v in self._results:
                    name = TaskName("update", self._results[v])
            outputs[name] = (*outputs.get(name, ()), number)
        return outputs

"""Stages whose programs differ by the names of their leaves and the values of literals alone, found before they are traced.

In: what goes into a stage and comes out of it. Out: a key that equal stages share, and how the stages that send to the one
correspond to those that send to the other. What can go wrong: nothing is lost where two equal stages are told apart; they are
planned twice. Two stages that are taken for equal and are not would get one plan; restoring it compares the programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence

from autopar.compat import Literal as JaxLiteral
from autopar.compat import Var
from autopar.microbatches.loop import Result
from autopar.program.fingerprint import aval_key, signature
from autopar.program.program import Atom, Equation
from autopar.stages.segments import Segment
from autopar.stages.tasks.ports import Port, StagePorts


def key_of_stage(stage: StagePorts) -> Hashable:
    """The same for equal stages, also of a step that is cut in several ways."""
    return _Key(stage).make()


def match_senders(one: StagePorts, other: StagePorts) -> Mapping[int, int] | None:
    """For each stage whose microbatches `one` receives, the stage from which `other` gets the same; None if there is no such map.

    The stages are equal.
    """
    found = {one.stage: other.stage}
    for port, same in zip(one.inputs, other.inputs, strict=True):
        if (
            port.maker is not None
            and same.maker is not None
            and found.setdefault(port.maker.stage, same.maker.stage) != same.maker.stage
        ):
            return None
    return found


class _Key:
    """All that decides what program a stage has, with variables numbered in order of appearance."""

    def __init__(self, ports: StagePorts) -> None:
        self.ports, self.loop = ports, ports.cut.loop
        self.assignment = ports.cut.loop.plan.assignment
        self.numbers: dict[Var, int] = {}

    def make(self) -> Hashable:
        """The key."""
        ports, before = self.ports, self.ports.made_before()
        leaves = (dataclasses.replace(leaf, path="") for leaf in ports.leaves())
        inputs = tuple((self._port(port), leaf) for port, leaf in zip(ports.inputs, leaves, strict=True))
        prologue = self._equations(self.loop.prologue_equations(before))
        made = self._atoms(self.loop.prologue_order(before))
        segments = tuple(map(self._segment, ports.segments))
        outputs = tuple((self._port(port), self._is_weak(port)) for port in ports.outputs)
        return inputs, prologue, made, segments, outputs, ports.state_of_output()

    def _port(self, port: Port) -> Hashable:
        maker = port.maker and (port.maker.kind, port.maker.level)
        layout = (
            None if isinstance(port.var, JaxLiteral) else self.ports.layouts.get(port.var)
        )  # a step may return a literal
        return port.source, self._atom(port.var), maker, layout

    def _is_weak(self, port: Port) -> bool:
        return port.output is not None and self.loop.traced.outputs[port.output].weak_type

    def _segment(self, segment: Segment) -> Hashable:
        """The work of a task, what it reads and writes, what it collects, and what it returns."""
        return (
            (segment.name.kind, segment.name.level),
            self._atoms(segment.reads),
            self._equations(segment.equations),
            tuple(segment.late.get(eqn) and self._atom(segment.late[eqn]) for eqn in segment.equations),
            self._atoms(segment.writes),
            tuple(map(self._result, segment.results)),
            self._atoms([self.loop.program.outvars[i] for i in segment.outputs]),
        )

    def _result(self, result: Result) -> Hashable:
        return result.monoid, result.dim, result.single, self._atom(result.var)

    def _equations(self, equations: Sequence[Equation]) -> Hashable:
        """Operations, what they wait for, and how they are divided among microbatches."""
        body = signature(equations, self.numbers, literals=False)
        waits = tuple(eqn.after and self._atom(eqn.after) for eqn in equations)
        return body, waits, tuple(self._strategy(inner) for eqn in equations for inner in _walk(eqn))

    def _strategy(self, eqn: Equation) -> Hashable:
        strategy = self.assignment.strategies.get(eqn)
        return strategy and (strategy.inputs, strategy.outputs), self.assignment.joins.get(eqn)

    def _atoms(self, atoms: Sequence[Atom]) -> Hashable:
        return tuple(map(self._atom, atoms))

    def _atom(self, atom: Atom) -> Hashable:
        if isinstance(atom, JaxLiteral):
            return "literal", aval_key(atom)
        return self.numbers.setdefault(atom, len(self.numbers)), aval_key(atom)


def _walk(eqn: Equation) -> Iterator[Equation]:
    """An equation, and those nested in it."""
    yield eqn
    for region in eqn.regions:
        yield from region.walk()

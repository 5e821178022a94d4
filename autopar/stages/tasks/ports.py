"""What goes into one pipeline stage, and what comes out of it.

In: a `StageCut` and the number of a stage. Out: `StagePorts`, the inputs and outputs of the stage's program with their shapes and
names, known before the program is traced. Nothing can go wrong here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, cast

import jax

from autopar.compat import Literal as JaxLiteral
from autopar.compat import Var
from autopar.layouts.mesh import Layout
from autopar.program.step import Leaf
from autopar.program.task_name import TaskName
from autopar.stages.segments import Segment, StageCut

Source = Literal["leaf", "lent", "rows", "received", "exchanged"]


@dataclasses.dataclass(frozen=True, eq=False)
class Port:
    """One input or output of a stage's program.

    source: leaf (lives here), lent (lives on another stage), rows (slices of the batch), received (made by another stage's
    forward or backward, stacked over microbatches), exchanged (made once by another stage's update or loop). `maker`: the
    segment that makes it; none makes a leaf. `output`: its number among the step's outputs, if it is one.
    """

    source: Source
    var: Var
    maker: TaskName | None = None
    output: int | None = None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StagePorts:
    """The inputs and outputs of one stage, in the order in which its program has them."""

    cut: StageCut
    stage: int
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of the stage: forward, backward, updates by level."""
        return self.cut.of_stage(self.stage)

    @property
    def body(self) -> list[Segment]:
        """Those that run for every microbatch."""
        return [segment for segment in self.segments if segment.name.in_loop]

    @property
    def updates(self) -> list[Segment]:
        """Those that run once a step."""
        return [segment for segment in self.segments if not segment.name.in_loop]

    @property
    def microbatches(self) -> int:
        """Their number."""
        return self.cut.loop.plan.microbatches

    @functools.cached_property
    def layouts(self) -> dict[Var, Layout]:
        """The layout over time of every value that the loop makes."""
        return self.cut.loop.layouts()

    @functools.cached_property
    def leaf_of(self) -> dict[Var, Leaf]:
        """The leaves of the whole step."""
        return dict(zip(self.cut.loop.program.invars, self.cut.loop.traced.inputs, strict=True))

    def made_before(self) -> set[Var]:
        """What the stage needs of the prologue."""
        outvars = self.cut.loop.program.outvars
        wanted = {v for segment in self.segments for v in segment.reads}
        wanted |= {v for s in self.updates for i in s.outputs if not isinstance(v := outvars[i], JaxLiteral)}
        return wanted & self.cut.loop.prologue_values()

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and types of the inputs."""
        return [self._aval(port) for port in self.inputs]

    def leaves(self) -> tuple[Leaf, ...]:
        """The inputs as leaves."""
        return tuple(self._leaf(port, self._aval(port)) for port in self.inputs)

    def state_of_output(self) -> tuple[int | None, ...]:
        """For each output the number of the input whose place it takes."""
        numbers = {port.var: i for i, port in enumerate(self.inputs) if port.source == "leaf"}
        traced, program = self.cut.loop.traced, self.cut.loop.program
        sources = [None if port.output is None else traced.state_of_output[port.output] for port in self.outputs]
        return tuple(None if source is None else numbers.get(program.invars[source]) for source in sources)

    def output_leaf(self, port: Port, aval: jax.ShapeDtypeStruct) -> Leaf:
        """An output of this shape and type as a leaf."""
        is_stack = port.source == "received"
        microbatches = self.microbatches if is_stack else 1
        weak = port.output is not None and self.cut.loop.traced.outputs[port.output].weak_type
        return Leaf(
            path=self.path(port),
            role="output",
            shape=tuple(aval.shape),
            dtype=aval.dtype,
            microbatches=microbatches,
            streamed=is_stack,
            weak_type=weak,
        )

    def path(self, port: Port) -> str:
        """The name of a port: the path of its leaf, or what makes it."""
        if port.output is not None:
            return self.cut.loop.traced.outputs[port.output].path
        if port.source in ("leaf", "lent", "rows"):
            return self.leaf_of[port.var].path
        return f"{port.source} {port.var.aval.str_short()} of {port.maker}"

    def _leaf(self, port: Port, aval: jax.ShapeDtypeStruct) -> Leaf:
        if port.source in ("received", "exchanged"):
            microbatches = self.microbatches if port.source == "received" else 1
            shape = tuple(aval.shape)
            is_stack = port.source == "received"
            return Leaf(
                path=self.path(port),
                role="other",
                shape=shape,
                dtype=aval.dtype,
                microbatches=microbatches,
                streamed=is_stack,
                from_forward=is_stack and port.maker is not None and port.maker.kind == "forward",
            )
        leaf = self.leaf_of[port.var]
        microbatches = self.microbatches if port.source == "rows" else 1
        donated = leaf.donated and port.source == "leaf"
        return dataclasses.replace(leaf, shape=tuple(aval.shape), microbatches=microbatches, donated=donated)

    def _aval(self, port: Port) -> jax.ShapeDtypeStruct:
        aval = port.var.aval
        weak = bool(getattr(aval, "weak_type", False))
        shape = tuple(aval.shape)
        if port.source == "rows":
            shape = (self.microbatches, shape[0] // self.microbatches, *shape[1:])
        elif port.source == "received":
            shape = (self.microbatches, *self.layouts[port.var].local_shape(shape, self.cut.loop.mesh))
        return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=weak)


def find_ports(cut: StageCut, stage: int) -> StagePorts:
    """What goes into a stage of a step that is cut, and what comes out."""
    finder = _Finder(cut, stage)
    return StagePorts(cut=cut, stage=stage, inputs=finder.find_inputs(), outputs=finder.find_outputs())


class _Finder:
    def __init__(self, cut: StageCut, stage: int) -> None:
        self.cut, self.stage, self.loop = cut, stage, cut.loop
        self.segments = cut.of_stage(stage)
        self.body = [segment for segment in self.segments if segment.name.in_loop]
        self.updates = [segment for segment in self.segments if not segment.name.in_loop]
        self.leaf_of = dict(zip(cut.loop.program.invars, cut.loop.traced.inputs, strict=True))

    def _needed(self) -> list[Var]:
        """Leaves that the stage reads, directly or through the prologue, and those that live here."""
        leaves = self.cut.leaves_of(self.stage)
        here = [v for v in self.leaf_of if self.cut.homes[v] == self.stage and self.leaf_of[v].role != "batch"]
        return [v for v in self.loop.program.invars if v in leaves or v in here]

    def find_inputs(self) -> tuple[Port, ...]:
        """Leaves, and what other stages make."""
        ports = []
        for v in self._needed():
            if v in self.loop.sliced:
                ports.append(Port("rows", v))
            else:
                at_home = self.cut.homes[v] == self.stage or self.leaf_of[v].role in ("batch", "const")
                ports.append(Port("leaf" if at_home else "lent", v))
        ports += [Port("received", v, self.cut.made_by[v]) for v in self._made_elsewhere(self.body)]
        ports += [Port("exchanged", v, self.cut.made_by[v]) for v in self._made_elsewhere(self.updates)]
        return tuple(ports)

    def _made_elsewhere(self, segments: Sequence[Segment]) -> list[Var]:
        """What segments read of other stages."""
        reads = dict.fromkeys(v for segment in segments for v in segment.reads)
        return [v for v in reads if v in self.cut.made_by and self.cut.made_by[v].stage != self.stage]

    def find_outputs(self) -> tuple[Port, ...]:
        """What other stages read, and the step's own outputs."""
        elsewhere = [segment for segment in self.cut.segments.values() if segment.name.stage != self.stage]
        read = {v for segment in elsewhere for v in segment.reads}
        read_by_updates = {v for segment in elsewhere if segment.name.kind == "update" for v in segment.reads}
        ports = [
            Port("received" if segment.name.in_loop else "exchanged", v, segment.name)
            for segment in self.segments
            for v in segment.writes
            if v in read
        ]
        ports += [
            Port("exchanged", result.var, self._finisher().name)
            for segment in self.body
            for result in segment.results
            if result.var in read_by_updates
        ]
        for segment in self.updates:
            # A step may return a literal; nobody looks for the port that has it.
            ports += [Port("leaf", cast(Var, self.loop.program.outvars[i]), segment.name, i) for i in segment.outputs]
        return tuple(ports)

    def _finisher(self) -> Segment:
        """The first update: it finishes what the loop has collected."""
        return next(segment for segment in self.updates if segment.name.level == 0)

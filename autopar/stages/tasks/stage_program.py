"""One pipeline stage as a step of its own, to be planned like any other.

In: a `StageCut` and the number of a stage. Out: a `StageProgram`: a `TracedStep` that computes what the stage computes in a whole
step, with everything that other stages send as inputs and everything that they need as outputs,

    prologue;  for t in 0..m-1: forward(t), backward(t);  updates

so that one strategy graph holds all layouts of the stage: of its weights, of what forward leaves for backward, of the
accumulators. Operations carry the name of their segment (`Equation.task`), by which `execution/stage_tasks.py` takes the
planned stage apart again. What can go wrong: a value that is partial over time cannot be sent whole; it travels as the term
of its microbatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, cast

import jax
import jax.numpy as jnp

from autopar.compat import Literal as JaxLiteral
from autopar.compat import Var
from autopar.intra_op.lowering.per_device import Placed
from autopar.layouts.mesh import Layout
from autopar.microbatches.loop import StepLowering, TimeLoop
from autopar.program.fingerprint import fingerprint_of
from autopar.program.from_jaxpr import program_of
from autopar.program.step import Leaf, TracedStep
from autopar.program.tags import tag_operations
from autopar.program.task_name import TaskName
from autopar.program.walk import Scope
from autopar.stages.segments import Segment, StageCut

Arrays = Sequence[jax.Array]
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
class StageProgram:
    """See the module's text. `step.inputs` follow `inputs`, `step.outputs` follow `outputs`."""

    stage: int
    cut: StageCut
    step: TracedStep
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


def trace_stage(cut: StageCut, stage: int) -> StageProgram:
    """Trace the program of one stage of a step that is cut."""
    return _Tracer(cut, stage).trace()


class _Tracer:
    def __init__(self, cut: StageCut, stage: int) -> None:
        self.cut, self.stage = cut, stage
        self.loop: TimeLoop = cut.loop
        self.microbatches = cut.loop.plan.microbatches
        self.layouts = cut.loop.layouts()
        self.segments = cut.of_stage(stage)
        self.body = [segment for segment in self.segments if segment.name.in_loop]
        self.updates = [segment for segment in self.segments if not segment.name.in_loop]
        self.leaf_of = dict(zip(cut.loop.program.invars, cut.loop.traced.inputs, strict=True))
        self.results = {r.var: r for r in cut.loop.results}
        self.known = cut.loop.prologue_values()
        self.inputs = self._input_ports()
        self.outputs = self._output_ports()

    # What goes in and out.

    def _needed(self) -> list[Var]:
        """Leaves that the stage reads, directly or through the prologue, and those that live here."""
        leaves = self.cut.leaves_of(self.stage)
        here = [v for v in self.leaf_of if self.cut.homes[v] == self.stage and self.leaf_of[v].role != "batch"]
        return [v for v in self.loop.program.invars if v in leaves or v in here]

    def _input_ports(self) -> tuple[Port, ...]:
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

    def _output_ports(self) -> tuple[Port, ...]:
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

    # Tracing.

    def trace(self) -> StageProgram:
        avals = [self._aval(port) for port in self.inputs]
        closed, shapes = jax.make_jaxpr(self._run, return_shape=True)(*avals)
        program, constants = program_of(closed)
        numbers = {port.var: i for i, port in enumerate(self.inputs) if port.source == "leaf"}
        sources = [self._source(port, numbers) for port in self.outputs]
        leaves = tuple(self._leaf(port, aval) for port, aval in zip(self.inputs, avals, strict=True))
        added = tuple(
            Leaf(path=f"constant/{i}", role="const", shape=tuple(v.aval.shape), dtype=v.aval.dtype)
            for i, v in enumerate(program.invars[len(leaves) :])
        )
        step = TracedStep(
            program=program,
            constants=constants,
            in_tree=jax.tree.structure(tuple(avals)),
            out_tree=jax.tree.structure(tuple(shapes)),
            inputs=(*leaves, *added),
            outputs=tuple(self._output_leaf(p, s) for p, s in zip(self.outputs, shapes, strict=True)),
            state_of_output=tuple(sources),
            fingerprint=fingerprint_of(program),
            microbatches=self.microbatches,
        )
        return StageProgram(stage=self.stage, cut=self.cut, step=step, inputs=self.inputs, outputs=self.outputs)

    def _source(self, port: Port, numbers: Mapping[Var, int]) -> int | None:
        if port.output is None:
            return None
        source = self.loop.traced.state_of_output[port.output]
        return None if source is None else numbers.get(self.loop.program.invars[source])

    def _path(self, port: Port) -> str:
        if port.output is not None:
            return self.loop.traced.outputs[port.output].path
        return f"{port.source} {port.var.aval.str_short()} of {port.maker}"

    def _leaf(self, port: Port, aval: jax.ShapeDtypeStruct) -> Leaf:
        if port.source in ("received", "exchanged"):
            microbatches = self.microbatches if port.source == "received" else 1
            shape = tuple(aval.shape)
            is_stack = port.source == "received"
            return Leaf(
                path=self._path(port),
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

    def _output_leaf(self, port: Port, aval: jax.ShapeDtypeStruct) -> Leaf:
        is_stack = port.source == "received"
        microbatches = self.microbatches if is_stack else 1
        weak = port.output is not None and self.loop.traced.outputs[port.output].weak_type
        return Leaf(
            path=self._path(port),
            role="output",
            shape=tuple(aval.shape),
            dtype=aval.dtype,
            microbatches=microbatches,
            streamed=is_stack,
            weak_type=weak,
        )

    def _aval(self, port: Port) -> jax.ShapeDtypeStruct:
        aval = port.var.aval
        weak = bool(getattr(aval, "weak_type", False))
        shape = tuple(aval.shape)
        if port.source == "rows":
            shape = (self.microbatches, shape[0] // self.microbatches, *shape[1:])
        elif port.source == "received":
            shape = (self.microbatches, *self._one(port.var))
        return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=weak)

    def _one(self, var: Var) -> tuple[int, ...]:
        """Shape of a body value in one microbatch."""
        return self.layouts[var].local_shape(tuple(var.aval.shape), self.loop.mesh)

    def _run(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        given = dict(zip(((p.source, p.var) for p in self.inputs), arrays, strict=True))
        once = {v: x for (source, v), x in given.items() if source in ("leaf", "lent")}
        rows = {v: x for (source, v), x in given.items() if source == "rows"}
        received = {v: x for (source, v), x in given.items() if source == "received"}
        exchanged = {v: x for (source, v), x in given.items() if source == "exchanged"}
        once = self._prologue(once, rows)
        collected, sent = self._loop(once, rows, received)
        made, returned = self._updates(once, exchanged, collected)
        return tuple(
            returned[port.output]
            if port.output is not None
            else (sent if port.source == "received" else made)[port.var]
            for port in self.outputs
        )

    def _prologue(self, once: Mapping[Var, jax.Array], rows: Mapping[Var, jax.Array]) -> dict[Var, jax.Array]:
        wanted = {v for segment in self.segments for v in segment.reads}
        wanted |= {v for s in self.updates for i in s.outputs if isinstance(v := self.loop.program.outvars[i], Var)}
        wanted = {v for v in wanted if v in self.known}
        names, values = list(once), list(once.values())
        stacks = list(rows)

        def compute(*arrays: jax.Array) -> Arrays:
            leaves = dict(zip(names, arrays, strict=False))
            whole = {v: jnp.reshape(x, v.aval.shape) for v, x in zip(stacks, arrays[len(names) :], strict=True)}
            found = self.loop.prologue_of(wanted, {**leaves, **whole})
            return [found[v] for v in computed]

        computed = self.loop.prologue_order(wanted)
        results = tag_operations(compute, TaskName("prologue", self.stage))(*values, *rows.values())
        return {**once, **dict(zip(computed, results, strict=True))}

    def _loop(
        self,
        once: Mapping[Var, jax.Array],
        rows: Mapping[Var, jax.Array],
        received: Mapping[Var, jax.Array],
    ) -> tuple[dict[Var, jax.Array], dict[Var, jax.Array]]:
        """All microbatches: what they add up or collect, by variable, and what they send, stacked."""
        terms = [r for segment in self.body for r in segment.results if r.monoid]
        slices = [r for segment in self.body for r in segment.results if not r.monoid]
        sends = [port.var for port in self.outputs if port.source == "received"]

        def one(
            accumulators: list[jax.Array], step: tuple[jax.Array, list[jax.Array], list[jax.Array]]
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            number, these_rows, these_received = step
            values = {v: Placed(x, _rows_of(v)) for v, x in zip(rows, these_rows, strict=True)}
            values |= {v: Placed(x, self.layouts[v]) for v, x in zip(received, these_received, strict=True)}
            held = {r.var: a for r, a in zip(terms, accumulators, strict=True)}
            for segment in self.body:
                made, summed = self._segment(segment, number, once, values, held)
                values |= made
                held |= summed
            return [held[r.var] for r in terms], [values[v].array for v in (*sends, *(r.var for r in slices))]

        if not self.body:
            return {}, {}
        numbers = jnp.arange(self.microbatches, dtype=jnp.int32)
        start = [r.initial() for r in terms]
        xs = (numbers, list(rows.values()), list(received.values()))
        accumulators, stacks = jax.lax.scan(one, start, xs)
        collected = {r.var: a for r, a in zip(terms, accumulators, strict=True)}
        collected |= {r.var: x for r, x in zip(slices, stacks[len(sends) :], strict=True)}
        return collected, dict(zip(sends, stacks, strict=False))

    def _segment(
        self,
        segment: Segment,
        number: jax.Array,
        once: Mapping[Var, jax.Array],
        values: Mapping[Var, Placed],
        held: Mapping[Var, jax.Array],
    ) -> tuple[dict[Var, Placed], dict[Var, jax.Array]]:
        """Forward or backward of one microbatch, traced under its name: what it makes for others, and the new accumulators.

        `once`: whole values; `values`: those of the microbatch; `held`: the accumulators so far.
        """
        whole = {v: once[v] for v in segment.reads if v in once}
        moving = {v: values[v] for v in segment.reads if v in values}
        terms = [r for r in segment.results if r.monoid]
        slices = [r for r in segment.results if not r.monoid]
        writes = [*dict.fromkeys((*segment.writes, *(r.var for r in slices)))]

        def compute(number: jax.Array, fixed: Arrays, parts: Arrays, accumulators: Arrays) -> tuple[Arrays, Arrays]:
            lowering = StepLowering(self.loop.plan, number)
            scope = Scope(lowering, {v: Placed(x, _whole(v)) for v, x in zip(whole, fixed, strict=True)})
            scope.values.update((v, Placed(x, p.layout)) for (v, p), x in zip(moving.items(), parts, strict=True))
            scope.run(segment.equations)
            summed = [
                r.add(a, lowering.move_to(scope.values[r.var], r.layout, r.var.aval))
                for r, a in zip(terms, accumulators, strict=True)
            ]
            return [scope.values[v].array for v in writes], summed

        made, summed = tag_operations(compute, segment.name)(
            number, list(whole.values()), [p.array for p in moving.values()], [held[r.var] for r in terms]
        )
        placed = {v: Placed(x, self.layouts[v]) for v, x in zip(writes, made, strict=True)}
        return placed, {r.var: a for r, a in zip(terms, summed, strict=True)}

    def _updates(
        self,
        once: Mapping[Var, jax.Array],
        exchanged: Mapping[Var, jax.Array],
        collected: Mapping[Var, jax.Array],
    ) -> tuple[dict[Var, jax.Array], dict[int, jax.Array]]:
        """Values of the updates by variable, and the step's outputs by number."""
        known = {**once, **exchanged}
        made: dict[Var, jax.Array] = {}
        returned: dict[int, jax.Array] = {}
        for segment in self.updates:
            found, outputs = self._update(segment, {**known, **made}, collected if segment.name.level == 0 else {})
            made |= found
            returned |= outputs
        return made, returned

    def _update(
        self, segment: Segment, known: Mapping[Var, jax.Array], collected: Mapping[Var, jax.Array]
    ) -> tuple[dict[Var, jax.Array], dict[int, jax.Array]]:
        """One update, traced under its name, which finishes what the loop has collected: its values, and the step's outputs."""
        reads = [v for v in self._reads_of(segment) if v in known]
        made = [*collected, *segment.made()]

        def compute(finishing: Arrays, arrays: Arrays) -> tuple[Arrays, Arrays]:
            lowering = StepLowering(self.loop.plan, 0)
            scope = Scope(lowering, {v: Placed(x, _whole(v)) for v, x in zip(reads, arrays, strict=True)})
            finished = {v: self.results[v].finish(x) for v, x in zip(collected, finishing, strict=True)}
            scope.values.update((v, Placed(x, _whole(v))) for v, x in finished.items())
            scope.run(segment.equations)
            return [scope.values[v].array for v in made], [self._output(i, scope) for i in segment.outputs]

        values, outputs = tag_operations(compute, segment.name)(list(collected.values()), [known[v] for v in reads])
        return dict(zip(made, values, strict=True)), dict(zip(segment.outputs, outputs, strict=True))

    def _reads_of(self, segment: Segment) -> list[Var]:
        outvars = [self.loop.program.outvars[i] for i in segment.outputs]
        wanted = [*segment.reads, *(v for v in outvars if not isinstance(v, JaxLiteral))]
        return list(dict.fromkeys(wanted))

    def _output(self, number: int, scope: Scope[Placed]) -> jax.Array:
        atom = self.loop.program.outvars[number]
        return jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, JaxLiteral) else scope.values[atom].array


def _whole(var: Var) -> Layout:
    return Layout.replicated(len(var.aval.shape))


def _rows_of(var: Var) -> Layout:
    return Layout(((0,), *((),) * (len(var.aval.shape) - 1)))

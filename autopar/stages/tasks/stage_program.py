"""One pipeline stage as a step of its own, to be planned like any other.

In: a `StageCut` and the number of a stage. Out: a `StageProgram`: a `TracedStep` that computes what the stage computes in a whole
step, with everything that other stages send as inputs and everything that they need as outputs,

    prologue;  for t in 0..m-1: forward(t), backward(t);  updates

so that one strategy graph holds all layouts of the stage: of its weights, of what forward leaves for backward, of the
accumulators. Operations carry the name of their piece (`Equation.task`), by which `execution/stage_tasks.py` takes the
planned stage apart again. What can go wrong: a value that is partial over time cannot be sent whole; it travels as the term
of its microbatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from autopar.compat import Literal as JaxLiteral
from autopar.compat import Var
from autopar.intra_op.lowering.per_device import Placed
from autopar.layouts.mesh import Layout
from autopar.microbatches.loop import StepLowering, TimeLoop
from autopar.program.fingerprint import fingerprint_of
from autopar.program.from_jaxpr import program_of, task_scope
from autopar.program.step import Leaf, TracedStep
from autopar.program.walk import Scope
from autopar.stages.segments import PieceName, Segment, StageCut

Source = Literal["leaf", "lent", "rows", "received", "exchanged", "constant"]
PROLOGUE = "prologue"


@dataclasses.dataclass(frozen=True, eq=False)
class Port:
    """One input or output of a stage's program.

    source: leaf (lives here), lent (lives on another stage), rows (slices of the batch), received (made by another stage's
    forward or backward, stacked over microbatches), exchanged (made once by another stage's update or loop). `piece`: who
    makes it, or, for a leaf, nothing.
    """

    source: Source
    var: Var
    piece: PieceName | None = None
    output: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class StageProgram:
    """See the module's text. `step.inputs` follow `inputs`, `step.outputs` follow `outputs`."""

    stage: int
    cut: StageCut
    step: TracedStep
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


def stage_program(cut: StageCut, stage: int) -> StageProgram:
    """The program of one stage."""
    return _Tracer(cut, stage).trace()


class _Tracer:
    def __init__(self, cut: StageCut, stage: int) -> None:
        self.cut, self.stage = cut, stage
        self.loop: TimeLoop = cut.loop
        self.microbatches = cut.loop.plan.microbatches
        self.layouts = cut.loop.layouts()
        self.pieces = cut.of_stage(stage)
        self.body = [p for p in self.pieces if p.name.kind != "update"]
        self.updates = [p for p in self.pieces if p.name.kind == "update"]
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
        for pieces, source in ((self.body, "received"), (self.updates, "exchanged")):
            foreign = dict.fromkeys(
                v
                for piece in pieces
                for v in piece.reads
                if v in self.cut.made_by and self.cut.made_by[v].stage != self.stage
            )
            ports += [Port(source, v, self.cut.made_by[v]) for v in foreign]  # type: ignore[arg-type]
        return tuple(ports)

    def _output_ports(self) -> tuple[Port, ...]:
        ports = []
        for piece in self.pieces:
            readers = [p for p in self.cut.pieces.values() if p.name.stage != self.stage]
            for v in piece.writes:
                if any(v in p.reads for p in readers):
                    ports.append(Port("received" if piece.name.kind != "update" else "exchanged", v, piece.name))
        for piece in self.body:
            for result in piece.results:
                readers = [
                    p for p in self.cut.pieces.values() if p.name.stage != self.stage and p.name.kind == "update"
                ]
                if any(result.var in p.reads for p in readers):
                    ports.append(Port("exchanged", result.var, self._finisher().name))
        for piece in self.updates:
            ports += [Port("leaf", self.loop.program.outvars[i], piece.name, i) for i in piece.outputs]
        return tuple(ports)

    def _finisher(self) -> Segment:
        """The first update piece: it finishes what the loop has collected."""
        return next(p for p in self.updates if p.name.level == 0)

    # Tracing.

    def trace(self) -> StageProgram:
        avals = [self._aval(port) for port in self.inputs]
        closed, shapes = jax.make_jaxpr(self._run, return_shape=True)(*avals)
        program, constants = program_of(closed)
        numbers = {port.var: i for i, port in enumerate(self.inputs) if port.source == "leaf"}
        sources = [self._source(port, numbers) for port in self.outputs]
        leaves = tuple(self._leaf(port, aval) for port, aval in zip(self.inputs, avals, strict=True))
        added = tuple(
            Leaf(f"constant/{i}", "const", tuple(v.aval.shape), v.aval.dtype)
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
        return StageProgram(self.stage, self.cut, step, self.inputs, self.outputs)

    def _source(self, port: Port, numbers: Mapping[Var, int]) -> int | None:
        if port.output is None:
            return None
        source = self.loop.traced.state_of_output[port.output]
        return None if source is None else numbers.get(self.loop.program.invars[source])

    def _path(self, port: Port) -> str:
        if port.output is not None:
            return self.loop.traced.outputs[port.output].path
        return f"{port.source} {port.var.aval.str_short()} of {port.piece}"

    def _leaf(self, port: Port, aval: Any) -> Leaf:
        if port.source in ("received", "exchanged"):
            microbatches = self.microbatches if port.source == "received" else 1
            shape = tuple(aval.shape)
            is_stack = port.source == "received"
            return Leaf(self._path(port), "other", shape, aval.dtype, microbatches=microbatches, streamed=is_stack)
        leaf = self.leaf_of[port.var]
        microbatches = self.microbatches if port.source == "rows" else 1
        donated = leaf.donated and port.source == "leaf"
        return dataclasses.replace(leaf, shape=tuple(aval.shape), microbatches=microbatches, donated=donated)

    def _output_leaf(self, port: Port, aval: Any) -> Leaf:
        is_stack = port.source == "received"
        microbatches = self.microbatches if is_stack else 1
        weak = port.output is not None and self.loop.traced.outputs[port.output].weak_type
        return Leaf(
            self._path(port),
            "output",
            tuple(aval.shape),
            aval.dtype,
            microbatches=microbatches,
            streamed=is_stack,
            weak_type=weak,
        )

    def _aval(self, port: Port) -> Any:
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

    def _run(self, *arrays: Any) -> tuple[Any, ...]:
        given = dict(zip(((p.source, p.var) for p in self.inputs), arrays, strict=True))
        once = {v: x for (source, v), x in given.items() if source in ("leaf", "lent")}
        rows = {v: x for (source, v), x in given.items() if source == "rows"}
        received = {v: x for (source, v), x in given.items() if source == "received"}
        exchanged = {v: x for (source, v), x in given.items() if source == "exchanged"}
        once = self._prologue(once, rows)
        collected, sent = self._loop(once, rows, received)
        made = self._updates(once, exchanged, collected)
        return tuple(
            sent[port.var] if port.source == "received" else made[port.output if port.output is not None else port.var]
            for port in self.outputs
        )

    def _prologue(self, once: dict[Var, Any], rows: Mapping[Var, Any]) -> dict[Var, Any]:
        wanted = {v for piece in self.pieces for v in piece.reads}
        wanted |= {v for p in self.updates for i in p.outputs if isinstance(v := self.loop.program.outvars[i], Var)}
        wanted = {v for v in wanted if v in self.known}
        names, values = list(once), list(once.values())
        stacks = list(rows)

        def compute(*arrays: Any) -> tuple[Any, ...]:
            leaves = dict(zip(names, arrays, strict=False))
            whole = {v: jnp.reshape(x, v.aval.shape) for v, x in zip(stacks, arrays[len(names) :], strict=True)}
            found = self.loop.prologue_of(wanted, {**leaves, **whole})
            return tuple(found[v] for v in computed)

        computed = self.loop.prologue_order(wanted)
        results = task_scope(PROLOGUE, compute)(*values, *rows.values())
        return {**once, **dict(zip(computed, results, strict=True))}

    def _loop(
        self, once: Mapping[Var, Any], rows: Mapping[Var, Any], received: Mapping[Var, Any]
    ) -> tuple[dict[Var, Any], dict[Var, Any]]:
        terms = [(p.name, r) for p in self.body for r in p.results if r.monoid]
        slices = [r for p in self.body for r in p.results if not r.monoid]
        sends = [port.var for port in self.outputs if port.source == "received"]

        def one(accumulators: list[Any], step: tuple[Any, list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            number, these_rows, these_received = step
            values = {v: Placed(x, _rows_of(v)) for v, x in zip(rows, these_rows, strict=True)}
            values |= {v: Placed(x, self.layouts[v]) for v, x in zip(received, these_received, strict=True)}
            held = {r.var: a for (_, r), a in zip(terms, accumulators, strict=True)}
            for piece in self.body:
                values |= self._piece(piece, number, once, values, held)
            return [held[r.var] for _, r in terms], [values[v].array for v in (*sends, *(r.var for r in slices))]

        if not self.body:
            return {}, {}
        numbers = jnp.arange(self.microbatches, dtype=jnp.int32)
        start = [r.initial() for _, r in terms]
        xs = (numbers, list(rows.values()), list(received.values()))
        accumulators, stacks = jax.lax.scan(one, start, xs)
        collected = {r.var: a for (_, r), a in zip(terms, accumulators, strict=True)}
        collected |= {r.var: x for r, x in zip(slices, stacks[len(sends) :], strict=True)}
        return collected, dict(zip(sends, stacks, strict=False))

    def _piece(
        self,
        piece: Segment,
        number: Any,
        once: Mapping[Var, Any],
        values: Mapping[Var, Placed],
        held: dict[Var, Any],
    ) -> dict[Var, Placed]:
        """Forward or backward of one microbatch, traced under its name; `held` gets the new accumulators."""
        constants = {v: once[v] for v in piece.reads if v in once}
        operands = {v: values[v] for v in piece.reads if v in values}
        terms = [r for r in piece.results if r.monoid]
        slices = [r for r in piece.results if not r.monoid]
        writes = [*dict.fromkeys((*piece.writes, *(r.var for r in slices)))]

        def compute(number: Any, fixed: Sequence[Any], moving: Sequence[Any], accumulators: Sequence[Any]) -> Any:
            lowering = StepLowering(self.loop.plan, number)
            scope = Scope(lowering, {v: Placed(x, _whole(v)) for v, x in zip(constants, fixed, strict=True)})
            layouts = (p.layout for p in operands.values())
            scope.values.update((v, Placed(x, la)) for v, x, la in zip(operands, moving, layouts, strict=True))
            scope.run(piece.equations)
            summed = [
                r.add(a, lowering.move_to(scope.values[r.var], r.layout, r.var.aval))
                for r, a in zip(terms, accumulators, strict=True)
            ]
            return tuple(scope.values[v].array for v in writes), tuple(summed)

        made, summed = task_scope(str(piece.name), compute)(
            number,
            list(constants.values()),
            [p.array for p in operands.values()],
            [held[r.var] for r in terms],
        )
        held.update((r.var, a) for r, a in zip(terms, summed, strict=True))
        return {v: Placed(x, self.layouts[v]) for v, x in zip(writes, made, strict=True)}

    def _updates(
        self, once: Mapping[Var, Any], exchanged: Mapping[Var, Any], collected: Mapping[Var, Any]
    ) -> dict[Any, Any]:
        """Values of the update pieces by variable, and the step's outputs by number."""
        known: dict[Any, Any] = {**once, **exchanged}
        made: dict[Any, Any] = {}
        for piece in self.updates:
            first = piece.name.level == 0
            raw = list(collected) if first else []
            reads = [v for v in self._reads_of(piece) if v in known]
            names = [*raw, *(v for eqn in piece.equations for v in eqn.outvars)]

            def compute(
                finishing: Sequence[Any],
                arrays: Sequence[Any],
                piece: Segment = piece,
                raw: Any = raw,
                reads: Any = reads,
            ) -> Any:
                lowering = StepLowering(self.loop.plan, 0)
                scope = Scope(lowering, {v: Placed(x, _whole(v)) for v, x in zip(reads, arrays, strict=True)})
                for v, x in zip(raw, finishing, strict=True):
                    scope.values[v] = Placed(self.results[v].finish(x), _whole(v))
                scope.run(piece.equations)
                outs = [self._output(i, scope) for i in piece.outputs]
                return tuple(scope.values[v].array for v in (*raw, *_made(piece))), tuple(outs)

            values, outs = task_scope(str(piece.name), compute)([collected[v] for v in raw], [known[v] for v in reads])
            found = dict(zip(names, values, strict=True))
            known |= found
            made |= found | dict(zip(piece.outputs, outs, strict=True))
        return made

    def _reads_of(self, piece: Segment) -> list[Var]:
        outvars = [self.loop.program.outvars[i] for i in piece.outputs]
        wanted = [*piece.reads, *(v for v in outvars if not isinstance(v, JaxLiteral))]
        return list(dict.fromkeys(wanted))

    def _output(self, number: int, scope: Scope[Placed]) -> Any:
        atom = self.loop.program.outvars[number]
        return jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, JaxLiteral) else scope.values[atom].array


def _made(piece: Segment) -> list[Var]:
    return [v for eqn in piece.equations for v in eqn.outvars]


def _whole(var: Var) -> Layout:
    return Layout.replicated(len(var.aval.shape))


def _rows_of(var: Var) -> Layout:
    return Layout(((0,), *((),) * (len(var.aval.shape) - 1)))

"""One pipeline stage as a step of its own, to be planned like any other.

In: a `StageCut` and the number of a stage. Out: a `StageProgram`: a `TracedStep` that computes what the stage computes in a whole
step, with everything that other stages send as inputs and everything that they need as outputs (`ports.py`),

    prologue;  for t in 0..m-1: forward(t), backward(t);  updates

so that one strategy graph holds all layouts of the stage: of its weights, of what forward leaves for backward, of the
accumulators. Operations carry the name of their segment (`Equation.task`), by which `execution/stage_tasks.py` takes the
planned stage apart again. The step is traced when it is first asked for. What can go wrong: a value that is partial over time
cannot be sent whole; it travels as the term of its microbatch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from autopar.compat import Literal as JaxLiteral
from autopar.compat import Var
from autopar.intra_op.lowering.per_device import Placed
from autopar.layouts.mesh import Layout
from autopar.microbatches.loop import StepLowering, accumulate
from autopar.program.fingerprint import outline_of
from autopar.program.from_jaxpr import program_of
from autopar.program.step import Leaf, TracedStep
from autopar.program.tags import tag_operations
from autopar.program.task_name import TaskName
from autopar.program.walk import Scope
from autopar.stages.segments import Segment, StageCut
from autopar.stages.tasks.ports import Port, StagePorts, find_ports

Arrays = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class StageProgram:
    """See the module's text. `step.inputs` follow `inputs`, `step.outputs` follow `outputs`.

    The step's fingerprint leaves out the values of literals, such as numbers of layers that keys of dropout are made from. So
    stages that differ in nothing else have equal plans; that of the whole step has them.
    """

    ports: StagePorts

    @property
    def stage(self) -> int:
        """Its number."""
        return self.ports.stage

    @property
    def cut(self) -> StageCut:
        """All stages."""
        return self.ports.cut

    @property
    def inputs(self) -> tuple[Port, ...]:
        """What it takes."""
        return self.ports.inputs

    @property
    def outputs(self) -> tuple[Port, ...]:
        """What it gives."""
        return self.ports.outputs

    @functools.cached_property
    def step(self) -> TracedStep:
        """Its program, with leaves."""
        return _Tracer(self.ports).trace()


def program_of_stage(cut: StageCut, stage: int) -> StageProgram:
    """The program of one stage of a step that is cut."""
    return StageProgram(find_ports(cut, stage))


class _Tracer:
    def __init__(self, ports: StagePorts) -> None:
        self.ports, self.loop, self.stage = ports, ports.cut.loop, ports.stage
        self.inputs, self.outputs = ports.inputs, ports.outputs
        self.segments, self.body, self.updates = ports.segments, ports.body, ports.updates
        self.microbatches = ports.microbatches
        self.results = {r.var: r for r in self.loop.results}

    def trace(self) -> TracedStep:
        """The stage's step."""
        avals = self.ports.avals()
        closed, shapes = jax.make_jaxpr(self._run, return_shape=True)(*avals)
        program, constants = program_of(closed)
        leaves = self.ports.leaves()
        added = tuple(
            Leaf(path=f"constant/{i}", role="const", shape=tuple(v.aval.shape), dtype=v.aval.dtype)
            for i, v in enumerate(program.invars[len(leaves) :])
        )
        return TracedStep(
            program=program,
            constants=constants,
            in_tree=jax.tree.structure(tuple(avals)),
            out_tree=jax.tree.structure(tuple(shapes)),
            inputs=(*leaves, *added),
            outputs=tuple(self.ports.output_leaf(p, s) for p, s in zip(self.outputs, shapes, strict=True)),
            state_of_output=self.ports.state_of_output(),
            fingerprint=outline_of(program),
            microbatches=self.microbatches,
        )

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
        wanted = self.ports.made_before()
        names, values = list(once), list(once.values())
        stacks = list(rows)

        def compute(*arrays: jax.Array) -> Arrays:
            leaves = dict(zip(names, arrays, strict=False))
            whole = {v: jnp.reshape(x, v.aval.shape) for v, x in zip(stacks, arrays[len(names) :], strict=True)}
            found = self.loop.prologue_of(frozenset(computed), {**leaves, **whole})
            return [found[v] for v in computed]

        computed = self.loop.prologue_order(wanted)
        results = tag_operations(compute, TaskName("prologue", self.stage))(*values, *rows.values())
        known = {**once, **dict(zip(computed, results, strict=True))}
        first = {v: self.loop.first_made(v) for v in wanted}
        return {**known, **{v: known[w] for v, w in first.items() if w in known}}

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
            values |= {v: Placed(x, self.ports.layouts[v]) for v, x in zip(received, these_received, strict=True)}
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
        sent = {port.var for port in self.outputs if port.source == "received"}

        def compute(number: jax.Array, fixed: Arrays, parts: Arrays, accumulators: Arrays) -> tuple[Arrays, Arrays]:
            lowering = StepLowering(self.loop.plan, number, segment.late)
            scope = Scope(lowering, {v: Placed(x, _whole(v)) for v, x in zip(whole, fixed, strict=True)})
            scope.values.update(
                (v, lowering.place(v, x, p.layout)) for (v, p), x in zip(moving.items(), parts, strict=True)
            )
            sums = dict(zip((r.var for r in terms), accumulators, strict=True))
            summed = accumulate(segment.equations, scope, lowering, terms, sums)
            made = [scope.values[v].array for v in writes]
            made = [_computed(x) if v in sent else x for v, x in zip(writes, made, strict=True)]
            return made, [summed[r.var] for r in terms]

        made, summed = tag_operations(compute, segment.name)(
            number, list(whole.values()), [p.array for p in moving.values()], [held[r.var] for r in terms]
        )
        placed = {v: Placed(x, self.ports.layouts[v]) for v, x in zip(writes, made, strict=True)}
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


def _computed(array: jax.Array) -> jax.Array:
    """The same value as the result of operations, which a task can write. A literal, which may be a scalar's, is of none."""
    return array if array.ndim else jnp.squeeze(jnp.expand_dims(array, 0), 0)


def _whole(var: Var) -> Layout:
    return Layout.replicated(len(var.aval.shape))


def _rows_of(var: Var) -> Layout:
    return Layout(((0,), *((),) * (len(var.aval.shape) - 1)))

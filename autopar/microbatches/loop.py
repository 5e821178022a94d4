"""A step as a loop over microbatches: the same results, the activations of one microbatch at a time.

In: a traced step and its `TimePlan`. Out: a `TracedStep` of the same arguments and results whose program is

    prologue;  for t in 0..m-1: accumulators += body(t);  epilogue

The body is the user's own equations, localised by their factor rules to microbatch t exactly as they are to a device's shard;
constants such as 1/N keep the value of the full batch, so sums, means and weighted losses are exact, and random bits are those
of the undecorated step. Batch leaves enter as (m, examples / m, ...). `TimeLoop` gives the three parts one by one, for pipeline
stages. What can go wrong: a step that mixes examples; `time_axis.MixedExamples` says where.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from autopar.avals import Aval, is_opaque
from autopar.compat import Literal, Var, attributed_to
from autopar.errors import UnsupportedProgramError
from autopar.intra_op.lowering.per_device import Lowering, Placed
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.layouts.monoids import COMBINE, neutral_element
from autopar.microbatches.equal_values import find_equal
from autopar.microbatches.time_plan import TimePlan
from autopar.program.evaluate import wait_for
from autopar.program.program import Equation
from autopar.program.step import Leaf, TracedStep
from autopar.program.walk import Scope


@dataclasses.dataclass(frozen=True)
class TimeMesh(LogicalMesh):
    """The mesh of microbatches as one of them sees it: its place is a traced number, or 0 outside a loop."""

    position: jax.typing.ArrayLike = dataclasses.field(default=0, compare=False)

    def index(self, axis: int) -> jax.Array:
        """The number of the microbatch."""
        return cast(jax.Array, self.position)


class StepLowering(Lowering):
    """Lowers to one microbatch, and keeps the user's source lines. `late`: what other equations wait for than the plan says."""

    def __init__(
        self, plan: TimePlan, microbatch: jax.typing.ArrayLike, late: Mapping[Equation, Var] | None = None
    ) -> None:
        super().__init__(plan.assignment)
        self.mesh = TimeMesh((plan.microbatches,), ("time",), microbatch)
        self._plan, self._late = plan, {**plan.late, **(late or {})}

    def operation(self, eqn: Equation, scope: Scope[Placed]) -> list[Placed]:
        """One equation, under the user's source line."""
        with attributed_to(eqn):
            return super().operation(eqn, scope)

    def place(self, var: Var, array: jax.Array, layout: Layout) -> Placed:
        """A value of the program, with a note if it is an estimate."""
        return Estimate(array, layout) if var in self._plan.estimates else Placed(array, layout)

    def move_to(self, value: Placed, layout: Layout, aval: Aval, *, after: jax.Array | None = None) -> jax.Array:
        """As for devices; a term becomes an estimate of the sum, and an estimate a term of the average."""
        microbatches, given = self.mesh.size, value.layout.partial
        if given and not (layout.partial or layout.sharded_axes):
            return value.array * microbatches if given[0][1] == "sum" else value.array
        if isinstance(value, Estimate) and layout.partial and not given:
            if not jnp.issubdtype(value.array.dtype, jnp.inexact):
                raise UnsupportedProgramError(
                    f"the step makes {aval.dtype}{list(aval.shape)} of a statistic of the batch, and {microbatches} "
                    "microbatches, each with its own statistic, have no average of it. Leave batch_statistics='microbatch' out."
                )
            return value.array / microbatches if layout.partial[0][1] == "sum" else value.array
        return super().move_to(value, layout, aval, after=after)

    def late(self, eqn: Equation) -> Var | None:
        """What an equation waits for; in the loop, what is there in the loop."""
        return self._late.get(eqn, eqn.after)

    def hold_back(self, array: jax.Array, late: jax.Array) -> jax.Array:
        """As a barrier, which the program that is traced here keeps."""
        return wait_for(late, array)


@dataclasses.dataclass(frozen=True)
class Estimate(Placed):
    """A value that is not the same in every microbatch though each has the whole; see `estimates.py`."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A value that leaves the body: terms combined by `monoid`, or, without one, slices of dimension `dim`.

    `single`: there is one microbatch, whose term is the value. Random keys are never split, so they are the same in every
    microbatch. Their words are collected as integers by their elementwise maximum, which is the words of any one of them.
    """

    var: Var
    monoid: str = ""
    dim: int = 0
    single: bool = False

    @property
    def layout(self) -> Layout:
        """The layout over time in which a microbatch hands it over."""
        rank = len(self.var.aval.shape)
        if self.monoid:
            return Layout(((),) * rank, () if self.single else ((0, self.monoid),))
        return Layout(tuple((0,) if d == self.dim else () for d in range(rank)))

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The type in which it is collected; terms of less than 32 bits are summed in float32."""
        dtype: np.dtype[np.generic] = self._collected.dtype
        narrow = self.monoid == "sum" and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
        return jnp.dtype(jnp.float32) if narrow else dtype

    def initial(self) -> jax.Array:
        """The accumulator before the first microbatch."""
        return jnp.full(self._collected.shape, neutral_element(self._monoid, self.dtype))

    def add(self, accumulator: jax.Array, term: jax.Array) -> jax.Array:
        """The accumulator after one more microbatch."""
        term = jax.random.key_data(term) if is_opaque(self.var.aval) else term.astype(self.dtype)
        return COMBINE[self._monoid](accumulator, term)

    def finish(self, collected: jax.Array) -> jax.Array:
        """The value of the full batch, from the accumulator or from the stack (m, ...) of slices."""
        if is_opaque(self.var.aval):
            kind = jax.random.key_impl(jax.lax.full((), 0, self.var.aval.dtype))
            keys: jax.Array = jax.random.wrap_key_data(collected, impl=kind)
            return keys
        if self.monoid:
            return collected.astype(self.var.aval.dtype)
        return jnp.reshape(jnp.moveaxis(collected, 0, self.dim), self.var.aval.shape)

    @property
    def _collected(self) -> jax.ShapeDtypeStruct:
        """Shape and type of what is collected: of random keys their words."""
        aval = self.var.aval
        key = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        return jax.eval_shape(jax.random.key_data, key) if is_opaque(aval) else key

    @property
    def _monoid(self) -> str:
        if is_opaque(self.var.aval):
            return "max"
        truth = self.var.aval.dtype == jnp.bool_ and self.monoid == "sum"
        return "or" if truth else self.monoid


class TimeLoop:
    """The prologue, the body and the epilogue of a step, as functions of arrays by variable.

    `pieces`: scans of the step that are parts of a longer one.
    """

    def __init__(self, traced: TracedStep, plan: TimePlan, *, pieces: frozenset[Equation] = frozenset()) -> None:
        self.traced, self.plan, self.pieces = traced, plan, pieces
        self.mesh = LogicalMesh((plan.microbatches,), ("time",))
        self.program = traced.program
        self._equations = {phase: plan.of_phase(phase) for phase in ("prologue", "body", "epilogue")}
        made_before = (v for eqn in self._equations["prologue"] for v in eqn.outvars)
        self._inputs = frozenset(self.program.invars)
        self._known = self._inputs.union(made_before)
        self._equal = find_equal(self._equations["prologue"])
        self.sliced = self._sliced_inputs()
        self.body_operands = self._operands_of("body")
        self.results = self._results()

    def inputs(self) -> tuple[Leaf, ...]:
        """The step's leaves; those that enter in slices have a leading dimension of microbatches."""
        m = self.plan.microbatches
        return tuple(
            dataclasses.replace(leaf, shape=(m, leaf.shape[0] // m, *leaf.shape[1:]), microbatches=m)
            if var in self.sliced
            else leaf
            for var, leaf in zip(self.program.invars, self.traced.inputs, strict=True)
        )

    def prologue(self, inputs: Sequence[jax.Array]) -> dict[Var, jax.Array]:
        """Inputs, as `inputs()` describes them, to every whole value that is known before the loop; equal ones are one array."""
        values = {
            var: jnp.reshape(x, var.aval.shape) if var in self.sliced else x
            for var, x in zip(self.program.invars, inputs, strict=True)
        }
        found = self._whole("prologue", values)
        return {v: found[self._equal.get(v, v)] for v in found}

    def first_made(self, value: Var) -> Var:
        """Of what the prologue makes, the first that equals a value known before the loop; else that value itself."""
        first = self._equal.get(value, value)
        return value if first in self._inputs else first

    def body(
        self,
        microbatch: jax.typing.ArrayLike,
        values: Mapping[Var, jax.Array],
        slices: Mapping[Var, jax.Array],
        accumulators: Mapping[Var, jax.Array],
    ) -> tuple[dict[Var, jax.Array], dict[Var, jax.Array]]:
        """One microbatch: the accumulators after it, and what it gives to stacks. `slices` are its rows of sliced inputs."""
        lowering = StepLowering(self.plan, microbatch)
        scope = Scope(lowering, {var: _whole(x) for var, x in values.items()})
        scope.values.update((var, Placed(rows, _rows(var))) for var, rows in slices.items())
        terms = [r for r in self.results if r.monoid]
        summed = accumulate(self._equations["body"], scope, lowering, terms, accumulators)
        rows = {
            r.var: lowering.move_to(scope.values[r.var], r.layout, r.var.aval) for r in self.results if not r.monoid
        }
        return summed, rows

    def epilogue(self, values: Mapping[Var, jax.Array], finished: Sequence[jax.Array]) -> list[jax.Array]:
        """The step's flat outputs."""
        known = {**values, **{r.var: x for r, x in zip(self.results, finished, strict=True)}}
        after = self._whole("epilogue", known)
        return [
            jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else after[atom]
            for atom in self.program.outvars
        ]

    def run(self, *inputs: jax.Array) -> list[jax.Array]:
        """The whole step, with the loop as one `lax.scan`."""
        values = self.prologue(inputs)
        needed = {var: values[var] for var in self.body_operands if var not in self.sliced}
        stacks = {var: x for var, x in zip(self.program.invars, inputs, strict=True) if var in self.sliced}
        terms = [r.var for r in self.results if r.monoid]

        def one(
            accumulators: list[jax.Array], step: tuple[jax.Array, list[jax.Array]]
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            microbatch, rows = step
            held = dict(zip(terms, accumulators, strict=True))
            summed, given = self.body(microbatch, needed, dict(zip(stacks, rows, strict=True)), held)
            return [summed[v] for v in terms], list(given.values())

        numbers = jnp.arange(self.plan.microbatches, dtype=jnp.int32)
        start = [r.initial() for r in self.results if r.monoid]
        accumulators, slices = jax.lax.scan(one, start, (numbers, list(stacks.values())))
        summed, joined = iter(accumulators), iter(slices)
        finished = [r.finish(next(summed if r.monoid else joined)) for r in self.results]
        return self.epilogue(values, finished)

    def prologue_values(self) -> frozenset[Var]:
        """Inputs, and what the prologue makes."""
        return self._known

    def prologue_order(self, wanted: Set[Var]) -> list[Var]:
        """What the prologue has to make for the wanted values, in order: of equal ones the first."""
        first = set(map(self.first_made, wanted))
        return [v for eqn in self._equations["prologue"] for v in eqn.outvars if v in first]

    def leaves_of(self, values: Iterable[Var]) -> frozenset[Var]:
        """The inputs from which values known before the loop are made; other values are left out."""
        known = self.prologue_values()
        needed = {v for v in values if v in known}
        for eqn in self.prologue_equations(needed):
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
        return frozenset(v for v in self.program.invars if v in needed)

    def prologue_of(self, wanted: Set[Var], leaves: Mapping[Var, jax.Array]) -> dict[Var, jax.Array]:
        """Wanted values of the prologue, and nothing that they do not need, from whole leaves."""
        scope = Scope(StepLowering(self.plan, 0), {var: _whole(x) for var, x in leaves.items()})
        scope.run(self.prologue_equations(wanted))
        return {var: placed.array for var, placed in scope.values.items()}

    def prologue_equations(self, wanted: Set[Var]) -> list[Equation]:
        """Those of the prologue that wanted values need, in order."""
        needed, chosen = set(wanted), []
        for eqn in reversed(self._equations["prologue"]):
            if any(v in needed for v in eqn.outvars):
                chosen.append(eqn)
                needed.update(v for v in eqn.invars if not isinstance(v, Literal))
        return chosen[::-1]

    def _whole(self, phase: str, values: Mapping[Var, jax.Array]) -> dict[Var, jax.Array]:
        scope = Scope(StepLowering(self.plan, 0), {var: _whole(x) for var, x in values.items()})
        scope.run(self._equations[phase])
        return {var: placed.array for var, placed in scope.values.items()}

    def _operands_of(self, phase: str) -> tuple[Var, ...]:
        """Values that a phase takes from earlier ones, in order of first use."""
        made = {v for eqn in self._equations[phase] for v in eqn.outvars}
        used = (v for eqn in self._equations[phase] for v in eqn.invars if not isinstance(v, Literal))
        return tuple(dict.fromkeys(v for v in used if v not in made))

    def _sliced_inputs(self) -> frozenset[Var]:
        """Batch leaves of which the body takes rows."""
        batch = {
            var
            for var, leaf in zip(self.program.invars, self.traced.inputs, strict=True)
            if leaf.role == "batch" and leaf.shape and leaf.shape[0] % self.plan.microbatches == 0
        }
        taken: dict[Var, set[Layout]] = {}
        for eqn in self._equations["body"]:
            for atom, layout in zip(eqn.invars, self.plan.assignment.operand_layouts(eqn), strict=True):
                if not isinstance(atom, Literal) and atom in batch:
                    taken.setdefault(atom, set()).add(layout)
        return frozenset(var for var, layouts in taken.items() if layouts == {_rows(var)})

    def _results(self) -> tuple[Result, ...]:
        used = {v for eqn in self._equations["epilogue"] for v in eqn.invars if not isinstance(v, Literal)}
        used |= {v for v in self.program.outvars if not isinstance(v, Literal)}
        layouts, single = self.layouts(), self.plan.microbatches == 1
        found = (v for eqn in self._equations["body"] for v in eqn.outvars if v in used)
        return tuple(_result(v, layouts[v], single=single) for v in found)

    def layouts(self) -> dict[Var, Layout]:
        """The layout over time of every value that the body makes."""
        return {
            var: layout
            for eqn in self._equations["body"]
            for var, layout in zip(eqn.outvars, self.plan.assignment.result_layouts(eqn), strict=True)
        }


def accumulate(
    equations: Sequence[Equation],
    scope: Scope[Placed],
    lowering: StepLowering,
    terms: Sequence[Result],
    accumulators: Mapping[Var, jax.Array],
) -> dict[Var, jax.Array]:
    """Run equations of one microbatch and add its terms: each as soon as it is made, so that no gradient waits for all others.

    Returns:
        The accumulators after this microbatch, by the variable of their term.
    """
    by_var, summed = {r.var: r for r in terms}, dict(accumulators)
    for eqn in equations:
        scope.run([eqn])
        for v in eqn.outvars:
            if (term := by_var.get(v)) is not None:
                summed[v] = term.add(summed[v], lowering.move_to(scope.values[v], term.layout, v.aval))
    return summed


def _whole(array: jax.Array) -> Placed:
    return Placed(array, Layout.replicated(len(np.shape(array))))


def _rows(var: Var) -> Layout:
    return Layout(((0,), *((),) * (len(var.aval.shape) - 1)))


def _result(var: Var, layout: Layout, *, single: bool) -> Result:
    """A value repeated in every microbatch is the sum of what the first has and zeros."""
    if layout.sharded_axes and not is_opaque(var.aval):
        return Result(var, dim=next(d for d, axes in enumerate(layout.dims) if axes))
    return Result(var, monoid=layout.partial[0][1] if layout.partial else "sum", single=single)

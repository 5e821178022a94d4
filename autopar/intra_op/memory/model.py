"""How many bytes a device needs at a choice's peak, and the rows that keep the search within a limit.

In: a `StrategyGraph` and what becomes of its inputs. Out: the peak of a finished choice with the tensors behind it, and
`MemoryRow`s, buffers alive together as bytes per choice of each node, for the planner. The account is XLA's own:

    arguments + results that take no donated argument's place + the most that temporaries take at one step.

`device_program` writes down what one device runs, `footprint` which buffers that needs and when. The peak of a finished choice
counts everything, moved copies too; rows (`rows.py`) leave out what depends on pairs of choices, so the planner checks each
result.

What can go wrong: XLA needs more than predicted, by what it rewrites and by gaps between buffers. Arguments and results are
exact; for temporaries a limit must leave room for more than the prediction, `Tuning.temporaries_margin`, which `required` counts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Hashable, Mapping, Sequence, Set

import numpy as np

from autopar.avals import itemsize_of
from autopar.compat import Literal, Var
from autopar.intra_op.choices.graph import Source, StrategyGraph
from autopar.intra_op.choices.strategies import ShardingStrategy
from autopar.intra_op.lowering.assignment import Assignment, assign
from autopar.intra_op.memory.compilers import XLA_CPU, Compiler
from autopar.intra_op.memory.device_operations import Value
from autopar.intra_op.memory.device_program import DeviceProgram, device_program
from autopar.intra_op.memory.footprint import Footprint, footprint_of
from autopar.intra_op.memory.nearest_scope import nearest_scopes
from autopar.intra_op.memory.rows import rows_of, totals_of
from autopar.intra_op.memory.tuning import TUNING, Tuning
from autopar.intra_op.xla_cpu.table import Making, can_move_sums, making_of
from autopar.program.loops import Filled, Goes, LoopEquation
from autopar.program.program import Atom, Equation, Program
from autopar.rules.table import entry_for
from autopar.solver.problem import MemoryRow

_NAMED = 128
"""So many of the largest tensors at the peak are told by a module, their own or the nearest."""
_LATEST = 4
"""Choices whose peaks are kept: each takes a second to compute for a deep step, and some hundred KB."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resident:
    """One entry of a live set; `is_kept` if it is an argument or a result, there from the first step to the last."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    is_kept: bool
    scope: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class _Peak:
    """Bytes of a device at the peak, the tensors alive then, largest first, and the bytes of temporaries at every step."""

    bytes: int
    tensors: tuple[Resident, ...]
    totals: np.ndarray


@dataclasses.dataclass(frozen=True)
class Streams:
    """Numbers of the inputs and outputs that are stacks of `microbatches` slices of which one is there at a time."""

    microbatches: int = 1
    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()


class Wholes:
    """What a device runs before anything is chosen, and its buffers: models of one program share them in a search."""

    def __init__(self) -> None:
        self.programs: weakref.WeakKeyDictionary[Program, dict[Hashable, DeviceProgram]] = weakref.WeakKeyDictionary()
        self.footprints: weakref.WeakKeyDictionary[DeviceProgram, Footprint] = weakref.WeakKeyDictionary()


class MemoryModel:
    """Memory of one graph's choices. `aliased_outputs` are those that take the place of a donated input, and which input."""

    def __init__(
        self,
        graph: StrategyGraph,
        *,
        input_names: Sequence[str],
        aliased_outputs: Mapping[int, int],
        streams: Streams | None = None,
        compiler: Compiler = XLA_CPU,
        tuning: Tuning = TUNING,
        wholes: Wholes | None = None,
    ) -> None:
        self.graph, self.input_names, self.aliased = graph, tuple(input_names), dict(aliased_outputs)
        self.tuning, self.compiler = tuning, compiler
        self.streams, self._wholes = streams or Streams(), wholes or Wholes()
        self._bytes: dict[tuple[int, int, bool, tuple[int, ...]], np.ndarray] = {}
        self._latest: dict[Hashable, _Peak] = {}

    def peak(self, choice: Sequence[int], *, copy_span: int | None = None) -> tuple[int, tuple[Resident, ...]]:
        """(bytes per device, the tensors alive then, largest first) of a finished choice; `copy_span` as in `spmd.assign`.

        The latest few are kept: a search looks at a choice, at its likes, and at those that it accepts again.
        """
        found = self._latest_peak(choice, copy_span)
        return found.bytes, found.tensors

    def over_step(self, choice: Sequence[int], *, copy_span: int | None = None, points: int) -> tuple[int, ...]:
        """Bytes per device of a finished choice over the step, as the most of each of so many stretches of operations."""
        found = self._latest_peak(choice, copy_span)
        kept = sum(t.bytes for t in found.tensors if t.is_kept)
        stretches = np.array_split(found.totals, min(points, len(found.totals)))
        return tuple(kept + int(stretch.max()) for stretch in stretches)

    def _latest_peak(self, choice: Sequence[int], copy_span: int | None) -> _Peak:
        key = (tuple(choice), copy_span)
        if key not in self._latest:
            program = self._program(assign(self.graph, choice, copy_span=copy_span))
            footprint = self._footprint(program, with_copies=True)
            self._latest[key] = self._peak(program, footprint, [v.bytes for v in program.values])
            for oldest in list(self._latest)[:-_LATEST]:
                del self._latest[oldest]
        return self._latest[key]

    def required(self, choice: Sequence[int], *, copy_span: int | None = None) -> int:
        """Bytes per device that a limit must offer for a finished choice, so that XLA's own figure is within it."""
        peak, tensors = self.peak(choice, copy_span=copy_span)
        kept = sum(t.bytes for t in tensors if t.is_kept)
        return kept + math.ceil((peak - kept) / self.tuning.temporaries_margin)

    def parts(self, choice: Sequence[int]) -> tuple[int, int]:
        """Bytes per device that a finished choice keeps from the first step to the last, and those of its temporaries."""
        peak, tensors = self.peak(choice)
        kept = sum(t.bytes for t in tensors if t.is_kept)
        return kept, math.ceil((peak - kept) / self.tuning.temporaries_margin)

    def least_kept(self) -> int:
        """The bytes per device that are kept, if every value could take its smallest layout."""
        return sum(int(self._sizes(self._whole.values[v]).min()) for v in self._kept(self._whole))

    @functools.cached_property
    def _whole(self) -> DeviceProgram:
        """What a device runs before anything is chosen; found once for all meshes of as many devices."""
        if self._has_streams:
            return self._program(None)
        known = self._wholes.programs.setdefault(self.graph.program, {})
        if self._kind not in known:
            known[self._kind] = self._program(None)
        return known[self._kind]

    @functools.cached_property
    def _whole_footprint(self) -> Footprint:
        known = self._wholes.footprints
        if self._whole not in known:
            known[self._whole] = self._footprint(self._whole)
        return known[self._whole]

    @property
    def _kind(self) -> Hashable:
        """Equal for meshes on which a device runs the same before anything is chosen."""
        return self.graph.mesh.size, self.compiler, self.input_names

    @property
    def _has_streams(self) -> bool:
        return bool(self.streams.inputs or self.streams.outputs)

    def bound(self) -> int:
        """Bytes per device below which `required` is for no choice: least inputs and results, and the least that one operation
        takes at once: what it makes, and what is handed to it if something else made that; of a loop, what it carries; of a
        scatter, where it is not added to anything, its result."""
        there = _there_anyway(self.graph.program)
        summed = _summed(self.graph.program, turned=True) if self.compiler.adds_into_products else set[Var]()
        outside = there | summed
        most = 0
        for node in self.graph.nodes:
            eqn = node.equation
            if eqn is None or node.loop is not None or not entry_for(eqn).heavy or eqn.outvars[0] in outside:
                continue
            made = [i for i, v in enumerate(eqn.invars) if not isinstance(v, Literal) and v not in there]
            most = max(most, min(self._together(eqn, made, s) for s in node.choices.strategies))
        for together in sure_buffers(self.graph.program, there):
            most = max(most, sum(self._least_of(v) for v in together))
        return self.least_kept() + math.ceil(most / self.tuning.temporaries_margin)

    def least_of_inputs(self) -> int:
        """Bytes per device of the inputs that are there as wholes, each in its smallest layout; `bound` is never less."""
        inputs, streamed = self.graph.program.invars, self.streams.inputs
        return sum(self._least_of(v) for i, v in enumerate(inputs) if i not in streamed)

    def _together(self, eqn: Equation, operands: Sequence[int], strategy: ShardingStrategy) -> int:
        """Bytes of an operation's result and of some of its operands, each counted once."""
        layouts = {(eqn.invars[i], strategy.inputs[i]) for i in operands}
        held = [*layouts, (eqn.outvars[0], strategy.outputs[0])]
        return sum(la.local_bytes(v.aval.shape, itemsize_of(v.aval), self.graph.mesh) for v, la in held)

    def _least_of(self, var: Var) -> int:
        """Bytes of a variable of the program in its smallest layout."""
        if var not in self.graph.sources:
            return 0
        size = math.prod(var.aval.shape) * itemsize_of(var.aval)
        value = Value(
            name="", shape=tuple(var.aval.shape), dtype="", bytes=size, var=var, itemsize=itemsize_of(var.aval)
        )
        return int(self._sizes(value).min())

    def evenly_divided_parts(self) -> tuple[int, int]:
        """As `parts`, if every value were divided evenly among all devices and never gathered; of no choice are both less."""
        program, devices = self._whole, self.graph.mesh.size
        given = frozenset(program.inputs)
        sizes = [0 if v.copy_of in given else v.bytes // devices for v in program.values]
        peak = self._peak(program, self._whole_footprint, sizes).bytes
        kept = sum(sizes[v] for v in self._kept(program))
        return kept, math.ceil((peak - kept) / self.tuning.temporaries_margin)

    def least(self) -> tuple[int, tuple[Resident, ...]]:
        """The peak if every value could take its smallest layout, and the largest tensors even so."""
        return self._least.bytes, self._least.tensors

    @functools.cached_property
    def _least(self) -> _Peak:
        program = self._whole
        given = frozenset(program.inputs)
        sizes = [0 if v.copy_of in given else int(self._sizes(v).min()) for v in program.values]
        return self._peak(program, self._whole_footprint, sizes)

    def rows(self, choice: Sequence[int]) -> list[MemoryRow]:
        """What a limit must offer at the points that need most under `choice`, one of each stretch; see `rows.py`."""
        return rows_of(
            self._whole,
            self._whole_footprint,
            self._kept(self._whole),
            self._sizes,
            self._node_of,
            choice,
            margin=self.tuning.temporaries_margin,
            points=self.tuning.watched_points,
        )

    def _sizes(self, value: Value) -> np.ndarray:
        """Bytes per device of a value of the whole program for every choice of the node that decides."""
        source = self._source_of(value)
        if source is None:
            return np.zeros(1)
        strategies = self.graph.nodes[source.node].choices.strategies  # the graph keeps them, one for equal operations
        known = (id(strategies), source.output, source.stacked, value.shape)
        if known not in self._bytes:
            layouts = [s.outputs[source.output] for s in strategies]
            layouts = [la.prepend() for la in layouts] if source.stacked else layouts
            share = [la.local_bytes(value.shape, 1, self.graph.mesh) for la in layouts]
            self._bytes[known] = np.array(share, dtype=float) / max(math.prod(value.shape), 1)
        return self._bytes[known] * value.bytes

    def _source_of(self, value: Value) -> Source | None:
        """The node of the graph whose choice decides the size of a value; None if none does."""
        return None if value.var is None else self.graph.sources.get(value.var)

    def _node_of(self, value: Value) -> int | None:
        source = self._source_of(value)
        return None if source is None else source.node

    def _is_stack(self, value: Value) -> bool:
        """Whether a value has a row for each microbatch."""
        source = self._source_of(value)
        return source is not None and source.stacked and value.shape[:1] == (self.streams.microbatches,)

    def _program(self, assignment: Assignment | None) -> DeviceProgram:
        """What one device runs; of a stream, and of what loops stack up for one, a slice takes memory."""
        program = device_program(self.graph, self.input_names, assignment, self.compiler)
        if not self._has_streams:
            return program
        microbatches, streams = self.streams.microbatches, self.streams
        passing = {program.inputs[i] for i in streams.inputs} | {program.outputs[i] for i in streams.outputs}
        values = tuple(
            dataclasses.replace(value, bytes=value.bytes // microbatches)
            if number in passing or self._is_stack(value)
            else value
            for number, value in enumerate(program.values)
        )
        return dataclasses.replace(program, values=values)

    def _kept(self, program: DeviceProgram) -> list[int]:
        """Inputs, and outputs that have memory of their own: there from the first step to the last."""
        own = [v for place, v in enumerate(program.outputs) if v >= 0 and place not in self.aliased]
        return [*program.inputs, *own]

    def _footprint(self, program: DeviceProgram, *, with_copies: bool = False) -> Footprint:
        """`with_copies`: of donated arguments. No choice needs less than it does without them."""
        outputs = frozenset(v for v in program.outputs if v >= 0)
        given = {program.outputs[place]: program.inputs[source] for place, source in self.aliased.items()}
        places = {result: argument for result, argument in given.items() if result >= 0} if with_copies else {}
        return footprint_of(program.block, program.values, elsewhere=outputs, places=places)

    def _peak(self, program: DeviceProgram, footprint: Footprint, sizes: Sequence[int]) -> _Peak:
        buffers = footprint.with_own_memory(sizes)
        totals = totals_of(buffers, footprint.steps, sizes)
        worst = int(np.argmax(totals))
        alive = [(v, True) for v in self._kept(program)]
        alive += [(b.value, False) for b in buffers if b.first <= worst <= b.last]
        copied = {one.copy.value for one in footprint.lent if one.copy is not None}
        named = [
            (n, is_kept, name if is_kept or n not in copied else f"copy of {name}")
            for n, is_kept in alive
            for name in (program.values[n].name,)
        ]
        largest_first = sorted(named, key=lambda one: (-sizes[one[0]], one[2]))
        scopes = nearest_scopes(program.block, program.values, [n for n, _, _ in largest_first[:_NAMED]])
        tensors = tuple(
            Resident(
                name=name, shape=v.shape, dtype=v.dtype, bytes=sizes[n], is_kept=is_kept, scope=scopes.get(n, v.scope)
            )
            for n, is_kept, name in largest_first
            for v in (program.values[n],)
        )
        return _Peak(bytes=sum(t.bytes for t in tensors), tensors=tensors, totals=totals)


def sure_buffers(program: Program, there: Set[Var]) -> list[list[Var]]:
    """Variables that have buffers of their own whatever is chosen, in lists of those that are alive together.

    `there`: those that take no memory of their own, to begin with. What is written in the place of such a value is left out; and
    so is a scatter that XLA may move into a sum, onto the buffer of the other summand.
    """
    there, summed, found = set(there), _summed(program), list[list[Var]]()

    def is_there(atom: Atom) -> bool:
        return not isinstance(atom, Literal) and atom in there

    for eqn in program.equations:
        if isinstance(eqn, LoopEquation) and eqn.branch_number is None:
            starts = eqn.operands_to(Filled.CARRY)
            ends = zip(starts, eqn.results_from(Goes.CARRY), strict=True)
            found.append([after for before, after in ends if not is_there(before) and after not in there])
        elif making_of(eqn) is Making.IN_PLACE:
            (result,) = eqn.outvars
            if is_there(eqn.invars[0]):
                there.add(result)
            elif result not in there and result not in summed:
                found.append([result])
        elif _is_name(eqn) and is_there(eqn.invars[0]):
            there.update(eqn.outvars)
    return found


def _summed(program: Program, *, turned: bool = False) -> set[Var]:
    """Variables that a sum reads, under any name: a compiler may let what makes them write over the other summand.

    `turned`: also what it reads with its dimensions in another order, in which a product can be made at once.
    """
    summed = set[Var]()
    for eqn in reversed(program.equations):
        is_name = _is_name(eqn) or (turned and entry_for(eqn).permutation is not None)
        if can_move_sums(eqn) or (is_name and eqn.outvars[0] in summed):
            summed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return summed


def _is_name(eqn: Equation) -> bool:
    return making_of(eqn) in (Making.NAME, Making.SAME) and bool(eqn.invars)


def _there_anyway(program: Program) -> set[Var]:
    """Values that take no memory of their own: inputs and results of the program, under any name."""
    renamed = [
        (eqn.invars[0], eqn.outvars[0])
        for eqn in program.equations
        if making_of(eqn) in (Making.NAME, Making.SAME) and eqn.invars and not isinstance(eqn.invars[0], Literal)
    ]
    given = set(program.invars)
    for before, after in renamed:
        if before in given:
            given.add(after)
    results = {v for v in program.outvars if not isinstance(v, Literal)}
    for before, after in reversed(renamed):
        if after in results:
            results.add(before)
    return given | results

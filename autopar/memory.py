"""Which values are in memory together, and how many bytes that is.

In: a `StrategyGraph` and what becomes of its inputs. Out: `MemoryRow`s, the maximal live sets as bytes per choice of each node,
for the planner; and the peak of one finished choice, with the tensors behind it. The model of what XLA keeps:

    - inputs stay for the whole step; an output that takes the place of a donated input needs no room of its own;
    - an operation that XLA folds into its users has no buffer, unless some user cannot take it in, such as a contraction, a
      loop or the end of the step; what it reads stays alive until it is used;
    - a `fan_out` is its operand in another layout: the operand's buffer goes when the fan_out's is there;
    - a value that an equation needs in another layout is a copy, alive from the first to the last equation that needs it so;
    - inside a loop the body's live set comes on top of what is alive around the loop.

What can go wrong: XLA's own order and fusion differ; tests compare with `compiled.memory_analysis()`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from autopar.compat import Literal, Var
from autopar.graph import StrategyGraph, is_opaque, itemsize_of
from autopar.intra_op import MemoryRow
from autopar.program import Equation, Program, fan_out_p
from autopar.rules import entry_for
from autopar.spmd import is_gathered


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A value in memory: which output of which node it is, and from which position to which it is alive."""

    node: int
    output: int
    stacked: bool
    aval: Any
    first: int
    last: int
    name: str


@dataclasses.dataclass(frozen=True)
class Resident:
    """One entry of a live set."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class LiveSet:
    """What is in memory together, and the nodes whose equations run then."""

    buffers: tuple[Buffer, ...]
    nodes: tuple[int, ...]


class MemoryModel:
    """Live sets of one graph; made once, asked for rows and for the peak of choices."""

    def __init__(self, graph: StrategyGraph, *, input_names: Sequence[str], aliased_outputs: frozenset[int]) -> None:
        self.graph = graph
        self._bytes: dict[tuple[int, int, bool], np.ndarray] = {}
        self._is_constant: dict[tuple[int, int, bool], bool] = {}
        persistent = list(self._inputs(input_names))
        aliased = {
            graph.program.outvars[i] for i in aliased_outputs if not isinstance(graph.program.outvars[i], Literal)
        }
        self._position: dict[int, int] = {}
        self._numbers = {node.equation: number for number, node in enumerate(graph.nodes) if node.equation is not None}
        sets = _maximal(self._live_sets(graph.program, aliased)) or [LiveSet((), ())]
        self.live_sets = [LiveSet((*persistent, *live.buffers), live.nodes) for live in sets]
        self._set_of = {node: number for number, live in enumerate(self.live_sets) for node in live.nodes}

    def bytes_of(self, buffer: Buffer) -> np.ndarray:
        """Bytes per device for every choice of the buffer's node."""
        key = (buffer.node, buffer.output, buffer.stacked)
        if key not in self._bytes:
            strategies = self.graph.nodes[buffer.node].choices.strategies
            shape, itemsize = buffer.aval.shape, itemsize_of(buffer.aval)
            layouts = [s.outputs[buffer.output] for s in strategies]
            layouts = [la.prepend() for la in layouts] if buffer.stacked else layouts
            self._bytes[key] = np.array(
                [la.local_bytes(shape, itemsize, self.graph.mesh) for la in layouts], dtype=float
            )
            self._is_constant[key] = bool(np.ptp(self._bytes[key]) == 0)
        return self._bytes[key]

    def rows(self) -> list[MemoryRow]:
        """The live sets as rows of the planner's model, without moved copies: these depend on pairs of choices."""
        rows = []
        for number, live in enumerate(self.live_sets):
            fixed = 0.0
            by_node: dict[int, np.ndarray] = {}
            for buffer in live.buffers:
                size = self.bytes_of(buffer)
                if self._is_constant[buffer.node, buffer.output, buffer.stacked]:
                    fixed += float(size[0])
                else:
                    by_node[buffer.node] = by_node[buffer.node] + size if buffer.node in by_node else size
            rows.append(MemoryRow(f"point{number}", by_node, fixed))
        return rows

    def peak(self, choice: Sequence[int], *, copy_span: int | None = None) -> tuple[int, tuple[Resident, ...]]:
        """(bytes per device, the tensors alive then, largest first) of a finished choice; `copy_span` as in `spmd.assign`."""
        return self._peak(choice, self._moved(choice, copy_span))

    def _peak(
        self, choice: Sequence[int], moved: Sequence[tuple[int, int, Resident]]
    ) -> tuple[int, tuple[Resident, ...]]:
        totals = np.array(
            [sum(self.bytes_of(b)[choice[b.node]] for b in live.buffers) for live in self.live_sets], float
        )
        for first, last, copy in moved:
            totals[first : last + 1] += copy.bytes
        worst = int(np.argmax(totals))
        tensors = [
            Resident(b.name, tuple(b.aval.shape), str(b.aval.dtype), int(self.bytes_of(b)[choice[b.node]]))
            for b in self.live_sets[worst].buffers
        ]
        tensors += [copy for first, last, copy in moved if first <= worst <= last]
        return int(totals[worst]), tuple(sorted(tensors, key=lambda r: (-r.bytes, r.name)))

    def _moved(self, choice: Sequence[int], copy_span: int | None) -> list[tuple[int, int, Resident]]:
        """Copies in another layout: (first live set, last live set, what). Users of one layout share a copy, as when lowered."""
        nodes = self.graph.nodes
        users: dict[Any, list[tuple[int, int]]] = {}
        copies: dict[Any, Resident] = {}
        gathered: dict[Any, bool] = {}
        for use in self.graph.uses:
            if use.target not in self._set_of or is_opaque(use.aval):
                continue
            given = nodes[use.source.node].choices.strategies[choice[use.source.node]].outputs[use.source.output]
            wanted = nodes[use.target].choices.strategies[choice[use.target]].inputs[use.operand]
            if (given, use.source.stacked) == (wanted, use.stacked):
                continue
            key, at = (use.source, use.stacked, wanted), self._set_of[use.target]
            users.setdefault(key, []).append((self._position[use.target], at))
            layout = wanted.prepend() if use.stacked else wanted
            size = layout.local_bytes(use.aval.shape, itemsize_of(use.aval), self.graph.mesh)
            name = f"moved {nodes[use.source.node].label} {tuple(use.aval.shape)}"
            copies[key] = Resident(name, tuple(use.aval.shape), str(use.aval.dtype), size)
            if copy_span is not None and key not in gathered:
                given = given.prepend() if use.source.stacked else given
                gathered[key] = is_gathered(self.graph.spaces.between(use.aval, given, layout).path(given, layout))
        return [
            (first, last, copies[key])
            for key, places in users.items()
            for first, last in _stays(sorted(places), copy_span if gathered.get(key) else None)
        ]

    def least(self) -> tuple[int, tuple[Resident, ...]]:
        """The peak if every value could take its smallest layout, and the largest tensors even so."""
        smallest: dict[int, int] = {}
        for live in self.live_sets:
            for b in live.buffers:
                smallest[b.node] = int(np.argmin(self.bytes_of(b)))
        return self._peak([smallest.get(v, 0) for v in range(len(self.graph.nodes))], ())

    def _inputs(self, names: Sequence[str]) -> Iterator[Buffer]:
        for number, node in enumerate(self.graph.nodes):
            if node.input_number is not None:
                var = self.graph.program.invars[node.input_number]
                yield Buffer(number, 0, False, var.aval, 0, 0, names[node.input_number])

    def _live_sets(self, program: Program, aliased: frozenset[Var] | set[Var]) -> list[LiveSet]:
        """The buffers alive at each equation of a program, nested ones on top."""
        position = {eqn: i for i, eqn in enumerate(program.equations)}
        users: dict[Var, list[Equation | None]] = {}
        for eqn in program.equations:
            for v in eqn.invars:
                if not isinstance(v, Literal):
                    users.setdefault(v, []).append(eqn)
        for v in program.outvars:
            if not isinstance(v, Literal):
                users.setdefault(v, []).append(None)
        end = len(program.equations)
        self._position.update((self._numbers[eqn], i) for eqn, i in position.items() if eqn in self._numbers)
        last: dict[Var, int] = {}
        buffers: list[Buffer] = []
        for eqn in reversed(program.equations):
            for v in eqn.outvars:
                last[v] = max((self._until(u, position, last, end) for u in users.get(v, ())), default=position[eqn])
                buffer = self._buffer(eqn, v, users.get(v, ()), position[eqn], last[v])
                if buffer is not None and v not in aliased:
                    buffers.append(buffer)
        sets: list[list[Buffer]] = [[] for _ in program.equations]
        for buffer in buffers:
            for at in range(buffer.first, min(buffer.last, end - 1) + 1):
                sets[at].append(buffer)
        return [
            LiveSet((*outer, *inner.buffers), inner.nodes)
            for eqn, outer in zip(program.equations, sets, strict=True)
            for inner in self._inner(eqn)
        ]

    def _inner(self, eqn: Equation) -> list[LiveSet]:
        if not eqn.regions:
            moves = eqn in self._numbers and eqn.primitive is not fan_out_p
            return [LiveSet((), (self._numbers[eqn],) if moves else ())]
        return _maximal([s for region in eqn.regions for s in self._live_sets(region, set())]) or [LiveSet((), ())]

    def _until(self, user: Equation | None, position: Mapping[Equation, int], last: Mapping[Var, int], end: int) -> int:
        """Until when a user needs its operand: a folded one passes the need on to its own users."""
        if user is None:
            return end
        if user.loop is None and _is_folded(user):
            return max((last.get(v, position[user]) for v in user.outvars), default=position[user])
        return position[user]

    def _buffer(
        self, eqn: Equation, var: Var, users: Sequence[Equation | None], first: int, last: int
    ) -> Buffer | None:
        source = self.graph.sources.get(var)
        if source is None:
            return None
        if eqn.loop is None and entry_for(eqn).fused and not entry_for(eqn).free:
            if all(u is not None and u.loop is None and entry_for(u).fused for u in users):
                return None
        elif (
            eqn.loop is None
            and entry_for(eqn).free
            and eqn.primitive is not fan_out_p
            and all(u is not None and u.loop is None for u in users)
        ):
            return None
        if len(users) == 1 and users[0] is not None and users[0].primitive is fan_out_p:
            last = first
        name = f"{eqn.primitive.name} {tuple(var.aval.shape)}"
        return Buffer(source.node, source.output, source.stacked, var.aval, first, last, name)


def _stays(places: Sequence[tuple[int, int]], copy_span: int | None) -> list[tuple[int, int]]:
    """(first, last) live set of each stay of a copy whose users are at (position, live set), in order."""
    stays: list[tuple[int, int]] = []
    before: int | None = None
    for position, at in places:
        if before is None or (copy_span is not None and position - before > copy_span):
            stays.append((at, at))
        else:
            stays[-1] = (min(stays[-1][0], at), max(stays[-1][1], at))
        before = position
    return stays


def _is_folded(eqn: Equation) -> bool:
    return entry_for(eqn).fused and eqn.primitive is not fan_out_p


def _maximal(sets: Sequence[LiveSet]) -> list[LiveSet]:
    """The sets that no neighbour contains, the ones just before something goes; they run what the others ran."""
    kept: list[LiveSet] = []
    members: list[frozenset[tuple[int, int, bool]]] = []
    for live in sets:
        keys = frozenset((b.node, b.output, b.stacked) for b in live.buffers)
        if members and keys <= members[-1]:
            kept[-1] = LiveSet(kept[-1].buffers, (*kept[-1].nodes, *live.nodes))
            continue
        nodes = live.nodes
        while members and members[-1] <= keys:
            nodes = (*kept.pop().nodes, *nodes)
            members.pop()
        kept.append(LiveSet(live.buffers, nodes))
        members.append(keys)
    return kept

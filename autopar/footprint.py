"""What XLA's CPU compiler keeps in memory while it runs a list of operations, and from when to when.

In: the `Operation`s of one device with their values. Out: `Span`s, the buffers with the first and last step of each, in the
order in which XLA runs the steps. What is modelled, as read from XLA's buffer assignments:

    - pointwise work is folded into what reads it and has no buffer, unless a reader takes only whole buffers (a contraction, a
      collective, a loop, the end), or it is costly and read more than once; a cheap value of one operand that has a buffer for
      such a reader is still computed again by its other readers, which then hold on to what it was computed from;
    - steps run breadth first, each as soon as its operands are there: a gather of a parameter, random bits, or a part that
      is recomputed without waiting for the backward pass run at the very start, wherever they stand in the program;
    - pointwise work writes over an operand of its size that nobody reads again; a loop writes over what it starts from;
    - a loop's body comes on top of what is alive around it.

What can go wrong: offsets. Buffers of different sizes leave gaps, which are not modelled: see `memory.LIMIT_MARGIN`.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Hashable, Iterable, Mapping, Sequence


class Kind(enum.Enum):
    """How an operation is run: not at all, folded into its readers, folded if read once, reading folded work, or whole."""

    ALIAS = "alias"
    CHEAP = "cheap"
    COSTLY = "costly"
    REDUCE = "reduce"
    WHOLE = "whole"


FOLDED = (Kind.CHEAP, Kind.COSTLY)


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of one device; `key` is the (node, output, stacked) of the strategy graph whose layout decides its size.

    `is_copy`: it needs memory only as far as its layout is larger than the smallest, in which it is there anyway.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    key: tuple[int, int, bool] | None
    is_copy: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """Inputs and outputs are numbers of values; `over[i]` is what output i takes the place of if nobody reads it again.

    Operations of one `group` that do not wait for each other are merged, as XLA does with all-reduces.
    """

    kind: Kind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    over: tuple[int, ...] = ()
    bodies: tuple[Block, ...] = ()
    group: Hashable = None


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """Operations in program order and what they compute; everything they read from elsewhere is there already."""

    operations: tuple[Operation, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Span:
    """A buffer and the steps from which to which it is taken."""

    value: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Footprint:
    """The buffers of a block and how many steps it has."""

    spans: tuple[Span, ...]
    steps: int


def footprint_of(block: Block, values: Sequence[Value], *, elsewhere: frozenset[int] = frozenset()) -> Footprint:
    """The buffers of a block; `elsewhere` are outputs that are written to memory that is there anyway."""
    folding = _Folding(_merged(block, values), values)
    order = _breadth_first(folding)
    starts, steps, inner = _steps(order, values)
    place = {op: at for at, op in enumerate(order)}
    birth = {v: place[op] for op in order for v in op.outputs}
    death = dict(birth)
    for op in order:
        for v in folding.reads[op]:
            if v in birth:
                death[v] = max(death[v], place[op])
    for v in block.outputs:
        v = folding.original(v)
        if v in birth:
            death[v] = len(order)
    for op in order:
        _write_over(op, place[op], folding, values, death)
    apart = {folding.original(v) for v in elsewhere}
    ends = [*starts, steps]
    spans = [
        Span(v, starts[at], min(ends[min(death[v] + 1, len(order))], steps) - 1)
        for v, at in birth.items()
        if v not in apart and death[v] >= at
    ]
    return Footprint((*spans, *inner), steps)


def _steps(order: Sequence[Operation], values: Sequence[Value]) -> tuple[list[int], int, list[Span]]:
    """(first step of each operation, steps in all, buffers inside loops): a loop takes the steps of its bodies."""
    starts, inner, now = [], [], 0
    for op in order:
        starts.append(now)
        length = 0
        for body in op.bodies:
            part = footprint_of(body, values)
            inner += [Span(s.value, now + length + s.first, now + length + s.last) for s in part.spans]
            length += part.steps
        now += max(length, 1)
    return starts, now, inner


def _write_over(op: Operation, at: int, folding: _Folding, values: Sequence[Value], death: dict[int, int]) -> None:
    """Let the outputs of an operation take the place of operands that it is the last to read."""
    if op.over:
        pairs: Iterable[tuple[int, Sequence[int]]] = [
            (out, (folding.original(v),)) for out, v in zip(op.outputs, op.over, strict=True)
        ]
    elif op.kind in FOLDED:
        pairs = [(out, folding.reads[op]) for out in op.outputs]
    else:
        return
    for out, candidates in pairs:
        for v in candidates:
            if death.get(v) == at and values[v].bytes == values[out].bytes and v not in op.outputs:
                death[v] = at - 1
                break


class _Folding:
    """Which values of a block have a buffer, and which buffers each operation that runs reads."""

    def __init__(self, block: Block, values: Sequence[Value]) -> None:
        self.values = values
        self.maker: dict[int, Operation] = {}
        self._original: dict[int, int] = {}
        self.users: dict[int, list[Operation]] = collections.defaultdict(list)
        for op in block.operations:
            if op.kind is Kind.ALIAS:
                self._original[op.outputs[0]] = self.original(op.inputs[0])
                continue
            self.maker.update((v, op) for v in op.outputs)
            for v in dict.fromkeys(self.original(v) for v in op.inputs):
                self.users[v].append(op)
        self.ends = {self.original(v) for v in block.outputs}
        self._sources: dict[int, tuple[int, ...]] = {}
        for op in block.operations:  # in program order, so that no search goes deep
            for v in op.outputs if op.kind in FOLDED else ():
                self._sources_of(v)
        self.running = [op for op in block.operations if self._runs(op)]
        self.reads = {op: self._reads(op) for op in self.running}

    def original(self, value: int) -> int:
        """The value that this is only another name of."""
        return self._original.get(value, value)

    def _runs(self, op: Operation) -> bool:
        if op.kind is Kind.ALIAS:
            return False
        return op.kind not in FOLDED or any(self._has_buffer(v) for v in op.outputs)

    def _has_buffer(self, value: int) -> bool:
        op = self.maker.get(value)
        if op is None or op.kind not in FOLDED or value in self.ends:
            return True
        users = self.users[value]
        if any(u.kind is Kind.WHOLE for u in users):
            return True
        if op.kind is Kind.CHEAP:
            return False
        size = self.values[value].bytes
        return len(users) > 1 or any(self.values[v].bytes > size for u in users if u.kind in FOLDED for v in u.outputs)

    def _reads(self, op: Operation) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for v in op.inputs:
            v = self.original(v)
            if op.kind is Kind.WHOLE or (self._has_buffer(v) and not self._is_computed_again(v)):
                found[v] = None
            else:
                found.update(dict.fromkeys(self._sources_of(v)))
        return tuple(found)

    def _sources_of(self, value: int) -> tuple[int, ...]:
        """The buffers from which a folded value is computed."""
        if value not in self._sources:
            found: dict[int, None] = {}
            for v in self.maker[value].inputs:
                v = self.original(v)
                if self._has_buffer(v) and not self._is_computed_again(v):
                    found[v] = None
                else:
                    found.update(dict.fromkeys(self._sources_of(v)))
            self._sources[value] = tuple(found)
        return self._sources[value]

    def _is_computed_again(self, value: int) -> bool:
        """Whether readers that can fold it do so although it has a buffer."""
        op = self.maker.get(value)
        if op is None or op.kind is not Kind.CHEAP or value in self.ends:
            return False
        size = self.values[value].bytes
        return sum(self.values[v].bytes >= size for v in op.inputs) <= 1


def _merged(block: Block, values: Sequence[Value]) -> Block:
    """The block with operations of one group merged: in depth-first order from the outputs, until one waits for another."""
    if not any(op.group is not None for op in block.operations):
        return block
    maker = {v: op for op in block.operations for v in op.outputs}
    number = {op: 1 << i for i, op in enumerate(op for op in block.operations if op.group is not None)}
    before: dict[Operation, int] = {}
    for op in block.operations:
        before[op] = 0
        for source in {maker[v] for v in op.inputs if v in maker}:
            before[op] |= before[source] | number.get(source, 0)
    open_groups: dict[Hashable, list[Operation]] = {}
    merged: list[list[Operation]] = []
    for op in _depth_first(block, maker):
        if op.group is None:
            continue
        members = open_groups.get(op.group)
        if members is None or any(before[op] & number[m] for m in members):
            members = open_groups[op.group] = []
            merged.append(members)
        members.append(op)
    replaced: dict[Operation, Operation | None] = {}
    for members in merged:
        inputs = tuple(dict.fromkeys(v for m in members for v in m.inputs))
        whole = dataclasses.replace(members[0], inputs=inputs, outputs=tuple(v for m in members for v in m.outputs))
        replaced.update(dict.fromkeys(members))
        replaced[members[0]] = whole
    operations = [replaced.get(op, op) for op in block.operations]
    return dataclasses.replace(block, operations=tuple(op for op in operations if op is not None))


def _depth_first(block: Block, maker: Mapping[int, Operation]) -> list[Operation]:
    """Operations after what they read, from the outputs on."""
    done: dict[Operation, None] = {}
    stack = [(maker[v], False) for v in reversed(block.outputs) if v in maker]
    while stack:
        op, is_left = stack.pop()
        if is_left:
            done[op] = None
        elif op not in done:
            stack.append((op, True))
            stack += [(maker[v], False) for v in reversed(op.inputs) if v in maker and maker[v] not in done]
    return list(done)


def _breadth_first(folding: _Folding) -> list[Operation]:
    """The operations that run, in XLA's order."""
    waiting = {}
    readers: dict[Operation, list[Operation]] = collections.defaultdict(list)
    for op in folding.running:
        needed = {folding.maker[v] for v in folding.reads[op] if v in folding.maker}
        waiting[op] = len(needed)
        for source in needed:
            readers[source].append(op)
    queue = collections.deque(op for op in folding.running if waiting[op] == 0)
    order = []
    while queue:
        op = queue.popleft()
        order.append(op)
        for reader in readers[op]:
            waiting[reader] -= 1
            if waiting[reader] == 0:
                queue.append(reader)
    assert len(order) == len(folding.running), "operations wait for each other in a circle"
    return order

"""Rewrites of a `Block` that XLA makes before it assigns buffers: all-reduces combined, scatters that add to sums.

In: a `Block`. Out: the block as XLA leaves it.

Combined operations: the members of each group are merged, in an order that can be run. The combiner goes depth first from the
outputs and joins what does not wait for each other. What can go wrong: members of two groups that read from each other crosswise;
then only groups that keep an order are joined.

Scattered sums: `a + scatter(b, updates)` becomes `scatter(a + b, updates)` wherever nothing else reads the scatter's result, so
that neither the zeros to which a gradient of a lookup is added nor that gradient have a buffer. With more scatters in one sum
each adds to the result of the next. What can go wrong: a constant `b` is taken for zeros, as in gradients.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Mapping, Sequence

from autopar.intra_op.memory.device_operations import Block, Kind, Operation, Value


def merge_groups(block: Block) -> Block:
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
    joined: list[list[Operation]] = []
    for op in _depth_first(block, maker):
        if op.group is None:
            continue
        members = open_groups.get(op.group)
        if members is None or any(before[op] & number[m] for m in members):
            members = open_groups[op.group] = []
            joined.append(members)
        members.append(op)
    operations = _join(block.operations, joined)
    if not _has_order(operations):  # members of two groups read from each other: join only groups that keep an order
        kept: list[list[Operation]] = []
        for members in joined:
            if _has_order(_join(block.operations, [*kept, members])):
                kept.append(members)
        operations = _join(block.operations, kept)
    return dataclasses.replace(block, operations=_sort(operations))


def _join(operations: Sequence[Operation], groups: Sequence[Sequence[Operation]]) -> list[Operation]:
    """The operations with the members of each group as one, in the place of its first member."""
    replaced: dict[Operation, Operation | None] = {}
    for members in groups:
        inputs = tuple(dict.fromkeys(v for m in members for v in m.inputs))
        whole = dataclasses.replace(members[0], inputs=inputs, outputs=tuple(v for m in members for v in m.outputs))
        replaced.update(dict.fromkeys(members))
        replaced[members[0]] = whole
    return [op for op in (replaced.get(op, op) for op in operations) if op is not None]


def _has_order(operations: Sequence[Operation]) -> bool:
    """Whether no operation reads, through others, from itself."""
    maker = {v: i for i, op in enumerate(operations) for v in op.outputs}
    readers: list[list[int]] = [[] for _ in operations]
    waits = [0] * len(operations)
    for i, op in enumerate(operations):
        for source in {maker[v] for v in op.inputs if v in maker}:
            readers[source].append(i)
            waits[i] += 1
    ready = [i for i, count in enumerate(waits) if not count]
    for i in ready:
        for reader in readers[i]:
            waits[reader] -= 1
            if not waits[reader]:
                ready.append(reader)
    return len(ready) == len(operations)


def _sort(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Every operation after those that it reads from, else in the order given."""
    maker = {v: op for op in operations for v in op.outputs}
    done: dict[Operation, None] = {}
    for start in operations:
        _add_with_sources(start, maker, done)
    return tuple(done)


def _add_with_sources(start: Operation, maker: Mapping[int, Operation], done: dict[Operation, None]) -> None:
    """Add an operation after all that it reads from."""
    stack = [(start, False)]
    while stack:
        op, is_left = stack.pop()
        if is_left:
            done[op] = None
        elif op not in done:
            stack.append((op, True))
            stack += [(maker[v], False) for v in reversed(op.inputs) if v in maker and maker[v] not in done]


def _depth_first(block: Block, maker: Mapping[int, Operation]) -> list[Operation]:
    """Operations after what they read, from the outputs on."""
    done: dict[Operation, None] = {}
    for v in block.outputs:
        if v in maker:
            _add_with_sources(maker[v], maker, done)
    return list(done)


def move_sums_into_scatters(block: Block, values: Sequence[Value]) -> Block:
    """The block with sums inside its scatters, which take the places of the sums among the operations."""
    if not any(_is_scatter(op) for op in block.operations):
        return block
    sums = _Sums(block, values)
    operations = [new for op in block.operations for new in sums.rewrite(op)]
    return dataclasses.replace(block, operations=tuple(op for op in operations if op not in sums.gone))


def _is_scatter(op: Operation) -> bool:
    return op.adds and op.kind is Kind.WHOLE


class _Sums:
    """Who makes and who reads which value; `gone` are the scatters that run somewhere else now, and other names of theirs."""

    def __init__(self, block: Block, values: Sequence[Value]) -> None:
        self.names: dict[int, int] = {}
        self.renames: dict[int, list[Operation]] = collections.defaultdict(list)
        self.maker: dict[int, Operation] = {}
        self.constants: set[int] = set()
        self.gone: set[Operation] = set()
        self.uses = collections.Counter(block.outputs)
        for op in block.operations:
            if op.kind is Kind.ALIAS and values[op.inputs[0]].shape == values[op.outputs[0]].shape:
                self.names[op.outputs[0]] = self.original(op.inputs[0])
                self.renames[self.original(op.inputs[0])].append(op)
                continue
            self.maker.update((v, op) for v in op.outputs)
            self.uses.update(self.original(v) for v in op.inputs)
            if op.kind is Kind.CHEAP and self.constants.issuperset(self.original(v) for v in op.inputs):
                self.constants.update(op.outputs)
        for v in block.outputs:
            self.uses[self.original(v)] += 1

    def original(self, value: int) -> int:
        """The value that this is only another name of."""
        return self.names.get(value, value)

    def rewrite(self, op: Operation) -> list[Operation]:
        """What runs in the place of an operation."""
        if not op.adds or op.kind is not Kind.CHEAP or len(op.inputs) != 2:
            return [op]
        for one, other in (op.inputs, op.inputs[::-1]):
            scatter = self.maker.get(self.original(one))
            if scatter is not None and _is_scatter(scatter) and self.uses[self.original(one)] == 1:
                return self._scatter_onto(op, scatter, other)
        return [op]

    def _scatter_onto(self, total: Operation, scatter: Operation, other: int) -> list[Operation]:
        """The scatter onto the other summand, and before it the sum of that with what the scatter added to."""
        self.gone.add(scatter)
        (made,), (base, *rest) = scatter.outputs, scatter.inputs
        self.gone.update(self.renames[made])
        before: list[Operation] = []
        if self.original(base) not in self.constants:
            before = self.rewrite(Operation(kind=Kind.CHEAP, inputs=(other, base), outputs=(made,), adds=True))
            other = made
        last = dataclasses.replace(scatter, inputs=(other, *rest), outputs=total.outputs, over=(other,))
        self.maker[total.outputs[0]] = last
        return [*before, last]

"""Operations of one group as one, as XLA's combiner of all-reduces makes them.

In: a `Block` some of whose operations name a group. Out: the block with the members of each group merged, in an order that can be
run. The combiner goes depth first from the outputs and joins what does not wait for each other. What can go wrong: members of two
groups that read from each other crosswise; then only groups that keep an order are joined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

from autopar.operations import Block, Operation


def merged(block: Block) -> Block:
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
    operations = _joined(block.operations, joined)
    if not _has_order(
        operations
    ):  # members of two groups read from each other: only groups that keep an order are joined
        kept: list[list[Operation]] = []
        for members in joined:
            if _has_order(_joined(block.operations, [*kept, members])):
                kept.append(members)
        operations = _joined(block.operations, kept)
    return dataclasses.replace(block, operations=_sorted(operations))


def _joined(operations: Sequence[Operation], merged: Sequence[Sequence[Operation]]) -> list[Operation]:
    """The operations with each group of `merged` as one, in the place of its first member."""
    replaced: dict[Operation, Operation | None] = {}
    for members in merged:
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


def _sorted(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Every operation after those that it reads from, else in the order given."""
    maker = {v: op for op in operations for v in op.outputs}
    done: dict[Operation, None] = {}
    for start in operations:
        _visit(start, maker, done)
    return tuple(done)


def _visit(start: Operation, maker: Mapping[int, Operation], done: dict[Operation, None]) -> None:
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
            _visit(maker[v], maker, done)
    return list(done)

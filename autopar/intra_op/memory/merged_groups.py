"""Collectives that XLA's compiler for CPUs combines: all of a kind that do not wait for each other.

In: a `Block` whose collectives name their groups. Out: the block with the members of each group merged, in an order that can be
run. The combiner goes depth first from the outputs and joins what does not wait for each other. It runs after fusion, so that the
order is that of fused operations, whose operands stand in another order than in the program: what is fused leaves its place, and
what it reads comes last. A sum of many terms is so read from its last term to its first. What can go wrong: what XLA fuses is not
known yet (`folding.py` decides it for the merged block), and is taken from the kinds of operations; members of two groups that
read from each other crosswise; then only groups that keep an order are joined.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Hashable, Mapping, Sequence

from autopar.intra_op.memory.device_operations import FOLDED, Block, Kind, Operation


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
    for op in _fused_order(block, maker):
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
        _add_with_operands(start, lambda op: _makers(op.inputs, maker), done)
    return tuple(done)


def _fused_order(block: Block, maker: Mapping[int, Operation]) -> list[Operation]:
    """What runs, each after what it reads, from the outputs on: operands in the order in which fused operations have them."""
    written = {op: at for at, op in enumerate(_depth_first(block, lambda op: _makers(op.inputs, maker), maker))}
    return _depth_first(block, lambda op: _fused_operands(op, maker, written), maker)


def _fused_operands(
    op: Operation, maker: Mapping[int, Operation], written: Mapping[Operation, int]
) -> Sequence[Operation]:
    """The operations whose results an operation reads when all that can be is fused into it: of these the last is fused first."""
    if op.kind not in (*FOLDED, Kind.REDUCE):
        return _makers(op.inputs, maker)
    operands = dict.fromkeys(_makers(op.inputs, maker))
    waiting = [(-written[one], one) for one in operands if _is_fused(one)]
    heapq.heapify(waiting)
    while waiting:
        _, fused = heapq.heappop(waiting)
        del operands[fused]
        for one in _makers(fused.inputs, maker):
            if one not in operands:
                operands[one] = None
                if _is_fused(one):
                    heapq.heappush(waiting, (-written[one], one))
    return list(operands)


def _is_fused(op: Operation) -> bool:
    return op.kind is Kind.ALIAS or op.kind in FOLDED


def _makers(values: Sequence[int], maker: Mapping[int, Operation]) -> list[Operation]:
    return [maker[v] for v in values if v in maker]


def _depth_first(
    block: Block, operands: Callable[[Operation], Sequence[Operation]], maker: Mapping[int, Operation]
) -> list[Operation]:
    """Operations after their operands, from the outputs on."""
    done: dict[Operation, None] = {}
    for start in _makers(block.outputs, maker):
        _add_with_operands(start, operands, done)
    return list(done)


def _add_with_operands(
    start: Operation, operands: Callable[[Operation], Sequence[Operation]], done: dict[Operation, None]
) -> None:
    """Add an operation after all that it reads from."""
    stack = [(start, False)]
    while stack:
        op, is_left = stack.pop()
        if is_left:
            done[op] = None
        elif op not in done:
            stack.append((op, True))
            stack += [(one, False) for one in reversed(operands(op)) if one not in done]

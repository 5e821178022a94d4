"""Collectives that XLA's compiler for GPUs combines: those of one kind, up to a number of bytes.

In: a `Block` whose collectives name their groups, and a limit in bytes. Out: the block with the collectives of a group in buckets
of at most so many bytes of results, each one operation: it runs when the operands of all are there, so they wait for each other,
and the gradients that a bucket reduces live until then. A collective joins the open bucket of its group if that can still run
before anything reads one of its results. What can go wrong: XLA orders collectives by a schedule of its own, so that other ones
may meet in a bucket.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Hashable, Sequence

from autopar.intra_op.memory.device_operations import FOLDED, Block, Kind, Operation, Value

Place = tuple[int, int]
"""The number of an operation in the program and, for buckets that come after it, their order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Around:
    """What collectives read from and what reads them.

    Attributes:
        made_at: the place of the last plain operation that they read from.
        read_at: that of the first one that reads a result of theirs.
        sources: the collectives that they read from, whose places may change.
        readers: the collectives that read them.
    """

    made_at: Place
    read_at: Place
    sources: tuple[Operation, ...]
    readers: tuple[Operation, ...]

    def and_around(self, other: _Around) -> _Around:
        """What is around these and others."""
        return _Around(
            made_at=max(self.made_at, other.made_at),
            read_at=min(self.read_at, other.read_at),
            sources=self.sources + other.sources,
            readers=self.readers + other.readers,
        )


@dataclasses.dataclass(eq=False, kw_only=True)
class _Bucket:
    """Collectives that run as one operation, at a place."""

    members: list[Operation]
    around: _Around
    bytes: int
    place: Place


def combine_in_buckets(block: Block, values: Sequence[Value], limit_bytes: float) -> Block:
    """The block with the collectives of each group combined."""
    if not any(op.group is not None for op in block.operations):
        return block
    return dataclasses.replace(block, operations=tuple(_Buckets(block, values, limit_bytes).run()))


class _Buckets:
    """Where each operation runs, and which buckets there are."""

    def __init__(self, block: Block, values: Sequence[Value], limit_bytes: float) -> None:
        self.operations, self.values, self.limit_bytes = block.operations, values, limit_bytes
        self.number = {op: at for at, op in enumerate(block.operations)}
        self.makers = {v: op for op in block.operations for v in op.outputs}
        self.readers: dict[int, list[Operation]] = collections.defaultdict(list)
        for op in block.operations:
            for v in set(op.inputs):
                self.readers[v].append(op)
        self.bucket: dict[Operation, _Bucket] = {}
        self._near: dict[tuple[Operation, bool], list[Operation]] = {}

    def run(self) -> list[Operation]:
        """The operations, in an order that can be run."""
        is_open: dict[Hashable, _Bucket] = {}
        for op in self.operations:
            if op.group is None:
                continue
            bucket = is_open.get(op.group)
            if bucket is None or not self._join(bucket, op):
                size = sum(self.values[v].bytes for v in op.outputs)
                is_open[op.group] = self.bucket[op] = _Bucket(
                    members=[op], around=self._around(op), bytes=size, place=(self.number[op], 0)
                )
        return self._in_order()

    def _join(self, bucket: _Bucket, op: Operation) -> bool:
        """Put a collective into a bucket, if that is small enough and can still run before its results are read."""
        size = bucket.bytes + sum(self.values[v].bytes for v in op.outputs)
        if size > self.limit_bytes or any(self.bucket.get(one) is bucket for one in self._running(op, before=True)):
            return False
        around = bucket.around.and_around(self._around(op))
        after = max([around.made_at, bucket.place, *map(self._place, around.sources)])
        place = after[0], len(self.bucket) + 1
        if min([around.read_at, *map(self._place, around.readers)]) <= place:
            return False
        bucket.members.append(op)
        bucket.around, bucket.bytes, bucket.place = around, size, place
        self.bucket[op] = bucket
        return True

    def _around(self, op: Operation) -> _Around:
        before, after = self._running(op, before=True), self._running(op, before=False)
        made = (self._place(one) for one in before if one.group is None)
        read = (self._place(one) for one in after if one.group is None)
        return _Around(
            made_at=max(made, default=(-1, 0)),
            read_at=min(read, default=(len(self.operations), 0)),
            sources=tuple(one for one in before if one.group is not None),
            readers=tuple(one for one in after if one.group is not None),
        )

    def _place(self, op: Operation) -> Place:
        bucket = self.bucket.get(op)
        return (self.number[op], 0) if bucket is None else bucket.place

    def _running(self, op: Operation, *, before: bool) -> list[Operation]:
        """The operations before or after one with nothing but folded work between."""
        if (op, before) in self._near:
            return self._near[op, before]
        found: list[Operation] = []
        seen, stack = {op}, [op]
        while stack:
            here = stack.pop()
            if before:
                around = [self.makers[v] for v in here.inputs if v in self.makers]
            else:
                around = [reader for v in here.outputs for reader in self.readers[v]]
            for one in around:
                if one in seen:
                    continue
                seen.add(one)
                (stack if one.kind is Kind.ALIAS or one.kind in FOLDED else found).append(one)
        self._near[op, before] = found
        return found

    def _in_order(self) -> list[Operation]:
        """Each bucket as one operation, and every operation after what it reads from; else by their places."""
        place: dict[Operation, Place] = {}
        for op in self.operations:
            bucket = self.bucket.get(op)
            if bucket is None or len(bucket.members) == 1:
                place[op] = self._place(op)
            elif op is bucket.members[0]:
                place[_combined(bucket.members)] = bucket.place
        makers = {v: op for op in place for v in op.outputs}
        readers: dict[Operation, list[Operation]] = collections.defaultdict(list)
        waits = dict.fromkeys(place, 0)
        for op in place:
            for source in {makers[v] for v in op.inputs if v in makers}:
                readers[source].append(op)
                waits[op] += 1
        queue = [(at, number, op) for number, (op, at) in enumerate(place.items()) if not waits[op]]
        heapq.heapify(queue)
        order, number = [], len(place)
        while queue:
            _, _, op = heapq.heappop(queue)
            order.append(op)
            for reader in readers[op]:
                waits[reader] -= 1
                if not waits[reader]:
                    number += 1
                    heapq.heappush(queue, (place[reader], number, reader))
        assert len(order) == len(place), "combined collectives wait for each other in a circle"
        return order


def _combined(members: Sequence[Operation]) -> Operation:
    inputs = tuple(dict.fromkeys(v for op in members for v in op.inputs))
    return dataclasses.replace(members[0], inputs=inputs, outputs=tuple(v for op in members for v in op.outputs))

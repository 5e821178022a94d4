"""Memory of arguments and results that is free for a while, and what XLA puts into it: of donated arguments that it copies, until
the results that take their places are there; of other results, until these are made.

In: the operations that run, in order, and which result takes the place of which argument. Out: `Lent` memory, and which buffers
lie in it. What is modelled, as XLA's copy insertion and buffer assignment do it:

    - a result may be written over an argument if everything that reads the argument comes before it. XLA inserts copies before
      it knows the order, so it asks what the result is computed from: a weight that backward reads to hand a cotangent on is
      not among what its own update waits for, so it is copied before the step begins, and read from the copy;
    - from then until the update, the argument's memory is free for others: buffers are placed from the largest to the smallest,
      each into the smallest memory that is large enough and free while the buffer is there.

So a copy costs nothing where other buffers fit into what it frees, and its own bytes where they are larger. What can go wrong:
XLA breaks ties by an order of its own.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence

from autopar.intra_op.memory.device_operations import FOLDED, Operation, Span
from autopar.intra_op.memory.folding import Folding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lent:
    """The memory of an argument or of a result.

    Attributes:
        value: the argument or the result.
        free_after: the step after which its memory is free for others. Copies are made one after the other, before step 0.
        free_until: the last step at which it is.
        copy: the buffer of the copy that is read in an argument's place.
    """

    value: int
    free_after: int
    free_until: int
    copy: Span | None = None

    def has_room_for(self, buffer: Span, sizes: Sequence[float]) -> bool:
        """Whether a buffer may lie in the memory, if nothing else does."""
        is_there = self.free_after < buffer.first and buffer.last <= self.free_until
        return is_there and sizes[buffer.value] <= sizes[self.value]


def copied_arguments(
    order: Sequence[Operation], folding: Folding, places: Mapping[int, int]
) -> dict[int, tuple[int, int]]:
    """Arguments that are copied, with the numbers of the operation that reads each last and of that which takes its place.

    Args:
        order: the operations that run.
        folding: what they read.
        places: for each result the argument whose place it takes.
    """
    makers = {
        argument: (folding.maker[made], made)
        for result, argument in places.items()
        for made in (folding.original(result),)
        if made in folding.maker and argument >= 0
    }
    number = {op: at for at, op in enumerate(order)}
    readers: dict[int, list[Operation]] = collections.defaultdict(list)
    for op in order:
        for v in folding.reads[op]:
            if v in makers:
                readers[v].append(op)
    waited_for = _awaited_by(order, folding, [(op, argument) for argument, (op, _) in makers.items()])
    found = {}
    for bit, (argument, (update, made)) in enumerate(makers.items()):
        late = [
            op
            for op in readers[argument]
            if not waited_for[op] >> bit & 1 and not (op is update and _writes_over(op, argument, made, folding))
        ]
        if late:
            found[argument] = number[readers[argument][-1]], number[update]
    return found


def _awaited_by(
    order: Sequence[Operation], folding: Folding, updates: Sequence[tuple[Operation, int]]
) -> Mapping[Operation, int]:
    """For each operation the bits of the updates that are computed from it."""
    own, found = dict.fromkeys(order, 0), dict.fromkeys(order, 0)
    for bit, (op, _) in enumerate(updates):
        own[op] |= 1 << bit
    for op in reversed(order):
        bits = own[op] | found[op]
        for source in {folding.maker[v] for v in folding.reads[op] if v in folding.maker}:
            found[source] |= bits
    return found


def _writes_over(op: Operation, argument: int, made: int, folding: Folding) -> bool:
    """Whether an operation writes each element of the result where it reads that of the argument."""
    if op.over:
        return folding.original(op.over[op.outputs.index(made)]) == argument
    return op.kind in FOLDED and argument in folding.read_in_place(op)


def lie_in_lent(buffers: Collection[Span], lent: Sequence[Lent], sizes: Sequence[float]) -> set[Span]:
    """The buffers that lie in lent memory; `sizes` are bytes of values. Negative steps are those of copies."""
    free = sorted(lent, key=lambda one: (sizes[one.value], -one.free_after))
    taken: list[list[Span]] = [[] for _ in free]
    room = [sizes[one.value] for one in free]
    found = set[Span]()
    for buffer in sorted(buffers, key=lambda b: (-sizes[b.value], b.first)):
        if sizes[buffer.value] <= 0:
            continue
        first = bisect.bisect_left(room, sizes[buffer.value])  # what is before has less memory
        for one, inside in zip(free[first:], taken[first:], strict=True):
            if one.has_room_for(buffer, sizes) and all(
                other.last < buffer.first or buffer.last < other.first for other in inside
            ):
                inside.append(buffer)
                found.add(buffer)
                break
    return found

"""What an XLA compiler keeps in memory while it runs a list of operations, and from when to when.

In: the `Operation`s of one device with their values. Out: `Span`s, the buffers with the first and last step of each, in the
order in which XLA runs the steps. What is modelled, as XLA's sources say and its buffer assignments show, for CPUs; what other
compilers do otherwise is in `compilers.py`:

    - pointwise work is folded into what reads it and has no buffer, unless a reader takes only whole buffers (a contraction, a
      collective, a loop, the end), or it is costly and would be computed in two places or often; a cheap value of one large
      operand that has a buffer all the same is still computed again by its other readers, which hold on to that operand; one of
      several large operands has a buffer if a reader also waits for something with a buffer made of it, as backward does;
    - a large reduction is left to a library, which reads buffers, also of what only repeats a smaller value or a constant; what
      leads to it and what follows it the library computes too: see `library_groups`;
    - steps run breadth first, each as soon as its operands are there: a gather of a parameter, random bits, or a part that
      is recomputed without waiting for the backward pass run at the very start, wherever they stand in the program;
    - pointwise work writes over an operand of its size that nobody reads again; a loop writes over what it starts from, which
      therefore lies where the loop's result will be, also if that is a result of the whole;
    - a loop's body comes on top of what is alive around it, but for what it carries on: that is written where it was, unless
      something reads it later;
    - a donated argument that is read by what its result does not wait for is copied: see `lent`.

What can go wrong: offsets. Buffers of different sizes leave gaps of 3 to 8 %, which are not modelled: see
`Tuning.temporaries_margin`.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from autopar.intra_op.memory.buckets import combine_in_buckets
from autopar.intra_op.memory.device_operations import FOLDED, Block, Operation, Span, Value
from autopar.intra_op.memory.folding import Folding
from autopar.intra_op.memory.lent import Lent, copied_arguments, lie_in_lent
from autopar.intra_op.memory.merged_groups import merge_groups
from autopar.intra_op.memory.product_sums import add_into_products
from autopar.intra_op.memory.scattered_sums import move_sums_into_scatters


@dataclasses.dataclass(frozen=True)
class Footprint:
    """The buffers of a block, how many steps it has, and the memory of arguments and results that is free for a while."""

    spans: tuple[Span, ...]
    steps: int
    lent: tuple[Lent, ...] = ()

    def with_own_memory(self, sizes: Sequence[float]) -> list[Span]:
        """The buffers that lie in no lent memory, copies of arguments among them; `sizes` are the bytes of each value."""
        if not self.lent:
            return list(self.spans)
        buffers = [*self.spans, *(one.copy for one in self.lent if one.copy is not None)]
        placed = lie_in_lent(buffers, self.lent, sizes)
        return [dataclasses.replace(b, first=max(b.first, 0)) for b in buffers if b not in placed]


def footprint_of(
    block: Block,
    values: Sequence[Value],
    *,
    elsewhere: frozenset[int] = frozenset(),
    places: Mapping[int, int] | None = None,
    unwritten: Collection[int] = (),
) -> Footprint:
    """The buffers of a block.

    `elsewhere`: outputs that are written to memory that is there anyway. `places`: for some of them the donated argument whose
    memory that is. `unwritten`: those whose memory is nobody else's, so that other buffers lie there until they are made.
    """
    folding = Folding(_as_compiled(block, values), values)
    order = folding.running if block.compiler.keeps_order else _order_breadth_first(folding)
    starts, steps, inner = _steps(order, values)
    apart = {folding.original(v) for v in elsewhere} | _ends_in_place(order, folding, block)
    results = {folding.original(v) for v in unwritten}
    last_reads = _last_reads(order, folding)
    begun = _begun_in_results(order, folding, last_reads, results)
    waiting, ends = results | begun.keys(), [*starts, steps]
    spans = [
        Span(v, starts[birth], min(ends[min(death + 1, len(order))], steps) - 1)
        for v, (birth, death) in _lifetimes(order, folding, values, last_reads, waiting).items()
        if v not in apart and v not in begun and death >= birth
    ]
    lent = [*_lent_arguments(order, folding, places or {}, ends), *_lent_results(order, results, begun, starts)]
    return Footprint((*spans, *inner), steps, tuple(lent))


def _lent_arguments(
    order: Sequence[Operation], folding: Folding, places: Mapping[int, int], ends: Sequence[int]
) -> Iterator[Lent]:
    """The memory of arguments that are copied; `ends`: the first step of each operation, and the end."""
    copied = copied_arguments(order, folding, places)
    for number, (v, (last, update)) in enumerate(sorted(copied.items()), start=-len(copied)):
        free_until = min(ends[last + 1], ends[update]) - 1
        yield Lent(value=v, free_after=number, free_until=free_until, copy=Span(v, number, ends[last + 1] - 1))


def _begun_in_results(
    order: Sequence[Operation], folding: Folding, last_reads: Mapping[int, int], results: Collection[int]
) -> dict[int, int]:
    """Values in whose memory loops go on to make results, each with its result: a stack of zeros lies where the rows will be."""
    found: dict[int, int] = {}
    if not results:
        return found
    made = {v for op in order for v in op.outputs}
    for at, op in reversed([*enumerate(order)]):
        for out, over in zip(op.outputs, op.over, strict=True) if op.over else ():
            result, start = found.get(out, out), folding.original(over)
            if result in results and start in made and start not in results and last_reads[start] == at:
                found[start] = result
    return found


def _lent_results(
    order: Sequence[Operation], results: Collection[int], begun: Mapping[int, int], starts: Sequence[int]
) -> Iterator[Lent]:
    """The memory of results before anything of them is made; see `_begun_in_results`."""
    first: dict[int, int] = {}
    for start, op in zip(starts, order, strict=True):
        for v in op.outputs:
            first.setdefault(begun.get(v, v), start)
    return (Lent(value=v, free_after=-1, free_until=first[v] - 1) for v in first if v in results)


def _as_compiled(block: Block, values: Sequence[Value]) -> Block:
    """The block as its compiler rewrites it."""
    block, limit = move_sums_into_scatters(block, values), block.compiler.merged_bytes
    merged = merge_groups(block) if math.isinf(limit) else combine_in_buckets(block, values, limit)
    return add_into_products(merged, values)


def _ends_in_place(order: Sequence[Operation], folding: Folding, block: Block) -> set[int]:
    """Of a loop's body, the results that lie in the memory of what they are in the next trip."""
    copied = copied_arguments(order, folding, block.places)
    made = {folding.original(v): carried for v, carried in block.places.items() if carried not in copied}
    return {v for v in made if v in folding.maker}


def _last_reads(order: Sequence[Operation], folding: Folding) -> dict[int, int]:
    """For each buffer the number of the last operation that needs it, its maker at least; one more than all for outputs."""
    found = {v: at for at, op in enumerate(order) for v in op.outputs}
    for at, op in enumerate(order):
        found.update((v, at) for v in folding.reads[op] if v in found)
    found.update((v, len(order)) for v in folding.ends if v in found)
    return found


def _lifetimes(
    order: Sequence[Operation],
    folding: Folding,
    values: Sequence[Value],
    last_reads: Mapping[int, int],
    unwritten: Collection[int],
) -> dict[int, tuple[int, int]]:
    """For each buffer the numbers of the operation that makes it and of the last that needs it; one more than all for outputs.

    What has memory that was `unwritten` takes no other buffer's place.
    """
    death, read_at = dict(last_reads), collections.defaultdict[int, set[int]](set)
    for v, at in death.items():
        read_at[at].add(v)
    for at, op in enumerate(order):
        death.update((v, at - 1) for v in _written_over(op, folding, values, read_at[at], unwritten))
    return {v: (at, death[v]) for at, op in enumerate(order) for v in op.outputs}


def _steps(order: Sequence[Operation], values: Sequence[Value]) -> tuple[list[int], int, list[Span]]:
    """(first step of each operation, steps in all, buffers inside loops): a loop takes the steps of its bodies."""
    starts, inner, now = [], [], 0
    for op in order:
        starts.append(now)
        length = 0
        for body in op.bodies:
            part = footprint_of(body, values, elsewhere=frozenset(body.outputs if op.chooses else ()))
            inner += [Span(s.value, now + length + s.first, now + length + s.last) for s in part.spans]
            length += part.steps
        now += max(length, 1)
    return starts, now, inner


def _written_over(
    op: Operation, folding: Folding, values: Sequence[Value], free: Collection[int], unwritten: Collection[int]
) -> set[int]:
    """The values that the outputs of an operation take the place of, among those that are `free` after it."""
    outputs = [out for out in op.outputs if out not in unwritten]
    if op.over:
        pairs: Iterable[tuple[int, Sequence[int]]] = [
            (out, (folding.original(v),)) for out, v in zip(op.outputs, op.over, strict=True) if out in outputs
        ]
    elif op.kind in FOLDED:
        pairs = [(out, [v for v in folding.read_in_place(op) if not _is_with_workspace(v, folding)]) for out in outputs]
    else:
        return set()
    taken: set[int] = set()
    for out, candidates in pairs:
        usable = (v for v in candidates if v in free and v not in taken and values[v].bytes == values[out].bytes)
        taken.update(itertools.islice((v for v in usable if v not in op.outputs), 1))
    return taken


def _is_with_workspace(value: int, folding: Folding) -> bool:
    """Whether a value is one of two results of a library's call; XLA writes over the results of its own operations alone."""
    return value in folding.maker and folding.maker[value].has_workspace


def _order_breadth_first(folding: Folding) -> list[Operation]:
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

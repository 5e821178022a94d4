"""Scatters that add to sums, as XLA rewrites a `Block` before it assigns buffers.

In: a `Block`. Out: the block as XLA leaves it: `a + scatter(b, updates)` becomes `scatter(a + b, updates)` wherever nothing else
reads the scatter's result, so that neither the zeros to which a gradient of a lookup is added nor that gradient have a buffer.
With more scatters in one sum each adds to the result of the next. What can go wrong: a constant `b` is taken for zeros, as in
gradients.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from autopar.intra_op.memory.device_operations import Block, Kind, Operation, Value


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

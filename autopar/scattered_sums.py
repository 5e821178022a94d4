"""Sums with what a scatter adds up, as XLA's simplifier turns them around: the scatter adds to the other summand at once.

In: a `Block`. Out: the block in which `a + scatter(b, updates)` is `scatter(a + b, updates)` wherever nothing else reads the
scatter's result, so that neither the zeros to which a gradient of a lookup is added nor that gradient have a buffer. With more
scatters in one sum each adds to the result of the next. What can go wrong: a constant `b` is taken for zeros, as in gradients.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from autopar.operations import Block, Kind, Operation, Value


def with_scattered_sums(block: Block, values: Sequence[Value]) -> Block:
    """See the module; the scatter takes the place of the sum among the operations."""
    if not any(_is_scatter(op) for op in block.operations):
        return block
    sums = _Sums(block, values)
    operations = [new for op in block.operations for new in sums.turned(op)]
    return dataclasses.replace(block, operations=tuple(op for op in operations if op not in sums.gone))


def _is_scatter(op: Operation) -> bool:
    return op.adds and op.kind is Kind.WHOLE


class _Sums:
    """Who makes and who reads which value; `gone` are the scatters that run somewhere else now."""

    def __init__(self, block: Block, values: Sequence[Value]) -> None:
        self.names: dict[int, int] = {}
        self.maker: dict[int, Operation] = {}
        self.constants: set[int] = set()
        self.gone: set[Operation] = set()
        self.uses = collections.Counter(block.outputs)
        for op in block.operations:
            if op.kind is Kind.ALIAS and values[op.inputs[0]].shape == values[op.outputs[0]].shape:
                self.names[op.outputs[0]] = self.original(op.inputs[0])
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

    def turned(self, op: Operation) -> list[Operation]:
        """What runs in the place of an operation."""
        if not op.adds or op.kind is not Kind.CHEAP or len(op.inputs) != 2:
            return [op]
        for one, other in (op.inputs, op.inputs[::-1]):
            scatter = self.maker.get(self.original(one))
            if scatter is not None and _is_scatter(scatter) and self.uses[self.original(one)] == 1:
                return self._scattered(op, scatter, other)
        return [op]

    def _scattered(self, total: Operation, scatter: Operation, other: int) -> list[Operation]:
        """The scatter onto the other summand, and before it the sum of that with what the scatter added to."""
        self.gone.add(scatter)
        (made,), (base, *rest) = scatter.outputs, scatter.inputs
        before: list[Operation] = []
        if self.original(base) not in self.constants:
            before = self.turned(Operation(Kind.CHEAP, (other, base), (made,), adds=True))
            other = made
        last = dataclasses.replace(scatter, inputs=(other, *rest), outputs=total.outputs, over=(other,))
        self.maker[total.outputs[0]] = last
        return [*before, last]

"""Sums that a matrix product's library call makes: `a @ b + c` is one call, which writes its result over `c`.

In: a `Block`, compiled by a `Compiler` that adds summands to products. Out: the block in which such a sum is the product's, made
where the product was, or where the sum was if the summand comes later. The product itself has no buffer: so a gradient is added
to the sum over microbatches as it is made. What is modelled, as XLA's rewriter of products for cuBLAS does it:

    - the product has no other reader, and takes one summand as large as it is, and before that one row that is repeated (a bias);
    - a summand that others read stays, and the result has memory of its own;
    - what is widened on the way (a product in bfloat16, added in float32) is one call only if the sum is a result of the block.

What can go wrong: cuBLAS has no call for some types, for which XLA leaves the sum apart. Products of integers are told apart.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from autopar.intra_op.memory.device_operations import FOLDED, Block, Kind, Operation, Value


def add_into_products(block: Block, values: Sequence[Value]) -> Block:
    """The block with sums made by products, which take the places of the sums among the operations."""
    if not block.compiler.adds_into_products or not any(op.multiplies for op in block.operations):
        return block
    sums = _ProductSums(block, values)
    for op in block.operations:
        sums.rewrite(op)
    return dataclasses.replace(block, operations=tuple(op for op in sums.operations if op is not None))


class _ProductSums:
    """The operations by place, None where one is gone; who makes and how often each value is read."""

    def __init__(self, block: Block, values: Sequence[Value]) -> None:
        self.values = values
        self.operations: list[Operation | None] = list(block.operations)
        self.place = {op: at for at, op in enumerate(block.operations)}
        self.names: dict[int, int] = {}
        self.maker: dict[int, Operation] = {}
        self.renames: dict[int, list[Operation]] = collections.defaultdict(list)
        for op in block.operations:
            if op.kind is Kind.ALIAS:
                self.names[op.outputs[0]] = self.original(op.inputs[0])
                self.renames[self.original(op.inputs[0])].append(op)
            else:
                self.maker.update((v, op) for v in op.outputs)
        self.uses = collections.Counter(self.original(v) for v in block.outputs)
        self.ends = set(self.uses)
        for op in block.operations:
            if op.kind is not Kind.ALIAS:
                self.uses.update(self.original(v) for v in op.inputs)

    def original(self, value: int) -> int:
        """The value that this is only another name of."""
        return self.names.get(value, value)

    def rewrite(self, op: Operation) -> None:
        """Let a product make the sum that an operation makes, if it may."""
        if not op.adds or op.kind is not Kind.CHEAP or len(op.inputs) != 2:
            return
        for summand, added in (op.inputs, op.inputs[::-1]):
            if (product := self._product(op, added)) is None or self.values[summand].elements != self._elements(op):
                continue
            is_row = self._is_repeated_row(summand)
            if is_row is None or (is_row and product.over):
                continue
            self._join(op, product, added, summand, is_row=is_row)
            return

    def _elements(self, op: Operation) -> int:
        return self.values[op.outputs[0]].elements

    def _product(self, total: Operation, added: int) -> Operation | None:
        """The product that a sum adds, if it may make the sum."""
        value, maker = self._only_reader_of(added)
        if maker is not None and self._widens(maker):
            is_end = self.uses[total.outputs[0]] == 1 and total.outputs[0] in self.ends
            value, maker = self._only_reader_of(maker.inputs[0]) if is_end else (value, None)
        is_free = maker is not None and maker.multiplies and len(maker.outputs) == 1
        return maker if is_free and self.values[value].elements == self._elements(total) else None

    def _only_reader_of(self, value: int) -> tuple[int, Operation | None]:
        """A value by its first name, and who makes it if it is read once."""
        value = self.original(value)
        return value, self.maker.get(value) if self.uses[value] == 1 else None

    def _widens(self, op: Operation) -> bool:
        """Whether an operation only turns numbers into wider ones."""
        if op.kind not in FOLDED or len(op.inputs) != 1 or len(op.outputs) != 1:
            return False
        before, after = self.values[op.inputs[0]], self.values[op.outputs[0]]
        return before.elements == after.elements and before.itemsize < after.itemsize

    def _is_repeated_row(self, value: int) -> bool | None:
        """Whether a summand repeats one row; None if it repeats something else, which no call adds."""
        maker = self.maker.get(self.original(value))
        if maker is None or maker.kind not in FOLDED:
            return False
        size = self.values[value].elements
        if any(self.values[v].elements >= size for v in maker.inputs):
            return False
        is_row = len(maker.inputs) == 1 and sum(n > 1 for n in self.values[maker.inputs[0]].shape) == 1
        return True if is_row else None

    def _join(self, total: Operation, product: Operation, added: int, summand: int, *, is_row: bool) -> None:
        """Let a product make a sum. A row is a summand of its own: what is added next is written over."""
        value, summand = self.original(added), self.original(summand)
        maker, places = self.maker[value], (self.place[total], self.place[product])
        self.operations[self.place[total]] = None
        self._drop(product)
        if maker is not product:
            self._drop(maker)
        if is_row:
            (summand,) = map(self.original, self.maker[summand].inputs)
        made = dataclasses.replace(
            product,
            inputs=(*product.inputs, summand),
            outputs=total.outputs,
            over=() if is_row else (summand,),
            multiplies=is_row,
        )
        is_late = summand in self.maker and self.place[self.maker[summand]] > places[1]
        self.place[made] = places[0] if is_late else places[1]
        self.operations[self.place[made]] = made
        self.maker[total.outputs[0]] = made

    def _drop(self, op: Operation) -> None:
        """Leave out an operation and the other names of what it makes."""
        for one in (op, *(other for v in op.outputs for other in self.renames[v])):
            self.operations[self.place[one]] = None

"""In which orders of dimensions XLA's CPU compiler takes the operands of a contraction without copying them.

In: a contraction. Out: whether each operand, and the result, can stay as it is; what cannot is written to a buffer of its own
with its dimensions in another order. Matrix products: XLA leaves a product alone if each operand has its batch dimensions first
and then two more; any other becomes one of two matrices per batch element, of the left operand as (batch, free, contracted)
and of the right as (batch, contracted, free). Rows and columns it can turn around while it multiplies. Convolutions take
examples first and channels last, kernels with their features last. What can go wrong: an order that XLA gives the maker of
the operand instead, so that there is no copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from autopar.compat import JaxprEqn

Order = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Orders:
    """The order in which each operand's dimensions are read, None as they are; whether the result lies as it is made.

    `turns_matrices`: of a matrix, or of each of several, rows and columns are turned around on reading. `matrices`: which
    operands are that, with rows or columns contracted; XLA's product reads one that the program turned as it was before.
    `reshaped`: which operands are read as a matrix that they are not: several of their dimensions are one of it. `makes_matrix`:
    the result is one matrix. `multiplies`: it is a product of matrices, one or several.
    """

    operands: tuple[Order | None, ...]
    is_result_in_order: bool = True
    turns_matrices: bool = False
    matrices: tuple[bool, ...] = ()
    reshaped: tuple[bool, ...] = ()
    makes_matrix: bool = False
    multiplies: bool = False

    def copy_order(self, operand: int, shape: Sequence[int]) -> Order | None:
        """The dimensions that are not trivial in the order of the copy that an operand of this shape is read from; None: no copy.

        A batch dimension of one is dropped between the turning and the product, which then cannot turn by itself.
        """
        order = self.operands[operand]
        if order is None:
            return None
        rank = len(shape)
        is_turned = order == (*range(rank - 2), rank - 1, rank - 2) and all(size > 1 for size in shape[: rank - 2])
        moved = tuple(d for d in order if shape[d] > 1)
        return None if moved == tuple(sorted(moved)) or (self.turns_matrices and is_turned) else moved

    def is_reshaped(self, operand: int) -> bool:
        """Whether an operand is read under another shape."""
        return operand < len(self.reshaped) and self.reshaped[operand]

    def reads_before(self, operand: int, permutation: Order, shape: Sequence[int]) -> bool:
        """Whether an operand of this shape, put in this order by the program, is read as it was before that."""
        batch = len(shape) - 2
        if operand >= len(self.matrices) or not self.matrices[operand]:
            return False
        return permutation[:batch] == tuple(range(batch)) and all(size > 1 for size in shape[:batch])


OrdersOf = Callable[[JaxprEqn], Orders]


def of_product(eqn: JaxprEqn) -> Orders:
    """The orders of a `dot_general`."""
    contracted, batched = eqn.params["dimension_numbers"]
    ranks = [len(v.aval.shape) for v in eqn.invars]
    kinds = list(zip(ranks, contracted, batched, strict=True))
    matrices = tuple(_is_plain(rank, inner, batch) and rank == len(batch) + 2 for rank, inner, batch in kinds)
    is_matrix = len(eqn.outvars[0].aval.shape) == 2 and not any(batch for _, _, batch in kinds)
    is_float = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
    if all(_is_plain(*of) for of in kinds):
        return Orders(operands=(None,) * len(ranks), matrices=matrices, makes_matrix=is_matrix, multiplies=is_float)
    found = []
    for place, (rank, inner, batch) in enumerate(kinds):
        free = [d for d in range(rank) if d not in inner and d not in batch]
        found.append((*batch, *free, *inner) if place == 0 else (*batch, *inner, *free))
    reshaped = tuple(len(inner) != 1 or rank != len(batch) + 2 for rank, inner, batch in kinds)
    return Orders(
        operands=tuple(found),
        turns_matrices=True,
        matrices=matrices,
        reshaped=reshaped,
        makes_matrix=is_matrix,
        multiplies=is_float,
    )


def _is_plain(rank: int, contracted: Sequence[int], batched: Sequence[int]) -> bool:
    """Whether XLA leaves an operand as it is: one contracted, at most one free dimension, batch dimensions first."""
    return len(contracted) == 1 and rank <= len(batched) + 2 and tuple(batched) == tuple(range(len(batched)))


def of_convolution(eqn: JaxprEqn) -> Orders:
    """The orders of a `conv_general_dilated`."""
    numbers = eqn.params["dimension_numbers"]
    rank = len(numbers.lhs_spec)
    image = (0, rank - 1, *range(1, rank - 1))
    kernel = (rank - 1, rank - 2, *range(rank - 2))
    given = (tuple(numbers.lhs_spec), tuple(numbers.rhs_spec))
    operands = tuple(None if spec == wanted else spec for spec, wanted in zip(given, (image, kernel), strict=True))
    return Orders(operands=operands, is_result_in_order=tuple(numbers.out_spec) == image)

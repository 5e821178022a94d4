"""What a product loses because multiprocessors work on whole tiles of its result, all of them at once.

In: how a device's libraries cut a product (m, k) x (k, n). Out: `filled`, the part of the multiply-adds done that the product
needs. With tiles of tm x tn, c multiprocessors and B products at once, the k of which may be cut into s parts:

    tiles  = B s ceil(m/tm) ceil(n/tn)               a tile that sticks out is multiplied in full
    waves  = ceil(tiles / c)                         the last wave lasts as long as a full one
    done   = waves c tm tn ceil(k / (s step)) step   a step along k is multiplied in full
    filled = B m n k / done, the most over the tiles and s in use

Source: NVIDIA, Matrix Multiplication Background User's Guide (DU-09799), chapter 3, tile and wave quantization. It is a bound:
all tiles count as equally fast, so a small one ends the last wave well. `padded_elements` are those of operands that a compiler
copies into larger ones first: XLA (`cublas_padding_requirements.h`) pads both dimensions of an operand to multiples of 16 bytes,
where tensor cores want rows to begin. What can go wrong: a library that pads, or cuts, otherwise.
"""

from __future__ import annotations

import dataclasses
import math

ROUNDING = 1e-9
"""Sizes are quotients; one that is whole but for rounding is taken for whole."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThreadBlocks:
    """How a device's libraries cut products in some number formats.

    Attributes:
        multiprocessors: How many tiles are worked on at once.
        tiles: Their sizes in the result, large ones first.
        step: Elements along k that are multiplied at a time.
        aligned_bytes: Dimensions whose elements are no multiple of this are padded first; 1 if none are.
        formats: The number formats of which this is true.
    """

    multiprocessors: int
    tiles: tuple[tuple[int, int], ...]
    step: int = 1
    aligned_bytes: int = 1
    formats: tuple[str, ...]

    def filled(self, m: float, n: float, k: float, *, batch: float = 1.0, enough: float = 1.0) -> float:
        """The part of the multiply-adds done that `batch` products (m, k) x (k, n) need; see the module.

        Once a way to cut them fills `enough`, other ways are not looked at. Parts of k are tried while there are fewer tiles than
        multiprocessors and each part has a step.
        """
        needed, most = batch * m * n * k / (self.multiprocessors * self.step), 0.0
        for rows, columns in reversed(self.tiles):
            tiles, parts = batch * _ceil(m / rows) * _ceil(n / columns), 1
            while True:
                waves = _ceil(tiles * parts / self.multiprocessors)
                most = max(most, needed / (waves * rows * columns * _ceil(k / (parts * self.step))))
                if most >= enough:
                    return min(1.0, most)
                if tiles * parts >= self.multiprocessors or k <= parts * self.step:
                    break
                parts *= 2
        return min(1.0, most)

    def whole_steps(self, k: float) -> float:
        """The elements along k that are multiplied where there are so many."""
        return self.step * _ceil(k / self.step)

    def padded_elements(self, m: float, n: float, k: float, *, batch: float = 1.0, itemsize: int) -> float:
        """Elements of the operands of `batch` products (m, k) x (k, n) that are copied, with zeros beside them, first."""
        m_padded, n_padded, k_padded = (round(size) * itemsize % self.aligned_bytes != 0 for size in (m, n, k))
        return batch * k * (m * (m_padded or k_padded) + n * (n_padded or k_padded))


def _ceil(size: float) -> int:
    return max(1, math.ceil(size - ROUNDING))

"""Seconds of a collective over axes of a logical mesh, by the cheapest algorithm for its size.

With the tiers of a machine, every algorithm of `algorithms` is priced on the levels that the axes cross together, and the
cheapest is taken. Without tiers (`Cluster.uniform`), the links are all there is, each a latency a per collective and b seconds
per byte:

    all-reduce       a + 2 b S (n-1)/n          S: operand
    reduce-scatter   a +   b S (n-1)/n          S: operand (the larger side)
    all-gather       a +   b S (n-1)/n          S: result (the larger side)
    all-to-all       a +   b S (n-1)/n          S: operand
    permute          a +   b S                  S: operand

What can go wrong: axes that cannot reduce jointly (`joint_reductions`). Each axis is then paid in full.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from autopar.cost_model.affine import Affine
from autopar.cost_model.algorithms import FOR_COMPARISON, Kind, algorithms_for
from autopar.cost_model.tiers import Dimension, Tier
from autopar.cost_model.topology import levels_of


@dataclasses.dataclass(frozen=True)
class AxisLink:
    """What a collective along one mesh axis sees: latency (s) and inverse bandwidth (s/byte)."""

    alpha_s: float
    beta_s_per_byte: float


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The cheapest algorithm of a collective for one size, and its seconds."""

    algorithm: str
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshCosts:
    """Times of collectives on a logical mesh.

    Attributes:
        sizes: The sizes of the mesh axes.
        links: The link of each axis; used where there are no tiers.
        joint_reductions: One collective may span several axes at once.
        all_reduce_latency: The part of its latency that an all-reduce still pays where the compiler merges all-reduces.
        tiers: The tiers of the machine, from the inside out.
    """

    sizes: tuple[int, ...]
    links: tuple[AxisLink, ...]
    joint_reductions: bool = True
    all_reduce_latency: float = 1.0
    tiers: tuple[Tier, ...] = ()

    def levels(self, axes: Sequence[int]) -> tuple[Dimension, ...]:
        """The levels of the machine that groups along `axes` cross, from the inside out; none without tiers."""
        return levels_of(self.tiers, self.sizes, axes) if self.tiers else ()

    def algorithms(self, kind: Kind, axes: Sequence[int]) -> dict[str, Affine]:
        """Every algorithm for `kind` over `axes`, as seconds of bytes; without tiers the one formula, as "links"."""
        key = (kind, tuple(sorted(axes)))
        if key not in self._known:
            found = (
                algorithms_for(kind, self.levels(axes)) if self.tiers else {"links": self._price_on_links(kind, axes)}
            )
            self._known[key] = {name: self._merge(kind, cost) for name, cost in found.items()}
        return self._known[key]

    def best(self, kind: Kind, size_bytes: float, axes: Sequence[int]) -> Chosen:
        """The cheapest algorithm for so many bytes; S of each kind as in `algorithms`."""
        found = {name: cost(size_bytes) for name, cost in self._offered(kind, axes).items()}
        name = min(found, key=lambda name: found[name])
        return Chosen(name, found[name])

    def seconds(self, kind: Kind, size_bytes: float, axes: Sequence[int]) -> float:
        """Seconds of a collective by its cheapest algorithm, over all of `axes` at once."""
        return min(cost(size_bytes) for cost in self._offered(kind, axes).values())

    def all_reduce_s(self, operand_bytes: float, axes: Sequence[int]) -> float:
        """Seconds to all-reduce `operand_bytes` per device over the ranks of `axes`."""
        return self._jointly_s("all-reduce", operand_bytes, axes)

    def reduce_scatter_s(self, operand_bytes: float, axes: Sequence[int]) -> float:
        """Seconds to reduce-scatter `operand_bytes` per device over the ranks of `axes`."""
        return self._jointly_s("reduce-scatter", operand_bytes, axes)

    def all_gather_s(self, result_bytes: float, axes: Sequence[int]) -> float:
        """Seconds to all-gather to `result_bytes` per device over the ranks of `axes`."""
        return self._jointly_s("all-gather", result_bytes, axes)

    def all_to_all_s(self, operand_bytes: float, axes: Sequence[int]) -> float:
        """Seconds for every rank of `axes` to exchange `operand_bytes` per device with the others, axis by axis."""
        return sum(self.seconds("all-to-all", operand_bytes, (axis,)) for axis in axes)

    def permute_s(self, operand_bytes: float, axes: Sequence[int]) -> float:
        """Seconds to send `operand_bytes` from each device to one other, somewhere along `axes`."""
        return self.seconds("collective-permute", operand_bytes, axes)

    def _offered(self, kind: Kind, axes: Sequence[int]) -> dict[str, Affine]:
        found = self.algorithms(kind, axes)
        return {name: cost for name, cost in found.items() if name not in FOR_COMPARISON} or found

    def _jointly_s(self, kind: Kind, size_bytes: float, axes: Sequence[int]) -> float:
        if self.joint_reductions:
            return self.seconds(kind, size_bytes, axes)
        return sum(self.seconds(kind, size_bytes, (axis,)) for axis in axes)

    def _merge(self, kind: Kind, cost: Affine) -> Affine:
        part = self.all_reduce_latency if kind == "all-reduce" else 1.0
        return Affine(part * cost.latency_s, cost.s_per_byte)

    def _price_on_links(self, kind: Kind, axes: Sequence[int]) -> Affine:
        """The formulas of the module's docstring; several axes are taken one by one, in the cheapest order."""
        latency_s = max(self.links[axis].alpha_s for axis in axes)
        if kind in ("collective-permute", "send", "broadcast", "reduce"):
            return Affine(latency_s, max(self.links[axis].beta_s_per_byte for axis in axes))
        passes = 2.0 if kind == "all-reduce" else 1.0
        orders = itertools.permutations(axes) if len(axes) <= 3 else [tuple(axes)]
        return Affine(latency_s, passes * min(self._s_per_byte_in(order) for order in orders))

    def _s_per_byte_in(self, order: Sequence[int]) -> float:
        s_per_byte, part = 0.0, 1.0
        for axis in order:
            n = self.sizes[axis]
            s_per_byte += self.links[axis].beta_s_per_byte * part * (n - 1) / n
            part /= n
        return s_per_byte

    @functools.cached_property
    def _known(self) -> dict[tuple[Kind, tuple[int, ...]], dict[str, Affine]]:
        """Algorithms already priced, by kind and axes."""
        return {}

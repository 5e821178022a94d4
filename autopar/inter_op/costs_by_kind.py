"""What ranges of layers cost on the submeshes of a cluster, also on several kinds of node.

In: the `LayerCosts` of each kind. Out: these where there is one kind, else the same for submeshes that say their kind, (nodes,
devices per node, kind). The layers of all kinds are cut at the same places. Bytes are those of the first kind's memory: where a
device of another kind has twice the memory, half of them count. What can go wrong: nothing that does not go wrong for one kind.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from autopar.inter_op.dynamic_program.kinds import KindOfNodes
from autopar.inter_op.dynamic_program.problem import ChosenStage, CostTable
from autopar.inter_op.dynamic_program.submeshes import Submesh, kind_of, size_of, submeshes
from autopar.inter_op.layer_costs import LayerCosts
from autopar.inter_op.layer_sums import repetitions
from autopar.inter_op.planned_layers import PlannedLayers
from autopar.intra_op.request import PlanRequest

KnownCosts: TypeAlias = dict[int, LayerCosts]
"""What layers cost, by the number of the kind of node."""
_COSTS = [field.name for field in dataclasses.fields(CostTable)]
_BYTES = ("weight_bytes", "activation_bytes", "working_bytes", "least_bytes")


@dataclasses.dataclass(frozen=True, eq=False)
class KindsInOrder:
    """Kinds of node in the order in which a pipeline goes through them, and what layers cost on kinds as far as that is known."""

    order: tuple[KindOfNodes, ...] = ()
    known: KnownCosts = dataclasses.field(default_factory=dict)


ALIKE = KindsInOrder()
"""No kinds: all nodes are alike."""


class CostsByKind:
    """See the module's text. Everything is as in `LayerCosts`."""

    def __init__(self, costs: Mapping[int, LayerCosts], bytes_as: Mapping[int, float]) -> None:
        """The costs of each kind, and what a byte of its devices' memory counts as."""
        self._costs, self._bytes_as = dict(costs), dict(bytes_as)

    @property
    def impossible(self) -> set[int]:
        """Numbers of microbatches into which the step cannot be cut."""
        return set[int]().union(*(one.impossible for one in self._costs.values()))

    @property
    def counts(self) -> frozenset[int]:
        """Numbers of microbatches under which something has been planned, for every kind."""
        first, *others = (one.counts for one in self._costs.values())
        return first.intersection(*others)

    def is_planned(self, count: int, submesh: Submesh, *, carried: bool = True) -> bool:
        """Whether layers are planned on as many devices of a kind, in `count` microbatches or what carries over to that."""
        return self._costs[kind_of(submesh)].is_planned(count, submesh[:2], carried=carried)

    def is_divided_otherwise(self, count: int, submesh: Submesh) -> bool:
        """Whether layers are planned on as many devices of a kind only in numbers whose examples these divide further."""
        return self._costs[kind_of(submesh)].is_divided_otherwise(count, submesh[:2])

    def of(self, count: int, kind: int | None = None) -> PlannedLayers:
        """The layers of a kind, the first one unless it is given, under a number of microbatches that has been planned."""
        return self._costs[next(iter(self._costs)) if kind is None else kind].of(count)

    def plan_more(self, count: int, submeshes: Sequence[Submesh]) -> bool:
        """From now on, plan layers on the smallest new submesh of each kind, in `count` microbatches; whether there is any."""
        is_new = False
        for kind, one in self._costs.items():
            is_new |= one.plan_more(count, [s[:2] for s in submeshes if kind_of(s) == kind])
        return is_new

    def plan_others(self, count: int, stages: Sequence[ChosenStage]) -> bool:
        """From now on, plan the layers that do not repeat on the devices of their stages; whether there are new ones."""
        is_new = False
        for kind, one in self._costs.items():
            is_new |= one.plan_others(count, [stage for stage in stages if kind_of(stage.submesh) == kind])
        return is_new

    def plan_all_others(self) -> bool:
        """In one more number of microbatches, plan all layers wherever the one that repeats is planned; whether there is one."""
        return any(one.plan_all_others() for one in self._costs.values())

    def start_with(self, count: int) -> bool:
        """Plan layers in this number of microbatches at first instead, if the step can be cut into it; whether it can."""
        starts = [one.start_with(count) for one in self._costs.values()]
        return all(starts)

    @property
    def has_common(self) -> bool:
        """Whether one layer repeats often, and nothing is known but the first number of microbatches."""
        return all(one.has_common and len(one.counts) == 1 for one in self._costs.values())

    @property
    def are_alike(self) -> bool:
        """Whether most forward work is that of the layer that repeats."""
        return all(one.are_alike for one in self._costs.values())

    def table(
        self, count: int, options: Sequence[Submesh], *, shares: Sequence[float] = (0.0,), split: bool = False
    ) -> CostTable:
        """Costs of all ranges of layers on all submeshes."""
        return self._together(options, shares, lambda one, own: one.table(count, own, shares=shares, split=split))

    def table_of_common(
        self, count: int, options: Sequence[Submesh], *, shares: Sequence[float] = (0.0,), split: bool = False
    ) -> CostTable:
        """As `table`, as if the layers that do not repeat cost nothing."""

        def table(one: LayerCosts, own: Sequence[Submesh]) -> CostTable:
            return one.table_of_common(count, own, shares=shares, split=split)

        return self._together(options, shares, table)

    def _together(
        self,
        options: Sequence[Submesh],
        shares: Sequence[float],
        table_of: Callable[[LayerCosts, Sequence[Submesh]], CostTable],
    ) -> CostTable:
        """The tables of all kinds as one, whose options are in the order that they are asked for in."""
        rows: dict[str, dict[tuple[int, int], np.ndarray]] = {name: {} for name in _COSTS}
        for kind, one in self._costs.items():
            own = [place for place, submesh in enumerate(options) if kind_of(submesh) == kind]
            if not own:
                continue
            table = table_of(one, [options[place][:2] for place in own])
            for name in _COSTS:
                scale = self._bytes_as[kind] if name in _BYTES else 1.0
                figures = scale * getattr(table, name)
                for number in range(len(repetitions(shares))):
                    for at, place in enumerate(own):
                        rows[name][number, place] = figures[number * len(own) + at]
        order = [(number, place) for number in range(len(repetitions(shares))) for place in range(len(options))]
        return CostTable(**{name: np.stack([found[key] for key in order]) for name, found in rows.items()})


def costs_on_kinds(
    kinds: KindsInOrder, make: Callable[..., LayerCosts]
) -> tuple[CostsByKind, tuple[Submesh, ...], float]:
    """(What layers cost on these kinds, all submeshes of them, the memory limit of the first).

    `make` makes costs from a request and its submeshes.
    """
    options = tuple((*one, kind.number) for kind in kinds.order for one in submeshes(*kind.part[:2]))
    for kind in kinds.order:
        if kind.number not in kinds.known:
            kinds.known[kind.number] = make(kind.request, submeshes(*kind.part[:2]), of_a_kind=True)
    limits = {kind.number: kind.request.memory_limit_bytes or math.inf for kind in kinds.order}
    first = limits[kinds.order[0].number]
    bytes_as = {number: first / own if math.isfinite(own) else 1.0 for number, own in limits.items()}
    return CostsByKind({number: kinds.known[number] for number in limits}, bytes_as), options, first


def costs_on(
    shape: Submesh,
    request: PlanRequest,
    kinds: KindsInOrder,
    make: functools.partial[LayerCosts],
    num_stages: int | None,
) -> tuple[LayerCosts | CostsByKind, tuple[Submesh, ...], float]:
    """(What layers cost, the submeshes that stages may have, the memory limit).

    There are at least as many layers as stages where the model has them; or as nodes, as a stage on each is often best. A stage
    leaves the others a device each.
    """
    make = functools.partial(make, fewest_layers=num_stages or shape[0])
    if kinds.order:
        return costs_on_kinds(kinds, make)
    others = max(num_stages - 1 if num_stages else 0, int(make.keywords["smallest_first"]))
    options = submeshes(*shape)
    options = tuple(one for one in options if size_of(one) <= size_of(shape) - others) or options
    return make(request, options, devices=size_of(shape)), options, request.memory_limit_bytes or math.inf

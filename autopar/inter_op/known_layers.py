"""What is known of layers, on numbers of devices in numbers of microbatches: planned in some, estimated in the others.

In: the layers in each number of microbatches, and the numbers of devices on which they are to be planned. Out: what a layer costs
anywhere. Where many layers are alike, one of them is planned wherever anything is asked, and the others where they are chosen, as
they scale as that one does. A larger number of devices costs what perfect division of a smaller one gives, a smaller one what a
larger one gives without its communication, and `candidates/layer_figures.py` carries figures over to another number of
microbatches. What can go wrong: an estimate need not be a bound, so a caller that chooses by an estimate has that planned and
chooses again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from autopar.inter_op.candidates.layer_figures import LayerFigures, carry_over, nearest_of, task_seconds
from autopar.inter_op.candidates.timetables import latency_share
from autopar.inter_op.planned_layers import PlannedLayers


@dataclasses.dataclass(eq=False, kw_only=True)
class KnownLayers:
    """See the module's text. All mappings are by numbers of microbatches.

    Attributes:
        examples: in the whole batch.
        layers: those of the step in a number of microbatches.
        sizes: the numbers of devices on which layers are planned: all of them, or if one repeats that one.
        others: (layer, devices) of the others that are planned then, each the first of those that are equal to it.
    """

    examples: int
    layers: dict[int, PlannedLayers] = dataclasses.field(default_factory=dict)
    sizes: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    others: dict[int, set[tuple[int, int]]] = dataclasses.field(default_factory=dict)
    _known: dict[tuple[int, int, int], LayerFigures | None] = dataclasses.field(default_factory=dict)

    def begin(self, count: int, layers: PlannedLayers, sizes: Collection[int] = (), *, others_on: int = 0) -> None:
        """Add a number of microbatches whose layers are planned on these numbers of devices, the others on one number if any."""
        self.layers[count], self.sizes[count] = layers, set(sizes)
        kinds = {layers.first_alike(layer) for layer in range(len(layers))} - {layers.common}
        self.others[count] = {(layer, others_on) for layer in kinds} if others_on else set()
        self._known.clear()

    def add(self, count: int, devices: int, among: Collection[int]) -> None:
        """From now on, plan the layers, or the one that repeats, on this number of devices as well.

        And on those `among` others of which they can use no more than of the ones that are planned: what they cost is known.
        """
        sizes, layers = self.sizes[count], self.layers[count]
        sizes.add(devices)
        planned = [layers.common] if layers.has_common else [*range(len(layers))]
        useful = {size: tuple(layers.useful_devices(layer, size) for layer in planned) for size in {*sizes, *among}}
        known = {useful[size] for size in sizes}
        sizes |= {size for size, of_layers in useful.items() if of_layers in known}
        self._known.clear()

    def add_others(self, count: int, places: Iterable[tuple[int, int]]) -> bool:
        """From now on, plan those of these (layer, devices) that do not repeat; whether there are new ones."""
        layers = self.layers[count]
        wanted = {(layers.first_alike(layer), devices) for layer, devices in places}
        new = {one for one in wanted if one[0] != layers.common} - self.others[count] if layers.has_common else set()
        self.others[count] |= new
        self._known.clear()
        return bool(new)

    def plan(self, sizes: Collection[int]) -> None:
        """Plan all that is to be planned on these numbers of devices, side by side."""
        for count, known in self.sizes.items():
            layers, others = self.layers[count], [one for one in self.others[count] if one[1] in sizes]
            ahead = min((size for size in sizes if size not in known), default=None)
            layers.plan(known & {*sizes}, others=sorted(others) if layers.has_common else None, perhaps=ahead)

    def figures(self, count: int, layer: int, devices: int) -> LayerFigures | None:
        """What a layer costs on these devices in this number of microbatches, planned or estimated; None if there is no plan.

        A layer is taken to scale as the one that repeats, if that is planned. If it is not, and other numbers of microbatches are
        planned, whose examples the devices divide as well, it is carried over from them. If none is, work, state and all else of
        a smaller submesh are divided evenly among more devices, but for the time in which it waits for communication: what
        devices send each other in a larger submesh is seldom less, and its links are no better.
        """
        key = (count, self._kind(layer), devices)
        if key not in self._known:
            self._known[key] = self._find_figures(count, layer, devices)
        return self._known[key]

    def is_common(self, layer: int) -> bool:
        """Whether a layer is the one that repeats, in all numbers of microbatches."""
        return all(layers.first_alike(layer) == layers.common for layers in self.layers.values())

    def _kind(self, layer: int) -> int:
        """The first of the layers that equal a layer in all numbers of microbatches that are planned."""
        return max(layers.first_alike(layer) for layers in self.layers.values())

    def _find_figures(self, count: int, layer: int, devices: int) -> LayerFigures | None:
        planned_in = self._planned_in(layer, devices)
        known = {m: self.layers[m].figures(layer, devices) for m in planned_in}
        if count in known:
            return known[count]
        planned = {m: figures for m, figures in known.items() if figures is not None}
        if known and not planned:
            return None
        if scaled := self._as_common_scales(count, layer, devices):
            return scaled
        ways = self.ways(count, devices)
        carried = {m: figures for m, figures in planned.items() if self.ways(m, devices) >= ways}
        if carried:
            alike = self._divided_alike(carried, devices, nearest=nearest_of(carried, count))
            return carry_over(alike, count, share=self._share(layer))
        if planned:
            return self._at_best(layer, devices, planned, count)
        smaller = {size for m in self.sizes for size in self.sizes_of(m, layer) if size < devices}
        divided = [
            {name: size / devices * figure for name, figure in dataclasses.asdict(figures).items()}
            for size in smaller
            if (figures := self.figures(count, layer, size)) is not None
        ]
        if not divided:
            return self._undivided(count, layer, devices)
        found = LayerFigures(**{name: max(one[name] for one in divided) for name in divided[0]})
        return found.slower(self._slowdown(count, layer, devices))

    def sizes_of(self, count: int, layer: int) -> set[int]:
        """The numbers of devices on which a layer is planned in a number of microbatches."""
        layers = self.layers[count]
        if not layers.has_common or layers.first_alike(layer) == layers.common:
            return self.sizes[count]
        return {devices for other, devices in self.others[count] if other == layers.first_alike(layer)}

    def _planned_in(self, layer: int, devices: int) -> list[int]:
        """The numbers of microbatches in which a layer is planned on as many devices, or on all of them that it can use."""

        def is_planned_in(count: int) -> bool:
            sizes, layers = self.sizes_of(count, layer), self.layers[count]
            if devices in sizes:
                return True
            useful = layers.useful_devices(layer, devices)
            return useful < devices and any(layers.useful_devices(layer, size) == useful for size in sizes)

        return [count for count in self.sizes if is_planned_in(count)]

    def _as_common_scales(self, count: int, layer: int, devices: int) -> LayerFigures | None:
        """Figures of a layer that is planned elsewhere, if it scales as the layer that repeats; None if that is not planned here.

        Elsewhere is where least differs: on other devices, or in another number of microbatches.
        """
        if devices not in self.sizes.get(count, ()) or not self.layers[count].has_common:
            return None
        here = self.layers[count].figures(self.layers[count].common, devices)
        places = ((m, size) for m in self.sizes for size in self.sizes_of(m, layer) & self.sizes[m])
        away = {one: abs(math.log(one[0] / count)) + abs(math.log(one[1] / devices)) for one in places}
        for m, size in sorted(away, key=lambda one: (away[one], one)):
            own, common = (self.layers[m].figures(one, size) for one in (layer, self.layers[m].common))
            if here and own and common:
                return own.scaled(common, here, divided=size / devices * min(1.0, m / count))
        return None

    def _undivided(self, count: int, layer: int, devices: int) -> LayerFigures:
        """What a layer takes at best where it is planned on more devices alone. Nothing is known of its memory."""
        sizes = (size for m in self.sizes for size in self.sizes_of(m, layer))
        larger = min((size for size in sizes if size > devices), default=None)
        if larger is None:
            return LayerFigures()
        planned = {m: self.layers[m].figures(layer, larger) for m in self._planned_in(layer, larger)}
        known = {m: figures for m, figures in planned.items() if figures is not None}
        if not known:
            return LayerFigures()
        least = self._at_best(layer, larger, known, count)
        task_s = least.forward_s + least.backward_s
        launches_s = min(task_s, self.layers[next(iter(known))].launches_s(layer))
        times = (launches_s + (task_s - launches_s) * larger / devices) / task_s if task_s else 1.0
        seconds = LayerFigures(forward_s=least.forward_s, again_s=least.again_s, backward_s=least.backward_s)
        return seconds.slower(times)

    def _at_best(self, layer: int, devices: int, planned: Mapping[int, LayerFigures], count: int) -> LayerFigures:
        """Figures on these devices without what a layer waits there, or does on several at once.

        Of `count` microbatches, from `planned` numbers of these, whose examples the devices divide less far.
        """
        nearest = nearest_of(planned, count)
        task_s, layers = planned[nearest].forward_s + planned[nearest].backward_s, self.layers[nearest]
        launches = min(1.0, layers.launches_s(layer) / task_s) if task_s else 0.0
        figures = carry_over(planned, count, share=np.maximum(launches, self._share(layer)))
        part = max(launches, layers.divided(layer, devices))
        return figures.slower(part)

    def _slowdown(self, count: int, layer: int, devices: int) -> float:
        """How many times longer a layer takes on these devices than if all of its time on fewer of them were divided evenly."""
        for known in (count, *self.layers):
            fewer = [size for size in self.sizes.get(known, ()) if size < devices]
            if fewer:
                layers = self.layers[known]
                one = layer if max(fewer) in self.sizes_of(known, layer) else layers.common
                waiting = layers.waiting(one, max(fewer))
                return 1 - waiting + waiting * devices / max(fewer)
        return 1.0

    def ways(self, count: int, devices: int) -> int:
        """The number of devices among which the examples of a microbatch can be divided evenly."""
        return math.gcd(max(1, self.examples // count), devices)

    def _divided_alike(
        self, planned: Mapping[int, LayerFigures], devices: int, *, nearest: int
    ) -> dict[int, LayerFigures]:
        """Of planned numbers of microbatches those whose examples the devices divide as far as those of the nearest one.

        Where they divide fewer, a microbatch takes longer for another reason than latency.
        """
        ways = self.ways(nearest, devices)
        return {m: figures for m, figures in planned.items() if self.ways(m, devices) == ways}

    def _share(self, layer: int) -> np.ndarray | float:
        """The part of a layer's (forward, backward) seconds that is latency, from submeshes planned under several counts.

        That of the layer that repeats, where the layer is planned under one alone.
        """
        shares = []
        for devices in set[int]().union(*(self.sizes_of(m, layer) for m in self.sizes)):
            counts = [m for m in self.sizes if devices in self.sizes_of(m, layer)]
            known = {m: f for m in counts if (f := self.layers[m].figures(layer, devices)) is not None}
            known = self._divided_alike(known, devices, nearest=next(iter(known), 1))
            if len(known) > 1:
                share = latency_share({m: task_seconds(f) for m, f in known.items()}, next(iter(known)))
                shares += [] if share is None else [share]
        if shares:
            return np.asarray(np.mean(shares, axis=0))
        layers = next(iter(self.layers.values()))
        return self._share(layers.common) if layers.has_common and layers.first_alike(layer) != layers.common else 0.0

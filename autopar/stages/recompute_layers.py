"""Recomputation per layer as a rewriting of the step: backward does a layer's forward work again instead of keeping its results.

In: a traced step. Out: the same step whose program has, before the backward of each layer but the last,

    the values that the layer received, as copies that wait for the cotangent;  the layer's forward work again, on these

and whose backward reads the new results. So between forward and backward there is what layers hand on, and the results of one
layer at a time. Operations and operands are the same, so are the results: a dropout mask comes from the same key. Layers are
those of `layers.cluster`; of several numbers of layers the one that keeps the fewest bytes counts:

    kept(n) = the bytes that cross n layers' boundaries + the most that backward reads of one layer's results

The last layer is left alone, because its backward begins at once. Values that the user named (`jax.ad_checkpoint`'s
`checkpoint_name`) may be kept, and only what leads from them to the others be done again. What can go wrong: a scan over layers
is one operation, and doing it again saves nothing; put `jax.checkpoint` on its body.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from autopar.avals import bytes_of
from autopar.compat import Literal, Var, attributed_to
from autopar.program.checkpoint_names import find_named, is_checkpoint_name
from autopar.program.evaluate import bind_equation, wait_for
from autopar.program.program import Atom, Equation, Program, can_be_awaited, operands_of
from autopar.program.step import TracedStep
from autopar.program.trace import retrace
from autopar.rules.table import entry_for
from autopar.stages.chain import chain_of
from autopar.stages.dependence import Dependence
from autopar.stages.layers import cluster
from autopar.stages.scan_stacks import forward_work
from autopar.stages.tuning import TUNING, Tuning


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """Forward work that is done again: `results` are what backward reads of it, `equations` make these, in order."""

    equations: tuple[Equation, ...]
    results: frozenset[Var]


@dataclasses.dataclass(frozen=True)
class Recomputation:
    """Layers whose forward work is done again, in the order of forward, and the bytes that forward keeps for backward.

    `keeps_named`: values that the user named are kept.
    """

    layers: tuple[Layer, ...]
    bytes_before: float
    bytes_after: float
    keeps_named: bool = False

    @property
    def kept_share(self) -> float:
        """The part of what forward keeps for backward that is still kept."""
        return self.bytes_after / self.bytes_before if self.bytes_before else 1.0

    def apply(self, traced: TracedStep, count: int | None = None) -> TracedStep:
        """The step with this work done again; itself if there is none. `count`: of the first layers only."""
        layers = self.layers[:count]
        if not layers:
            return traced
        return retrace(traced, traced.inputs, _Evaluation(traced, layers).run)


@dataclasses.dataclass(frozen=True)
class Repeated:
    """Which forward work backward does again: of the first so many layers, None: of all; and whether named values are kept."""

    layers: int | None = None
    keeps_named: bool = False

    def apply(self, traced: TracedStep, *, tuning: Tuning = TUNING) -> TracedStep:
        """The step with this work done again; itself if there is nothing that pays."""
        found = find_recomputation(traced, keeps_named=self.keeps_named, tuning=tuning)
        return found.apply(traced, self.layers)


def find_recomputation(traced: TracedStep, *, keeps_named: bool = False, tuning: Tuning = TUNING) -> Recomputation:
    """What is best done again; see the module's text. Results of at most `tuning.kept_bytes` are kept."""
    if any(entry_for(eqn).once for eqn in traced.program.walk()):
        return Recomputation((), 0, 0, keeps_named)
    divided = _Division(traced, tuning.kept_bytes, keeps_named=keeps_named)
    most = sum(map(bytes_of, divided.read_by_backward))
    found: list[tuple[float, tuple[Layer, ...]]] = [(most, ())]
    for count in tuning.recomputed_layers:
        if most and 2 * count <= len(divided.chain):
            found.append(divided.at(cluster(divided.chain, max_layers=count)))
    kept, layers = min(found, key=lambda pair: pair[0])
    return Recomputation(layers, most, kept, keeps_named)


def names_values(traced: TracedStep) -> bool:
    """Whether the step names values of its forward pass."""
    return any(is_checkpoint_name(eqn) for eqn in traced.program.equations)


class _Division:
    """What backward reads of forward, and what of it is kept where the forward chain is cut."""

    def __init__(self, traced: TracedStep, kept_bytes: int, *, keeps_named: bool) -> None:
        self.kept_bytes = kept_bytes
        self.kinds = Dependence.of_whole(traced)
        flops = {work.equation: work.flops for work in forward_work(traced, ())}
        self.chain = chain_of(self.kinds, flops.__getitem__)
        self.forward = [eqn for eqn in self.kinds.body if eqn not in self.kinds.backward]
        self.maker = {v: eqn for eqn in self.forward for v in eqn.outvars}
        self.named = find_named(self.forward) if keeps_named else frozenset()
        backward = (v for eqn in self.kinds.body if eqn in self.kinds.backward for v in operands_of(eqn))
        self.read_by_backward = [v for v in dict.fromkeys(backward) if v in self.maker]

    def at(self, cuts: Sequence[int]) -> tuple[float, tuple[Layer, ...]]:
        """(kept bytes, layers to recompute) for layers that begin at these places."""
        layer_of = self._layers(cuts)
        wanted: dict[int, list[Var]] = {}
        for v in self.read_by_backward:
            at = layer_of.get(v, frozenset())
            if len(at) == 1 and bytes_of(v) > self.kept_bytes and v not in self.named:
                wanted.setdefault(next(iter(at)), []).append(v)
        layers = {k: self._layer(found, layer_of) for k, found in sorted(wanted.items()) if k < len(cuts)}
        layers = {k: layer for k, layer in layers.items() if not any(eqn.regions for eqn in layer.equations)}
        crossing = sum(
            bytes_of(v) for v, at in layer_of.items() if len(at) > 1 and v in self.maker and self._is_anchored(v)
        )
        left = sum(bytes_of(v) for k, found in wanted.items() if k not in layers for v in found)
        left += sum(bytes_of(eqn.outvars[0]) for eqn in self.forward if self.named and is_checkpoint_name(eqn))
        most = max((sum(map(bytes_of, wanted[k])) for k in layers), default=0.0)
        return crossing + left + most, tuple(layers.values())

    def _is_anchored(self, v: Var) -> bool:
        return self.kinds.is_anchored(self.maker[v])

    def _layers(self, cuts: Sequence[int]) -> dict[Var, frozenset[int]]:
        """For each value of forward the layers that make or read it, also through what depends on no example or no weight."""
        own = {place.equation: bisect.bisect_right(cuts, i) for i, place in enumerate(self.chain)}
        found: dict[Var, set[int]] = {}
        for eqn in reversed(self.forward):
            layers = {own[eqn]} if eqn in own else set().union(*(found.get(v, set()) for v in eqn.outvars))
            for v in (*operands_of(eqn), *(eqn.outvars if eqn in own else ())):
                found.setdefault(v, set()).update(layers)
        return {v: frozenset(layers) for v, layers in found.items()}

    def _layer(self, results: Sequence[Var], layer_of: Mapping[Var, frozenset[int]]) -> Layer:
        """The equations behind results, back to what several layers use, and to arguments."""
        needed, chosen = set(results), []
        for eqn in reversed(self.forward):
            if any(v in needed for v in eqn.outvars):
                chosen.append(eqn)
                needed.update(v for v in operands_of(eqn) if self._is_made_again(v, layer_of))
        return Layer(tuple(reversed(chosen)), frozenset(results))

    def _is_made_again(self, v: Var, layer_of: Mapping[Var, frozenset[int]]) -> bool:
        return v in self.maker and v not in self.named and len(layer_of[v]) == 1


class _Evaluation:
    """Runs the step's equations, and each layer's again before the first backward equation that reads its results."""

    def __init__(self, traced: TracedStep, layers: Iterable[Layer]) -> None:
        self.program = traced.program
        self.layer_of = {v: layer for layer in layers for v in layer.results}
        self.backward = Dependence.of_whole(traced).backward
        self.constants = _constants(traced.program)

    def run(self, *arrays: jax.Array) -> list[jax.Array]:
        """The step's flat outputs."""
        values: dict[Var, jax.Array] = dict(zip(self.program.invars, arrays, strict=True))
        again: dict[Var, jax.Array] = {}
        late: jax.Array | None = None
        for eqn in self.program.equations:
            is_backward = eqn in self.backward
            for v in operands_of(eqn) if is_backward else ():
                if v in self.layer_of and v not in again:
                    again.update(_do_again(self.layer_of[v], values, late))
            with attributed_to(eqn):
                results = bind_equation(eqn, [_value(v, values, again if is_backward else {}) for v in eqn.invars])
                if eqn.after is not None:
                    results = [wait_for(values[eqn.after], array) for array in results]
            values.update(zip(eqn.outvars, results, strict=True))
            if is_backward:
                late = next((values[v] for v in reversed(eqn.outvars) if self._is_late(v)), late)
        return [_value(v, values, {}) for v in self.program.outvars]

    def _is_late(self, v: Var) -> bool:
        """Whether a result of backward is there only when backward is; the zeros of a derivative are there at once."""
        return can_be_awaited(v) and v not in self.constants


def _do_again(layer: Layer, values: Mapping[Var, jax.Array], late: jax.Array | None) -> dict[Var, jax.Array]:
    """A layer's results, made again of what it received, when `late` is there."""
    made = {v for eqn in layer.equations for v in eqn.outvars}
    received = dict.fromkeys(v for eqn in layer.equations for v in operands_of(eqn) if v not in made)
    waiting = [values[v] for v in received] + ([] if late is None else [late])
    own = dict(zip(received, jax.lax.optimization_barrier(waiting), strict=False))
    for eqn in layer.equations:
        with attributed_to(eqn):
            own.update(zip(eqn.outvars, bind_equation(eqn, [_value(v, own, {}) for v in eqn.invars]), strict=True))
    return {v: own[v] for v in layer.results}


def _constants(program: Program) -> set[Var]:
    """What is computed from no input."""
    found: set[Var] = set()
    for eqn in program.equations:
        if found.issuperset(operands_of(eqn)):
            found.update(eqn.outvars)
    return found


def _value(atom: Atom, values: Mapping[Var, jax.Array], again: Mapping[Var, jax.Array]) -> jax.Array:
    if isinstance(atom, Literal):
        return jnp.asarray(atom.val, atom.aval.dtype)
    return again[atom] if atom in again else values[atom]

"""Sums that a scan over layers rounds, as gradients in half precision are, rounded after the scan.

In: a `Program`. Out: the program whose scans stack the sums as they are, and casts of the stacks behind them. Rounding is no
linear operation: inside of the loop it would need the whole sum there, over all microbatches or over all devices for each layer.
What can go wrong: a stack that is wider than its rounded one takes more memory. So products that are rounded, which may also be
results that a forward pass keeps, are left inside unless they look like gradients: as wide after all casts as before, or of the
shape of what the scan reads a row of, as the gradient of a weight is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from autopar.compat import Var
from autopar.program.loops import LoopEquation
from autopar.program.program import CAST, Atom, Equation, Program

RESHAPING = ("reshape", "squeeze", "transpose")
SUM, PRODUCTS = "reduce_sum", ("dot_general", "conv_general_dilated")
"""What may stand between a sum in a scan, its rounding and the result."""


def with_late_casts(program: Program) -> Program:
    """The program with sums that a scan rounds, of `float32` to `bfloat16` say, rounded after it."""
    equations: list[Equation] = []
    for eqn in program.equations:
        inside = dataclasses.replace(eqn, regions=tuple(map(with_late_casts, eqn.regions)))
        is_scan = isinstance(inside, LoopEquation) and inside.loop.kind == "scan"
        equations.extend(_cast_behind(inside) if is_scan else (inside,))
    return dataclasses.replace(program, equations=tuple(equations))


@dataclasses.dataclass(frozen=True)
class _Rounded:
    """A result of a scan's body: the sum, the casts between the two, and the reshapes, each in order."""

    sum: Atom
    casts: Sequence[Equation]
    reshapes: Sequence[Equation]

    def reshaped(self) -> list[Equation]:
        """The reshapes without the casts."""
        value, made = self.sum, list[Equation]()
        for eqn in self.reshapes:
            out = Var(eqn.outvars[0].aval.update(dtype=value.aval.dtype))
            made.append(dataclasses.replace(eqn, invars=(value, *eqn.invars[1:]), outvars=(out,)))
            value = out
        return made

    def cast(self, wide: Var, stack: Var, scan: Equation) -> list[Equation]:
        """The casts from a stack of sums to the stack that was asked for."""
        made = list[Equation]()
        for cast in self.casts:
            is_last = cast is self.casts[-1]
            after = stack if is_last else Var(stack.aval.update(dtype=cast.outvars[0].aval.dtype))
            made.append(dataclasses.replace(cast, invars=(wide,), outvars=(after,), tag=scan.tag))
            wide = after
        return made


def _cast_behind(scan: Equation) -> list[Equation]:
    """The scan, and the casts of those of its stacks that are rounded sums."""
    assert isinstance(scan, LoopEquation)
    (body,) = scan.regions
    maker = {v: eqn for eqn in body.equations for v in eqn.outvars}
    results, outs, added, casts = list(body.outvars), list(scan.outvars), list(body.equations), list[Equation]()
    rows = {tuple(v.aval.shape) for v in body.invars[scan.loop.consts + scan.loop.carries :]}
    for i in range(scan.loop.carries, len(results)):
        rounded = _rounded_sum(results[i], maker, rows)
        if rounded is None:
            continue
        reshaped = rounded.reshaped()
        results[i] = reshaped[-1].outvars[0] if reshaped else rounded.sum
        added += reshaped
        wide = Var(outs[i].aval.update(dtype=results[i].aval.dtype))
        casts += rounded.cast(wide, outs[i], scan)
        outs[i] = wide
    region = Program(body.invars, tuple(added), tuple(results))
    return [dataclasses.replace(scan, regions=(region,), outvars=tuple(outs)), *casts]


def _rounded_sum(result: Atom, maker: Mapping[Var, Equation], rows: set[tuple[int, ...]]) -> _Rounded | None:
    """How a result is made of a sum that is rounded; None if it is not. `rows`: the shapes that the scan reads a row of."""
    casts, reshapes = list[Equation](), list[Equation]()
    value = result
    while (eqn := maker.get(value) if isinstance(value, Var) else None) is not None:
        if eqn.primitive.name not in (*RESHAPING, CAST):
            break
        (casts if eqn.primitive.name == CAST else reshapes).insert(0, eqn)
        value = eqn.invars[0]
    if eqn is None or not any(_narrows(cast.invars[0], cast.outvars[0]) for cast in casts):
        return None
    is_gradient = not _narrows(value, result) or tuple(result.aval.shape) in rows
    is_sum = eqn.primitive.name == SUM or (eqn.primitive.name in PRODUCTS and is_gradient)
    return _Rounded(value, casts, reshapes) if is_sum else None


def _narrows(before: Atom, after: Atom) -> bool:
    """Whether a real number loses digits between two types."""
    old, new = before.aval.dtype, after.aval.dtype
    both = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
    return bool(both and jnp.finfo(old).nmant > jnp.finfo(new).nmant)

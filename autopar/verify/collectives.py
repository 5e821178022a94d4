"""The collectives of compiled programs beside those of the plan: by kind and mesh axes, bytes per device and step.

In: a part of a step with its plan and its programs. Out: a row for each kind along each set of axes. XLA combines collectives
and splits them as it likes, so bytes are compared on the whole. What can go wrong: a collective in a loop of which XLA does
not know the length; its row says so, and is no difference.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping

from autopar.plan import Plan
from autopar.verification import Verdict, VerifiedRow
from autopar.verify.programs import PlannedPart

Way = tuple[str, tuple[str, ...] | None]
"""A kind of collective and the names of its axes in the mesh's order; None: groups that are no whole axes."""
_SUMS = ("all-reduce", "reduce-scatter")
_SHORT = ("bfloat16", "float16", "int16", "uint16")
_WIDENED = "XLA on CPUs adds 16-bit numbers up in 32 bits, and sends these"
_UPCAST = "XLA is given 16-bit numbers; on CPUs it computes in 32 bits, and sends some of these"


@dataclasses.dataclass(kw_only=True)
class _Tally:
    """Bytes of one way; `widened`: with 16-bit sums in 32 bits; `upcast`: with all 16-bit numbers in 32 bits."""

    bytes: float = 0
    widened: float = 0
    upcast: float = 0
    values: float = 0
    is_exact: bool = True


def rows(part: PlannedPart, *, platform: str) -> Iterator[VerifiedRow]:
    """A row for each way in which the plan or the programs communicate."""
    planned, compiled = _planned(part.plan), _communicated(part, given=False)
    given = planned if planned == compiled else _communicated(part, given=True)
    for way in sorted({*planned, *compiled}, key=str):
        said, done = planned.get(way, _Tally()), compiled.get(way, _Tally())
        verdict: Verdict = "differs"
        note = f"{said.values:g} planned, {done.values:g} compiled"
        if said.bytes == done.bytes:
            verdict, note = "matches", f"{said.values:g} values"
        elif said.widened == done.bytes and platform == "cpu":
            verdict, note = "explained", _WIDENED
        elif done.bytes < said.bytes == given.get(way, _Tally()).bytes:
            verdict, note = "explained", _merged(said, done)
        elif said.bytes == given.get(way, _Tally()).bytes and _is_upcast(said, done) and platform == "cpu":
            verdict, note = "explained", _UPCAST
        elif not done.is_exact:
            verdict, note = "unknown", "in a loop whose length XLA does not know"
        yield VerifiedRow(
            topic="collectives",
            what=_name(way),
            unit="bytes",
            planned=said.bytes,
            compiled=done.bytes,
            verdict=verdict,
            stage=part.stage,
            note=note,
        )


def _merged(said: _Tally, done: _Tally) -> str:
    return f"XLA is given all {said.values:g}, and does {done.values:g}: equal ones once, and none that nothing needs"


def _is_upcast(said: _Tally, done: _Tally) -> bool:
    """Whether a program may send what is planned with some 16-bit numbers in 32 bits."""
    return said.bytes < done.bytes <= said.upcast and done.values <= said.values


def _name(way: Way) -> str:
    kind, axes = way
    return f"{kind} over {'parts of axes' if axes is None else ' and '.join(axes)}"


def _planned(plan: Plan) -> Mapping[Way, _Tally]:
    found: dict[Way, _Tally] = collections.defaultdict(_Tally)
    for one in plan.collectives:
        axes = tuple(name for name in plan.axis_names if name in one.axes)
        tally = found[one.kind, axes]
        size = one.bytes * one.count
        tally.bytes += size
        is_short = one.operand.partition("[")[0] in _SHORT
        tally.widened += 2 * size if is_short and one.kind in _SUMS else size
        tally.upcast += 2 * size if is_short else size
        tally.values += one.count
    return found


def _communicated(part: PlannedPart, *, given: bool) -> Mapping[Way, _Tally]:
    """What the compiled programs communicate; or what XLA was given to."""
    found: dict[Way, _Tally] = collections.defaultdict(_Tally)
    for program in part.programs:
        for one in program.given_collectives if given else program.collectives:
            axes = one.mesh_axes(part.plan.mesh_shape)
            if axes == ():  # groups of one device
                continue
            tally = found[one.kind, None if axes is None else tuple(part.plan.axis_names[axis] for axis in axes)]
            tally.bytes += one.bytes * one.count * program.times
            tally.values += one.operands * one.count * program.times
            tally.is_exact = tally.is_exact and one.count_is_exact
    return found

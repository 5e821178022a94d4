"""Why there is no plan: what is known of each mesh, and the error that says it.

In: for each mesh the bytes below which no plan goes, and those of the least plan that was tried. Out: an `OutOfMemoryError` with
the largest tensors and the ways out. What can go wrong: bounds that are far below what plans need; the error says which it knows.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from autopar.errors import ConstraintError, OutOfMemoryError
from autopar.explain.paths import path_patterns, value_text
from autopar.explain.units import bytes_text
from autopar.intra_op.memory.model import Resident
from autopar.intra_op.memory.tuning import TUNING
from autopar.layouts.mesh import LogicalMesh
from autopar.solver.outcomes import Unfinished, Unreachable

_LISTED = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class NothingFits:
    """A mesh on which no plan was found to fit.

    Attributes:
        mesh: the mesh.
        bound_bytes: per device; no plan on it needs less.
        tried_bytes: what the least of the plans that were tried needs; None if the bound left nothing to try.
        tensors: the largest tensors that are alive together whatever the choice.
        is_settled: whether all plans are ruled out; else the search ended before it had tried all that may fit.
    """

    mesh: LogicalMesh
    bound_bytes: int
    tried_bytes: int | None
    tensors: tuple[Resident, ...]
    is_settled: bool


def out_of_memory(
    failures: Sequence[NothingFits], *, memory_limit_bytes: int | None, is_constrained: bool
) -> OutOfMemoryError:
    """The error of a step that fits no mesh; it speaks of the mesh that comes nearest.

    Args:
        failures: what is known of each mesh, of one at least.
        memory_limit_bytes: the limit per device.
        is_constrained: whether the user's constraints are in force.
    """
    best = min(failures, key=lambda f: f.bound_bytes if f.tried_bytes is None else f.tried_bytes)
    tried = [f.tried_bytes for f in failures if f.tried_bytes is not None]
    is_settled = all(f.is_settled for f in failures)
    largest = list(_largest(best.tensors))
    width = max((len(size) for size, _ in largest), default=0)
    lines = [
        f"no plan {'fits' if is_settled else 'was found that fits'} {bytes_text(memory_limit_bytes or 0)} per device on "
        f"{_devices_text(best.mesh.size)}: on mesh {best.mesh.shape} every plan needs at least {bytes_text(best.bound_bytes)} "
        f"per device, with room for {1 / TUNING.temporaries_margin - 1:.0%} more temporaries than predicted, which XLA may need; "
        f"{_what_is_known(tried, is_settled)}. "
        "The largest tensors that are alive together:",
        *(f"  {size:>{width}}  {what}" for size, what in largest),
        "Ways out: more devices; a smaller batch; num_microbatches, recompute and layouts left open, where they are fixed; a "
        "smaller type for state or activations; or a higher memory_limit_bytes.",
    ]
    if is_constrained:
        lines.append("Constraints are in force; those that keep leaves replicated cost memory on every device.")
    tensors = [f"{size}  {what}" for size, what in largest]
    return OutOfMemoryError(
        "\n".join(lines),
        needed_bytes=min(tried, default=None),
        bound_bytes=best.bound_bytes,
        tensors=tensors,
        is_settled=is_settled,
    )


def state_does_not_fit(
    held: Mapping[str, float], *, devices: int, limit_bytes: int, is_constrained: bool
) -> OutOfMemoryError:
    """The error of a step whose state alone exceeds the memory, which needs no search.

    Args:
        held: the bytes of each leaf of the state on a device, by its path, in the layouts that take the least.
        devices: their number.
        limit_bytes: the limit per device.
        is_constrained: whether the user's constraints keep leaves from being divided further.
    """
    alike: dict[str, list[float]] = {}
    for path, size in held.items():
        alike.setdefault(re.sub(r"\d+", "*", path), []).append(size)
    by_bytes = sorted(alike.items(), key=lambda one: -sum(one[1]))[:_LISTED]
    total = sum(held.values())
    tensors = [f"{bytes_text(sum(sizes))}  {pattern}" for pattern, sizes in by_bytes]
    width = max((len(bytes_text(sum(sizes))) for _, sizes in by_bytes), default=0)
    least = "as far as the constraints allow" if is_constrained else "as far as its layouts go"
    lines = [
        f"no plan fits {bytes_text(limit_bytes)} per device on {_devices_text(devices)}: the state alone takes "
        f"{bytes_text(total)} on each, divided {least}. More microbatches and recomputation do not make it smaller. Most of it:",
        *(f"  {bytes_text(sum(sizes)):>{width}}  {pattern}" for pattern, sizes in by_bytes),
        f"Ways out: more devices, {math.ceil(total * devices / max(limit_bytes, 1))} at the least if all of it is divided "
        "(ZeRO-3), and more for activations; an optimizer that keeps less; a smaller type for state; or a higher "
        "memory_limit_bytes.",
    ]
    if is_constrained:
        lines.append("Constraints are in force; those that keep leaves replicated cost memory on every device.")
    return OutOfMemoryError("\n".join(lines), bound_bytes=math.ceil(total), tensors=tensors)


def _devices_text(devices: int) -> str:
    return "1 device" if devices == 1 else f"{devices} devices"


def _largest(tensors: Sequence[Resident]) -> Iterator[tuple[str, str]]:
    """Sizes and names of the tensors that take most, equal ones together with their number, and their modules."""
    alike: dict[tuple[int, str, str, tuple[int, ...]], list[str]] = {}
    for t in tensors:
        alike.setdefault((t.bytes, value_text(t.name, t.shape), t.dtype, t.shape), []).append(t.scope)
    by_bytes = sorted(alike.items(), key=lambda one: -one[0][0] * len(one[1]))
    for (size, name, dtype, shape), scopes in by_bytes[:_LISTED]:
        times = f"{len(scopes)} x " if len(scopes) > 1 else ""
        modules = ", ".join(map(str, path_patterns(scope for scope in scopes if scope)[:2]))
        where = f"  {modules}" if modules else ""
        yield f"{times}{bytes_text(size)}", f"{name}  {dtype}{list(shape)}{where}"


def _what_is_known(tried: Sequence[int], is_settled: bool) -> str:
    """Which limit would do, or why none is known."""
    if not tried:
        return "this is a bound that no choice of layouts goes below, so none was searched for"
    known = f"the least that a plan was found to need is memory_limit_bytes={min(tried):_}"
    return known if is_settled else f"{known}; the search ended before it had tried every plan that may need less"


def no_way_there(meshes: Mapping[LogicalMesh, Unreachable | Unfinished], kinds: Collection[str]) -> ConstraintError:
    """The error of meshes on which no plan was found with the `kinds` of collectives allowed."""
    shapes = ", ".join(str(mesh.shape) for mesh in meshes)
    allowed = ", ".join(sorted(kinds)) or "none"
    if any(isinstance(outcome, Unfinished) for outcome in meshes.values()):
        return ConstraintError(
            f"no plan was found on mesh {shapes}: the search ended before it knew whether the kinds of collectives allowed "
            f"({allowed}) can bring every value to the layouts that the constraints and the operations ask for; allow all-gather "
            "and all-reduce, which always can"
        )
    return ConstraintError(
        f"no plan on mesh {shapes}: the kinds of collectives allowed ({allowed}) cannot bring every value to the layouts that "
        "the constraints and the operations ask for; allow all-gather and all-reduce, which always can"
    )

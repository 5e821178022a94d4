"""Why no plan fits the memory: what is known of each mesh, and the error that says it.

In: for each mesh the bytes below which no plan goes, and those of the least plan that was tried. Out: an `OutOfMemoryError` with
the largest tensors and the ways out. What can go wrong: bounds that are far below what plans need; the error says which it knows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autopar.errors import OutOfMemoryError
from autopar.intra_op.memory.model import Resident
from autopar.intra_op.memory.tuning import TUNING
from autopar.layouts.mesh import LogicalMesh


@dataclasses.dataclass(frozen=True)
class NothingFits:
    """A mesh on which no plan was found to fit. `bound_bytes`: no plan on it needs less; `tried_bytes`: what the least of the
    plans that were tried needs, None if the bound left nothing to try; `tensors` are alive together whatever the choice."""

    mesh: LogicalMesh
    bound_bytes: int
    tried_bytes: int | None
    tensors: tuple[Resident, ...]


def out_of_memory(
    failures: Sequence[NothingFits], *, memory_limit_bytes: int | None, is_constrained: bool
) -> OutOfMemoryError:
    """The error of a step that fits no mesh, told of the mesh that comes nearest."""
    best = min(failures, key=lambda f: f.bound_bytes if f.tried_bytes is None else f.tried_bytes)
    limit = memory_limit_bytes or 0
    tried = [f.tried_bytes for f in failures if f.tried_bytes is not None]
    known = (
        f"the least that a plan was found to need is memory_limit_bytes={min(tried):_}"
        if tried
        else "this is a bound that no choice of layouts goes below, so none was searched for"
    )
    lines = [
        f"no plan fits {_size(limit)} per device on {best.mesh.size} devices: on mesh {best.mesh.shape} every plan needs at "
        f"least {_size(best.bound_bytes)} per device; {known}. "
        f"A limit must leave room for {1 / TUNING.temporaries_margin - 1:.0%} more temporaries than predicted, which XLA may "
        "need. "
        "The largest tensors that are alive together:",
        *(f"  {_size(t.bytes):>12}  {t.name}  {t.dtype}{list(t.shape)}" for t in best.tensors[:6]),
        "Ways out: more devices; a smaller batch; recompute activations in the backward pass (jax.checkpoint on the layers); "
        "a smaller type for state or activations; or a higher memory_limit_bytes.",
    ]
    if is_constrained:
        lines.append("Constraints are in force; those that keep leaves replicated cost memory on every device.")
    return OutOfMemoryError("\n".join(lines), needed_bytes=min(tried, default=None))


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"

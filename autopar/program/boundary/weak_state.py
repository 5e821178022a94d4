"""State whose type is weak before a step and strong after it, or the other way round: the second call is another program.

In: the leaves of a state whose types change so. Out: a warning that names them. A Python number in the state is weakly typed: it
takes the type of what it is combined with. What the step returns in its place seldom is, so that all is traced, planned and
compiled once more, which `jax.jit` does as well and takes long here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autopar.errors import warn

_MOST_NAMED = 3


@dataclasses.dataclass(frozen=True)
class ChangedType:
    """A leaf of the state, its dtype by name, and whether it is weakly typed as given, and so not as returned, or the reverse."""

    path: str
    dtype: str
    is_weak: bool


def warn_of_weak_state(name: str, changed: Sequence[ChangedType]) -> None:
    """One warning if there is such a leaf. `name`: of the step."""
    if not changed:
        return
    first, paths = changed[0], [one.path for one in changed[:_MOST_NAMED]]
    more = f" and {len(changed) - _MOST_NAMED} more" if len(changed) > _MOST_NAMED else ""
    if first.is_weak:
        given, returned = "weakly typed, as Python numbers and jnp.full(shape, 0.5) are", first.dtype
        remedy = f"name the type, as in jnp.asarray(..., jnp.{first.dtype})"
    else:
        given, returned = first.dtype, "a weakly typed value, as Python numbers are"
        remedy = f"return it as jnp.asarray(..., jnp.{first.dtype})"
    verb = "is" if len(changed) == 1 else "are"
    warn(
        f"{', '.join(paths)}{more} {verb} {given}, and {name} returns {returned}: its second call has other types than the "
        f"first, and is planned and compiled again. To avoid that, {remedy}"
    )

"""A traced step: its program, its leaves with paths and roles, and which output takes which state leaf's place.

Data alone: `trace.py` makes it, passes rewrite it. `require_state` and its neighbours refuse steps that lack what a wish needs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import jax

from autopar.compat import module_path
from autopar.errors import ArgumentError
from autopar.layouts.constraints import HOW_A_BATCH_IS_GIVEN
from autopar.program.call import PyTree
from autopar.program.fingerprint import Fingerprint, outline_of
from autopar.program.program import Program
from autopar.program.uses import Use

Role = Literal["state", "batch", "other", "const", "output", "value"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """One input or output array: its path, role, shape and type.

    A leaf that enters as `microbatches` slices has a leading dimension of that size, which the caller's array lacks. If it is
    `streamed`, slices come and go one by one and are never all in memory. `weak_type` is set for outputs alone. `shared`: all
    examples of the batch share the leaf. `from_forward`: another stage's forward pass sends it. `use`: what the step does with a
    leaf of its state, if that is known (`uses.py`).
    """

    path: str
    role: Role
    shape: tuple[int, ...]
    dtype: Any
    donated: bool = False
    microbatches: int = 1
    streamed: bool = False
    weak_type: bool = False
    shared: bool = False
    from_forward: bool = False
    use: Use | None = None

    @property
    def given_shape(self) -> tuple[int, ...]:
        """The shape of the caller's array."""
        if self.microbatches == 1 or len(self.shape) == 1:
            return self.shape
        return (self.microbatches * self.shape[1], *self.shape[2:])

    @property
    def one(self) -> Leaf:
        """The leaf as one microbatch sees it."""
        return self if self.microbatches == 1 else dataclasses.replace(self, shape=self.shape[1:], microbatches=1)

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Shape and type as JAX writes them."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TracedStep:
    """See the module's text.

    `constants` are the values of the program's last inputs, leaves of role const. `assumed_finite`: what the loop over its
    microbatches takes for finite, see `Plan`.
    """

    program: Program
    constants: tuple[jax.typing.ArrayLike, ...]
    in_tree: jax.tree_util.PyTreeDef
    out_tree: jax.tree_util.PyTreeDef
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    state_of_output: tuple[int | None, ...]
    fingerprint: Fingerprint
    microbatches: int = 1
    assumed_finite: tuple[str, ...] = ()

    @functools.cached_property
    def outline(self) -> Fingerprint:
        """Equal for steps whose programs differ at most in the values of literals."""
        return outline_of(self.program)

    @functools.cached_property
    def modules(self) -> frozenset[str]:
        """The modules that equations come from, see `module_path`."""
        return frozenset(path for eqn in self.program.walk() if (path := module_path(eqn)))

    def input_paths(self) -> Iterator[str]:
        """The paths of the inputs, one after the other."""
        return (leaf.path for leaf in self.inputs)

    @property
    def shared(self) -> frozenset[int]:
        """The leaves of the batch, by number, that all examples share."""
        return frozenset(i for i, leaf in enumerate(self.inputs) if leaf.shared)


def fewer_examples(traced: TracedStep, earlier: TracedStep) -> tuple[int, int] | None:
    """(examples now, examples before) if a step has fewer of them and is given the same otherwise; None if that is not so."""
    pairs = list(zip(traced.inputs, earlier.inputs, strict=False))
    changed = [(one, before) for one, before in pairs if one.given_shape != before.given_shape]
    alike = len(traced.inputs) == len(earlier.inputs) and all(one.path == before.path for one, before in pairs)
    if not (alike and changed and all(_has_fewer_examples(one, before) for one, before in changed)):
        return None
    return changed[0][0].given_shape[0], changed[0][1].given_shape[0]


def _has_fewer_examples(one: Leaf, before: Leaf) -> bool:
    new, old = one.given_shape, before.given_shape
    return one.role == "batch" and len(new) == len(old) > 0 and new[1:] == old[1:] and new[0] < old[0]


class _InputLeaf(Protocol):
    """What is known of an input, of a step or of a plan."""

    @property
    def role(self) -> str:
        """State, batch, other or const."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""


def describe_missing_state(inputs: Sequence[_InputLeaf], name: str) -> str | None:
    """What is wrong with a train step that returns none of its arguments; None if it returns one."""
    if any(leaf.role == "state" for leaf in inputs):
        return None
    has_number = any(not leaf.shape for leaf in inputs)
    return (
        f"{name} does not return its state: no output has the structure, shapes and types of an argument, so there is no "
        "state to keep on the devices between steps. A train step returns the new state, e.g. `return state, loss`."
        + (" An argument that is one number alone is never taken for state." if has_number else "")
    )


def require_state(traced: TracedStep, name: str) -> None:
    """Raise ArgumentError if the step returns none of its arguments."""
    missing = describe_missing_state(traced.inputs, name)
    if missing is not None:
        raise ArgumentError(missing)


def require_state_like(traced: TracedStep, shapes: PyTree, name: str) -> None:
    """Raise ArgumentError if a tree of shapes is not the state that was planned, leaf by leaf."""
    wanted = [(leaf.shape, leaf.dtype) for leaf in traced.inputs if leaf.role == "state"]
    made = [(tuple(x.shape), x.dtype) for x in jax.tree.leaves(shapes)]
    if made != wanted:
        raise ArgumentError(
            f"create_fn makes {len(made)} leaves, the state of {name} has {len(wanted)} of the planned shapes and types; pass "
            "the function that makes the state, with the same sizes as were planned"
        )


def require_examples(traced: TracedStep, wish: str, *, at_least: int) -> None:
    """Raise ArgumentError if no leaf of the batch has so many examples, which the wish needs; see `HOW_A_BATCH_IS_GIVEN`."""
    batch = [leaf for leaf in traced.inputs if leaf.role == "batch"]
    if any(leaf.shape and leaf.shape[0] >= at_least for leaf in batch):
        return
    if batch:
        listed = ", ".join(f"{leaf.path} has shape {leaf.shape}" for leaf in batch[:4])
        raise ArgumentError(
            f"{wish} needs a batch of {at_least} or more examples, along the leading dimension of its arrays, but {listed}"
        )
    others = [leaf.path for leaf in traced.inputs if leaf.role != "const"]
    listed = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
    raise ArgumentError(
        f"{wish} needs a batch, and none of the arrays that the step takes ({listed or 'none'}) is in one. {HOW_A_BATCH_IS_GIVEN}"
    )

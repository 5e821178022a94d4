"""From a step function to a `TracedStep`: the program, its leaves by name, and the role of each.

In: a Python function and its arguments, arrays or `jax.ShapeDtypeStruct`s. Out: a frozen `TracedStep`: the program, the trees
of arguments and results, for each input leaf its path (`argument/key/key`), role (state, batch or other) and whether it is
donated, and which output takes which state leaf's place. An argument is state if the step returns a value of the same
structure, shapes and types, as train steps do. What can go wrong: leaves that are not arrays, side effects, a donated argument
that the step does not return; each is an error in the user's own names.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from autopar.collector import spared_collector
from autopar.compat import Literal as JaxLiteral
from autopar.compat import source_line
from autopar.errors import ArgumentError
from autopar.layouts.constraints import HOW_A_BATCH_IS_GIVEN
from autopar.program import Program, program_of
from autopar.rules.table import warn_of_missing_rules

Role = Literal["state", "batch", "other", "const", "output"]

SMALL = 1 / 16
"""Leaves of a batch with fewer bytes than this part of the largest, and another leading size, are shared by all examples."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One input or output array: its path, role, shape and type.

    A leaf that enters as `microbatches` slices has a leading dimension of that size, which the caller's array lacks. If it is
    `streamed`, slices come and go one by one, and never are all there. Of outputs it is kept whether they are weakly typed, of
    the batch which leaves all examples share.
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


@dataclasses.dataclass(frozen=True, eq=False)
class TracedStep:
    """See the module's text. `constants` are the values of the program's last inputs, leaves of role const."""

    program: Program
    constants: tuple[Any, ...]
    in_tree: Any
    out_tree: Any
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    state_of_output: tuple[int | None, ...]
    fingerprint: str
    microbatches: int = 1

    @property
    def shared(self) -> frozenset[int]:
        """The leaves of the batch, by number, that all examples share."""
        return frozenset(i for i, leaf in enumerate(self.inputs) if leaf.shared)


@dataclasses.dataclass(frozen=True)
class CallSignature:
    """How a step's arguments are read: which are batch, static, donated."""

    fun: Callable[..., Any]
    batch_argnums: tuple[int, ...]
    static_argnums: tuple[int, ...]
    donate_argnums: tuple[int, ...] | Literal["auto"]

    @property
    def name(self) -> str:
        """The step's name for messages."""
        return getattr(self.fun, "__name__", type(self.fun).__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class BoundArguments:
    """Arguments of one call: static values by position, and the tree of the others as (positional, keyword)."""

    static: tuple[tuple[int, Any], ...]
    dynamic: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    numbers: tuple[int, ...]
    names: tuple[str, ...]


def bind_arguments(signature: CallSignature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BoundArguments:
    """Sort a call's arguments; keywords that name positional parameters take their positions."""
    args, kwargs, names = _positions(signature.fun, tuple(args), dict(kwargs))
    _refuse_bad_numbers(signature, max(len(args), len(names)))
    all_names = (*names, *(f"arg{i}" for i in range(len(names), len(args))))
    static = tuple((i, args[i]) for i in signature.static_argnums if i < len(args))
    _refuse_unhashable(signature, static, all_names)
    numbers = tuple(i for i in range(len(args)) if i not in signature.static_argnums)
    return BoundArguments(
        static, tuple(args[i] for i in numbers), kwargs, numbers, tuple(all_names[i] for i in numbers)
    )


def _refuse_bad_numbers(signature: CallSignature, count: int) -> None:
    """Every argument number must be one of the step's; batch_argnums=(1,) is the default and holds where there is one."""
    donate = () if signature.donate_argnums == "auto" else signature.donate_argnums
    given = {
        "batch_argnums": signature.batch_argnums,
        "static_argnums": signature.static_argnums,
        "donate_argnums": donate,
    }
    wrong = [
        f"{what}={numbers}"
        for what, numbers in given.items()
        if any(i < 0 or i >= count for i in numbers) and (what, numbers) != ("batch_argnums", (1,))
    ]
    if wrong:
        raise ArgumentError(
            f"{', '.join(wrong)}: {signature.name} has {count} positional arguments, numbered from 0"
            + (f" to {count - 1}" if count else "")
        )


def _refuse_unhashable(signature: CallSignature, static: Sequence[tuple[int, Any]], names: Sequence[str]) -> None:
    wrong = []
    for number, value in static:
        try:
            hash(value)
        except TypeError:
            wrong.append(f"argument {number} ({names[number]!r}) is a {type(value).__name__}")
    if wrong:
        raise ArgumentError(
            f"static_argnums={signature.static_argnums}: {'; '.join(wrong)}, which cannot be hashed. A static value is part of "
            f"what {signature.name} is compiled for, so it must be hashable: pass a tuple instead of a list, and leave arrays "
            "out of static_argnums."
        )


def _positions(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[str, ...]]:
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        return args, kwargs, ()
    positional = [
        p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    while len(args) < len(positional) and positional[len(args)] in kwargs:
        args = (*args, kwargs.pop(positional[len(args)]))
    return args, kwargs, tuple(positional)


@spared_collector()
def trace(signature: CallSignature, bound: BoundArguments) -> TracedStep:
    """Trace the step; see the module's text. Raises ArgumentError, UnsupportedProgramError."""
    leaves, in_tree = jax.tree_util.tree_flatten((bound.dynamic, dict(bound.kwargs)))
    paths = leaf_paths(bound)
    _refuse_non_arrays(signature, paths, leaves)
    closed, out_shape = jax.make_jaxpr(without_static(signature.fun, bound), return_shape=True)(
        *_abstract(bound.dynamic), **_abstract(dict(bound.kwargs))
    )
    program, constants = program_of(closed, pruned=True)
    warn_of_missing_rules([eqn for eqn in program.walk() if eqn.loop is None])
    out_leaves, out_tree = jax.tree_util.tree_flatten(out_shape)
    state = _returned_arguments(bound, out_shape)
    donated = _donated_arguments(signature, bound, state, out_shape)
    inputs = _input_leaves(signature, bound, paths, program, state, donated)
    consts = tuple(
        Leaf(f"constant/{i}", "const", tuple(v.aval.shape), v.aval.dtype)
        for i, v in enumerate(program.invars[len(leaves) :])
    )
    state_of_output = _outputs_of_state(bound, state, out_leaves)
    outputs = tuple(
        Leaf(p, "output", tuple(x.shape), x.dtype, weak_type=bool(x.weak_type))
        for p, x in zip(output_paths(out_shape), out_leaves, strict=True)
    )
    return TracedStep(
        program, constants, in_tree, out_tree, (*inputs, *consts), outputs, state_of_output, fingerprint_of(program)
    )


def without_static(fun: Callable[..., Any], bound: BoundArguments) -> Callable[..., Any]:
    """The function of the arguments that are not static."""

    def call(*dynamic: Any, **kwargs: Any) -> Any:
        args: dict[int, Any] = dict(bound.static) | dict(zip(bound.numbers, dynamic, strict=True))
        return fun(*(args[i] for i in sorted(args)), **kwargs)

    return call


def _abstract(tree: Any) -> Any:
    """Leaves as abstract values, so that tracing touches no device; Python numbers stay weakly typed."""

    def leaf(x: Any) -> Any:
        if isinstance(x, (bool, int, float, complex)):
            return x
        weak = bool(getattr(x, "weak_type", False))
        # JAX 0.12 warns of types that it makes narrower; what comes from NumPy it takes as narrow without a word.
        dtype = jax.typeof(x).dtype if isinstance(x, (np.ndarray, np.generic)) else x.dtype
        return jax.ShapeDtypeStruct(np.shape(x), dtype, weak_type=weak)

    return jax.tree.map(leaf, tree)


def _join(head: str, path: Sequence[Any]) -> str:
    tail = jax.tree_util.keystr(tuple(path), simple=True, separator="/")
    return f"{head}/{tail}" if tail else head


def leaf_paths(bound: BoundArguments) -> list[str]:
    """`argument/key/key` of every leaf of the arguments, in order."""
    paths = []
    for name, value in (*zip(bound.names, bound.dynamic, strict=True), *sorted(bound.kwargs.items())):
        paths += [_join(name, path) for path, _ in jax.tree_util.tree_flatten_with_path(value)[0]]
    return paths


def output_paths(results: Any) -> list[str]:
    """`output/key/key` of every leaf of the results, in order."""
    return [_join("output", path) for path, _ in jax.tree_util.tree_flatten_with_path(results)[0]]


def _refuse_non_arrays(signature: CallSignature, paths: Sequence[str], leaves: Sequence[Any]) -> None:
    wrong = [
        f"{path} is a {type(leaf).__name__} ({str(leaf)[:40]!r})"
        for path, leaf in zip(paths, leaves, strict=True)
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) and not isinstance(leaf, (bool, int, float, complex))
    ]
    for path, leaf in zip(paths, leaves, strict=True):
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not _has_a_type_of_jax(leaf):
            wrong.append(f"{path} is a {type(leaf).__name__} of type {leaf.dtype}, which JAX has not")
    if wrong:
        raise ArgumentError(
            f"{signature.name} takes arrays, but {'; '.join(wrong)}. Pass such values with static_argnums, close over them, "
            "or take them out of the state or the batch."
        )


def _has_a_type_of_jax(leaf: Any) -> bool:
    try:
        jax.typeof(leaf) if isinstance(leaf, np.ndarray) else _dtype(leaf)
    except TypeError:
        return False
    return True


def _shapes(tree: Any) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(np.shape(x)), str(_dtype(x))) for x in jax.tree.leaves(tree)]


def _dtype(leaf: Any) -> Any:
    """The type that a leaf has in a traced program, where there are no 64-bit types unless they are enabled."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.typeof(leaf).dtype
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


def _parts(out_shape: Any) -> list[Any]:
    """The whole result, and its elements if it is a tuple or list."""
    return [out_shape, *(out_shape if isinstance(out_shape, (tuple, list)) else ())]


def _returned_arguments(bound: BoundArguments, out_shape: Any) -> dict[int, Any]:
    """Arguments (by place among the dynamic ones) that the step returns, with the part of the result that they match."""
    taken: set[int] = set()
    found: dict[int, Any] = {}
    structure: Callable[[Any], Any] = jax.tree.structure
    for place, value in enumerate(bound.dynamic):
        if not jax.tree.leaves(value):
            continue
        for part in _parts(out_shape):
            same = structure(part) == structure(value) and _shapes(part) == _shapes(value)
            if same and id(part) not in taken and not (len(_shapes(value)) == 1 and _shapes(value)[0][0] == ()):
                found[place] = part
                taken.add(id(part))
                break
    return found


def _donated_arguments(
    signature: CallSignature, bound: BoundArguments, state: Mapping[int, Any], out_shape: Any
) -> frozenset[int]:
    wanted = signature.donate_argnums
    batch = {place for place, number in enumerate(bound.numbers) if number in signature.batch_argnums}
    if wanted == "auto":
        return frozenset(place for place in state if place not in batch)
    for place, number in enumerate(bound.numbers):
        if number in wanted and place not in state and jax.tree.leaves(bound.dynamic[place]):
            raise ArgumentError(
                f"{signature.name} donates argument {number} ({bound.names[place]!r}) but does not return it: no output has "
                f"its structure, shapes and types. {_nearest(bound.names[place], bound.dynamic[place], out_shape)}Return the "
                f"new {bound.names[place]}, or leave it out of donate_argnums."
            )
    return frozenset(place for place, number in enumerate(bound.numbers) if number in wanted)


def _nearest(name: str, value: Any, out_shape: Any) -> str:
    """What keeps the part of the result that shares most leaves with the argument from being it; "" if none shares any."""
    before = _leaf_types(name, value)
    candidates = [after for part in _parts(out_shape) if (after := _leaf_types(name, part)).keys() & before.keys()]
    if not candidates:
        return ""
    after = max(
        candidates, key=lambda leaves: len(leaves.items() & before.items()) - len(leaves.keys() ^ before.keys())
    )
    changes = [
        f"{path} goes in as {before.get(path, 'nothing')} and comes out as {after.get(path, 'nothing')}"
        for path in [*before, *(path for path in after if path not in before)]
        if before.get(path) != after.get(path)
    ]
    listed = "; ".join(changes[:3]) + ("; ..." if len(changes) > 3 else "")
    return f"The nearest output differs: {listed or 'its containers are of other types'}. "


def _leaf_types(name: str, tree: Any) -> dict[str, str]:
    """Type of each leaf, as JAX writes it, by path."""
    paths = [_join(name, path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return {path: f"{dtype}{list(shape)}" for path, (shape, dtype) in zip(paths, _shapes(tree), strict=True)}


def require_state(traced: TracedStep, name: str) -> None:
    """Raise ArgumentError if the step returns none of its arguments."""
    if not any(leaf.role == "state" for leaf in traced.inputs):
        raise ArgumentError(
            f"{name} does not return its state: no output has the structure, shapes and types of an argument, so there is no "
            "state to keep on the devices between steps. A train step returns the new state, e.g. `return state, loss`."
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


def _input_leaves(
    signature: CallSignature,
    bound: BoundArguments,
    paths: Sequence[str],
    program: Program,
    state: Mapping[int, Any],
    donated: frozenset[int],
) -> tuple[Leaf, ...]:
    roles: list[tuple[Role, bool]] = []
    for place, (number, value) in enumerate(zip(bound.numbers, bound.dynamic, strict=True)):
        role: Role = "batch" if number in signature.batch_argnums else "state" if place in state else "other"
        roles += [(role, place in donated)] * len(jax.tree.leaves(value))
    roles += [("other", False)] * (len(paths) - len(roles))
    leaves = [
        Leaf(path, role, tuple(var.aval.shape), var.aval.dtype, donate)
        for path, (role, donate), var in zip(paths, roles, program.invars, strict=False)
    ]
    counts = _numbers_of_examples([leaf for leaf in leaves if leaf.role == "batch" and leaf.shape])
    return tuple(
        dataclasses.replace(leaf, shared=leaf.role == "batch" and bool(leaf.shape) and leaf.shape[0] not in counts)
        for leaf in leaves
    )


def _numbers_of_examples(leaves: Sequence[Leaf]) -> set[int]:
    """The leading sizes of a batch that count examples; those of a key, a scale or the weights of classes need little memory."""
    bytes_of = collections.Counter[int]()
    for leaf in leaves:
        bytes_of[leaf.shape[0]] += math.prod(leaf.shape) * leaf.dtype.itemsize
    most = max(bytes_of.values(), default=0)
    return {size for size, own in bytes_of.items() if own >= SMALL * most}


def _outputs_of_state(
    bound: BoundArguments, state: Mapping[int, Any], out_leaves: Sequence[Any]
) -> tuple[int | None, ...]:
    """For each output leaf the number of the input leaf whose place it takes."""
    starts, total = [], 0
    for value in bound.dynamic:
        starts.append(total)
        total += len(jax.tree.leaves(value))
    by_identity = {id(leaf): i for i, leaf in enumerate(out_leaves)}
    places: list[int | None] = [None] * len(out_leaves)
    for place, part in state.items():
        for offset, leaf in enumerate(jax.tree.leaves(part)):
            places[by_identity[id(leaf)]] = starts[place] + offset
    return tuple(places)


def fingerprint_of(program: Program) -> str:
    """A digest of the program's operations, shapes and structure; equal programs have equal digests."""
    numbers: dict[Any, int] = {}
    described = functools.cache(str)
    digest = hashlib.sha256()

    def name(atom: Any) -> str:
        if isinstance(atom, JaxLiteral):
            return f"{atom.val}:{described(atom.aval)}"
        return f"v{numbers.setdefault(atom, len(numbers))}:{described(atom.aval)}"

    for var in program.invars:
        digest.update(name(var).encode())
    for eqn in program.walk():
        line = f"{eqn.primitive.name} {[name(v) for v in eqn.invars]} {[name(v) for v in eqn.outvars]}\n"
        digest.update(line.encode())
    digest.update(str([name(v) for v in program.outvars]).encode())
    return digest.hexdigest()[:16]


def where(eqn: Any) -> str:
    """The user's line of an equation, for tables."""
    return source_line(eqn)

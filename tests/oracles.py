"""What would convince you: the oracles that tests share.

Oracle 1, `assert_same_as_jit`: a parallelized step computes what `jax.jit` computes on one device. Floating-point
leaves are compared relative to the largest entry of the leaf, because a sum in another order is off by rounding of the
largest terms; integers, booleans and keys must be equal. Adam divides a gradient by its own size, so an entry that is
zero up to rounding (the bias of an attention key) moves by +-lr at random: prefer SGD, or give `adam_lr`.

Oracle 6, `assert_predicted_bytes_are_real`: the plan's collectives are the compiled program's. `census` counts those by
operands and bytes, without scalars (the loss), and `Census.cost` prices them as the acceptance cases do.
"""

import dataclasses
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

from autopar.hlo.census import collectives

SCALAR_BYTES = 8
LEAST_SCALE = 1e-4


# --- same numbers -----------------------------------------------------------------------------------------------------


def assert_trees_close(
    actual, expected, *, rtol_of_scale=1e-5, least_scale=LEAST_SCALE, what="result", adam_lr=None, rounding=None
):
    """Equal structure, shapes and dtypes; entries within `rtol_of_scale` of the leaf's largest entry.

    A leaf smaller than `least_scale` everywhere is judged against `least_scale`. All differing leaves are reported.
    `rounding` maps names of leaves to absolute errors that they may have, even where these are larger.
    """
    actual_leaves, actual_tree = jax.tree.flatten_with_path(actual)
    expected_leaves, expected_tree = jax.tree.flatten_with_path(expected)
    assert actual_tree == expected_tree, f"{what}: the structures differ:\n{actual_tree}\n{expected_tree}"
    random_moves = _random_moves_of_adam(expected_leaves, adam_lr) if adam_lr is not None else {}
    random_moves |= rounding or {}
    problems = []
    for (path, a), (_, e) in zip(actual_leaves, expected_leaves, strict=True):
        name = jax.tree_util.keystr(path)
        problem = _difference(a, e, rtol_of_scale, least_scale, random_moves.get(name, 0.0))
        if problem:
            problems.append(f"{what}{name}: {problem}")
    assert not problems, "\n".join(problems)


def _difference(actual, expected, rtol, least_scale, random_moves):
    """What is wrong with one leaf, or None."""
    a, e = _as_numpy(actual), _as_numpy(expected)
    if (a.shape, a.dtype) != (e.shape, e.dtype):
        return f"{a.dtype}{list(a.shape)} instead of {e.dtype}{list(e.shape)}"
    if a.size == 0:
        return None
    if not jnp.issubdtype(e.dtype, jnp.inexact):
        wrong = int(np.sum(a != e))
        return f"{wrong} of {e.size} entries differ, and this type must be exact" if wrong else None
    wide = np.complex128 if np.iscomplexobj(e) else np.float64
    a, e = a.astype(wide), e.astype(wide)
    finite = np.isfinite(e)
    if not np.array_equal(finite, np.isfinite(a)) or not np.array_equal(a[~finite], e[~finite], equal_nan=True):
        return "infinities or NaNs in different places"
    a, e = np.where(finite, a, 0), np.where(finite, e, 0)
    error = np.abs(a - e)
    scale = max(float(np.max(np.abs(e))), least_scale)
    allowed = np.maximum(np.full(error.shape, rtol * scale), random_moves)
    excess = error > allowed
    if not excess.any():
        return None
    worst = np.unravel_index(int(np.argmax(error - allowed)), error.shape)
    return (
        f"{int(excess.sum())} of {error.size} entries differ; at {tuple(map(int, worst))} it is {a[worst]:.9g} "
        f"instead of {e[worst]:.9g}, off by {error[worst] / scale:.2e} of the scale {scale:.3g} "
        f"(allowed {allowed[worst] / scale:.0e})"
    )


def _as_numpy(leaf):
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.astype(np.float32) if array.dtype == jnp.bfloat16 else array


def _random_moves_of_adam(leaves, lr):
    """For each parameter leaf with a second moment in the same tree: how far rounding may move each entry.

    A gradient g carries an absolute error of about 1e-5 of the largest gradient G of any leaf, and Adam moves the entry
    by lr g / sqrt(nu): the move is off by lr * 1e-5 G / |g|, and never by more than 2.5 lr. G and g are taken from nu.
    """
    named = {jax.tree_util.keystr(path): _as_numpy(leaf) for path, leaf in leaves}
    moments = {name.split(".nu", 1)[1]: value for name, value in named.items() if ".nu[" in name}
    largest = max((float(value.max(initial=0.0)) for value in moments.values()), default=0.0)
    moves = {}
    for name in named:
        suffixes = [suffix for suffix in moments if name.endswith(suffix) and ".nu[" not in name and ".mu[" not in name]
        if suffixes:
            ratio = np.sqrt(largest / np.maximum(moments[max(suffixes, key=len)], 1e-30))
            moves[name] = lr * np.minimum(2.5, 1e-5 * ratio)
    return moves


def assert_same_as_jit(step, parallel_step, state, batch, steps=3, rtol_of_scale=1e-5, adam_lr=None):
    """Run `steps` steps of both from copies of `state` and compare everything they return, after every step.

    `step(state, batch)` returns the new state, or a tuple that begins with it. `batch` may be a list, one per step.
    With `adam_lr` (the learning rate), a parameter may be off by as much as Adam makes of the rounding of its gradient.
    Returns what the last step of `parallel_step` returned.
    """
    reference = jax.jit(step)
    batches = batch if isinstance(batch, list) else [batch] * steps
    expected_state = jax.device_put(_copied(state), jax.devices()[0])
    actual_state = _copied(state)
    structure = jax.tree.structure(state)
    actual = None
    for number, one_batch in enumerate(batches[:steps], start=1):
        expected = reference(expected_state, _copied(one_batch))
        actual = parallel_step(actual_state, _copied(one_batch))
        assert_trees_close(
            actual,
            expected,
            rtol_of_scale=rtol_of_scale,
            what=f"step {number}: ",
            adam_lr=None if adam_lr is None else number * adam_lr,
        )
        alone = jax.tree.structure(expected) == structure
        expected_state = expected if alone else expected[0]
        actual_state = actual if alone else actual[0]
    return actual


def _copied(tree):
    """Fresh buffers, so that a step that donates its arguments can have them."""
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, leaf.sharding, may_alias=False) if isinstance(leaf, jax.Array) else leaf, tree
    )


# --- what is communicated ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Operand:
    """One communicated value: bytes on the larger side, the mesh axes, and how often in a step."""

    kind: str
    bytes: int
    axes: tuple[int, ...] | None
    count: int


@dataclasses.dataclass(frozen=True)
class Census:
    """The communicated values of a compiled program, scalars left out."""

    mesh_shape: tuple[int, ...]
    operands: tuple[Operand, ...]

    def bytes_of(self, kind, axis=None):
        """Bytes of every operand of a kind, smallest first; with `axis`, of those along this mesh axis alone."""
        chosen = (o for o in self.operands if o.kind == kind and (axis is None or o.axes == (axis,)))
        return sorted(o.bytes for o in chosen for _ in range(o.count))

    def sums(self, axis=None):
        """Bytes of every all-reduce and reduce-scatter: a sum over devices, whether its result is kept whole or not."""
        return sorted(self.bytes_of("all-reduce", axis) + self.bytes_of("reduce-scatter", axis))

    def kinds(self):
        """The kinds of collectives there are."""
        return {o.kind for o in self.operands}

    def cost(self, alpha, beta):
        """Seconds as the acceptance cases price them: per mesh axis a latency and seconds per byte, added up.

        all-reduce a + 2 b (n-1)/n bytes; reduce-scatter, all-gather, all-to-all a + b (n-1)/n bytes; permute a + b
        bytes. A plan is judged by this where several sets of collectives are equally good.
        """
        return sum(o.count * _price(o.kind, o.bytes, o.axes, self.mesh_shape, alpha, beta) for o in self.operands)

    def __str__(self):
        """One line per kind, axes and bytes."""
        lines = Counter()
        for o in self.operands:
            lines[o.kind, o.axes, o.bytes] += o.count
        return "\n".join(f"{n} x {kind} along {axes}: {size} bytes" for (kind, axes, size), n in sorted(lines.items()))


def _price(kind, size, axes, mesh_shape, alpha, beta):
    assert axes is not None, f"a {kind} of {size} bytes is not along whole axes of the mesh {mesh_shape}"
    factor = 2.0 if kind == "all-reduce" else 1.0
    if kind == "collective-permute":
        return max(alpha[axis] for axis in axes) + max(beta[axis] for axis in axes) * size
    return sum(alpha[a] + factor * beta[a] * size * (mesh_shape[a] - 1) / mesh_shape[a] for a in axes)


def census(compiled, mesh_shape=None):
    """The census of a compiled step, or of anything with `as_text()` and a given `mesh_shape`."""
    mesh_shape = tuple(mesh_shape or compiled.plan.mesh_shape)
    return census_of_text(compiled.as_text(), mesh_shape)


def census_of_text(text, mesh_shape, *, scalars=False):
    """The census of an HLO text; values of at most `SCALAR_BYTES` are left out unless `scalars`."""
    operands = []
    for collective in collectives(text, num_devices=math.prod(mesh_shape)):
        assert collective.count_is_exact, f"a {collective.kind} in a loop of unknown length: {collective.op_name}"
        axes = collective.mesh_axes(mesh_shape)
        for size in collective.operand_bytes:
            if (scalars or size > SCALAR_BYTES) and axes != ():
                operands.append(Operand(collective.kind, size, axes, collective.count))
    return Census(mesh_shape, tuple(operands))


def assert_predicted_bytes_are_real(compiled):
    """Oracle 6: by kind and mesh axes, the plan and the compiled program communicate the same bytes.

    Compared on the whole, because XLA combines operands and splits them again as it likes.
    """
    plan = compiled.plan
    found = census_of_text(compiled.as_text(), tuple(plan.mesh_shape), scalars=True)
    real = Counter()
    for operand in found.operands:
        axes = None if operand.axes is None else tuple(plan.axis_names[axis] for axis in operand.axes)
        real[operand.kind, axes] += operand.bytes * operand.count
    predicted = Counter()
    for collective in plan.collectives:
        axes = tuple(sorted(collective.axes, key=list(plan.axis_names).index))
        predicted[collective.kind, axes] += collective.bytes * collective.count
    lines = [
        f"{kind} along {axes}: predicted {predicted[kind, axes]}, compiled {real[kind, axes]} bytes"
        for kind, axes in sorted({*real, *predicted}, key=str)
        if predicted[kind, axes] != real[kind, axes]
    ]
    assert not lines, "\n".join(lines)

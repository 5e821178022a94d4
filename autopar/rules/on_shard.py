"""How an equation runs on one device's shards.

In: an equation, the factor rule's names for its dimensions, which mesh axes shard each factor, and the local operands.
Out: the local results. Most primitives are bound unchanged; those that carry shapes, positions or indices in their
parameters get them translated here through `LocalCall`. What can go wrong: a parameter that still holds a global size,
which the random-strategy test finds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compat import HAVE_SHARDING, JaxprEqn, Literal, Params, Var, draw_gammas, hash_function
from autopar.layouts.mesh import Axes, LogicalMesh
from autopar.rules.factor_rule import FactorRule


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalCall:
    """One equation on one device, inside shard_map."""

    eqn: JaxprEqn
    operands: tuple[jax.Array, ...]
    rule: FactorRule
    factor_axes: Mapping[str, Axes]
    mesh: LogicalMesh

    @property
    def params(self) -> Params:
        """The equation's parameters."""
        return dict(self.eqn.params)

    def ways(self, factor: str) -> int:
        """Into how many shards `factor` is cut."""
        return self.mesh.ways(self.factor_axes.get(factor, ()))

    def local_size(self, dim: Sequence[str]) -> int:
        """Local size of a dimension made of these factors."""
        return math.prod(self.rule.size_of(f) // self.ways(f) for f in dim)

    def out_shape(self, output: int = 0) -> tuple[int, ...]:
        """Local shape of an output."""
        return tuple(self.local_size(dim) for dim in self.rule.outputs[output])

    def difference(self, results: Sequence[jax.Array]) -> str | None:
        """How results differ from the shapes that the rule promises on this shard, in words; None if they do not."""
        promised = [self.out_shape(number) for number in range(len(self.rule.outputs))]
        if not isinstance(results, list | tuple) or len(results) != len(promised):
            given = f"{len(results)} results" if isinstance(results, list | tuple) else f"a {type(results).__name__}"
            return f"its rule '{self.rule}' promises a sequence of {len(promised)} results on each device, there is {given}"
        for number, (shape, result) in enumerate(zip(promised, results, strict=True)):
            if jnp.shape(result) != shape:
                return (
                    f"its rule '{self.rule}' promises output {number} of shape {shape} on each device{self._cuts(number)}, the "
                    f"operation gives {jnp.shape(result)} there"
                )
        return None

    def _cuts(self, output: int) -> str:
        """Which factors of an output are cut, in words."""
        factors = dict.fromkeys(factor for dim in self.rule.outputs[output] for factor in dim)
        cuts = [f"{factor} is cut in {self.ways(factor)}" for factor in factors if self.ways(factor) > 1]
        return f" where {' and '.join(cuts)}" if cuts else ""

    def shard_index(self, factor: str) -> jax.Array | int:
        """Which shard of `factor` this device holds."""
        index: jax.Array | int = 0
        for axis in self.factor_axes.get(factor, ()):
            index = index * self.mesh.shape[axis] + self.mesh.index(axis)
        return index

    def line(self, factor: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Names of the mesh axes that shard a factor, in the mesh's order, and the number along them of each shard's device."""
        axes = self.factor_axes.get(factor, ())
        sizes = {axis: self.mesh.shape[axis] for axis in sorted(axes)}
        turned = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        order = [sorted(axes).index(axis) for axis in axes]
        return self.mesh.names(sorted(axes)), tuple(int(rank) for rank in turned.transpose(order).ravel())

    def offset(self, dim: Sequence[str]) -> jax.Array | int:
        """Global position of the first local element of a dimension made of these factors (major to minor)."""
        position: jax.Array | int = 0
        for factor in dim:
            local = self.rule.size_of(factor) // self.ways(factor)
            position = position * self.rule.size_of(factor) + self.shard_index(factor) * local
        return position

    def is_sharded(self, dim: Sequence[str]) -> bool:
        """Whether any factor of the dimension is sharded."""
        return any(self.ways(factor) > 1 for factor in dim)

    def bind(self, *operands: jax.Array, **changed: object) -> Sequence[jax.Array]:
        """The equation's primitive on local operands with some parameters changed."""
        primitive = self.eqn.primitive
        results = primitive.bind(*operands, **primitive.get_bind_params({**self.params, **changed}))
        return results if primitive.multiple_results else (results,)


Local = Callable[[LocalCall], Sequence[jax.Array]]


def unchanged(call: LocalCall) -> Sequence[jax.Array]:
    """Bind the primitive with its own parameters."""
    stripped = {key: None for key in ("out_sharding", "sharding") if key in call.params}
    if call.eqn.primitive.name in HAVE_SHARDING:
        stripped["out_sharding"] = None
    return call.bind(*call.operands, **stripped)


def identity(call: LocalCall) -> Sequence[jax.Array]:
    """The operands themselves."""
    return call.operands


def high_halves(call: LocalCall) -> Sequence[jax.Array]:
    """The high halves of products of integers, by products of half-words: XLA has no such operation on several devices."""
    return (_multiply_high(*call.operands),)


def hash_of_words(call: LocalCall) -> Sequence[jax.Array]:
    """A generator's hash by the operations that it stands for, of which XLA lacks `mulhi` on several devices."""
    jaxpr = jax.make_jaxpr(hash_function(call.eqn.primitive.name))(*call.operands).jaxpr
    known: dict[object, jax.Array] = dict(zip(jaxpr.invars, call.operands, strict=True))

    def read(atom: Var | Literal) -> jax.Array:
        return jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        operands = map(read, eqn.invars)
        is_high = eqn.primitive.name == "mulhi"
        known[eqn.outvars[0]] = _multiply_high(*operands) if is_high else eqn.primitive.bind(*operands, **eqn.params)
    return [read(atom) for atom in jaxpr.outvars]


def _multiply_high(a: jax.Array, b: jax.Array) -> jax.Array:
    info = jnp.iinfo(a.dtype)
    words, half = jnp.dtype(f"uint{info.bits}"), info.bits // 2
    x, y = (jax.lax.bitcast_convert_type(one, words) for one in (a, b))
    (low_x, high_x), (low_y, high_y) = ((one & ((1 << half) - 1), one >> half) for one in (x, y))
    cross, other = high_x * low_y, low_x * high_y
    carried = (low_x * low_y >> half) + (cross & ((1 << half) - 1)) + (other & ((1 << half) - 1))
    high = high_x * high_y + (cross >> half) + (other >> half) + (carried >> half)
    if info.min < 0:  # a negative number is 2^bits below the word that stands for it
        high -= jnp.where(a < 0, y, 0) + jnp.where(b < 0, x, 0)
    product: jax.Array = jax.lax.bitcast_convert_type(high.astype(words), a.dtype)
    return product


def observe(call: LocalCall) -> Sequence[jax.Array]:
    """The value; the device that is first on every axis shows the others, of which all have the whole."""
    value, *shown = call.operands
    conditions = [call.mesh.index(axis) == 0 for axis in range(len(call.mesh.shape))]
    conditions += [shown.pop(0)] if call.params["guarded"] else []
    return call.bind(value, functools.reduce(jnp.logical_and, conditions), *shown, guarded=True)


def reshape(call: LocalCall) -> Sequence[jax.Array]:
    """Reshape to the local shape."""
    return call.bind(*call.operands, new_sizes=call.out_shape(), sharding=None)


def broadcast_in_dim(call: LocalCall) -> Sequence[jax.Array]:
    """Broadcast to the local shape."""
    return call.bind(*call.operands, shape=call.out_shape(), sharding=None)


def tile(call: LocalCall) -> Sequence[jax.Array]:
    """As many repetitions as this shard has."""
    (operand,) = call.operands
    reps = (out // size if size else 1 for size, out in zip(operand.shape, call.out_shape(), strict=True))
    return call.bind(operand, reps=tuple(reps))


def empty(call: LocalCall) -> Sequence[jax.Array]:
    """An array of the local shape that nobody has filled yet."""
    return call.bind(shape=call.out_shape(), out_sharding=None)


def iota(call: LocalCall) -> Sequence[jax.Array]:
    """Local positions start at the shard's offset; whole numbers until the end, as sums of the type's own are rounded."""
    dimension, dtype = call.params["dimension"], call.params["dtype"]
    dims = call.rule.outputs[0][dimension]
    if not call.is_sharded(dims):
        return call.bind(shape=call.out_shape(), sharding=None)
    local = jax.lax.broadcasted_iota(jnp.uint32, call.out_shape(), dimension)
    return ((local + jnp.asarray(call.offset(dims), jnp.uint32)).astype(dtype),)


def iota_2x32(call: LocalCall) -> Sequence[jax.Array]:
    """Row-major global positions of this shard's elements, as two words each."""
    return _counters(call, call.params["shape"])


def dynamic_slice(call: LocalCall) -> Sequence[jax.Array]:
    """A sharded dimension is taken whole: its size is local, and its start, which clamps to 0, is dropped.

    Starts are clamped here: where a device goes on to take its shard of the slice, XLA of JAX 0.10 joins the two slices, and
    then clamps by the size of the second.
    """
    operand, *starts = call.operands
    sizes = call.out_shape()
    last = [whole - taken for whole, taken in zip(operand.shape, sizes, strict=True)]
    starts = [jnp.clip(s, 0, min(most, jnp.iinfo(s.dtype).max)) for s, most in zip(starts, last, strict=True)]
    return call.bind(operand, *_local_starts(call, call.rule.inputs[0], starts), slice_sizes=sizes)


def dynamic_update_slice(call: LocalCall) -> Sequence[jax.Array]:
    """As `dynamic_slice`: a sharded dimension is updated whole."""
    operand, update, *starts = call.operands
    return call.bind(operand, update, *_local_starts(call, call.rule.inputs[0], starts))


def _local_starts(call: LocalCall, dims: Sequence[Sequence[str]], starts: Sequence[jax.Array]) -> list[jax.Array]:
    return [jnp.zeros_like(s) if call.is_sharded(dim) else s for dim, s in zip(dims, starts, strict=True)]


def reduce_by_function(call: LocalCall) -> Sequence[jax.Array]:
    """Reduce arrays that XLA does not know to be joined of parts: it would reduce each part from the given first value."""
    half = len(call.operands) // 2
    return call.bind(*jax.lax.optimization_barrier(call.operands[:half]), *call.operands[half:])


def random_bits(call: LocalCall) -> Sequence[jax.Array]:
    """Threefry bits of this shard's positions: bit for bit the slice of the undecorated result.

    In partitionable threefry element i of the result is a hash of (key, i) alone, with i the row-major position as two
    32-bit words; 32-bit results are the exclusive or of the two hashed words, 64-bit ones their concatenation.
    """
    if not any(call.is_sharded(dim) for dim in call.rule.outputs[0]):
        return unchanged(call)
    bit_width, shape = call.params["bit_width"], call.params["shape"]
    high, low = _counters(call, shape)
    key_words = jax.random.key_data(call.operands[0])
    high, low = jax.extend.random.threefry2x32_p.bind(key_words[0], key_words[1], high, low)
    if bit_width == 64:
        return ((high.astype(jnp.uint64) << 32) | low.astype(jnp.uint64),)
    return ((high ^ low).astype({8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[bit_width]),)


def random_gamma(call: LocalCall) -> Sequence[jax.Array]:
    """Samples with this shard's keys, which are those that the whole would split from its one key."""
    if not any(call.is_sharded(dim) for dim in call.rule.outputs[0]):
        return unchanged(call)
    key, parameters = call.operands
    size = math.prod(call.rule.size_of(factor) for dim in call.rule.outputs[0] for factor in dim)
    high, low = _counters(call, call.eqn.outvars[0].aval.shape)
    del high
    keys = jax.random.split(key, size)[low.ravel()]
    return (draw_gammas(keys, parameters, call.params["log_space"]),)


def _counters(call: LocalCall, shape: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Row-major global positions of the local elements as (high, low) 32-bit words, shape `call.out_shape()` each."""
    local = call.out_shape()
    high = low = jnp.zeros(local, jnp.uint32)
    stride = math.prod(shape)
    is_one_word = stride < 1 << 32  # then the high word is a constant, which needs no memory
    for axis, (dim, size) in enumerate(zip(call.rule.outputs[0], shape, strict=True)):
        stride //= max(size, 1)
        index = jax.lax.broadcasted_iota(jnp.uint32, local, axis) + jnp.asarray(call.offset(dim), jnp.uint32)
        if is_one_word:
            low = low + index * jnp.uint32(stride)
            continue
        product_high, product_low = _wide_product(index, stride)
        low = low + product_low
        high = high + product_high + (low < product_low).astype(jnp.uint32)
    return high, low


def _wide_product(index: jax.Array, stride: int) -> tuple[jax.Array, jax.Array]:
    """(high, low) words of index * stride, from 16-bit halves so that no intermediate exceeds 32 bits."""
    a_low, a_high = index & 0xFFFF, index >> 16
    b_high_word, b_word = divmod(stride, 1 << 32)
    b_low, b_high = jnp.uint32(b_word & 0xFFFF), jnp.uint32(b_word >> 16)
    low_low, low_high, high_low, high_high = a_low * b_low, a_low * b_high, a_high * b_low, a_high * b_high
    middle = (low_low >> 16) + (low_high & 0xFFFF) + (high_low & 0xFFFF)
    low = (low_low & 0xFFFF) | (middle << 16)
    high = high_high + (low_high >> 16) + (high_low >> 16) + (middle >> 16) + index * jnp.uint32(b_high_word)
    return high, low

"""Small instances of the primitives in the rule table: what the golden file prints and what the rules are tested on.

`EXAMPLES` maps a primitive to functions with their arguments; the traced function holds exactly one equation of that
primitive. Sizes are multiples of 4, so that meshes of four devices split everything that may be split.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.lax import GatherScatterMode

from autopar.attention.blocks import Setting
from autopar.attention.primitive import attention_backward_p, attention_p
from autopar.compat import Literal
from autopar.program.from_jaxpr import program_of
from autopar.program.opened.rolls import roll_p


class Example(NamedTuple):
    """A function whose program holds one equation of the primitive, and arguments."""

    fun: object
    args: tuple

    def equation(self, primitive):
        """The equation of the primitive."""
        return self.instance(primitive)[0]

    def instance(self, primitive):
        """(equation, per operand the number of the argument that it is, or None for a literal)."""
        program, constants = program_of(jax.make_jaxpr(self.fun)(*self.args))
        assert not constants, primitive
        number = {var: i for i, var in enumerate(program.invars)}
        for eqn in program.equations:
            if eqn.primitive.name == "fan_out" and eqn.invars[0] in number:
                number[eqn.outvars[0]] = number[eqn.invars[0]]
        (eqn,) = (eqn for eqn in program.equations if eqn.primitive.name == primitive)
        return eqn, [None if isinstance(v, Literal) else number.get(v) for v in eqn.invars]


def _uniform(*shape):
    """Numbers between 0.1 and 0.9, made without JAX: this module is imported often, and each new shape would be compiled."""
    return np.random.default_rng(sum(shape)).uniform(0.1, 0.9, size=shape).astype(np.float32)


def floats(*shape):
    return jnp.asarray(_uniform(*shape))


def integers(*shape, below=8):
    return jnp.asarray(np.random.default_rng(sum(shape)).integers(below, size=shape).astype(np.int32))


def truths(*shape):
    return jnp.asarray(_uniform(*shape) > 0.5)


def _unary(names, *args):
    return {name: [Example(getattr(lax, name.rstrip("_")), args)] for name in names.split()}


_IMAGE, _TOKENS = (4, 8, 8, 8), floats(8, 4, 12)
_TABLE = floats(16, 12)


def convolution(images, kernel, **params):
    params = {"window_strides": (1, 1), "padding": "SAME"} | params

    def run(x, k):
        return lax.conv_general_dilated(x, k, dimension_numbers=("NHWC", "HWIO", "NHWC"), **params)

    return Example(run, (floats(*images), floats(*kernel)))


def _gather(mode):
    numbers = lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return Example(
        lambda table, i: lax.gather(table, i, numbers, slice_sizes=(1, 12), mode=mode),
        (_TABLE, integers(8, 4, 1, below=16)),
    )


def _batched_gather():
    numbers = lax.GatherDimensionNumbers((), (1,), (1,), operand_batching_dims=(0,), start_indices_batching_dims=(0,))
    return Example(
        lambda x, i: lax.gather(x, i, numbers, slice_sizes=(1, 1), mode=GatherScatterMode.CLIP),
        (floats(8, 16), integers(8, 4, 1, below=16)),
    )


def _scatter(operation, *, unique=False, turned=0.0):
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    places = jnp.asarray(
        [[3], [0], [9], [15], [4], [20], [2], [7]] if unique else [[3], [0], [3], [15], [4], [20], [0], [7]]
    )
    return Example(
        lambda table, i, rows: operation(table, i, rows, numbers, mode=GatherScatterMode.FILL_OR_DROP),
        (_TABLE + turned, places, floats(8, 12) + turned),
    )


def _window(fun):
    return [Example(fun, (floats(*_IMAGE),))]


def _reduce_window(init, monoid):
    return _window(lambda x: lax.reduce_window(x, init, monoid, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"))


def _max_pool_gradient(span=2, stride=2):
    def pool(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, span, span, 1), (1, stride, 2, 1), "SAME")

    shape = (4, 8 // stride, 4, 8)
    return Example(lambda x, g: jax.vjp(pool, x)[1](g)[0], (floats(*_IMAGE), floats(*shape)))


def _attention(*pairwise, queries=8, causal=False, backward=False):
    """Attention of 4 query heads to 2 heads of 8 keys; `pairwise`: a bias and a mask."""
    query, key, row = floats(4, queries, 4, 4), floats(4, 8, 2, 4), floats(4, 4, queries)
    bias, mask = ([x for x in pairwise if (x.dtype == bool) == is_mask] for is_mask in (False, True))
    setting = Setting(
        scale=0.5,
        is_causal=causal,
        window=None,
        has_bias=bool(bias),
        has_mask=bool(mask),
        queries=queries,
        keys=8,
    )
    primitive = attention_backward_p if backward else attention_p
    given = (query, key, key + 1, *bias, *mask, *([query, row, row + 1, query * 2] if backward else []))
    return Example(lambda *operands: primitive.bind(*operands, setting=setting), given)


_ATTENTIONS = [
    {"causal": True},
    {"pairwise": (floats(1, 4, 8, 8), truths(4, 1, 1, 8))},
    {"queries": 4, "pairwise": (floats(4, 1, 1, 8),), "causal": True},
]


def _ragged_contraction(x, y, sizes):
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    return lax.ragged_dot_general(x, y, sizes, numbers)


def _scaled_dot(left, right, left_scales, right_scales, **params):
    """A product of numbers of 8 bits; scales are powers of two."""
    values = [floats(*shape).astype(jnp.float8_e4m3fn) for shape in (left, right)]
    scales = [(2.0 ** -integers(*shape, below=3)).astype(jnp.float8_e8m0fnu) for shape in (left_scales, right_scales)]

    def run(x, y, of_x, of_y):
        return lax.scaled_dot(x, y, lhs_scale=of_x, rhs_scale=of_y, preferred_element_type=jnp.float32, **params)

    return Example(run, (*values, *scales))


X, ROW, CUBE = floats(8, 12), floats(12), floats(4, 8, 12)
MATRICES = jnp.asarray(_uniform(8, 4, 4) + _uniform(8, 4, 4).swapaxes(1, 2) + 4 * np.eye(4, dtype=np.float32))
FACTOR = jnp.asarray(np.linalg.cholesky(np.asarray(MATRICES)[0]))

_FLOATS = """
    abs acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor
    is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square tan tanh
"""
_PAIRS = "add atan2 div eq ge gt igamma igammac le lt max min mul ne nextafter pow rem sub"

EXAMPLES = {
    **_unary(_FLOATS, X),
    **_unary(_PAIRS, X, X),
    **_unary("clz population_count", integers(8, 12)),
    **{name: [Example(getattr(lax, f"bitwise_{name}"), (truths(8, 12),) * 2)] for name in ("and", "or", "xor")},
    **_unary("shift_left shift_right_arithmetic shift_right_logical", integers(8, 12), integers(8, 12)),
    **_unary("cummax cummin cumprod cumsum cumlogsumexp", CUBE),
    **_unary("complex", X, X),
    **_unary("conj real imag", lax.complex(X, X)),
    "acosh": [Example(lax.acosh, (X + 1,))],
    "add_any": [Example(jax.grad(lambda x: lax.mul(x, x).sum()), (jnp.float32(2),))],
    "approx_top_k": [Example(lambda x: lax.approx_max_k(x, 4), (X,))],
    "argmax": [Example(lambda x: lax.argmax(x, 1, jnp.int32), (CUBE,))],
    "argmin": [Example(lambda x: lax.argmin(x, 0, jnp.int32), (CUBE,))],
    "attention": [_attention(*case.pop("pairwise", ()), **case) for case in map(dict, _ATTENTIONS)],
    "attention_backward": [
        _attention(*case.pop("pairwise", ()), **case, backward=True) for case in map(dict, _ATTENTIONS)
    ],
    "bitcast_convert_type": [
        Example(lambda x: lax.bitcast_convert_type(x, jnp.int32), (X,)),
        Example(lambda x: lax.bitcast_convert_type(x, jnp.uint8), (X,)),
    ],
    "broadcast_in_dim": [
        Example(lambda x: lax.broadcast_in_dim(x, (4, 8, 12), (1,)), (floats(8),)),
        Example(lambda x: lax.broadcast_in_dim(x, (4, 8, 12), (0, 2)), (floats(1, 12),)),
    ],
    "cholesky": [Example(lambda x: lax.linalg.cholesky(x, symmetrize_input=False), (MATRICES,))],
    "cholesky_update": [Example(lax.linalg.cholesky_update, (FACTOR.T, floats(4)))],
    "clamp": [Example(lambda x: lax.clamp(jnp.float32(0.2), x, jnp.float32(0.7)), (X,))],
    "concatenate": [Example(lambda x, y: lax.concatenate([x, y], 1), (X, floats(8, 4)))],
    "conv_general_dilated": [
        convolution(_IMAGE, (3, 3, 8, 16)),
        convolution(_IMAGE, (1, 1, 8, 16), padding="VALID"),
        convolution(_IMAGE, (8, 8, 8, 4), padding="VALID"),
        convolution(_IMAGE, (3, 3, 2, 16), feature_group_count=4),
        convolution(_IMAGE, (3, 3, 1, 8), feature_group_count=8, window_strides=(2, 2)),
        convolution((16, 8, 8, 8), (3, 3, 8, 16), batch_group_count=4),
        convolution((4, 8, 4, 4), (2, 3, 4, 4), padding=((1, 1), (1, 1)), lhs_dilation=(2, 1)),
        convolution((4, 8, 4, 4), (8, 4, 4, 4), padding=((1, 1), (0, 1))),
    ],
    "convert_element_type": [
        Example(lambda x: lax.convert_element_type(x, jnp.bfloat16), (X,)),
        Example(lambda x: lax.convert_element_type(x, jnp.float32), (integers(8, 12).astype(jnp.int8),)),
    ],
    "copy": [Example(jnp.copy, (X,))],
    "device_put": [Example(jax.device_put, (X,))],
    "div": [
        Example(lax.div, (X, X)),
        Example(lambda x: x / 4, (X,)),
        Example(lambda x: x / 0, (X,)),
        Example(lambda x: 4 / x, (X,)),
    ],
    "mul": [Example(lax.mul, (X, X)), Example(lambda x: x * 3, (X,)), Example(lambda x: x * jnp.inf, (X,))],
    "mulhi": [Example(lax.mulhi, (jnp.arange(96).reshape(8, 12) << 20,) * 2)],
    "name": [Example(lambda x: checkpoint_name(x, "kept"), (X,))],
    "dot_general": [
        Example(lambda x, w: lax.dot_general(x, w, (((2,), (0,)), ((), ()))), (_TOKENS, floats(12, 16))),
        Example(lambda q, k: lax.dot_general(q, k, (((2,), (2,)), ((0,), (0,)))), (_TOKENS, floats(8, 16, 12))),
        Example(
            lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32),
            (integers(8, 12).astype(jnp.int8), integers(12, 16).astype(jnp.int8)),
        ),
    ],
    "dynamic_slice": [Example(lambda x, i: lax.dynamic_slice(x, (i, i), (4, 12)), (X, jnp.uint32(3)))],
    "dynamic_update_slice": [
        Example(lambda x, y, i: lax.dynamic_update_slice(x, y, (i, i)), (X, floats(4, 12), jnp.uint32(3)))
    ],
    "eig": [
        Example(
            lambda x: lax.linalg.eig(x, compute_left_eigenvectors=False, compute_right_eigenvectors=False), (MATRICES,)
        )
    ],
    "eigh": [Example(lambda x: lax.linalg.eigh(x, symmetrize_input=False), (MATRICES,))],
    "empty": [Example(lambda: lax.empty((8, 12), jnp.float32), ())],
    "fft": [Example(jnp.fft.rfft, (CUBE,)), Example(jnp.fft.fft2, (lax.complex(CUBE, CUBE),))],
    "gather": [_gather(GatherScatterMode.FILL_OR_DROP), _gather(GatherScatterMode.CLIP), _batched_gather()],
    "hessenberg": [Example(lax.linalg.hessenberg, (MATRICES,))],
    "householder_product": [Example(lax.linalg.householder_product, (MATRICES, floats(8, 4)))],
    "integer_pow": [Example(lambda x: lax.integer_pow(x, 3), (X,))],
    "iota": [
        Example(lambda: lax.broadcasted_iota(jnp.int32, (8, 12), 1), ()),
        Example(lambda: lax.broadcasted_iota(jnp.bfloat16, (1020, 4), 0), ()),
    ],
    "lu": [Example(lax.linalg.lu, (MATRICES,))],
    "lu_pivots_to_permutation": [
        Example(lambda x: lax.linalg.lu_pivots_to_permutation(x, 8), (integers(12, 4, below=4),))
    ],
    "not": [Example(lax.bitwise_not, (truths(8, 12),))],
    "optimization_barrier": [Example(lax.optimization_barrier, (X,))],
    "pad": [
        Example(lambda x: lax.pad(x, jnp.float32(0), ((0, 0, 0), (1, 3, 0))), (X,)),
        Example(lambda x: lax.pad(x, jnp.float32(0), ((1, -1, 0), (0, 1, 1))), (X,)),
    ],
    "pmax": [Example(lambda x: jax.vmap(lambda v: lax.pmax(v, "batch"), axis_name="batch", out_axes=None)(x), (CUBE,))],
    "pmin": [Example(lambda x: jax.vmap(lambda v: lax.pmin(v, "batch"), axis_name="batch", out_axes=None)(x), (CUBE,))],
    "psum": [Example(lambda x: jax.vmap(lambda v: lax.psum(v, "batch"), axis_name="batch", out_axes=None)(x), (CUBE,))],
    "qr": [Example(lambda x: lax.linalg.qr(x, full_matrices=False), (MATRICES,))],
    "random_bits": [
        Example(lambda key: jax.random.bits(key, (8, 12), jnp.uint32), (jax.random.key(3),)),
        Example(lambda key: jax.random.bits(key, (4, 8, 4), jnp.uint8), (jax.random.key(3),)),
    ],
    "random_fold_in": [Example(lambda key: jax.random.fold_in(key, 3), (jax.random.key(3),))],
    "random_gamma": [Example(lambda key, a: jax.random.gamma(key, a), (jax.random.key(3), 3 * X))],
    "random_seed": [Example(jax.random.key, (jnp.int32(3),))],
    "random_split": [Example(lambda key: jax.random.split(key, 4), (jax.random.key(3),))],
    "random_unwrap": [Example(jax.random.key_data, (jax.random.key(3),))],
    "random_wrap": [Example(jax.random.wrap_key_data, (jnp.zeros(2, jnp.uint32),))],
    "ragged_dot_general": [
        Example(lax.ragged_dot, (floats(24, 8), floats(4, 8, 12), jnp.asarray([3, 0, 7, 2], jnp.int32))),
        Example(_ragged_contraction, (floats(24, 8), floats(24, 12), jnp.asarray([9, 0, 7, 2], jnp.int32))),
    ],
    "reduce": [Example(lambda x: lax.reduce(x, np.float32(1), lambda a, b: a * b + a, (1,)), (CUBE,))],
    "reduce_and": [Example(lambda x: lax.reduce_and(x, (0,)), (truths(8, 12),))],
    "reduce_max": [
        Example(lambda x: lax.reduce_max(x, (2,)), (CUBE,)),
        Example(lambda x: lax.reduce_max(x, (2,)), (lax.complex(CUBE, -CUBE),)),
    ],
    "reduce_min": [Example(lambda x: lax.reduce_min(x, (0,)), (CUBE,))],
    "reduce_or": [Example(lambda x: lax.reduce_or(x, (1,)), (truths(8, 12),))],
    "reduce_precision": [Example(lambda x: lax.reduce_precision(x, 5, 2), (X,))],
    "reduce_prod": [Example(lambda x: lax.reduce_prod(x, (1,)), (X,))],
    "reduce_sum": [Example(lambda x: lax.reduce_sum(x, (0, 1)), (CUBE,))],
    "reduce_window": _reduce_window(1.0, lax.mul),
    "reduce_window_max": [
        *_reduce_window(-np.inf, lax.max),
        Example(
            lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 5, 3, 1), (1, 1, 2, 1), "SAME"),
            (floats(*_IMAGE) - 10,),
        ),
    ],
    "reduce_window_min": _reduce_window(np.inf, lax.min),
    "reduce_window_sum": _reduce_window(0.0, lax.add),
    "reduce_xor": [Example(lambda x: lax.reduce_xor(x, (1,)), (integers(8, 12),))],
    "reshape": [
        Example(lambda x: lax.reshape(x, (32, 12)), (CUBE,)),
        Example(lambda x: lax.reshape(x, (8, 4, 8)), (floats(8, 32),)),
        Example(lambda x: lax.reshape(x, (4, 8, 16)), (floats(8, 4, 16),)),
        Example(lambda x: lax.reshape(x, (8, 6)), (floats(12, 4),)),
    ],
    "rev": [Example(lambda x: lax.rev(x, (1,)), (X,))],
    "rng_bit_generator": [Example(lambda key: lax.rng_bit_generator(key, (8, 12)), (jnp.arange(4, dtype=jnp.uint32),))],
    "roll": [
        Example(lambda x: roll_p.bind(x, dimension=1, shift=1), (X,)),
        Example(lambda x: roll_p.bind(x, dimension=0, shift=5), (X,)),
    ],
    "scaled_dot": [
        _scaled_dot((4, 8, 16), (4, 16, 12), (4, 8, 4), (4, 4, 12)),
        _scaled_dot((8, 32), (12, 32), (8, 4), (12, 8), dimension_numbers=(((1,), (1,)), ((), ()))),
        _scaled_dot((8, 32), (32, 12), (8, 1), (4, 12)),
        _scaled_dot((8, 32), (32, 12), (8, 1), (1, 12)),
    ],
    "scatter": [_scatter(lax.scatter, unique=True)],
    "scatter-add": [_scatter(lax.scatter_add)],
    "scatter-max": [_scatter(lax.scatter_max), _scatter(lax.scatter_max, turned=1j)],
    "scatter-min": [_scatter(lax.scatter_min), _scatter(lax.scatter_min, turned=1j)],
    "scatter-mul": [_scatter(lax.scatter_mul)],
    "scatter-sub": [_scatter(lax.scatter_sub)],
    "schur": [Example(lambda x: lax.linalg.schur(x, compute_schur_vectors=False), (MATRICES,))],
    "select_and_scatter_add": [_max_pool_gradient(), _max_pool_gradient(span=3), _max_pool_gradient(span=3, stride=1)],
    "select_n": [Example(lax.select_n, (truths(8, 12), X, X * 2))],
    "slice": [
        Example(lambda x: lax.slice(x, (0, 2), (8, 10)), (X,)),
        Example(lambda x: lax.slice(x, (1, 1), (8, 11), (2, 1)), (X,)),
    ],
    "sort": [Example(lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), (X, integers(8, 12)))],
    "split": [Example(lambda x: lax.split(x, (4, 8), axis=1), (X,))],
    "squeeze": [Example(lambda x: lax.squeeze(x, (1,)), (floats(8, 1, 12),))],
    "stack": [Example(lambda x, y: jnp.stack([x, y], axis=1), (X, X))],
    "stop_gradient": [Example(lax.stop_gradient, (X,))],
    "svd": [Example(lambda x: lax.linalg.svd(x, compute_uv=False), (MATRICES,))],
    "symmetric_product": [Example(lax.linalg.symmetric_product, (floats(8, 4, 12), MATRICES))],
    "threefry2x32": [
        Example(
            lambda high, low, x, y: jax.extend.random.threefry2x32_p.bind(high, low, x, y),
            (
                jnp.uint32(3),
                jnp.uint32(5),
                jnp.arange(96, dtype=jnp.uint32).reshape(8, 12),
                jnp.ones((8, 12), jnp.uint32),
            ),
        )
    ],
    "top_k": [Example(lambda x: lax.top_k(x, 4), (X,))],
    "tile": [
        Example(lambda x: jnp.tile(x, (2, 3)), (X,)),
        Example(lambda x: jnp.tile(x, (4, 1, 2)), (floats(1, 8, 3),)),
    ],
    "transpose": [Example(lambda x: lax.transpose(x, (2, 0, 1)), (CUBE,))],
    "triangular_solve": [
        Example(lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), (MATRICES, floats(8, 4, 12))),
        Example(lambda a, b: lax.linalg.triangular_solve(a, b), (MATRICES, floats(8, 12, 4))),
    ],
    "tridiagonal": [Example(lax.linalg.tridiagonal, (MATRICES,))],
    "tridiagonal_solve": [Example(lax.linalg.tridiagonal_solve, (CUBE[0], CUBE[1] + 4, CUBE[2], floats(8, 12, 4)))],
    "unstack": [Example(lambda x: jnp.unstack(x, axis=1), (floats(8, 4, 12),))],
    "zeta": [Example(lax.zeta, (X + 1, X))],
}

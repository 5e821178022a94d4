"""Random numbers as the hashes of positions that they are, for generators that XLA, or a single rule, cannot divide.

In: an equation that makes keys or draws bits. Out: the function of its operands that hashes key and position word by word, whose
operations are divided like any others: by positions, and by the keys of an array of keys. Keys themselves stay whole. The
generators are those of JAX that hash: philox, threefry of four words, and the usual threefry where there are several keys. What
can go wrong: `rbg`, whose bits are XLA's own, and those of a batch others than those one by one; it runs whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax

from autopar import compat
from autopar.compat import JaxprEqn

RANDOM = ("random_bits", "random_fold_in", "random_gamma", "random_seed", "random_split")


def draws_as_hashes(eqn: JaxprEqn) -> Callable[..., jax.Array] | None:
    """The function by which a generator that hashes does what an equation asks for; None for all other equations."""
    if eqn.primitive.name not in RANDOM:
        return None
    name = _generator_of(eqn)
    if name not in compat.HASHES or (name == compat.THREEFRY and not _is_of_several_keys(eqn)):
        return None
    if eqn.primitive.name == "random_gamma":
        return functools.partial(eqn.primitive.impl, **eqn.params)
    return functools.partial(_draw, eqn, name)


def _generator_of(eqn: JaxprEqn) -> str:
    operand = eqn.outvars[0] if eqn.primitive.name == "random_seed" else eqn.invars[0]
    return compat.generator_of(operand.aval.dtype)


def _is_of_several_keys(eqn: JaxprEqn) -> bool:
    """Whether it draws the bits of an array of keys, which threefry does by position."""
    is_array = eqn.primitive.name == "random_bits" and eqn.invars[0].aval.shape != ()
    return is_array and compat.threefry_is_partitionable()


def _draw(eqn: JaxprEqn, name: str, *operands: jax.Array) -> jax.Array:
    given: Sequence[jax.Array] = operands
    if eqn.primitive.name != "random_seed":
        given = jax.random.key_data(operands[0]), *operands[1:]
    words = compat.draw_words(eqn, *given)
    if eqn.primitive.name == "random_bits":
        return words
    keys: jax.Array = jax.random.wrap_key_data(words, impl=name)
    return keys

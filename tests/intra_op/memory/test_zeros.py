"""What is zero everywhere is left out of sums, as XLA's simplifier does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.intra_op.memory.zeros import Zeros
from autopar.program.from_jaxpr import program_of

SQUARE = jax.ShapeDtypeStruct((128, 128), np.float32)


def sum_of(make_other):
    """The only sum of a program, its operands' numbers, and what is known of zeros after the rest."""
    program, _ = program_of(jax.make_jaxpr(lambda x: x + make_other(x))(SQUARE))
    numbers, zeros = {v: n for n, v in enumerate(program.invars)}, Zeros()
    for eqn in program.equations:
        read = [numbers.get(v, -1) if not isinstance(v, jax.extend.core.Literal) else -1 for v in eqn.invars]
        if eqn.primitive.name == "add":
            return zeros.find_same(eqn, read)
        numbers.update({v: len(numbers) + n for n, v in enumerate(eqn.outvars)})
        zeros.note(eqn, read, numbers[eqn.outvars[0]])
    raise AssertionError("the program has no sum")


@pytest.mark.parametrize(
    ("make_other", "same"),
    [
        (lambda x: jnp.zeros(x.shape, x.dtype), 0),
        (lambda x: jnp.square(-jnp.zeros(x.shape[::-1], x.dtype)).T, 0),
        (lambda x: jnp.ones(x.shape, x.dtype), None),
        (lambda x: jnp.exp(jnp.zeros(x.shape, x.dtype)), None),
        (lambda x: x - x, None),
    ],
)
def test_a_sum_with_zeros_is_its_other_operand(make_other, same):
    assert sum_of(make_other) == same

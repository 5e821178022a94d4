"""How many equations a value is behind: reading what was appended gives what reading all at once does, and reads it once."""

import jax
import jax.numpy as jnp

from autopar.program.from_jaxpr import program_of
from autopar.program.opened.depths import Depths

BLOCKS = 12


def train(x):
    for _ in range(BLOCKS):
        x = jax.checkpoint(lambda x: jnp.sin(x) * jnp.cos(x))(x)
    return jnp.sum(x)


EQUATIONS = program_of(jax.make_jaxpr(jax.grad(train))(jnp.ones(4)))[0].equations


class Watched(list):
    """A list that counts the entries which slices of it hand over."""

    read = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        self.read += len(found)
        return found


def test_appended_equations_are_read_as_all_are():
    assert sum(eqn.primitive.name == "optimization_barrier" for eqn in EQUATIONS) > BLOCKS
    depths = Depths()
    for end in range(len(EQUATIONS) + 1):
        assert depths.after(EQUATIONS[:end]) == Depths().after(EQUATIONS[:end])


def test_a_copy_behind_a_barrier_is_as_deep_as_what_it_is_a_copy_of():
    known = Depths().after(EQUATIONS)
    for eqn in EQUATIONS:
        behind = max(
            (known.get(v, 0) for v in (*eqn.invars, eqn.after) if isinstance(v, type(eqn.outvars[0]))), default=0
        )
        is_copy = eqn.primitive.name == "optimization_barrier"
        assert {known.get(v, 0) for v in eqn.outvars} == {behind + (not is_copy)}


def test_every_equation_of_a_scope_with_many_barriers_is_read_once():
    depths, growing = Depths(), Watched()
    for eqn in EQUATIONS:
        growing.append(eqn)
        depths.after(growing)
    assert growing.read == len(EQUATIONS)

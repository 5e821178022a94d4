"""What the table says of XLA's CPU compiler, against the compiler: who has a buffer, what the library for reductions does."""

import jax
import jax.numpy as jnp
import pytest

from autopar.intra_op.xla_cpu import table as xla_cpu
from autopar.intra_op.xla_cpu.table import JOINING_LIBRARY, LIBRARY_ELEMENTS, MAKINGS, Making, making_of
from autopar.program.from_jaxpr import program_of
from autopar.rules.primitive_rule import Work
from autopar.rules.table import RULES
from tests.rules.examples import EXAMPLES

POINTWISE = [
    name for name, entry in RULES.items() if entry.work is Work.POINTWISE and name in EXAMPLES and name != "add_any"
]
"""add_any is made by differentiation only."""
ON_THE_SAFE_SIDE = {
    "convert_element_type": "to a shorter type it has a buffer, the other way it has none",
    "tan": "XLA computes it again for each reader, as it does sine and cosine",
}
CHANGED_IN_0_12 = {"complex", "conj"}
"""What XLA of JAX 0.10 computes again for each reader, as the table says, and that of JAX 0.12 keeps."""
LEFT_TO_XLA = {"cos", "round", "sin", "tan"}
"""What the library that comes with JAX 0.10 does not compute, though XLA has a name for it there."""
BECOME_OTHERS = {"cosh", "exp2"}
"""What XLA writes as other operations, which the library computes."""
REFUSED_ON_SOME_PROCESSORS = {"mulhi"}
"""What XLA 0.10 takes for an operation of its library on some processors, and then cannot compile."""


def temporary_bytes(fun, arguments):
    compiled = jax.jit(fun).lower(*arguments).compile(compiler_options={"xla_backend_optimization_level": 0})
    return compiled.memory_analysis().temp_size_in_bytes


def result_of(example, arguments):
    """The first result as real numbers."""
    result = jax.tree.leaves(example.fun(*arguments))[0]
    return jnp.abs(result) if jnp.iscomplexobj(result) else result.astype(jnp.float32)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", POINTWISE)
def test_what_two_operations_read_has_a_buffer_if_it_is_costly_to_compute_again(name):
    (example, *_) = EXAMPLES[name]

    def read_twice(*arguments):
        result = result_of(example, arguments)
        return jnp.sum(result, axis=0), jnp.sum(result, axis=1)

    has_buffer = temporary_bytes(read_twice, example.args) > 0
    if name not in {*ON_THE_SAFE_SIDE, *CHANGED_IN_0_12}:
        assert (MAKINGS[name] is Making.COSTLY) == has_buffer


@pytest.mark.sweep
@pytest.mark.parametrize("name", POINTWISE)
def test_the_library_for_large_reductions_computes_what_leads_to_one(name):
    (example, *_) = EXAMPLES[name]
    times = -(-LIBRARY_ELEMENTS // 96)
    arguments = [jnp.tile(x, (times, 1)) if x.ndim else x for x in example.args]

    def reduce(*arguments):
        return jnp.sum(result_of(example, arguments))

    try:
        has_buffer = temporary_bytes(reduce, arguments) >= LIBRARY_ELEMENTS
    except jax.errors.JaxRuntimeError as error:
        if name in REFUSED_ON_SOME_PROCESSORS and "Unsupported elementwise operation" in str(error):
            return
        raise
    if name not in LEFT_TO_XLA | BECOME_OTHERS:
        assert (name in JOINING_LIBRARY) != has_buffer


def test_the_table_lists_only_what_does_not_follow_from_the_work_each_once_and_sorted():
    listed = [names.split() for names in xla_cpu._UNUSUAL.values()]
    assert all(names == sorted(names) for names in listed)
    assert sum(map(len, listed)) == len({name for names in listed for name in names})
    for making, names in xla_cpu._UNUSUAL.items():
        for name in names.split():
            assert xla_cpu._USUAL.get(RULES[name].work, Making.WHOLE) is not making
    assert sorted(JOINING_LIBRARY) == xla_cpu._LIBRARY.split()
    assert {*JOINING_LIBRARY, *xla_cpu._SUMS, *xla_cpu._ORDERS} <= {*RULES}
    assert set(MAKINGS) == set(RULES)


@pytest.mark.parametrize(
    ("fun", "making"),
    [
        (lambda x: x / 3.0, Making.CHEAP),
        (lambda x: 3.0 / x, Making.COSTLY),
        (lambda x: x.cumsum(0), Making.WHOLE),
        (lambda x: x.reshape(16), Making.NAME),
        (lambda x: x.T, Making.MOVED),
        (lambda x: x.sum(), Making.LIBRARY),
        (lambda x: x.prod(), Making.REDUCTION),
        (lambda x: x.argmax(0), Making.WHOLE),
        (lambda x: x.at[jnp.array([1, 2])].add(1.0, unique_indices=True), Making.IN_PLACE),
    ],
)
def test_the_making_of_an_equation(fun, making):
    program, _ = program_of(jax.make_jaxpr(fun)(jax.ShapeDtypeStruct((4, 4), jnp.float32)))
    assert making_of(program.equations[-1]) is making

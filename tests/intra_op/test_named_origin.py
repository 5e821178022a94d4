"""An operation without a module, such as the random bits of a dropout, is told by the module that reads what it makes."""

import jax
import jax.numpy as jnp

from autopar.compat import module_path
from autopar.intra_op.memory.device_operations import Block, Kind, Operation, Value
from autopar.intra_op.memory.nearest_scope import nearest_scopes
from autopar.intra_op.named_origin import Origins
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.trace import trace

WEIGHTS = {"up": jax.ShapeDtypeStruct((8, 8), jnp.float32), "key": jax.ShapeDtypeStruct((2,), jnp.uint32)}
EXAMPLES = jax.ShapeDtypeStruct((16, 8), jnp.float32)


def step(weights, x):
    with jax.named_scope("block_0"):
        h = x @ weights["up"]
    keep = jax.random.bernoulli(weights["key"], 0.5, h.shape)
    with jax.named_scope("drop"):
        return weights, jax.lax.select(keep, h, 2.0 * h)


def traced():
    signature = CallSignature(step, (1,), (), "auto")
    return trace(signature, bind_arguments(signature, (WEIGHTS, EXAMPLES), {}))


def test_the_mask_is_told_by_what_reads_it_and_a_module_by_itself():
    program = traced().program
    origins = Origins(program)
    named = {eqn.primitive.name: module_path(origins.of(eqn)) for eqn in program.equations}
    assert named["dot_general"] == "block_0"
    mask = next(eqn for eqn in program.equations if eqn.outvars and str(eqn.outvars[0].aval) == "bool[16,8]")
    assert module_path(mask) == ""
    assert module_path(origins.of(mask)) == "drop"


def test_an_operand_of_a_loop_is_told_by_what_reads_it_within():
    def in_a_loop(weights, x):
        with jax.named_scope("after"):
            return jnp.sum(jax.lax.map(lambda row: step(weights, row)[1], x))

    signature, rows = CallSignature(in_a_loop, (1,), (), "auto"), jax.ShapeDtypeStruct((4, 16, 8), jnp.float32)
    program = trace(signature, bind_arguments(signature, (WEIGHTS, rows), {})).program
    (loop,) = (eqn for eqn in program.equations if eqn.regions)
    origins = Origins(program)
    told = [module_path(origins.of(loop, operand)) for operand in loop.invars]
    assert "block_0" in told
    assert {module_path(origins.of(loop)), module_path(origins.of(loop, object()))} == {"after"}


def value(scope=""):
    return Value(name="v", shape=(2,), dtype="float32", bytes=8, var=None, itemsize=4, scope=scope)


def test_a_value_in_memory_takes_the_module_of_what_reads_it_and_else_of_what_it_is_made_of():
    values = [value(), value(), value("block_0/up"), value(), value()]
    chain = tuple(Operation(kind=Kind.CHEAP, inputs=(n,), outputs=(n + 1,)) for n in range(3))
    body = Block(operations=chain, outputs=(3,))
    assert nearest_scopes(body, values, [0, 2, 3, 4]) == {0: "block_0/up", 2: "block_0/up", 3: "block_0/up", 4: ""}
    assert nearest_scopes(body, values, [2]) == {2: "block_0/up"}

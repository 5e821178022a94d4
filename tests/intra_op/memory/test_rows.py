"""Rows of a memory limit: an input that loops or operations read in another layout counts in that one while it is read."""

import jax
import jax.numpy as jnp
import pytest

from tests.intra_op.memory.buffers import FLOAT, memory_of

SIDE = 256
WHOLE = SIDE * SIDE * FLOAT
PART = WHOLE // 4
SMALL = 20 * SIDE * FLOAT
"""More than everything but the weight takes."""


def in_a_loop(weight, batch):
    """Every trip reads the weight."""
    return jax.lax.scan(lambda total, row: (total + jnp.sum(jnp.tanh(row @ weight)), None), 0.0, batch)[0]


def twice(weight, batch):
    """Two products read the weight."""
    rows = batch.reshape(-1, SIDE)
    return jnp.sum(jnp.tanh(jnp.tanh(rows @ weight) @ weight))


def model_of(step):
    return memory_of(step, jnp.ones((SIDE, SIDE)), jnp.ones((4, 1, SIDE)))


def choices_of(memory, *, kept, read):
    """A choice in which the weight lies whole or in four parts, and is read so; of the rest the first is as good as any."""
    graph = memory.graph
    choice = [0] * len(graph.nodes)
    for number, node in enumerate(graph.nodes):
        is_head = node.equation is not None and node.equation.primitive.name == "fan_out"
        wanted = kept if node.input_number == 0 else read if is_head else None
        outputs = [strategy.outputs[0] for strategy in node.choices.strategies]
        if wanted is not None and (node.input_number == 0 or node.equation.outvars[0].aval.shape == (SIDE, SIDE)):
            sizes = [layout.local_bytes((SIDE, SIDE), FLOAT, graph.mesh) for layout in outputs]
            choice[number] = sizes.index(wanted)
    return choice


@pytest.mark.parametrize("step", [in_a_loop, twice])
@pytest.mark.parametrize(
    ("kept", "read", "counted"),
    [(WHOLE, WHOLE, WHOLE), (PART, PART, PART), (PART, WHOLE, WHOLE), (WHOLE, PART, WHOLE)],
    ids=["whole", "split", "gathered", "cut out"],
)
def test_an_input_counts_once_as_it_is_read_or_as_it_is_kept_whichever_is_more(step, kept, read, counted):
    memory = model_of(step)
    choice = choices_of(memory, kept=kept, read=read)
    used = max(row.used(choice) for row in memory.rows(choice))
    assert counted <= used < counted + SMALL
    assert used <= memory.required(choice) + SMALL


def cast_in_a_loop(weight, batch):
    """Every trip reads a cast of the weight, which is made once."""
    narrow = weight.astype(jnp.bfloat16)
    return jax.lax.scan(lambda total, row: (total + jnp.sum(jnp.tanh(row @ narrow)), None), 0.0, batch)[0]


@pytest.mark.parametrize("read", [WHOLE, PART], ids=["gathered", "split"])
def test_a_cast_that_a_loop_reads_counts_as_it_is_read(read):
    memory = memory_of(cast_in_a_loop, jnp.ones((SIDE, SIDE)), jnp.ones((4, 1, SIDE), jnp.bfloat16))
    choice = choices_of(memory, kept=PART, read=read)
    for number, node in enumerate(memory.graph.nodes):
        if node.equation is not None and node.equation.primitive.name == "convert_element_type":
            outputs = [strategy.outputs[0] for strategy in node.choices.strategies]
            if node.equation.outvars[0].aval.shape == (SIDE, SIDE):
                choice[number] = [la.local_bytes((SIDE, SIDE), FLOAT, memory.graph.mesh) for la in outputs].index(PART)
    used = max(row.used(choice) for row in memory.rows(choice))
    assert PART + read // 2 <= used < PART + read // 2 / memory.tuning.temporaries_margin + SMALL
    assert used <= memory.required(choice) + SMALL


@pytest.mark.parametrize("step", [in_a_loop, twice])
def test_copies_are_not_there_in_the_least_that_a_step_needs(step):
    memory = model_of(step)
    assert PART <= memory.least()[0] < PART + SMALL
    assert sum(memory.evenly_divided_parts()) < PART + SMALL
